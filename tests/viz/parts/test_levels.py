"""No site of the ten programs is more than three openings away, however deep the modules of the library are."""

from __future__ import annotations

import pytest

import fusionlab as fl
from fusionlab.viz.cards.album import Album
from fusionlab.viz.cards.card import Card, Site
from fusionlab.viz.parts.runs import shallow

from ..cards.programs import PROGRAMS
from ..cards.test_programs import built

MOST_OPENINGS = 3
CHEAP_FIRST = sorted((name for name, _ in PROGRAMS), key=lambda name: name != "MLP without scopes")


def card(name, *children, site=None, count=1):
    kind = "site" if site is not None else "part" if children else "nodes"
    return Card(id=name, name=name, kind=kind, children=children, site=site, count=count)


@pytest.mark.parametrize("name", CHEAP_FIRST)
def test_a_site_is_on_screen_after_three_openings(name):
    function, args = built(name)
    findings = fl.find(function, *args, device="h100")
    album = Album(findings.graph, findings)
    sites = [c.id for c in album.overview(None).cards() if c.site is not None]
    assert sites
    assert max(len(album.around(None, site)) for site in sites) <= MOST_OPENINGS


def deep(*, count=1, beside=1):
    inner = card("stack", card("sum"), card("dense", site=Site("a", "gemm_epilogue", "on")), count=3)
    part = card("self", inner, *(card(f"beside {k}") for k in range(beside)), count=count)
    return card("layer", card("attention", part, card("output"), card("add")))


def names(found):
    return [c.name for c in found.walk()]


def test_the_smallest_part_around_a_deep_site_gives_way_to_its_inside():
    assert names(shallow(deep())) == [n for n in names(deep()) if n != "self"]


@pytest.mark.parametrize("kept", [{"count": 2}, {"beside": 3}])
def test_a_stack_and_a_part_of_many_cards_stay(kept):
    assert "self" in names(shallow(deep(**kept)))
