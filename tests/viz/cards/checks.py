"""A picture judged by rectangles: what overlaps, what stands out, what an edge passes through."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from fusionlab.viz.cards.layout.picture import Box, Cell, Chip, Mark, Picture, Rect, Rule, Text, Wire

SLACK = 0.6


def flat(marks) -> Iterator[Mark]:
    """Marks, those in cells included."""
    for mark in marks:
        yield mark
        if isinstance(mark, Cell):
            yield from flat(mark.marks)
        if isinstance(mark, Chip):
            yield mark.text


def texts(picture: Picture) -> list[Text]:
    """Every text."""
    marks = [m for b in picture.boxes for m in flat(b.marks)]
    marks += [t for lane in picture.lanes for t in lane.texts] + [t for p in picture.pills for t in p.texts]
    marks += [*picture.heads, *flat(picture.legend), *(t for w in picture.wires for t in w.label)]
    return [m for m in marks if isinstance(m, Text)]


def faults(picture: Picture) -> list[str]:
    """All that is wrong with a picture."""
    return [*_boxes(picture), *_marks(picture), *_texts(picture), *_wires(picture), *_frame(picture)]


def _boxes(picture: Picture) -> Iterator[str]:
    for a, b in itertools.combinations(picture.boxes, 2):
        if a.outer.meets(b.outer, SLACK) and not (a.rect.holds(b.outer, SLACK) and a.level < b.level):
            yield f"{a.id} and {b.id} overlap"
    for box, pill in itertools.product(picture.boxes, picture.pills):
        if box.outer.meets(pill.rect, SLACK):
            yield f"{box.id} lies on a pill"


def _marks(picture: Picture) -> Iterator[str]:
    for box in picture.boxes:
        for mark in flat(box.marks):
            if not box.rect.holds(mark.rect, SLACK):
                yield f"{mark} stands out of {box.id}"
        solid = [m for m in flat(box.marks) if not isinstance(m, Cell | Chip)]
        for a, b in itertools.combinations(solid, 2):
            if a.rect.meets(b.rect, SLACK):
                yield f"in {box.id} {a} and {b} overlap"
        for chip, mark in itertools.product((m for m in box.marks if isinstance(m, Chip)), solid):
            if chip.rect.meets(mark.rect, SLACK) and mark is not chip.text and not isinstance(mark, Rule):
                yield f"in {box.id} {chip} and {mark} overlap"
    for pill in picture.pills:
        for text in pill.texts:
            if not pill.rect.holds(text.rect, SLACK):
                yield f"{text} stands out of its pill"
    for lane in picture.lanes:
        for text in lane.texts:
            if not lane.rect.holds(text.rect, SLACK):
                yield f"{text} stands out of its lane"


def _texts(picture: Picture) -> Iterator[str]:
    found = texts(picture)
    for text in found:
        if text.size < 9:
            yield f"{text} is too small"
        if not text.text:
            yield f"{text} says nothing"
    for a, b in itertools.combinations(found, 2):
        if a.rect.meets(b.rect, SLACK):
            yield f"{a.text!r} and {b.text!r} overlap"
    for label in (t for w in picture.wires for t in w.label):
        for box in picture.boxes:
            if label.rect.meets(box.outer, SLACK) and not (box.state == "opened" and box.rect.holds(label.rect)):
                yield f"the label {label.text!r} lies on {box.id}"
        for pill in picture.pills:
            if label.rect.meets(pill.rect, SLACK):
                yield f"the label {label.text!r} lies on a pill"


def segments(wire: Wire) -> Iterator[Rect]:
    """What an edge covers."""
    half = wire.width / 2
    for (x0, y0), (x1, y1) in itertools.pairwise(wire.path):
        assert x0 == x1 or y0 == y1
        across, down = (half, 0) if x0 == x1 else (0, half)
        yield Rect(min(x0, x1) - across, min(y0, y1) - down, abs(x1 - x0) + 2 * across, abs(y1 - y0) + 2 * down)


def _wires(picture: Picture) -> Iterator[str]:
    words = texts(picture)
    ends = {b.id: b for b in picture.boxes}
    for wire in picture.wires:
        for part in segments(wire):
            yield from (
                f"{wire.start} to {wire.end} passes through {t.text!r}" for t in words if part.meets(t.rect, SLACK)
            )
            for box in picture.boxes:
                if (
                    part.meets(box.outer, SLACK)
                    and box.id not in (wire.start, wire.end)
                    and not _around(box, wire, ends)
                ):
                    yield f"{wire.start} to {wire.end} passes through {box.id}"
                if box.id in (wire.start, wire.end) and part.meets(box.rect, 1.5 + wire.width / 2):
                    yield f"{wire.start} to {wire.end} runs inside {box.id}"


def _around(box: Box, wire: Wire, ends: dict[str, Box]) -> bool:
    return all(
        name in ends and box.level < ends[name].level and box.rect.holds(ends[name].rect, SLACK)
        for name in (wire.start, wire.end)
    )


def _frame(picture: Picture) -> Iterator[str]:
    pane = Rect(0, 0, picture.width, picture.height)
    rects = [b.outer for b in picture.boxes] + [p.rect for p in picture.pills] + [t.rect for t in texts(picture)]
    rects += [r for w in picture.wires for r in segments(w)] + [lane.rect for lane in picture.lanes]
    yield from (f"{rect} stands out of the picture" for rect in rects if not pane.holds(rect))
