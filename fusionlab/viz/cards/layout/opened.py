"""The inside of an opened card: its parts one below the other, nested to any depth."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ..card import Card, Edge
from .faces import (
    HEIGHT,
    LINE,
    NARROW,
    PLAIN,
    STATE_WORDS,
    TITLE,
    Scale,
    chip_text,
    closed_face,
    line_face,
    opens,
    title_marks,
)
from .lines import Column, Slot, Widths, channels_of, column_wires, summed
from .measure import share_text, text_width
from .picture import SHEET, Box, Chip, Mark, Rect, Text, Wire
from .said import SAID

HEAD_ROOM, _FOOT, _PAD, _STEP = 32.0, 11.0, 12.0, 9.0
_CLOSE, _APART = 10.0, 22.0  # between two boxes of one line, between others
_GROWS = 0.2  # of a title's width: to 9 pixels on screen from 7.5
_RUN = re.compile(r"^(.*?)(\d+) … (?:.*?[_\s])?(\d+)(\D.*)?$")


@dataclass(frozen=True)
class Inside:
    """The drawing of a card, outer boxes first, and its height."""

    boxes: tuple[Box, ...]
    wires: tuple[Wire, ...]
    height: float


@dataclass(frozen=True)
class Drawing:
    """The common settings of all cards of a picture."""

    scale: Scale
    widths: Widths
    opened: Collection[str]

    def is_open(self, card: Card) -> bool:
        return card.id in self.opened and opens(card)


def depth_of(card: Card, opened: Collection[str]) -> int:
    """How many opened cards lie in each other, this one the first."""
    if card.id not in opened or not card.children:
        return 0
    return 1 + max(depth_of(c, opened) for c in card.children)


def opened_name(card: Card) -> str:
    """ "layer_17, 18 of 24": of a stack the part that is shown, by its name in the program and by its place, counted from 1."""
    if card.count < 2:
        return card.name
    return f"{_own_name(card)}, {card.copy + 1} of {card.count}"


def _own_name(card: Card) -> str:
    """ "layer_17", or the name of the whole run where it does not count by equal steps."""
    run = _RUN.match(card.name)
    if run is None:
        return card.name
    name, first, last, tail = run.groups(default="")
    step, rest = divmod(int(last) - int(first), card.count - 1)
    name = f"{name.removesuffix('turns ')}turn " if name.endswith("turns ") else name
    return card.name if rest else f"{name}{int(first) + card.copy * step}{tail}"


def spoken(card: Card, scale: Scale, is_open: bool) -> str:
    """A card in one line: its name, what it costs, its sites, whether it is open."""
    named = replace(card, name=opened_name(card), count=1) if is_open else card
    name = " ".join(filter(None, (card.prefix, named.name, chip_text(named))))
    share = share_text(scale.share(card.cost))
    sites = [f"{s.count:,} {s.pass_name} {STATE_WORDS[s.state]}" for s in card.strips]
    state = STATE_WORDS[card.site.state] if card.site else ""
    more = f"{share} of {scale.unit}" if share else ""
    note = "; ".join(filter(None, card.said)) or (card.site.note if card.site else "")
    opened = ("opened" if is_open else "closed") if opens(card) else ""
    return ", ".join(filter(None, (name, card.where, more, *sites, state, note, opened)))


def state_of(card: Card, is_open: bool) -> str:
    """ "opened" or "closed" of what opens, the state of a site, else ""."""
    if opens(card):
        return "opened" if is_open else "closed"
    return card.site.state if card.site else ""


def box_of(card: Card, rect: Rect, drawing: Drawing, lane: str, level: int = 0) -> Box:
    """The box of a card, with nothing in it."""
    is_open = drawing.is_open(card)
    site = card.site
    return Box(
        id=card.id,
        kind=card.kind,
        rect=rect,
        state=state_of(card, is_open),
        level=level,
        lane=lane,
        label=spoken(card, drawing.scale, is_open),
        stack=card.count > 1 and (level == 0 or is_open),
        pass_name=site.pass_name if site else "",
        backward=site.backward if site else False,
    )


def opened_inside(card: Card, x: float, y: float, width: float, drawing: Drawing, lane: str, level: int = 0) -> Inside:
    """An opened card with its upper left corner at (x, y), and all that is in it."""
    edges = summed(card.edges, {c.id: child.id for child in card.children for c in child.walk()})
    channels = channels_of([c.id for c in card.children], edges)
    indent = _STEP * (max(channels.values()) + 1) + 3 if channels else 0.0
    left, inner = x + _PAD + indent, width - 2 * _PAD - indent
    parts = _parts(card, edges, left, y + HEAD_ROOM, inner, drawing, lane, level + 1)
    slots = [Slot(p.boxes[0].id, p.boxes[0].outer) for p in parts]
    column = Column(left + min(inner, 300) / 2, -1, _STEP, left, left + inner, 3.0)
    wires = column_wires(slots, edges, channels, drawing.widths, column)
    height = max(p.boxes[0].outer.bottom for p in parts) + _FOOT - y
    rect = Rect(x, y, width, height)
    box = replace(box_of(card, rect, drawing, lane, level), marks=tuple(_head(card, rect, drawing.scale)))
    boxes = (box, *(b for p in parts for b in p.boxes))
    return Inside(boxes, (*wires, *(w for p in parts for w in p.wires)), height + 2 * SHEET * box.stack)


def _parts(
    card: Card, edges: Sequence[Edge], x: float, y: float, width: float, drawing: Drawing, lane: str, level: int
) -> list[Inside]:
    """The content of an opened card, from the top; the name of its forward part is not repeated."""
    linked = {frozenset((e.start, e.end)) for e in edges}
    parts: list[Inside] = []
    for before, child in zip((None, *card.inside), card.inside, strict=False):
        y += _gap(before, child, linked)
        shown = replace(child, prefix="") if child.prefix == card.prefix else child
        parts.append(_part(shown, x, y, width, drawing, lane, level))
        y += parts[-1].height
    return parts


def _part(card: Card, x: float, y: float, width: float, drawing: Drawing, lane: str, level: int) -> Inside:
    if drawing.is_open(card):
        wide = width - 2 * SHEET * (card.count > 1)
        return opened_inside(card, x, y, wide, drawing, lane, level)
    if not opens(card):
        rect = Rect(x, y, width, LINE + SAID * len(card.said))
        box = replace(box_of(card, rect, drawing, lane, level), line=True, marks=line_face(card, rect, drawing.scale))
        return Inside((box,), (), rect.height)
    rect = Rect(x, y, width, HEIGHT)
    box = replace(box_of(card, rect, drawing, lane, level), marks=closed_face(card, rect, drawing.scale, PLAIN))
    return Inside((box,), (), HEIGHT)


def _gap(one: Card | None, other: Card, linked: Collection[frozenset[str]]) -> float:
    """Between two parts: room for a label where there is an edge to or from one that opens. None above the first."""
    if one is None:
        return 0.0
    is_linked = frozenset((one.id, other.id)) in linked
    return _APART if is_linked and (opens(one) or opens(other)) else _CLOSE


def _head(card: Card, rect: Rect, scale: Scale) -> list[Mark]:
    """Name, which of how many, what it costs."""
    y, left, right = rect.y + 20, rect.x + 24, rect.right - 11
    caret = Text(rect.x + 10, y - 0.5, "▾", kind="caret", size=10)
    steps = 44 if card.count > 1 else 0
    named = replace(card, name=opened_name(card), count=1, prefix="" if rect.width < NARROW else card.prefix)
    wished = text_width(named.name, TITLE, True) + text_width(named.prefix, TITLE) + steps + 12
    wished += text_width(chip_text(named), 10, True) + 24 if chip_text(named) else 0
    cost, marks = _cost(card, scale, right - left - wished), [caret]
    if cost:
        marks.append(Text(right, y, cost, muted=True, kind="number", line=1, anchor="end"))
        right -= text_width(cost, 10) + 10
    title = title_marks(named, left, right - steps, y)
    return [*marks, *title, *(_steps(title, y, right) if steps else [])]


def _cost(card: Card, scale: Scale, room: float) -> str:
    share = share_text(scale.share(card.cost))
    of = f"{share} of {scale.unit}" if share else ""
    whole = " · ".join(filter(None, (scale.said(card.cost), of)))
    everyone = f"all {card.count}: {whole}" if card.count > 1 else whole
    return next((t for t in (everyone, whole, of, share) if text_width(t, 10) <= room), "")


def _steps(title: list[Mark], y: float, limit: float) -> list[Mark]:
    """Two chips that show the part before and after, with room for a title that grows in a picture shown small, if there is any."""
    end, start = max((m.rect.right for m in title), default=0.0), min((m.rect.x for m in title), default=0.0)
    x = max(end + 9, min(end + 9 + _GROWS * (end - start), limit - 35))
    places = ((-1, "‹", x), (1, "›", x + 19))
    return [
        Chip(Rect(at, y - 12, 16, 16), Text(at + 8, y, text, 11, True, kind="step", anchor="middle"), step)
        for step, text, at in places
    ]
