"""Neighbours that are shown together: work of one line as one box, equal parts as one stack; and few levels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from fusionlab.graph.program.ir import all_nodes, type_text

from ..cards.card import Card
from .groups import Group, products_in
from .items import Item

MOST_AROUND = 3  # cards around a site
_MOST_LIFTED = 3  # cards that may take the place of one


def boxed(children: Iterable[Group | Item]) -> list[Group | Item]:
    """Work of one line as one box, each product in one of its own."""
    out: list[Group | Item] = []
    for child in children:
        last = out[-1] if out else None
        if isinstance(child, Item) and isinstance(last, Item) and _joins(last, child):
            main = child.main if _has_product(child) else last.main
            out[-1] = Item([*last.nodes, *child.nodes], main, None, [*last.sites, *child.sites])
            continue
        out.append(child)
    return out


def _joins(a: Item, b: Item) -> bool:
    if any(i.site or i.is_fused or i.is_region for i in (a, b)):
        return False
    return a.frames[-1:] == b.frames[-1:] and not (_has_product(a) and _has_product(b))


def _has_product(item: Item) -> bool:
    return products_in(Group((), "", [item])) > 0


def _signature(part: Group | Item) -> tuple:
    """Equal for parts that compute the same of the same types: casts and masks left out, states of sites too."""
    items = part.items if isinstance(part, Group) else [part]
    sites = tuple(getattr(s.record, "formula", s.record.pass_name) for i in items for s in i.sites)
    return sites, *(
        (n.primitive, type_text(n.outputs[0].aval) if n.outputs else "") for i in items for n in all_nodes([i.main])
    )


def runs_of(parts: Sequence[Group | Item]) -> list[list[Group | Item]]:
    """Neighbours that are equal together."""
    runs: list[list[Group | Item]] = []
    before: tuple | None = None
    for part in parts:
        now = (isinstance(part, Group), _signature(part))
        if runs and now == before:
            runs[-1].append(part)
        else:
            runs.append([part])
        before = now
    return runs


# Levels --------------------------------------------------------------------------------------------------------------
def shallow(card: Card) -> Card:
    """The card, with the smallest parts around a site that is too deep replaced by what is in them.

    A stack stays, for one steps through its copies, and so does a loop.
    """
    while (part := _looked_through(card)) is not None:
        card = _without(card, part)
    return card


def _looked_through(card: Card) -> str | None:
    """The id of the part to replace: around a site that is too deep, the one with the fewest cards, the innermost of these."""
    for around in _around_sites(card, ()):
        if len(around) <= MOST_AROUND:
            continue
        parts = [c for c in around[:0:-1] if c.kind == "part" and c.count == 1 and len(c.children) <= _MOST_LIFTED]
        if parts:
            return min(parts, key=lambda c: len(c.children)).id
    return None


def _around_sites(card: Card, around: tuple[Card, ...]) -> Iterator[tuple[Card, ...]]:
    """The cards around each site, outermost first."""
    if card.site is not None:
        yield around
    for child in card.children:
        yield from _around_sites(child, (*around, card))


def _without(card: Card, part: str) -> Card:
    """The card with what is in a part in the place of the part."""
    children: list[Card] = []
    for child in card.children:
        children += child.children if child.id == part else [_without(child, part)]
    return replace(card, children=tuple(children)) if card.children else card
