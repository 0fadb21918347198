"""Inputs and results: one pill for those of a lane, at the end where the flow begins or ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..card import Card, Edge, Overview
from .measure import cut, text_width
from .picture import Pill, Rect, Text
from .rows import PILL

_PAD, _APART = 12.0, 14.0


@dataclass(frozen=True)
class PillGroup:
    """The inputs or results of a lane. `side` is "top" or "bottom"."""

    id: str
    cards: tuple[Card, ...]
    lane: str
    side: str

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(c.id for c in self.cards)


def pill_groups(overview: Overview) -> list[PillGroup]:
    """An input is drawn in the first lane that reads it, a result in the last lane that makes it."""
    lanes = {c.id: p for row in overview.rows for p, c in row.cards.items()}
    found: dict[tuple[str, str], list[Card]] = {}
    for card in (*overview.inputs, *overview.results):
        lane = _lane_of(card, overview.edges, lanes, overview.phases)
        if lane:
            down = (card.kind == "output") == (lane != "backward")
            found.setdefault((lane, "bottom" if down else "top"), []).append(card)
    return [PillGroup(f"{lane}-{side}", tuple(cards), lane, side) for (lane, side), cards in found.items()]


def _lane_of(card: Card, edges: Sequence[Edge], lanes: dict[str, str], phases: Sequence[str]) -> str:
    """ "" of an input that nobody reads."""
    if card.kind == "output":
        met = {lanes.get(e.start) for e in edges if e.end == card.id}
        return next((p for p in reversed(phases) if p in met), "")
    met = {lanes.get(e.end) for e in edges if e.start == card.id}
    return next((p for p in phases if p in met), "")


def placed_pill(group: PillGroup, centre: float, y: float, left: float, right: float) -> Pill:
    """The pill as wide as its texts: with types where they fit, else names, else those that fit and how many more."""
    room = right - left - 2 * _PAD
    typed = [" ".join(filter(None, (c.name, c.type))) for c in group.cards]
    names = [c.name for c in group.cards]
    texts = next((t for t in (typed, names) if _wide(t) <= room), None) or _some(names, room)
    wide = _wide(texts) + 2 * _PAD
    x = min(max(centre - wide / 2, left), right - wide)
    rect = Rect(x, y, wide, PILL)
    marks, at = [], x + _PAD
    for text in texts:
        wide = text_width(text, 10)
        marks.append(Text(at + wide / 2, y + 14.7, text, kind="pill-text", anchor="middle"))
        at += wide + _APART
    return Pill(group.id, group.ids, group.cards[0].kind, rect, tuple(marks), group.lane, ", ".join(typed))


def _wide(texts: Sequence[str]) -> float:
    return sum(text_width(t, 10) for t in texts) + _APART * (len(texts) - 1)


def _some(names: Sequence[str], room: float) -> list[str]:
    """As many names as fit, and how many more there are."""
    for count in range(len(names) - 1, 0, -1):
        texts = [*names[:count], f"{len(names) - count} more"]
        if _wide(texts) <= room:
            return texts
    return [cut(names[0], room, 10)] if len(names) == 1 else [f"{len(names)} values"]
