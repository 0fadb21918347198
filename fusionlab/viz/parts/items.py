"""Units of a picture: a site, a region, or an operation with the casts, reshapes, masks and literals that it reads."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fusionlab.graph.cost.traffic import is_region
from fusionlab.graph.program.ir import Node, all_nodes
from fusionlab.graph.program.scopes import Source, frames_of

from .nodes import ALONE, PRODUCTS, fused_name, is_light, is_recomputed
from .sites import Found

RECOMPUTED = "recomputed"


@dataclass(eq=False)
class Item:
    """One thing: its nodes in program order, and the site that it is.

    `main` is its heaviest node, which sets its place; `sites` are those it is counted for, drawn as it or not; `instance` is the
    layer it is in ("blocks[3]"), where scopes do not say that.
    """

    nodes: list[Node]
    main: Node
    site: Found | None = None
    sites: list[Found] = field(default_factory=list)
    instance: str = ""

    @functools.cached_property
    def every(self) -> tuple[Node, ...]:
        """Its nodes and all that is inside them. Read once `nodes` is whole."""
        return tuple(all_nodes(self.nodes)) if any(n.blocks for n in self.nodes) else tuple(self.nodes)

    @functools.cached_property
    def ids(self) -> tuple[int, ...]:
        """Ids of `every`."""
        return tuple(n.id for n in self.every)

    @property
    def scope(self) -> tuple[str, ...]:
        own = tuple(self.main.scope.split("/")) if self.main.scope else ()
        whole = (self.instance, *own) if self.instance else own
        return (*whole[:1], RECOMPUTED, *whole[1:]) if self.is_recomputed else whole

    @functools.cached_property
    def is_recomputed(self) -> bool:
        """Whether the backward pass computes here again what the forward pass did not keep."""
        return is_recomputed(self.main)

    @property
    def frames(self) -> tuple[Source, ...]:
        return frames_of(self.main)

    @functools.cached_property
    def is_fused(self) -> bool:
        """Whether it is a fused op, in a program whose sites are fused already."""
        return bool(fused_name(self.main))

    @property
    def is_region(self) -> bool:
        return is_region(self.main)


def items_of(nodes: Sequence[Node], sites: Collection[Found], weights: Mapping[int, int]) -> list[Item]:
    """The items of one stretch of the program, in the order of their last nodes.

    Args:
      nodes: in program order.
      sites: those that have nodes here; earlier ones are drawn where two want the same node, the other one is only counted.
      weights: node id -> what it costs; the heaviest node of an item sets its place.
    """
    gathering = _Gathering(nodes, weights)
    gathering.take_sites(sites)
    gathering.take_work()
    gathering.take_light()
    for item in gathering.items:
        item.nodes.sort(key=lambda n: n.id)
    return sorted(gathering.items, key=lambda item: item.main.id)


class _Gathering:
    """Nodes of one stretch as they are put into items."""

    def __init__(self, nodes: Sequence[Node], weights: Mapping[int, int]) -> None:
        self.nodes, self.weights = nodes, weights
        self.items: list[Item] = []
        self.item_of: dict[int, Item] = {}
        self.makers = {v.id: n for n in nodes for v in n.outputs}
        self.readers: dict[int, list[Node]] = {}
        for node in nodes:
            for value in node.values:
                self.readers.setdefault(value.id, []).append(node)

    def take_sites(self, sites: Collection[Found]) -> None:
        """An item for each site that has nodes left for it here."""
        by_id = {n.id: n for n in self.nodes}
        for site in sites:
            here = [i for i in sorted(site.nodes) if i in by_id]
            mine = [by_id[i] for i in here if i not in self.item_of]
            if mine:
                self._begin(mine, site)
            elif here:
                self.item_of[here[0]].sites.append(site)

    def take_work(self) -> None:
        """An item for each node that computes; a value that is only kept for the backward pass belongs to the item of its operands."""
        for node in self.nodes:
            if node.id in self.item_of or is_light(node):
                continue
            item = None if self._is_read(node) else self._maker(node)
            if item is not None and _is_told_with(node, item):
                self._join(node, item)
            else:
                self._begin([node])

    def take_light(self) -> None:
        """Nodes that only move data join the first item that reads them; those without a reader here join the item they read."""
        for node in reversed(self.nodes):
            item = self._reader(node) if node.id not in self.item_of else None
            if item is not None:
                self._join(node, item)
        for node in self.nodes:
            if node.id in self.item_of:
                continue
            item = self._maker(node)
            if item is None:
                self.items.append(item := Item([], node))
            self._join(node, item)

    def _begin(self, nodes: list[Node], site: Found | None = None) -> None:
        item = _item(nodes, self.weights, site)
        self.items.append(item)
        self.item_of.update((n.id, item) for n in nodes)

    def _join(self, node: Node, item: Item) -> None:
        item.nodes.append(node)
        self.item_of[node.id] = item

    def _is_read(self, node: Node) -> bool:
        """Whether work here reads what a node makes."""
        return any(not is_light(reader) for v in node.outputs for reader in self.readers.get(v.id, ()))

    def _reader(self, node: Node) -> Item | None:
        found = (self.item_of.get(r.id) for v in node.outputs for r in self.readers.get(v.id, ()))
        return next((item for item in found if item is not None), None)

    def _maker(self, node: Node) -> Item | None:
        """The item that makes what a node reads, looked at through what only moves data."""
        waiting, seen = list(node.values), set()
        while waiting:
            maker = self.makers.get(waiting.pop().id)
            if maker is None or maker.id in seen:
                continue
            seen.add(maker.id)
            if maker.id in self.item_of:
                return self.item_of[maker.id]
            waiting += maker.values
        return None


def _is_told_with(node: Node, item: Item) -> bool:
    """Whether a node that nothing reads here carries no information: work of the same function on what the item made."""
    if is_region(node) or node.primitive in ALONE:
        return False
    last, own = frames_of(node)[-1:], item.frames[-1:]
    return node.scope == item.main.scope and [f.function for f in last] == [f.function for f in own]


def _item(nodes: list[Node], weights: Mapping[int, int], site: Found | None) -> Item:
    products = [n for n in nodes if n.primitive in PRODUCTS]
    solid = products or [n for n in nodes if not is_light(n)] or nodes
    main = max(solid, key=lambda n: (weights.get(n.id, 0), n.id))
    return Item(list(nodes), main, site, [site] if site is not None else [])
