"""The sites inside a part by pass and state, and the site that a box is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fusionlab.fusers.engine.outcomes import Candidate
from fusionlab.graph.program.ir import Node

from ..cards.card import Amount, Site, Strip
from ..palette import pass_of_op
from .items import Item
from .sites import Found

Kind = tuple[str, str, bool]  # pass, state, whether it is the backward pass


def strips_of(items: Sequence[Item], sites: Collection[Found], cost: Mapping[int, Amount]) -> tuple[Strip, ...]:
    """Sites by pass and state, those inside loops and branches too; then fused ops, in a program whose sites are fused already."""
    found: dict[Kind, list[Collection[int]]] = {}
    for site in _sites_in(items, sites):
        found.setdefault((site.record.pass_name, site.state, site.backward), []).append(site.nodes)
    for node in (n for i in items if i.site is None for n in i.every):
        if (fused := _fused(node)) is not None:
            found.setdefault((fused.pass_name, fused.state, fused.backward), []).append((node.id,))
    return tuple(_strip(kind, several, cost) for kind, several in found.items())


def _strip(kind: Kind, several: Sequence[Collection[int]], cost: Mapping[int, Amount]) -> Strip:
    name, state, backward = kind
    return Strip(name, state, len(several), backward, sum((cost[i] for ids in several for i in ids), Amount()))


def _sites_in(items: Sequence[Item], sites: Collection[Found]) -> Collection[Found]:
    found: dict[int, Found] = {}
    for item in items:
        found.update((id(s), s) for s in item.sites)
        if item.is_region:
            inside = set(item.ids)
            found.update((id(s), s) for s in sites if not inside.isdisjoint(s.nodes))
    return found.values()


def site_of(item: Item) -> Site | None:
    """The site that an item is, as its card says it."""
    if item.site is None:
        return _fused(item.main)
    record = item.site.record
    note = record.formula if isinstance(record, Candidate) else record.sentence
    return Site(record.id, record.pass_name, item.site.state, item.site.backward, note)


def _fused(node: Node) -> Site | None:
    """A fused op, in a program whose sites are fused already."""
    name = pass_of_op(node.primitive)
    return None if name is None else Site("", name.removesuffix("_grad"), "applied", name.endswith("_grad"))
