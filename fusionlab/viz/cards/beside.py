"""A program next to the same program with its sites fused: one lane each, every row the same work on both sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .card import AFTER, BESIDE, PHASES, Amount, Card, Edge, Fused, Overview, Row
from .layout.rows import shown, strips_together

_NARROW = 760.0  # px: below it the cards of a lane are so narrow that they leave their prefix out


def beside(overview: Overview, fused: Fused, width: float, height: float) -> Overview:
    """The program before and after in two lanes, with as many rows as a pane of this size has room for."""
    named = map(_whole_name, _in_order(overview)) if width < _NARROW else _in_order(overview)
    rows = [Row(c.name, {BESIDE[0]: _before(c, fused)}) for c in named]
    order = {row.cards[BESIDE[0]].id: i for i, row in enumerate(rows)}
    edges = tuple(replace(e, kind="flow") for e in overview.edges if _is_drawn(e, order))
    one = replace(
        overview,
        phases=BESIDE,
        rows=tuple(rows),
        edges=edges,
        totals={BESIDE[0]: overview.total, BESIDE[1]: fused.total},
        kept=0,
        gradients=0,
    )
    one = shown(one, height)
    mirrored = (Row(row.name, row.cards | {BESIDE[1]: _after(row.cards[BESIDE[0]], fused)}) for row in one.rows)
    inputs, results = ((*cards, *(replace(c, id=AFTER + c.id) for c in cards)) for cards in (one.inputs, one.results))
    return replace(
        one, rows=tuple(mirrored), inputs=inputs, results=results, edges=(*one.edges, *map(_edge_after, one.edges))
    )


def _in_order(overview: Overview) -> list[Card]:
    """The cards of all lanes as they run: those of the backward pass stand as forward does, so they are turned."""
    cards: list[Card] = []
    for phase in PHASES:
        mine = [row.cards[phase] for row in overview.rows if phase in row.cards]
        cards += [_turned(c) for c in reversed(mine)] if phase == "backward" else mine
    return cards


def _whole_name(card: Card) -> Card:
    """No lane here names the part whose backward pass this is."""
    return replace(card, name=f"{card.prefix} {card.name}".strip(), prefix="")


def _turned(card: Card) -> Card:
    """What is inside, in the order in which it runs; of a choice the branches stay as they are."""
    inside = [_turned(c) for c in card.children]
    is_choice = card.kind == "region" and not card.turns
    return replace(card, children=tuple(inside if is_choice else inside[::-1]))


def _is_drawn(edge: Edge, order: Mapping[str, int]) -> bool:
    """What flows inside a lane; what is kept and gradients only from one row to the next."""
    if edge.kind == "flow":
        return True
    return edge.start in order and edge.end in order and order[edge.end] - order[edge.start] == 1


def _before(card: Card, fused: Fused) -> Card:
    if card.children:
        return replace(card, children=tuple(_before(c, fused) for c in card.children))
    return replace(card, said=_lines(card, fused)[0])


def _after(card: Card, fused: Fused) -> Card:
    children = tuple(_after(c, fused) for c in card.children)
    known = fused.cards.get(card.id)
    if known is None:  # several rows in one card
        cost, strips = sum((c.cost for c in children), Amount()), strips_together(children)
    else:
        cost, strips = known.cost, known.strips
    edges = tuple(map(_edge_after, card.edges))
    said = () if children else _lines(card, fused)[1]
    return replace(card, id=AFTER + card.id, cost=cost, strips=strips, children=children, edges=edges, said=said)


def _edge_after(edge: Edge) -> Edge:
    return replace(edge, start=AFTER + edge.start, end=AFTER + edge.end)


def _lines(card: Card, fused: Fused) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The lines in a site's box before and after, equally many on both sides."""
    if card.site is None:
        return (), ()
    before: Sequence[str] = [fused.written.get(card.id, "")]
    after = fused.why.get(card.site.id, ("",))
    most = max(len(before), len(after))
    return (*before, *[""] * (most - len(before))), (*after, *[""] * (most - len(after)))
