"""Where the cards of a picture stand, and how it is drawn: judged by rectangles, over toys and over anything."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from fusionlab.viz.cards.card import Card
from fusionlab.viz.cards.layout.measure import cut, share_text, text_width
from fusionlab.viz.cards.layout.opened import opened_name
from fusionlab.viz.cards.layout.rows import joined
from fusionlab.viz.cards.plan import described, plan, shown
from fusionlab.viz.cards.svg import svg

from . import toys
from .checks import faults, texts

PANES = ((932, 700), (640, 500))
TOYS = {
    make.__name__: make
    for make in (toys.train_step, toys.u_net, toys.inference, toys.clipped, toys.many_rows, toys.tangled)
}


@pytest.mark.parametrize("name", TOYS)
def test_the_first_view_is_in_the_pane_and_nothing_overlaps(name):
    for width, height in PANES:
        picture = plan(TOYS[name](), width, height)
        assert faults(picture) == []
        assert (picture.width, picture.height) == (width, height)
        assert len(picture.boxes) + len(picture.pills) <= 60
        assert min(t.size for t in texts(picture)) >= 9


@pytest.mark.parametrize("name", TOYS)
def test_opening_moves_neither_the_card_nor_what_is_above(name):
    for width, height in PANES:
        program = shown(TOYS[name](), height)
        opened: list[str] = []
        before = plan(program, width, height)
        closed = svg(before)
        for card in [c for row in program.rows for c in row.cards.values() if c.children]:
            after = plan(program, width, height, [*opened, card.id])
            old, new = ({b.id: b.rect for b in p.boxes} for p in (before, after))
            assert (old[card.id].x, old[card.id].y) == (new[card.id].x, new[card.id].y)
            above = [i for i in old if old[i].bottom <= old[card.id].y]
            assert {i: old[i].y for i in above} == {i: new[i].y for i in above}
            assert [b.id for b in after.boxes if b.id in old] == [b.id for b in before.boxes]
            assert {b.id for b in after.boxes} - old.keys() == {c.id for c in card.children}
            opened, before = [*opened, card.id], after
            assert len(opened) not in (1, 2, 4) or faults(after) == []
        assert svg(plan(program, width, height)) == closed


def test_a_card_inside_an_open_one_opens_where_it_stands():
    program = toys.train_step()
    before = {b.id: b.rect for b in plan(program, 932, 700, ["f-layers"]).boxes}
    after = {b.id: b.rect for b in plan(program, 932, 700, ["f-layers", "forward-mlp"]).boxes}
    for name in ("f-layers", "forward-attn", "forward-mlp"):
        assert (before[name].x, before[name].y) == (after[name].x, after[name].y)


@pytest.mark.parametrize("seed", range(24))
def test_anything_is_drawn_without_overlaps(seed):
    width, height = ((932, 700), (640, 500), (852, 520), (1400, 900))[seed % 4]
    program = shown(toys.random_overview(seed), height)
    ids = [c.id for c in program.cards()]
    for opened in ((), ids[::7][:9]):
        picture = plan(program, width, height, opened)
        assert faults(picture) == []
    ElementTree.fromstring(svg(picture))


def test_the_text_is_the_same_each_time_and_has_a_group_for_each_card():
    opened = ["f-layers", "forward-attn"]
    once, again = (svg(plan(toys.train_step(), 932, 700, names), "x-") for names in (opened, opened[::-1]))
    assert once == again
    ids = [e.get("id") for e in ElementTree.fromstring(once).iter() if e.get("id")]
    pills = ["forward-top", "forward-bottom"]
    assert sorted(ids) == sorted(f"x-{name}" for name in [*described(toys.train_step(), opened), *pills])
    numbers = re.findall(r' (?:x|y|width|height)="([^"]*)"', once)
    assert all(re.fullmatch(r"-?\d+(\.\d)?", n) for n in numbers)


def test_what_can_be_clicked_says_its_name_share_and_sites():
    found = described(toys.train_step(), ["f-layers"])
    assert found["f-layers"]["label"].startswith("layer_17, 18 of 24, 39 % of bytes, 48 layer_norm fused")
    assert found["f-layers"]["label"].endswith("opened")
    assert (found["f-layers"]["group"], found["f-layers"]["closed"]) == (True, False)
    assert (found["b-layers"]["group"], found["b-layers"]["closed"]) == (True, True)
    assert "forward-softmax" not in found
    assert described(toys.train_step(), ["f-layers", "forward-attn"])["forward-softmax"]["state"] == "declined"


def test_one_of_several_equal_parts_is_called_by_its_number():
    names = {"layer_0 … 23": "layer_17", "encoder[0 … 23]": "encoder[17]", "layer_23 … 0": "layer_6", "block": "block"}
    names |= {
        "h1 … 24.q": "h18.q",
        "step turns 0 … 23": "step turn 17",
        "layer_0 … 46": "layer_34",
        "a_0 … 30": "a_0 … 30",
    }
    shown = {name: opened_name(Card("c", name, count=24, copy=17)) for name in names}
    assert shown == {name: f"{part}, 18 of 24" for name, part in names.items()}
    # Not "layers 0 of 2", which says that none was.
    assert opened_name(Card("c", "layers[0 … 1]", count=2)) == "layers[0], 1 of 2"
    assert opened_name(Card("c", "head")) == "head"


def test_an_edge_ends_at_the_open_card_and_is_level_with_its_row():
    for opened in ((), ["f-layers"]):
        picture = plan(toys.train_step(), 932, 700, opened)
        (kept,) = (w for w in picture.wires if (w.start, w.end) == ("f-layers", "b-layers"))
        assert kept.path[0][1] == kept.path[1][1]
        assert kept.width == pytest.approx(10.3)


def test_cheap_neighbours_share_a_row_and_can_be_reached():
    program = toys.many_rows(40)
    few = joined(program, 9)
    assert len(few.rows) == 9
    assert {c.id for c in program.cards()} <= {c.id for c in few.cards()}
    assert few.total == program.total
    assert sum((c.cost for row in few.rows for c in row.cards.values()), start=toys.Amount()) == program.total
    ids = {c.id for row in few.rows for c in row.cards.values()}
    assert all({e.start, e.end} <= ids for e in few.edges)
    assert joined(few, 9) is few


def test_texts_are_cut_in_the_middle_to_the_room_there_is():
    assert cut("layer_norm", 200, 10) == "layer_norm"
    assert cut("layer_0 … 23", text_width("layer_0…23", 10), 10) == "layer_0…23"
    for room in range(5, 120, 7):
        text = cut("a_name_that_is_rather_long", room, 10, True)
        assert text_width(text, 10, True) <= room
    assert (share_text(0.301), share_text(0.0294), share_text(0.0004)) == ("30 %", "2.9 %", "")
