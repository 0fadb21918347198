"""The rows of a picture, the amount of text in their cards and the gaps between them, chosen so that a program fits a pane's
height."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..card import Amount, Card, Overview, Row, Strip
from .faces import CELLS, COMPACT, HEIGHT, LOW, PASSES, PLAIN, STRIP, Scale, height_of
from .lines import summed

TOP, HEAD, FOOT = 12.0, 30.0, 30.0  # above the lanes, of their titles, below them
PILL = 22.0
WIDEST_GAP, LEAST_GAP, STACK_GAP = 42.0, 18.0, 24.0
_ROOMY = 22.0  # the least gap where a card may say more
_MANY = 15
_NUMBERED = re.compile(r"^(.*?)(\d+)$")
_PASSES_FROM, _CELLS_FROM = 0.065, 0.15  # shares of the program


@dataclass(frozen=True)
class Grid:
    """Rows from above: how much the cards of each say, its upper edge, its height, and the gap between two."""

    details: tuple[int, ...]
    tops: tuple[float, ...]
    heights: tuple[float, ...]
    gap: float

    def axis(self, row: int) -> float:
        """The height at which level edges meet a row."""
        return self.tops[row] + self.heights[row] / 2


def grid_of(overview: Overview, height: float, above: bool, below: bool, narrow: bool) -> Grid:
    """The rows of a picture; `above` and `below`: whether there are pills; `narrow`: titles have no room for sites after them."""
    rows = overview.rows
    scale = Scale(overview.total)
    shares = [_share(row, scale) for row in rows]
    fit = _Fit(rows, height, above, below)
    details = [PLAIN] * len(rows)
    dearest = sorted(range(len(rows)), key=lambda i: (-shares[i], i))
    for i in reversed(dearest):
        if fit.fits(details, LEAST_GAP):
            break
        details[i] = COMPACT
    if narrow:
        details = _with_strips(rows, fit, details, dearest)
    for detail, least in ((PASSES, _PASSES_FROM), (CELLS, _CELLS_FROM)):
        for i in dearest:
            wished = [*details[:i], detail, *details[i + 1 :]]
            # The dearest rows say their passes even where gaps get small for it: their colours are what is looked for.
            gap = LEAST_GAP if detail == PASSES and shares[i] >= _CELLS_FROM else _ROOMY
            if (shares[i] >= least or _says_more(rows[i])) and details[i] >= PLAIN and fit.fits(wished, gap):
                details = wished
    gap = WIDEST_GAP
    while gap > LEAST_GAP and not fit.fits(details, gap):
        gap -= 1
    tops, heights = fit.placed(details, gap)
    return Grid(tuple(details), tuple(tops), tuple(heights), gap)


def _with_strips(rows: Sequence[Row], fit: _Fit, details: list[int], dearest: Sequence[int]) -> list[int]:
    """A line of swatches for each row that has sites, dearest first; cheap rows without any become one line for it."""
    for i in dearest:
        if details[i] != PLAIN or not _has_sites(rows[i]):
            continue
        wished = [*details[:i], STRIP, *details[i + 1 :]]
        # First those go down to one line that have no sites, then any that cost less: their strip stands beside their title.
        cheaper = [*reversed(dearest[dearest.index(i) + 1 :])]
        for j in sorted(cheaper, key=lambda j: _has_sites(rows[j])):
            if fit.fits(wished, LEAST_GAP):
                break
            if wished[j] == PLAIN:
                wished[j] = COMPACT
        if fit.fits(wished, LEAST_GAP):
            details = wished
    return details


def _says_more(row: Row) -> bool:
    return any(c.said for c in row.cards.values())


def _has_sites(row: Row) -> bool:
    return any(c.strips for c in row.cards.values())


def _share(row: Row, scale: Scale) -> float:
    return max(scale.counted(sum((c.cost for c in row.cards.values()), Amount())))


def is_stack(row: Row) -> bool:
    """Whether sheets stand behind a card of the row."""
    return any(c.count > 1 for c in row.cards.values())


@dataclass(frozen=True)
class _Fit:
    rows: Sequence[Row]
    height: float
    above: bool
    below: bool

    def placed(self, details: Sequence[int], gap: float) -> tuple[list[float], list[float]]:
        y = TOP + HEAD + (PILL + gap if self.above else 8)
        tops, heights = [], []
        for row, detail in zip(self.rows, details, strict=True):
            tops.append(y)
            heights.append(max((height_of(c, detail) for c in row.cards.values()), default=LOW))
            y += heights[-1] + gap_after(row, gap)
        return tops, heights

    def fits(self, details: Sequence[int], gap: float) -> bool:
        tops, heights = self.placed(details, gap)
        if not tops:
            return True
        end = (
            tops[-1]
            + heights[-1]
            + (gap_after(self.rows[-1], gap) + PILL if self.below else 6 * is_stack(self.rows[-1]))
        )
        return end + 6 + FOOT <= self.height


def gap_after(row: Row, gap: float) -> float:
    """The gap below a row, which holds the sheets of a stack."""
    return max(gap, STACK_GAP) if is_stack(row) else gap


# -- rows that share one card -----------------------------------------------------------------------------------------


def shown(overview: Overview, height: float) -> Overview:
    """The program with as many rows as a pane of this height has room for, the cheap ones joined."""
    room = height - TOP - HEAD - FOOT - 6 - 2 * (PILL + LEAST_GAP)
    many = len(overview.rows) > _MANY
    stacks = sum(map(is_stack, overview.rows)) * (STACK_GAP - LEAST_GAP)
    least = math.floor((room - stacks + LEAST_GAP) / ((HEIGHT if many else LOW) + LEAST_GAP))
    return joined(overview, max(least, 3))


def joined(overview: Overview, most_rows: int) -> Overview:
    """The program with no more than so many rows: neighbours that cost least share a row and a card that opens into theirs."""
    if len(overview.rows) <= max(most_rows, 1):
        return overview
    rows = tuple(_together(group, overview) for group in _cheap_together(overview, most_rows))
    outermost = [card for row in rows for card in row.cards.values()]
    names = {c.id: card.id for card in outermost for c in (card, *card.children)}
    names |= {c.id: c.id for c in (*outermost, *overview.inputs, *overview.results)}
    return replace(overview, rows=rows, edges=tuple(summed(overview.edges, names)))


def _cheap_together(overview: Overview, most_rows: int) -> list[list[Row]]:
    groups = [[row] for row in overview.rows]
    scale = Scale(overview.total)
    costs = [_share(row, scale) for row in overview.rows]
    while len(groups) > max(most_rows, 1):
        one_kind = [_prefixes(groups[k]) == _prefixes(groups[k + 1]) for k in range(len(groups) - 1)]
        i = min(range(len(groups) - 1), key=lambda k: (not one_kind[k] and overview.is_beside, costs[k] + costs[k + 1]))
        groups[i : i + 2] = [groups[i] + groups[i + 1]]
        costs[i : i + 2] = [costs[i] + costs[i + 1]]
    return groups


def _prefixes(group: Sequence[Row]) -> set[str]:
    return {c.prefix for row in group for c in row.cards.values()}


def _together(group: Sequence[Row], overview: Overview) -> Row:
    if len(group) == 1:
        return group[0]
    cards: dict[str, Card] = {}
    for phase in overview.phases:
        inside = [row.cards[phase] for row in group if phase in row.cards]
        if phase == "backward":
            inside.reverse()
        if inside:
            cards[phase] = inside[0] if len(inside) == 1 else _card_of(inside, overview)
    return Row(_name_of([next(iter(row.cards.values())) for row in group]), cards)


def _card_of(cards: Sequence[Card], overview: Overview) -> Card:
    own = {c.id for c in cards}
    prefixes = {c.prefix for c in cards}
    return Card(
        id=f"more-{cards[0].id}",
        name=_name_of(cards),
        prefix=prefixes.pop() if len(prefixes) == 1 else "",
        nodes=tuple(sorted(n for c in cards for n in c.nodes)),
        cost=sum((c.cost for c in cards), Amount()),
        params=sum(c.params for c in cards),
        strips=strips_together(cards),
        children=tuple(cards),
        edges=tuple(e for e in overview.edges if e.start in own and e.end in own),
    )


def _name_of(cards: Sequence[Card]) -> str:
    """ "norm, head"; "block_3 … 7"; "norm … head"."""
    first, last = cards[0].name, cards[-1].name
    if len({c.prefix for c in cards}) > 1:  # no prefix is said of all of them
        first, last = (f"{c.prefix} {c.name}".strip() for c in (cards[0], cards[-1]))
    if len(cards) == 2 and first != last:
        return f"{first}, {last}"
    one, other = _NUMBERED.match(first), _NUMBERED.match(last)
    if one and other and one[1] == other[1]:
        return f"{first} … {other[2]}"
    return f"{first} … {last}" if first != last else f"{first} and {len(cards) - 1} more"


def strips_together(cards: Sequence[Card]) -> tuple[Strip, ...]:
    """The strips of several cards, those of one pass and state as one."""
    found: dict[tuple[str, str, bool], Strip] = {}
    for strip in (s for c in cards for s in c.strips):
        key = strip.pass_name, strip.state, strip.backward
        old = found.get(key)
        found[key] = replace(old, count=old.count + strip.count, cost=old.cost + strip.cost) if old else strip
    return tuple(found.values())
