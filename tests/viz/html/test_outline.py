"""The outline of a picture and the way to a card, as plain data."""

import json
from dataclasses import replace

from fusionlab.viz.html.outline import MOST_LINES, outline, trail, way_to

from ..cards.toys import inference, train_step


def lines_of(line):
    yield line
    for child in line.get("lines", ()):
        yield from lines_of(child)


def test_it_is_a_tree_of_lanes_rows_and_what_is_inside_them():
    told = outline(train_step())
    program = told["line"]
    assert [lane["name"] for lane in program["lines"]] == ["forward", "backward", "update"]
    forward = program["lines"][0]
    assert [line["name"] for line in forward["lines"]] == ["embed", "layer_0 … 23", "head", "cross_entropy"]
    stack = forward["lines"][1]
    assert (stack["count"], stack["bytes"]) == (24, ["360 GB", "39 %"])
    assert ["layer_norm", "applied", 48, False] in stack["strips"]
    assert [line["name"] for line in stack["lines"]] == ["attn", "mlp"]
    backward = program["lines"][1]["lines"][1]
    assert backward["prefix"] == "backward of"
    assert all(line["id"].startswith("fl-") for line in lines_of(program) if line is not program)
    assert told["colours"].keys() == {"layer_norm", "gemm_epilogue", "dot_product_attention"}
    assert json.loads(json.dumps(told)) == told


def test_what_is_inside_a_stack_is_told_of_all_copies():
    forward = train_step().rows[1].cards["forward"]
    stack = outline(train_step())["line"]["lines"][0]["lines"][1]
    for card, line in zip(forward.children, stack["lines"], strict=True):
        assert [n for _, _, n, _ in line["strips"]] == [24 * strip.count for strip in card.strips]


def test_one_lane_is_the_program():
    overview = inference()
    program = outline(overview)["line"]
    assert [line["name"] for line in program["lines"]] == [row.cards["forward"].name for row in overview.rows]
    card = overview.rows[0].cards["forward"]
    assert [step["name"] for step in trail(overview, [card.id])] == [overview.title, card.name]


def test_what_is_deep_is_told_when_it_is_asked_for():
    overview = train_step()
    row = overview.rows[2]
    many = tuple(replace(row.cards["forward"], id=f"inner-{k}") for k in range(2 * MOST_LINES))
    wide = replace(row, cards=row.cards | {"forward": replace(row.cards["forward"], id="wide", children=many)})
    overview = replace(overview, rows=(*overview.rows[:2], wide, *overview.rows[3:]))
    short = {line["id"]: line for line in lines_of(outline(overview)["line"])}
    assert short["fl-wide"]["inside"] == len(many)
    assert "lines" not in short["fl-wide"]
    assert len(short) <= MOST_LINES + 4
    whole = {line["id"]: line for line in lines_of(outline(overview, {"wide"})["line"])}
    assert len(whole["fl-wide"]["lines"]) == len(many)


def test_the_way_to_a_card_names_the_cards_around_it():
    overview = train_step()
    card = overview.rows[1].cards["forward"].children[0]
    assert [c.name for c in way_to(overview, card.id)] == ["layer_0 … 23", "attn"]
    assert way_to(overview, "nothing") == ()
    steps = trail(overview, [card.id])
    assert [s["name"] for s in steps] == ["train_step", "forward", "layer_17, 18 of 24", "attn"]
    assert (steps[2]["at"], steps[2]["of"]) == (18, 24)
    assert [s["id"] for s in steps[:2]] == ["", "fl-forward"]
    both = [overview.rows[k].cards["forward"].id for k in (0, 2)]
    assert [s["name"] for s in trail(overview, both)] == ["train_step", "forward"]
    assert [s["name"] for s in trail(overview, [])] == ["train_step"]
