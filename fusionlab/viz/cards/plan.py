"""The layout of a picture: lanes as columns, modules as rows, opened cards grown in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .card import AFTER, Card, Edge, Overview
from .layout.between import between_marks
from .layout.faces import NARROW, Scale, closed_face, height_of, opens
from .layout.lanes import MARGIN, Span, heads_of, lane_of, legend_of, spans_of
from .layout.lines import (
    Column,
    Port,
    Slot,
    bus_room,
    buses_of,
    channels_of,
    column_wires,
    level_wires,
    summed,
    widths_of,
)
from .layout.opened import Drawing, box_of, depth_of, opened_inside, spoken, state_of
from .layout.picture import SHEET, Box, Mark, Picture, Pill, Rect, Wire
from .layout.pills import pill_groups, placed_pill
from .layout.rows import FOOT, HEAD, PILL, TOP, gap_after, grid_of, is_stack, shown

_INSET = 10.0  # of cards in their lane
_LEAST_OPENED = 16.0  # between rows below an opened card


def plan(overview: Overview, width: float, height: float, opened: Collection[str] = ()) -> Picture:
    """Places everything.

    The picture is wider or higher than the pane only where opened cards need it, or where not even the least rows fit.

    Args:
      overview: the program; rows that do not fit are joined (see `shown`).
      width, height: the pane's, in px.
      opened: ids of cards.
    """
    return _Plan(shown(overview, height), width, height, both_sides(overview, opened)).picture()


def both_sides(overview: Overview, opened: Collection[str]) -> frozenset[str]:
    """The open cards: in a before/after picture, a card that is open on one side is open on both."""
    return frozenset(opened) | ({AFTER + card for card in opened} if overview.is_beside else set())


def described(overview: Overview, opened: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """The clickable parts while these cards are open: id -> label, kind, state, whether it opens and whether it is closed.

    `overview` is as `shown` gives it.
    """
    scale, found = Scale(overview.total), {}
    opened = both_sides(overview, opened)
    todo = [
        *overview.inputs,
        *(row.cards[p] for row in overview.rows for p in overview.phases if p in row.cards),
        *overview.results,
    ]
    while todo:
        card = todo.pop(0)
        is_open = card.id in opened and opens(card)
        closed = opens(card) and not is_open
        label = (
            " ".join(filter(None, (card.name, card.type)))
            if card.kind in ("input", "output")
            else spoken(card, scale, is_open)
        )
        found[card.id] = {
            "label": label,
            "kind": card.kind,
            "group": opens(card),
            "closed": closed,
            "state": state_of(card, is_open),
        }
        if is_open:
            todo[:0] = card.inside
    return found


@dataclass(frozen=True)
class _Lane:
    """Where the edges of a lane run, and the stretch of its cards."""

    column: Column
    cards: Span


class _Plan:
    """One picture as it is made."""

    def __init__(self, overview: Overview, width: float, height: float, opened: frozenset[str]) -> None:
        self.overview, self.width, self.height = overview, width, height
        self.phases = list(overview.phases)
        self.groups = pill_groups(overview)
        self.cards = [
            (i, p, row.cards[p]) for i, row in enumerate(overview.rows) for p in self.phases if p in row.cards
        ]
        self.edges = summed(overview.edges, self._names())
        self.drawing = Drawing(Scale(overview.total), widths_of(self.edges), opened)
        self.row_of = {card.id: i for i, _, card in self.cards}
        self.lane = {card.id: p for _, p, card in self.cards} | {g.id: g.lane for g in self.groups}
        self.between = [self._between(a, b) for a, b in zip(self.phases, self.phases[1:], strict=False)]
        self.buses = [buses_of(edges, self.row_of) for edges in self.between]
        self.rooms = [bus_room(b) for b in self.buses]
        self.base = spans_of(self.phases, width, self.rooms, {})
        self.spans = spans_of(self.phases, width, self.rooms, {p: self._depth(p) for p in self.phases})
        self.channels = {p: channels_of(self._order(p), self._flows(p), self._most_channels(p)) for p in self.phases}
        narrow = any(self._room(p)[0] < NARROW for p in self.phases[:2])
        self.grid = grid_of(overview, height, self._has("top"), self._has("bottom"), narrow)

    def _names(self) -> dict[str, str]:
        """The names an edge may use -> the card or pill at which it begins or ends."""
        names = {card.id: card.id for _, _, card in self.cards}
        return names | {name: group.id for group in self.groups for name in group.ids}

    def _depth(self, phase: str) -> int:
        """How deep cards of a lane are open."""
        return max((depth_of(c, self.drawing.opened) for _, p, c in self.cards if p == phase), default=0)

    def _has(self, side: str) -> bool:
        return any(g.side == side for g in self.groups)

    def _between(self, left: str, right: str) -> list[Edge]:
        """Edges from the cards of one lane to those of the next."""
        return [
            e
            for e in self.edges
            if e.start in self.row_of
            and e.end in self.row_of
            and (self.lane[e.start], self.lane[e.end]) == (left, right)
        ]

    def picture(self) -> Picture:
        """All of it."""
        channels = self.channels
        columns = {p: self._column(p) for p in self.phases}
        boxes, wires, rects = self._boxes(columns)
        pills = self._pills(columns, rects)
        slots = [Slot(name, rect) for name, rect in rects.items()] + [Slot(p.id, p.rect, True) for p in pills]
        for phase in self.phases:
            wires += self._column_wires(phase, slots, channels[phase], columns[phase].column)
        wires += self._levels(rects)
        bottom = max([self.height - FOOT, *(s.rect.bottom + 6 for s in slots)])
        right = max(self.width, self.spans[-1].right + MARGIN) if self.spans else self.width
        return Picture(
            width=right,
            height=bottom + FOOT,
            title=self.overview.title,
            lanes=tuple(lane_of(p, s, bottom, self.overview) for p, s in zip(self.phases, self.spans, strict=True)),
            heads=tuple(heads_of(self.phases, self.spans, self.rooms, self.overview)),
            boxes=tuple(boxes),
            pills=tuple(pills),
            wires=tuple(wires),
            legend=tuple(self._legend(bottom + 19)) if self.spans else (),
            between=tuple(between_marks(self.overview, boxes, self.spans)) if self.overview.is_beside else (),
        )

    def _legend(self, y: float) -> Sequence[Mark]:
        beside = self.overview.is_beside
        backward = "backward" in self.phases or (beside and any(s.backward for _, _, c in self.cards for s in c.strips))
        return legend_of(self.spans, y, backward, self.overview.mesh, beside, self.drawing.scale.unit)

    # -- columns --

    def _order(self, phase: str) -> list[str]:
        """The content of a lane, from the top."""
        of_lane = [g for g in self.groups if g.lane == phase]
        top = [g.id for g in of_lane if g.side == "top"]
        bottom = [g.id for g in of_lane if g.side == "bottom"]
        return [*top, *(card.id for _, p, card in self.cards if p == phase), *bottom]

    def _flows(self, phase: str) -> list[Edge]:
        """The edges inside a lane."""
        return [e for e in self.edges if self.lane[e.start] == self.lane[e.end] == phase]

    def _column_wires(
        self, phase: str, slots: Sequence[Slot], channels: Mapping[str, int], column: Column
    ) -> list[Wire]:
        by_name = {s.id: s for s in slots}
        mine = [by_name[name] for name in self._order(phase)]
        return column_wires(mine, self._flows(phase), channels, self.drawing.widths, column)

    def _most_channels(self, phase: str) -> int:
        wide = self.base[self.phases.index(phase)].width
        return 5 if wide >= 260 else 3 if wide >= 180 else 2

    def _room(self, phase: str) -> tuple[float, float, float]:
        """The width of closed cards in a lane, of all its channels, and of one."""
        channels, base = self.channels[phase], self.base[self.phases.index(phase)]
        step = 12.0 if base.width >= 260 else 8.0
        taken = step * (max(channels.values()) + 1) + 2 if channels else 0.0
        return base.width - 2 * _INSET - taken, taken, step

    def _column(self, phase: str) -> _Lane:
        """The stretch that the cards of a lane have, and where its edges run."""
        span = self.spans[self.phases.index(phase)]
        closed, taken, step = self._room(phase)
        side = 1 if phase in ("backward", "update") else -1
        indent = taken if side < 0 else 0.0
        x, wide = span.x + _INSET + indent, span.width - 2 * _INSET - taken
        straight = x + min(wide, closed) / 2
        edge = x if side < 0 else x + wide + 2 * SHEET
        return _Lane(Column(straight, side, step, edge, x + wide), Span(x, wide))

    # -- cards --

    def _boxes(self, columns: Mapping[str, _Lane]) -> tuple[list[Box], list[Wire], dict[str, Rect]]:
        """All cards, what flows in those that are open, and the frames of the outermost."""
        boxes: list[Box] = []
        wires: list[Wire] = []
        rects: dict[str, Rect] = {}
        self.shift: list[float] = []
        end, least = 0.0, 0.0
        for i, row in enumerate(self.overview.rows):
            top = self.grid.tops[i]
            shift = max(0.0, end + least - top)
            self.shift.append(shift)
            end = top + shift + self.grid.heights[i]
            for phase in self.phases:
                if phase not in row.cards:
                    continue
                card = row.cards[phase]
                found, inner = self._card(card, phase, i, shift, columns[phase].cards)
                boxes += found
                wires += inner
                rects[card.id] = found[0].outer
                end = max(end, found[0].rect.bottom)
            least = gap_after(row, _LEAST_OPENED) if is_stack(row) else _LEAST_OPENED
        return boxes, wires, rects

    def _card(self, card: Card, phase: str, row: int, shift: float, span: Span) -> tuple[Sequence[Box], Sequence[Wire]]:
        detail = self.grid.details[row]
        high = height_of(card, detail)
        y = self.grid.axis(row) + shift - high / 2
        if self.drawing.is_open(card):
            inside = opened_inside(card, span.x, y, span.width, self.drawing, phase)
            return inside.boxes, inside.wires
        rect = Rect(span.x, y, span.width, high)
        box = box_of(card, rect, self.drawing, phase)
        return [replace(box, marks=closed_face(card, rect, self.drawing.scale, detail))], []

    # -- pills --

    def _pills(self, columns: Mapping[str, _Lane], rects: Mapping[str, Rect]) -> list[Pill]:
        found = []
        for group in self.groups:
            column = columns[group.lane]
            y = TOP + HEAD
            if group.side == "bottom":
                y = self._below(group.lane, rects)
            found.append(placed_pill(group, column.column.x, y, column.cards.x, column.cards.right))
        return found

    def _below(self, phase: str, rects: Mapping[str, Rect]) -> float:
        """The position of a pill below the last card of a lane."""
        mine = [(i, card) for i, p, card in self.cards if p == phase]
        if not mine:
            return TOP + HEAD + PILL + self.grid.gap
        row, card = mine[-1]
        usual = (
            self.grid.axis(row)
            + height_of(card, self.grid.details[row]) / 2
            + gap_after(self.overview.rows[row], self.grid.gap)
        )
        return max(usual, rects[card.id].bottom + _LEAST_OPENED)

    # -- from lane to lane --

    def _levels(self, rects: Mapping[str, Rect]) -> list[Wire]:
        ports = {
            card.id: Port(rects[card.id].x, rects[card.id].right, self.grid.axis(i) + self.shift[i], i)
            for i, _, card in self.cards
        }
        wires: list[Wire] = []
        for i, edges in enumerate(self.between):
            left, right = self.spans[i].right, self.spans[i + 1].x
            room = Rect(left, TOP, right - left, self.height)
            wires += level_wires(edges, ports, self.buses[i], self.drawing.widths, room)
        return wires
