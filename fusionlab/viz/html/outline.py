"""The outline of a picture, its cards as a tree with shares and sites, and the way from the whole program to a card: plain data."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ..cards.card import Amount, Card, Overview, Strip
from ..cards.layout.faces import Scale
from ..cards.layout.measure import operations_text, share_text
from ..cards.layout.opened import opened_name
from ..markup import ID_PREFIX
from ..palette import colour_of

MOST_LINES = 240  # told at once; what is deeper is told when it is asked for

Line = dict[str, Any]


def outline(overview: Overview, asked: Collection[str] = (), id_prefix: str = ID_PREFIX) -> dict[str, Any]:
    """The cards of a picture as a tree: the program, its lanes where there are several, rows, and what is inside them.

    Keys: `colours` (pass -> its colour), `unit` ("time" where kernels were timed, else "bytes") and `line`, that of the program. A line has
    `id` (what selects it: "" for the program, a lane, or the card in the picture), `name`, `prefix` and `count` of a card, `operations` and
    that of its unit (amount, and share of the program's),
    `strips` ([pass, state, how many, whether backward]), `inside` (how many lines), and `lines` if they are included. The inside of a
    stack is that of all its copies, so that the shares add up.

    Args:
      overview: the program as it is drawn.
      asked: ids of cards whose insides are included although they are deep.
      id_prefix: prefix of the ids of cards in the picture.
    """
    tree = _Tree(overview, _told(overview, asked), id_prefix)
    passes = dict.fromkeys(s.pass_name for card in overview.cards() for s in card.strips)
    return {"colours": {name: colour_of(name) for name in passes}, "unit": tree.scale.unit, "line": tree.program()}


def trail(overview: Overview, shown: Sequence[str], id_prefix: str = ID_PREFIX) -> list[dict[str, Any]]:
    """The way from the program to what is selected: the program, the lane where there are several, the cards around it and its own.

    A step has `id` (as a line of the outline), `name` and `prefix`; of equal parts also `at` (which one is shown, from 1) and `of`.

    Args:
      overview: the program as it is drawn.
      shown: ids of the cards that show what is selected, without a prefix; of several, what they have in common is the way.
    """
    steps: list[dict[str, Any]] = [{"id": "", "name": overview.title, "prefix": ""}]
    ways = [way for way in (_way(overview, card_id) for card_id in shown) if way]
    if not ways:
        return steps
    common = [column[0] for column in zip(*ways, strict=False) if len({s["id"] for s in column}) == 1]
    lanes = 1 if len(overview.phases) > 1 and not overview.is_beside else 0  # one lane alone is the program
    steps += common[1 - lanes :]
    return [step | {"id": id_prefix + step["id"]} if step["id"] else step for step in steps]


def way_to(overview: Overview, card_id: str) -> tuple[Card, ...]:
    """The cards around a card, outermost first, and itself; () where it is not there."""
    for _, card in _tops(overview):
        found = _inside(card, card_id)
        if found:
            return found
    return ()


def _inside(card: Card, card_id: str) -> tuple[Card, ...]:
    if card.id == card_id:
        return (card,)
    for child in card.children:
        found = _inside(child, card_id)
        if found:
            return (card, *found)
    return ()


def _tops(overview: Overview) -> Iterator[tuple[str, Card]]:
    """The cards of the rows, lane by lane."""
    for phase in overview.phases:
        for row in overview.rows:
            if phase in row.cards:
                yield phase, row.cards[phase]


def _way(overview: Overview, card_id: str) -> list[dict[str, Any]]:
    way = way_to(overview, card_id)
    if not way:
        return []
    lane = next(phase for phase, card in _tops(overview) if card is way[0])
    return [{"id": lane, "name": lane, "prefix": ""}, *map(_step, way)]


def _step(card: Card) -> dict[str, Any]:
    step = {"id": card.id, "name": opened_name(card), "prefix": card.prefix}
    return step | {"at": card.copy + 1, "of": card.count} if card.count > 1 else step


def _told(overview: Overview, asked: Collection[str]) -> set[str]:
    """Cards whose insides are included: level by level, as many lines as there is room for."""
    todo = deque(card for _, card in _tops(overview))
    told, lines = set(), len(todo)
    while todo:
        card = todo.popleft()
        if card.id in asked or lines + len(card.children) <= MOST_LINES:
            told.add(card.id)
            lines += len(card.children)
            todo += card.children
    return told


class _Tree:
    """The lines of one outline."""

    def __init__(self, overview: Overview, told: set[str], id_prefix: str) -> None:
        self.overview, self.told, self.id_prefix = overview, told, id_prefix
        self.total, self.scale = overview.total, Scale(overview.total)

    def program(self) -> Line:
        phases = self.overview.phases[: 1 if self.overview.is_beside else None]  # both sides have the same lines
        lanes = [self._lane(phase) for phase in phases]
        lines = lanes if len(phases) > 1 else lanes[0]["lines"]
        return self._line("", self.overview.title, self.total) | {"lines": lines, "inside": len(lines)}

    def _lane(self, phase: str) -> Line:
        cost = (self.overview.totals or {}).get(phase, Amount())
        lines = [self._card(card, 1) for of, card in _tops(self.overview) if of == phase]
        return self._line(self.id_prefix + phase, phase, cost) | {"lines": lines, "inside": len(lines)}

    def _card(self, card: Card, copies: int) -> Line:
        """A card of which there are so many."""
        line = self._line(self.id_prefix + card.id, card.name, card.cost * copies)
        line["strips"] = [_strip(strip, copies) for strip in card.strips]
        more = {"prefix": card.prefix, "count": card.count if card.count > 1 else 0, "inside": len(card.children)}
        line |= {name: value for name, value in more.items() if value}
        if card.children and card.id in self.told:
            line["lines"] = [self._card(child, copies * card.count) for child in card.children]
        return line

    def _line(self, line_id: str, name: str, cost: Amount) -> Line:
        operations, share = map(share_text, self.scale.shares(cost))
        return {
            "id": line_id,
            "name": name,
            self.scale.unit: [self.scale.said(cost), share],
            "operations": [operations_text(cost.operations), operations],
        }


def _strip(strip: Strip, copies: int) -> list[Any]:
    return [strip.pass_name, strip.state, strip.count * copies, strip.backward]
