"""Looks at a drawing of cards as a strict reader would: every fault of size, name, place and crossing, each with what it is of.

What it goes by: a card is `g.card` with a `rect.card-body`, inputs and results `g.pill` with a `rect`, lanes `g.lane`, an edge
`g.edge` with a `path` and `data-start`, `data-end`, its label `text.edge-label`; a name is `text.title`, parts in a closed card `g.cell`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from .drawing import Element, Point, Rect, Text, around, elements, numbers, polylines, texts

NEAR = (
    9.0  # an edge ends this near to its card, if not at its frame: at the sheets behind it, or before its arrow's head
)
# Names that say nothing: of the machinery around a call, of nobody, and ids of the drawing or of the program.
NOBODY = re.compile(r"|apply|wrapped|wrapper|\d[\d,]*(?: nodes?)?|[\d\s.…]+|n\d+|%\d+|<.*>")
ANYWHERE = re.compile(r"__call__|<(?:lambda|locals|genexpr|listcomp|dictcomp)>|part~\d+|\bcluster_\w+|(?<!\S)%\d+")
PREFIX = "fl-"  # of ids: what edges call their ends has none


@dataclass(frozen=True)
class Box:
    """A card or a pill as drawn: its id, its name ("" if none is written), its body and its group."""

    id: str
    name: str
    rect: Rect
    group: Element

    @property
    def is_open(self) -> bool:
        """Whether other boxes may stand in it."""
        return "card" in self.group.classes and not self.group.classes & {"closed", "site", "nodes"}

    def __str__(self) -> str:
        return self.name or self.id


@dataclass(frozen=True)
class Line:
    """An edge's path. `ends` are the ids of its cards where the drawing tells them."""

    points: tuple[Point, ...]
    ends: frozenset[str]
    name: str
    width: float

    def crosses(self, rect: Rect) -> bool:
        """Whether more than a px of its stroke lies in a rectangle."""
        room = rect.grown(self.width / 2 - 1.0)
        return any(room.is_crossed(a, b) for a, b in pairwise(self.points))

    def ends_among(self, boxes: list[Box]) -> set[str]:
        """Ids of the boxes that are its ends or hold one: those that it names, those around its two points, and the nearest frame."""
        found = set(self.ends)
        for point in (self.points[0], self.points[-1]):
            found |= {box.id for box in boxes if box.rect.grown(1.0).has(point)}
            nearest = min(boxes, key=lambda box: box.rect.from_frame(point), default=None)
            if nearest and nearest.rect.from_frame(point) <= NEAR:
                found.add(nearest.id)
        return found


@dataclass(frozen=True)
class Report:
    """What was found in a drawing, each fault as a sentence without its verb.

    Attributes:
      smallest_text: in px; 0 where nothing is written.
      boxes: how many cards are visible.
      extent: what the drawing covers.
      outside: whether it does not fit the pane.
      passes: names of those whose colour is in sight (`data-pass`).
      the others: faults of that kind, in the order of the drawing.
    """

    smallest_text: float
    boxes: int
    extent: Rect
    outside: bool
    passes: frozenset[str] = frozenset()
    names: tuple[str, ...] = ()
    overlapping_boxes: tuple[str, ...] = ()
    overlapping_labels: tuple[str, ...] = ()
    texts_outside: tuple[str, ...] = ()
    texts_over_marks: tuple[str, ...] = ()
    marks_outside: tuple[str, ...] = ()
    edges_through_boxes: tuple[str, ...] = ()
    edges_through_labels: tuple[str, ...] = ()

    def faults(self, least_text: float = 9.0, most_boxes: int = 60) -> tuple[str, ...]:
        """All faults, a line for each."""
        small = self.smallest_text < least_text
        found = [f"text of {self.smallest_text:.1f} px"] if small else []
        found += [f"{self.boxes} boxes"] if self.boxes > most_boxes else []
        found += [f"larger than the pane: {self.extent}"] if self.outside else []
        lists = ("names", "overlapping_boxes", "overlapping_labels", "texts_outside")
        lists += ("texts_over_marks", "marks_outside", "edges_through_boxes", "edges_through_labels")
        return (*found, *(f"{kind.replace('_', ' ')}: {fault}" for kind in lists for fault in getattr(self, kind)))


def check(svg: str, width: float, height: float) -> Report:
    """Looks at a drawing that is shown in a pane of this size."""
    all_elements = list(elements(svg))
    lines, written = _lines(all_elements), texts(all_elements)
    cards = _boxes(all_elements, written, "card")
    boxes = [*cards, *_boxes(all_elements, written, "pill")]
    marks = _marks(all_elements)
    extent = _extent(all_elements, written, lines)
    return Report(
        smallest_text=min((t.size for t in written), default=0.0),
        boxes=len(cards),
        extent=extent,
        outside=not Rect(0.0, 0.0, width, height).holds(extent, slack=1.0),
        passes=frozenset(name for e in all_elements if e.visible and (name := e.xml.get("data-pass"))),
        names=tuple(_bad_names(cards, written)),
        overlapping_boxes=tuple(_overlapping_boxes(boxes)),
        overlapping_labels=tuple(_overlapping_labels(written)),
        texts_outside=tuple(_texts_outside(boxes, written)),
        texts_over_marks=tuple(_texts_over_marks(marks, written)),
        marks_outside=tuple(_marks_outside(marks, cards)),
        edges_through_boxes=tuple(_through_boxes(lines, boxes)),
        edges_through_labels=tuple(f"{e.name} crosses {t.text!r}" for e in lines for t in written if e.crosses(t.rect)),
    )


def _boxes(all_elements: list[Element], written: list[Text], kind: str) -> list[Box]:
    bodies: dict[int, Rect] = {}
    for e in all_elements:
        group = e.inside(kind)
        if e.tag == "rect" and group is not None and e.visible and (kind == "pill" or "card-body" in e.classes):
            bodies.setdefault(id(group.xml), e.rect)
    mine: dict[int, list[Text]] = {}
    for text in written:
        if group := text.element.inside(kind):
            mine.setdefault(id(group.xml), []).append(text)
    groups = [e for e in all_elements if kind in e.classes and id(e.xml) in bodies]
    return [_box(e, mine.get(id(e.xml), []), bodies[id(e.xml)]) for e in groups]


def _box(group: Element, written: list[Text], body: Rect) -> Box:
    said = next((t.text for t in written), "nothing")
    return Box(_id(group) or said, _name(written), body, group)


def _id(group: Element) -> str:
    return group.xml.get("id", "").removeprefix(PREFIX)


def _name(written: list[Text]) -> str:
    """A box's title; a pill needs none."""
    titles = [t.text for t in written if "title" in t.element.classes and t.element.inside("cell") is None]
    return next(iter(titles), "")


def _bad_names(cards: list[Box], written: list[Text]) -> Iterator[str]:
    cells = [t for t in written if "title" in t.element.classes and t.element.inside("cell")]
    for where, name in (*((card.id, card.name) for card in cards), *(("a cell", cell.text) for cell in cells)):
        if NOBODY.fullmatch(name.partition(" · ")[0].strip()):
            yield f"{where} is called {name!r}"
    for text in written:
        if ANYWHERE.search(text.text):
            yield f"written: {text.text!r}"


def _overlapping_boxes(boxes: list[Box]) -> Iterator[str]:
    for one, other in itertools.combinations(boxes, 2):
        nested = any(a.is_open and a.rect.holds(b.rect) and a.rect != b.rect for a, b in ((one, other), (other, one)))
        if one.rect.meets(other.rect) and not nested:
            yield f"{one} and {other}"


def _overlapping_labels(written: list[Text]) -> Iterator[str]:
    for one, other in itertools.combinations(written, 2):
        if one.rect.meets(other.rect):
            yield f"{one.text!r} and {other.text!r}"


def _texts_outside(boxes: list[Box], written: list[Text]) -> Iterator[str]:
    bodies = {id(box.group.xml): box for box in boxes}
    for text in written:
        box = next((b for e in reversed(text.element.parents) if (b := bodies.get(id(e.xml)))), None)
        if box and "edge-label" not in text.element.classes and not box.rect.holds(text.rect, slack=1.0):
            yield f"{text.text!r} of {box}"


def _marks(all_elements: list[Element]) -> dict[int, list[Element]]:
    """Swatches, bars, rules and grounds of each card, by the identity of its group: what is drawn after its body."""
    rects: dict[int, list[Element]] = {}
    for e in all_elements:
        group = e.inside("card")
        if e.tag == "rect" and group is not None and e.visible:
            rects.setdefault(id(group.xml), []).append(e)
    return {group: _above_the_body(mine) for group, mine in rects.items()}


def _texts_over_marks(marks: dict[int, list[Element]], written: list[Text]) -> Iterator[str]:
    """Texts that lie half on a mark of their card: on a ground of their own they lie wholly."""
    for text in written:
        group = text.element.inside("card")
        for mark in marks.get(id(group.xml), []) if group else ():
            if mark.rect.meets(text.rect, slack=1.0) and not mark.rect.holds(text.rect, slack=1.0):
                yield f"{text.text!r} over {_kind(mark)}"


def _marks_outside(marks: dict[int, list[Element]], boxes: list[Box]) -> Iterator[str]:
    for box in boxes:
        for mark in marks.get(id(box.group.xml), []):
            if not box.rect.holds(mark.rect, slack=1.0):
                yield f"{_kind(mark)} of {box}"


def _kind(mark: Element) -> str:
    return mark.xml.get("class") or "a rectangle"


def _above_the_body(rects: list[Element]) -> list[Element]:
    """Those drawn after a card's body: sheets lie before it."""
    body = next((i for i, e in enumerate(rects) if "card-body" in e.classes), -1)
    return rects[body + 1 :]


def _lines(all_elements: list[Element]) -> list[Line]:
    paths = ((e, e.inside("edge")) for e in all_elements if e.tag == "path" and e.visible)
    return [line for path, edge in paths if edge is not None for line in _lines_of(path, edge)]


def _lines_of(path: Element, edge: Element) -> Iterator[Line]:
    start, end = (edge.xml.get(f"data-{name}", "") for name in ("start", "end"))
    width = numbers(path.style.get("stroke-width", "1"))[0] * path.move.across
    for points in polylines(path.xml.get("d", ""), path.move):
        name = f"{start} → {end}" if start and end else _id(edge) or f"the edge from {points[0]} to {points[-1]}"
        if len(points) > 1:
            yield Line(tuple(points), frozenset({start, end} - {""}), name, width)


def _through_boxes(lines: list[Line], boxes: list[Box]) -> Iterator[str]:
    for line in lines:
        ends = line.ends_among(boxes)
        for box in boxes:
            if box.id not in ends and line.crosses(box.rect):
                yield f"{line.name} crosses {box}"


def _extent(all_elements: list[Element], written: list[Text], lines: list[Line]) -> Rect:
    """What cards, lanes, pills, labels and edges cover; a ground that fills the pane and what clips are not asked."""
    rects = [
        e.rect for e in all_elements if e.tag == "rect" and e.visible and any(map(e.inside, ("card", "lane", "pill")))
    ]
    corners = [(r.left, r.top) for r in (*rects, *(t.rect for t in written))]
    corners += [(r.right, r.bottom) for r in (*rects, *(t.rect for t in written))]
    corners += [p for line in lines for p in line.points]
    return around(corners) if corners else Rect(0.0, 0.0, 0.0, 0.0)
