"""Edges: straight between neighbours, in channels next to the cards where they skip some, level from lane to lane."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..card import Edge
from .measure import bytes_text, text_width
from .picture import Rect, Text, Wire

MOST_CHANNELS = 5
_THIN, _WIDE = 1.3, 9.0
_HEAVY = 0.45  # of the widest: from here on a label is larger


@dataclass(frozen=True)
class Widths:
    """How wide an edge is for its bytes; the heaviest of those kept is the widest."""

    largest: float

    def of(self, edge: Edge, most: float = 99.0) -> float:
        return min(_THIN + _WIDE * math.sqrt(min(edge.bytes / self.largest, 1.0)), most)

    def heavy(self, edge: Edge) -> bool:
        """Whether its label is larger than others'."""
        return edge.bytes >= _HEAVY * self.largest


def widths_of(edges: Iterable[Edge]) -> Widths:
    """Flows stay thinner than what is kept, also where nothing is."""
    edges = tuple(edges)
    kept = max((e.bytes for e in edges if e.kind == "kept"), default=0)
    flow = max((e.bytes for e in edges if e.kind != "kept"), default=0)
    return Widths(max(kept, 8 * flow, 1))


@dataclass(frozen=True)
class Slot:
    """The ends of a column's edges: a card, or a pill, whose own text names the value that flows (`plain`)."""

    id: str
    rect: Rect
    plain: bool = False


@dataclass(frozen=True)
class Column:
    """Where the edges of a column may run.

    Attributes:
      x: of the straight ones.
      side, step, edge: the channels are at the left (-1) or right (1), so far from each other, the first one step from `edge`.
      right: where labels end at the latest.
      widest: an edge.
    """

    x: float
    side: int
    step: float
    edge: float
    right: float
    widest: float = 12.0


def summed(edges: Iterable[Edge], names: Mapping[str, str]) -> list[Edge]:
    """Edges between what `names` calls their ends, one for each pair; those with an end that it does not know are left out."""
    found: dict[tuple[str, str], Edge] = {}
    for edge in edges:
        start, end = names.get(edge.start, ""), names.get(edge.end, "")
        if not start or not end or start == end:
            continue
        old = found.get((start, end))
        new = replace(edge, start=start, end=end)
        if old is not None:
            new = replace(old, bytes=old.bytes + edge.bytes, type="", values=old.values + edge.values)
        found[start, end] = new
    return list(found.values())


def _skips(order: Sequence[str], edges: Iterable[Edge]) -> tuple[list[Edge], list[Edge]]:
    """Edges between neighbours, one for each pair of them; and the others."""
    index = {name: i for i, name in enumerate(order)}
    straight: dict[int, Edge] = {}
    skips: list[Edge] = []
    for edge in edges:
        i, j = index[edge.start], index[edge.end]
        if abs(i - j) == 1 and min(i, j) not in straight:
            straight[min(i, j)] = edge
        else:
            skips.append(edge)
    return list(straight.values()), skips


def channels_of(order: Sequence[str], edges: Iterable[Edge], most: int = MOST_CHANNELS) -> dict[str, int]:
    """Start of edges that skip something -> the channel they share, 0 next to the cards. The heaviest, where not all have one."""
    index = {name: i for i, name in enumerate(order)}
    spans: dict[str, tuple[int, int, int]] = {}
    for edge in _skips(order, edges)[1]:
        i, j = index[edge.start], index[edge.end]
        low, high, weight = spans.get(edge.start, (i, i, 0))
        spans[edge.start] = min(low, j), max(high, j), weight + edge.bytes
    return intervals(spans, most)


def intervals(spans: Mapping[str, tuple[float, float, float]], most: int) -> dict[str, int]:
    """Name -> track, so that no two that touch share one, the shortest first; of (low, high, weight) the heaviest get one."""
    kept: list[str] = []
    for name in sorted(spans, key=lambda n: (-spans[n][2], spans[n][:2], n)):
        if _deepest([spans[n] for n in kept], spans[name]) < most:
            kept.append(name)
    return _tracks({n: spans[n] for n in kept}, most)


def _tracks(spans: Mapping[str, tuple[float, float, float]], most: int) -> dict[str, int]:
    tracks: list[list[tuple[float, float]]] = []
    found: dict[str, int] = {}
    for name in sorted(spans, key=lambda n: (spans[n][1] - spans[n][0], spans[n][:2], n)):
        low, high, _ = spans[name]
        free = (i for i, track in enumerate(tracks) if all(b < low or high < a for a, b in track))
        track = next(free, len(tracks))
        if track < most:
            tracks += [[]] if track == len(tracks) else []
            tracks[track].append((low, high))
            found[name] = track
    return found


def _deepest(spans: Iterable[tuple[float, float, float]], new: tuple[float, float, float]) -> int:
    """How many of the spans lie over one point of the new one, where most do."""
    meeting = [s for s in spans if s[0] <= new[1] and new[0] <= s[1]]
    return max(sum(s[0] <= at <= s[1] for s in meeting) for at in (new[0], *(s[0] for s in meeting)))


def column_wires(
    slots: Sequence[Slot], edges: Sequence[Edge], channels: Mapping[str, int], widths: Widths, column: Column
) -> list[Wire]:
    """The edges of one column of cards. `channels` is what `channels_of` gave for them."""
    rects = {s.id: s.rect for s in slots}
    straight, skips = _skips([s.id for s in slots], edges)
    wires = [_straight(e, rects, widths, column) for e in straight]
    plain = {s.id for s in slots if s.plain}
    wires = [replace(w, label=()) if {w.start, w.end} & plain else w for w in wires]
    return wires + [_skip(e, rects, channels[e.start], widths, column) for e in skips if e.start in channels]


def _straight(edge: Edge, rects: Mapping[str, Rect], widths: Widths, column: Column) -> Wire:
    start, end = rects[edge.start], rects[edge.end]
    first, last = (start.bottom, end.y) if start.y < end.y else (start.y, end.bottom)
    wide = widths.of(edge, column.widest)
    label = _label(edge, column.x + wide / 2 + 8, (first + last) / 2, column.right) if abs(last - first) >= 15 else ()
    return Wire(edge.start, edge.end, edge.kind, ((column.x, first), (column.x, last)), wide, True, label, spoken(edge))


def _label(edge: Edge, x: float, middle: float, right: float) -> tuple[Text, ...]:
    number = Text(x, middle + 3.4, bytes_text(edge.bytes), bold=True, kind="edge-label")
    if number.rect.right > right:
        return ()
    kind = Text(number.rect.right + 7, middle + 3.4, edge.type, muted=True, kind="edge-label type")
    return (number, kind) if edge.type and kind.rect.right <= right else (number,)


def spoken(edge: Edge) -> str:
    """The tooltip of an edge."""
    values = f"{edge.values} values" if edge.values > 1 else edge.type
    kind = {"kept": "kept for the backward pass", "gradients": "gradients"}.get(edge.kind, "")
    return ", ".join(filter(None, (bytes_text(edge.bytes), values, kind)))


def _skip(edge: Edge, rects: Mapping[str, Rect], channel: int, widths: Widths, column: Column) -> Wire:
    start, end = rects[edge.start], rects[edge.end]
    x = column.edge + column.side * column.step * (channel + 1)
    leaves, comes = start.y + 0.3 * min(start.height, 42), end.y + 0.7 * min(end.height, 42)
    path = ((_side(start, column.side), leaves), (x, leaves), (x, comes), (_side(end, column.side), comes))
    wide = widths.of(edge, min(column.widest, column.step - 5))
    return Wire(edge.start, edge.end, edge.kind, path, wide, True, (), spoken(edge))


def _side(rect: Rect, side: int) -> float:
    return rect.x if side < 0 else rect.right


# -- from lane to lane ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Port:
    """The side of a card: the x of both its sides and the height at which level edges meet it."""

    left: float
    right: float
    axis: float
    row: int


def buses_of(edges: Iterable[Edge], rows: Mapping[str, int], most: int = 3) -> dict[str, int]:
    """End of edges that come from other rows -> the track of the vertical line in which they meet."""
    spans: dict[str, tuple[int, int, int]] = {}
    for edge in edges:
        i, j = rows[edge.start], rows[edge.end]
        if i != j:
            low, high, weight = spans.get(edge.end, (j, j, 0))
            spans[edge.end] = min(low, i), max(high, i), weight + edge.bytes
    return intervals(spans, most)


def level_wires(
    edges: Sequence[Edge], ports: Mapping[str, Port], buses: Mapping[str, int], widths: Widths, room: Rect
) -> list[Wire]:
    """The edges between two lanes; `room` is the space between these. Those of one row are level, others join a vertical line."""
    level, off = [], {}
    for edge in edges:
        if ports[edge.start].row == ports[edge.end].row:
            level.append(edge)
        elif edge.end in buses:
            off.setdefault(edge.end, []).append(edge)
    taken = bus_room(buses)
    zone = Rect(room.x + taken, room.y, room.width - taken, room.height)
    wires = [_level(e, ports, widths, zone) for e in level]
    level_ends = {e.end for e in level}
    met = {ports[end].row for end in level_ends.union(off)}
    for end, meeting in off.items():
        wires += _meeting(meeting, ports, end in level_ends, met, room.x + 7 + 7 * buses[end], widths)
    return wires


def _meeting(
    edges: Sequence[Edge], ports: Mapping[str, Port], joins: bool, met: Collection[int], x: float, widths: Widths
) -> list[Wire]:
    """Edges that meet in one vertical line; where it joins a level one (`joins`), that one has the arrow."""
    one, *others = [_bus(e, ports, not joins, met, x, widths) for e in edges]
    return [one, *(others if joins else map(_joining, others))]


def bus_room(buses: Mapping[str, int]) -> float:
    """The width that vertical lines take between two lanes."""
    return 7.0 * (max(buses.values()) + 1) + 3 if buses else 0.0


def _level(edge: Edge, ports: Mapping[str, Port], widths: Widths, zone: Rect) -> Wire:
    start, end = ports[edge.start], ports[edge.end]
    wide = widths.of(edge)
    path = ((start.right, start.axis), (end.left, start.axis))
    label = _level_label(edge, start.axis + wide / 2, widths.heavy(edge), zone)
    return Wire(edge.start, edge.end, edge.kind, path, wide, True, label, spoken(edge))


def _level_label(edge: Edge, below: float, heavy: bool, zone: Rect) -> tuple[Text, ...]:
    text = bytes_text(edge.bytes)
    for size in (12.5, 10.0) if heavy and edge.kind == "kept" else (10.0,):
        if text_width(text, size, True) <= zone.width + 4:
            return (Text(zone.centre, below + 0.74 * size + 3, text, size, True, kind="edge-label", anchor="middle"),)
    return ()


def _bus(edge: Edge, ports: Mapping[str, Port], arrow: bool, met: Collection[int], x: float, widths: Widths) -> Wire:
    start, end = ports[edge.start], ports[edge.end]
    leaves = start.axis - 9 * (start.row in met)
    last = (end.left, end.axis)
    path = ((start.right, leaves), (x, leaves), (x, end.axis), *([last] if arrow else []))
    return Wire(edge.start, edge.end, edge.kind, path, widths.of(edge, 4.0), arrow, (), spoken(edge))


def _joining(wire: Wire, radius: float = 5.0) -> Wire:
    """An edge that joins another one above or below the round corner of that, where it has a way to go before."""
    *before, (x, start), (_, end), _ = wire.path
    wire = replace(wire, path=wire.path[:-1], arrow=False)
    if abs(end - start) <= radius:
        return wire
    return replace(wire, path=(*before, (x, start), (x, end - math.copysign(radius, end - start))))
