"""The checker of drawings: a clean one has no fault, and each kind of fault is found in one that has it alone."""

from __future__ import annotations

import pytest

from .drawing import Move, Rect, polylines, text_width
from .geometry import check

STYLE = "<style>text{font-size:10px} .card .title{font-size:12.5px;font-weight:bold} @media print{text{font-size:1px}}</style>"


def card(name, x, y, width=120, height=42, *, kind="part closed", inside=""):
    """A card with its name, and its body at a place of the pane."""
    title = f'<text class="title" data-line="0" x="{x + 10}" y="{y + 18}">{name}</text>' if name is not None else ""
    body = f'<rect class="card-body" x="{x}" y="{y}" width="{width}" height="{height}"/>'
    return f'<g id="fl-{name}" class="card {kind}">{body}{title}{inside}</g>'


def edge(path, label="", kind="flow"):
    return f'<g class="edge {kind}"><path d="{path}"/>{label}</g>'


def text(letters, x, y, extra=""):
    return f'<text x="{x}" y="{y}" {extra}>{letters}</text>'


def drawing(*parts, size=(400, 300)):
    width, height = size
    lane = '<g class="lane"><rect x="8" y="8" width="384" height="284"/></g>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 400 300">'
    return f"{head}{STYLE}{lane}{''.join(parts)}</svg>"


def report(*parts, pane=(400, 300), size=(400, 300)):
    return check(drawing(*parts, size=size), *pane)


EMBED, HEAD = card("embed", 20, 20), card("head", 20, 120)
CLEAN = (
    EMBED,
    HEAD,
    edge("M80 62 V120", text("33.6 MB", 90, 95, 'class="edge-label"')),
    card("layer_3", 160, 20, 200, 150, kind="part opened", inside=card("attn", 170, 60) + card("mlp", 170, 120)),
    edge("M140 41 H152 Q156 41 156 45 V137 Q156 141 160 141 H170"),
    '<g class="pill"><rect x="20" y="200" width="80" height="22"/><g class="card output"><text x="28" y="214">loss f32[]</text></g></g>',
)


def test_a_clean_drawing_has_no_fault():
    found = report(*CLEAN)
    assert found.faults() == ()
    assert (found.boxes, found.smallest_text) == (5, 10.0)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("names", [card("__call__", 20, 20)]),
        ("overlapping_boxes", [EMBED, card("head", 100, 50)]),
        ("overlapping_boxes", [card("head", 20, 20, 200, 100), card("embed", 90, 60)]),  # in one that is closed
        ("overlapping_boxes", [EMBED, '<g class="pill"><rect x="120" y="50" width="80" height="22"/></g>']),
        ("overlapping_labels", [text("56.0 GB", 20, 200), text("1.48 GB", 50, 204)]),
        ("texts_outside", [card("a name that is longer than its card", 20, 20)]),
        ("texts_over_marks", [card("embed", 20, 20, inside='<rect class="bar" x="50" y="32" width="40" height="5"/>')]),
        (
            "marks_outside",
            [card("embed", 20, 20, inside='<rect class="swatch" x="134" y="40" width="11" height="11"/>')],
        ),
        ("edges_through_boxes", [EMBED, edge("M10 50 H300")]),
        ("edges_through_boxes", [EMBED, HEAD, card("mlp", 20, 70, height=40), edge("M80 62 V120")]),
        ("edges_through_boxes", [EMBED, edge('M10 70 H300" stroke-width="20')]),
        ("edges_through_labels", [EMBED, edge("M80 62 V120", text("33.6 MB", 60, 95, 'class="edge-label"'))]),
        ("edges_through_labels", [text("kept", 60, 200), edge("M20 230 Q80 230 80 150")]),
    ],
)
def test_each_kind_of_fault_is_found_and_told_once(kind, parts):
    found = report(*parts)
    assert len(getattr(found, kind)) == 1
    assert len(found.faults()) == 1


@pytest.mark.whole
@pytest.mark.parametrize(
    "name", ["", "apply", "wrapped", "257 nodes", "n12", "0", "0 … 11", "&lt;lambda&gt; · model.py:3", None]
)
def test_names_that_say_nothing_are_found(name):
    assert len(report(card(name, 20, 20, 200)).names) >= 1


def test_what_a_card_writes_beside_its_name_is_no_name():
    assert len(report(card(None, 20, 20, inside=text("58 %", 30, 38, 'data-line="0"'))).names) == 1


def test_the_passes_in_sight_are_told():
    swatch = '<rect class="swatch" x="{}" y="40" width="11" height="11" data-pass="{}" {}/>'
    drawn = card("embed", 20, 20, inside=swatch.format(30, "lerp", "") + swatch.format(60, "matmul", 'display="none"'))
    assert report(drawn).passes == {"lerp"}


def test_a_part_in_a_closed_card_needs_a_name_too():
    cell = '<g class="cell"><rect x="30" y="45" width="80" height="15"/><text class="title" x="35" y="57">{}</text></g>'
    assert report(card("embed", 20, 20, inside=cell.format("attn"))).faults() == ()
    assert len(report(card("embed", 20, 20, inside=cell.format("apply"))).names) == 1


@pytest.mark.whole
@pytest.mark.parametrize("written", ["part~6", "cluster_layer_0", "%12", "Block.__call__ · model.py:19"])
def test_ids_are_found_wherever_they_are_written(written):
    assert len(report(card("embed", 20, 20), text(written, 20, 200)).names) == 1


@pytest.mark.whole
@pytest.mark.parametrize(
    "name", ["layer_0 … 23", "x @ w", "apply_gradients", "dot_general + 7", "layer_norm · model.py:19-21"]
)
def test_names_that_one_can_say_are_let_be(name):
    assert report(card(name, 20, 20, 250)).faults() == ()


def test_small_text_is_told_as_it_is_shown():
    assert report(EMBED, text("tiny", 200, 200, 'style="font-size:7px"')).smallest_text == 7
    half = report(*CLEAN, size=(200, 150))
    assert half.smallest_text == 5
    assert half.faults() == ("text of 5.0 px",)


def test_what_does_not_fit_the_pane_is_told():
    assert report(*CLEAN, pane=(300, 300)).outside
    assert not report(*CLEAN).outside


def test_what_is_hidden_is_not_looked_at():
    hidden = f'<g display="none">{EMBED}</g><g style="visibility:hidden">{EMBED}</g><defs><g>{EMBED}</g></defs>'
    assert report(*CLEAN, hidden) == report(*CLEAN)


def test_a_card_that_is_moved_lies_where_it_is_shown():
    moved = f'<g transform="translate(100,200)">{card("embed", 0, 0)}</g>'
    assert report(moved, edge("M50 220 H300")).edges_through_boxes == (
        "the edge from (50.0, 220.0) to (300.0, 220.0) crosses embed",
    )
    assert report(moved, edge("M20 20 H300")).faults() == ()


def test_the_ends_that_an_edge_tells_are_its_ends():
    through = edge("M10 50 H300").replace('class="edge flow"', 'class="edge flow" data-start="embed" data-end="head"')
    assert report(EMBED, through).edges_through_boxes == ()


def test_a_path_is_read_in_all_its_spellings():
    corners = [(10.0, 10.0), (30.0, 10.0), (30.0, 40.0)]
    for path in ("M10 10H30V40", "M10,10 L30,10 30,40", "m10 10 h20 v30", "M1e1 10 l20 0 l0 30"):
        assert polylines(path, Move()) == [corners]
    (curve,) = polylines("M0 0 C0 10 10 10 10 0", Move())
    assert curve[-1] == (10.0, 0.0)
    assert max(y for _, y in curve) == 7.5
    assert [len(piece) for piece in polylines("M0 0 L9 0 M9 9 L5 5 L5 9 Z", Move())] == [2, 4]


def test_widths_are_those_of_helvetica():
    assert text_width("embed", 10) == pytest.approx(30.57)
    assert text_width("embed", 10, bold=True) > text_width("embed", 10)
    assert not Rect(0, 0, 10, 10).is_crossed((0, 0), (0, 10))  # along a frame is not through it
