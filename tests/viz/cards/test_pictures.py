"""Pictures of the ten programs, as a strict reader looks at them: in two sizes of the pane, first closed, then with one card opened."""

from __future__ import annotations

import functools
from collections import Counter

import pytest

import fusionlab as fl
from fusionlab.viz.cards.album import Album
from fusionlab.viz.cards.layout.picture import Swatch

from .geometry import check
from .test_programs import NAMES, built

SIZES = ((932.0, 700.0), (606.0, 361.0))  # of the pane at 1440 x 900, and at 1100 x 700 beside a file browser
MOST_OPENED = 20
MOVED = 20.0  # px


@functools.lru_cache(maxsize=1)  # neighbours share it
def found(name):
    function, args = built(name)
    return fl.find(function, *args, device="h100")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_a_program_reads_at_first_sight(name, size):
    findings = found(name)
    album = Album(findings.graph, findings)
    album.pane = size
    report = check(album.svg(None), *size)
    assert report.faults() == ()
    sites = Counter(r.pass_name for r in (*findings.candidates, *findings.rejections))
    assert report.passes >= sites.keys(), "a pass that has a site shows its colour"
    assert _counted(album) == sites


@pytest.mark.parametrize("name", NAMES)
def test_a_card_opens_where_it_stands_and_nothing_else_does(name):
    findings = found(name)
    album = Album(findings.graph, findings)
    closed = album.svg(None)
    before = album.picture(None)
    for card in [k for k, item in album.items(None).items() if item["closed"]][:MOST_OPENED]:
        album.toggle(None, card)
        assert (
            check(album.svg(None), before.width, 10_000).faults(most_boxes=200) == ()
            or before.width < album.picture(None).width
        )
        was, now = ({b.id: b for b in p.boxes} for p in (before, album.picture(None)))
        assert abs(was[card].rect.x - now[card].rect.x) + abs(was[card].rect.y - now[card].rect.y) <= MOVED
        assert {k for k, item in album.items(None).items() if item["group"] and not item["closed"]} == {card}
        album.toggle(None, card)
        assert album.svg(None) == closed


def _counted(album):
    """Pass -> its sites by the strips of the first view; backward passes of sites are not sites of their own."""
    cards = (card for row in album.overview(None).rows for card in row.cards.values())
    counts = Counter()
    for strip in (s for card in cards for s in card.strips if not s.backward):
        counts[strip.pass_name] += strip.count
    return counts


@pytest.mark.parametrize("name", ["transformer of 2 layers", "U-Net"])
def test_cards_beside_channels_of_edges_show_their_sites(name):
    findings = found(name)
    album = Album(findings.graph, findings)
    album.pane = (860.0, 640.0)  # room for titles, but for no sites beside them
    sites = {c.id for row in album.overview(None).rows for c in row.cards.values() if c.strips}
    shown = {b.id for b in album.picture(None).boxes if any(isinstance(m, Swatch) for m in b.marks)}
    assert sites
    assert sites <= shown
