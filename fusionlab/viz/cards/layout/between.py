"""The column between a program and the same program with its sites fused: the bytes of each row on both sides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..card import AFTER, BESIDE, Card, Overview
from .lanes import Span
from .measure import bytes_text, text_width
from .opened import HEAD_ROOM
from .picture import Bar, Box, Mark, Rect, Text

_PAD, _BAR = 10.0, 4.0


def between_marks(overview: Overview, boxes: Sequence[Box], spans: Sequence[Span]) -> Iterator[Mark]:
    """For each row, and each row inside an opened card: bars on one scale for all that is closed, and the numbers.

    Of a part of several equal ones they are of all, so that what is inside and outside of it compares.
    """
    cards = {card.id: card for row in overview.rows for top in row.cards.values() for card in _walk(top)}
    rows = [(box, cards[box.id], cards[AFTER + box.id]) for box in boxes if box.lane == BESIDE[0] and box.id in cards]
    largest = max((before.cost.bytes for box, before, _ in rows if box.state != "opened"), default=0)
    room = Span(spans[0].right + _PAD, spans[1].x - spans[0].right - 2 * _PAD)
    for box, before, after in rows:
        if box.state == "opened":
            yield from _numbers(before, after, room, box.rect.y + HEAD_ROOM / 2 + 3.7)
        elif before.cost.bytes:
            yield from _row(before, after, room, box.rect.middle, largest)


def _walk(card: Card) -> Iterator[Card]:
    yield card
    for child in card.inside:
        yield from _walk(child)


def _row(before: Card, after: Card, room: Span, middle: float, largest: float) -> Iterator[Mark]:
    changed = after.cost.bytes != before.cost.bytes
    top = middle - (11 if changed else 9)
    for k, card in enumerate((before, after) if changed else (before,)):
        share = card.cost.bytes / max(largest, 1)
        rect = Rect(room.x, top + k * (_BAR + 1), room.width, _BAR)
        yield Bar(rect, min(share, 1.0), BESIDE[k], 1, _pass_of(after) if k else "")
    yield from _numbers(before, after, room, top + (_BAR + 1) * (1 + changed) + 9)


def _pass_of(card: Card) -> str:
    """The pass that changes a card, where it is one."""
    applied = {s.pass_name for s in card.strips if s.state == "applied"}
    return applied.pop() if len(applied) == 1 else ""


def _numbers(before: Card, after: Card, room: Span, y: float) -> Iterator[Text]:
    was, now = before.cost.bytes, after.cost.bytes
    if was == now:
        stays = " stays" if before.site is not None and before.site.state != "applied" else ""
        yield Text(room.x, y, bytes_text(was) + stays, muted=True, kind="number", line=1)
        return
    number, change = f"{bytes_text(was)} → {bytes_text(now)}", _percent(was, now)
    wide = text_width(number, 10, True)
    if wide > room.width:
        number, wide = bytes_text(now), text_width(bytes_text(now), 10, True)
    yield Text(room.x, y, number, bold=True, kind="number", line=1)
    if change and wide + 6 + text_width(change, 10, True) <= room.width:
        kind = "less" if now < was else "number"
        yield Text(room.x + wide + 6, y, change, bold=True, kind=kind, line=1)


def _percent(was: int, now: int) -> str:
    """ "−69 %"; "" where it rounds to none."""
    change = round(100 * (now - was) / max(was, 1))
    return f"{'−' if change < 0 else '+'}{abs(change)} %" if change else ""
