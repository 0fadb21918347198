"""The sites inside a part by pass and state, and the site that a box is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fusionlab.fusers.engine.outcomes import Candidate
from fusionlab.graph.program.ir import Node

from ..cards.card import Amount, Card, Overview, Row, Site, Strip
from ..palette import pass_of_op
from .items import Item
from .sites import Found

Kind = tuple[str, str, bool]  # pass, state, whether it is the backward pass


@dataclass(frozen=True)
class Mark:
    """One site of a part, as a strip of one.

    Attributes:
      candidate: its id, if it can be switched on; "" for what is declined, or fused already.
      strip: the site while it is off.
    """

    candidate: str
    strip: Strip


class Marks:
    """The sites of a program's parts. What they cost is added up once: no toggle changes that."""

    def __init__(self, sites: Collection[Found], nodes: Iterable[Node], cost: Mapping[int, Amount]) -> None:
        self.sites = sites
        self._of_site = {id(s): Mark(_candidate(s), _strip(s, cost)) for s in sites}
        nodes = [*nodes]
        of = {primitive: _fused(primitive) for primitive in {n.primitive for n in nodes}}
        self._of_fused = {n.id: _mark(fused, cost[n.id]) for n in nodes if (fused := of[n.primitive]) is not None}

    def inside(self, items: Sequence[Item]) -> tuple[Mark, ...]:
        """Sites of items, those inside loops and branches too; then fused ops, in a program whose sites are fused already."""
        found: dict[int, Mark] = {}
        for item in items:
            found.update((id(s), self._of_site[id(s)]) for s in item.sites)
            if item.is_region:
                inside = set(item.ids)
                found.update((id(s), self._of_site[id(s)]) for s in self.sites if not inside.isdisjoint(s.nodes))
        fused = (i for item in items if item.site is None for i in item.ids) if self._of_fused else ()
        return *found.values(), *(self._of_fused[i] for i in fused if i in self._of_fused)


def _candidate(site: Found) -> str:
    return site.record.id if isinstance(site.record, Candidate) else ""


def _strip(site: Found, cost: Mapping[int, Amount]) -> Strip:
    amount = sum((cost[i] for i in site.nodes), Amount())
    return Strip(site.record.pass_name, site.state, 1, site.backward, amount)


def _mark(fused: Site, cost: Amount) -> Mark:
    return Mark("", Strip(fused.pass_name, fused.state, 1, fused.backward, cost))


def strips_of(marks: Iterable[Mark], applied: Collection[str]) -> tuple[Strip, ...]:
    """Sites by pass and state, those of these ids applied."""
    found: dict[Kind, list[Amount]] = {}
    for mark in marks:
        state = "applied" if mark.candidate in applied else mark.strip.state
        found.setdefault((mark.strip.pass_name, state, mark.strip.backward), []).append(mark.strip.cost)
    return tuple(Strip(name, state, len(c), late, sum(c, Amount())) for (name, state, late), c in found.items())


def stated(overview: Overview, marks: Mapping[str, Sequence[Mark]], applied: Collection[str]) -> Overview:
    """An overview whose cards say the states of their sites.

    Args:
      overview: as it is whatever is applied.
      marks: card id -> the sites inside it.
      applied: ids of the candidates that are.
    """

    def said(card: Card) -> Card:
        site = card.site
        if site is not None and site.id in applied and site.state == "candidate":
            site = replace(site, state="applied")
        strips = strips_of(marks.get(card.id, ()), applied)
        return replace(card, site=site, strips=strips, children=tuple(map(said, card.children)))

    rows = tuple(Row(row.name, {p: said(c) for p, c in row.cards.items()}) for row in overview.rows)
    return replace(overview, rows=rows)


def site_of(item: Item) -> Site | None:
    """The site of an item, as its card shows it while nothing is applied."""
    if item.site is None:
        return _fused(item.main.primitive)
    record = item.site.record
    note = record.formula if isinstance(record, Candidate) else record.sentence
    return Site(record.id, record.pass_name, item.site.state, item.site.backward, note)


def _fused(primitive: str) -> Site | None:
    """A fused op, in a program whose sites are fused already."""
    name = pass_of_op(primitive)
    return None if name is None else Site("", name.removesuffix("_grad"), "applied", name.endswith("_grad"))
