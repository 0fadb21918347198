"""A program before and after beside each other: level rows, one selection, bytes that agree with the fused program's."""

from __future__ import annotations

import pytest

from fusionlab.graph.cost.cost import cost_of
from fusionlab.viz.cards.album import Album
from fusionlab.viz.cards.card import AFTER

from .geometry import check
from .test_pictures import SIZES, found

NAMES = ("MLP without scopes", "decode loop", "U-Net", "transformer of 2 layers", "transformer of 24 layers")
MOST_OPENED = 8


def both(name, size):
    findings = found(name)
    album = Album(findings.graph, findings)
    album.pane, album.fused = size, findings.apply()
    return album


def level(album):
    """Whether every box stands at the height, and is as high, as its counterpart."""
    places = {b.id: (b.rect.y, b.rect.height, b.rect.width) for b in album.picture(None).boxes}
    before = {i: place for i, place in places.items() if not i.startswith(AFTER)}
    return before == {i.removeprefix(AFTER): place for i, place in places.items() if i.startswith(AFTER)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_both_sides_are_level_in_the_pane_and_add_up(name, size):
    album = both(name, size)
    assert check(album.svg(None), *size).faults() == ()
    assert level(album)
    overview = album.overview(None)
    totals = overview.totals
    assert totals["before"].bytes == cost_of(album.graph).total.bytes_moved
    # What XLA runs anyway changes nothing; the others are counted in the program with them fused.
    changing = [c.id for c in album.findings.candidates if not c.idle and not c.same_code]
    fused = album.findings.apply(changing) if changing else album.graph
    assert totals["after"].bytes == pytest.approx(cost_of(fused).total.bytes_moved, rel=0.01)
    for side, total in totals.items():
        assert sum(row.cards[side].cost.bytes for row in overview.rows) == total.bytes


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_opening_one_side_opens_its_counterpart(name, size):
    album = both(name, size)
    closed = album.svg(None)
    cards = [k for k, item in album.items(None).items() if item["closed"] and not k.startswith(AFTER)]
    for card in cards[:MOST_OPENED]:
        album.toggle(None, card)
        picture, items = album.picture(None), album.items(None)
        assert not items[card]["closed"]
        assert not items[AFTER + card]["closed"]
        assert level(album)
        pane = max(picture.width, size[0]), max(picture.height, size[1])
        assert check(album.svg(None), *pane).faults(most_boxes=200) == ()
        album.toggle(None, card)
    assert album.svg(None) == closed
