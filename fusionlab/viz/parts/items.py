"""What a reader takes for one thing: a site, a region, or an operation with the casts, reshapes, masks and literals that it reads."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fusionlab.fusers.engine.outcomes import Candidate, Rejection
from fusionlab.graph.cost.traffic import is_region
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Node, all_nodes
from fusionlab.graph.program.scopes import Source

from ..model.folding import LAYOUT_OPS
from .frames import frames_of

RECOMPUTED = "recomputed"
_ALONE = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general", "sort", "top_k", "fft"})
PRODUCTS = _ALONE - {"sort", "top_k", "fft"}


@dataclass(eq=False)
class Found:
    """A site as it is drawn: its record, state, nodes, and whether these are its backward pass."""

    record: Candidate | Rejection
    state: str
    nodes: frozenset[int]
    backward: bool = False


@dataclass(eq=False)
class Item:
    """One thing: its nodes in program order, and the site that it is.

    `main` is its heaviest node, which says where it stands; `sites` are those it is counted for, drawn as it or not; `instance` is the
    layer it is in ("blocks[3]"), where scopes do not say that.
    """

    nodes: list[Node]
    main: Node
    site: Found | None = None
    sites: list[Found] = field(default_factory=list)
    instance: str = ""

    @property
    def scope(self) -> tuple[str, ...]:
        own = tuple(self.main.scope.split("/")) if self.main.scope else ()
        whole = (self.instance, *own) if self.instance else own
        return (*whole[:1], RECOMPUTED, *whole[1:]) if self.is_recomputed else whole

    @functools.cached_property
    def is_recomputed(self) -> bool:
        """Whether the backward pass computes here again what the forward pass did not keep."""
        return any("rematted_computation" in str(e.source_info.name_stack) for e in (*self.main.calls, self.main.eqn))

    @property
    def frames(self) -> tuple[Source, ...]:
        return frames_of(self.main)

    @property
    def is_region(self) -> bool:
        return is_region(self.main)


def is_light(node: Node) -> bool:
    """Whether a node only moves, converts or makes up data: it is told with what reads it."""
    return not is_region(node) and (
        node.primitive in LAYOUT_OPS or node.primitive in ("eq", "lt", "le", "gt", "ge", "and")
    )


def sites_of(
    graph: Graph, records: Iterable[tuple[Candidate | Rejection, str]], backward: Collection[int]
) -> list[Found]:
    """Every site, its backward pass as one of its own; candidates come first.

    Args:
      graph: the program; a region that belongs to a site brings what is inside.
      records: candidates and rejections, each with its state.
      backward: ids of the nodes of the backward phase. What forward computes for the backward pass belongs to the site itself.
    """
    found = []
    for record, state in records:
        own = record.node_ids if isinstance(record, Candidate) else (record.site_ids or record.node_ids)
        pair = record.backward.node_ids if record.backward is not None else frozenset()
        late = _whole(graph, pair) & frozenset(backward)
        found.append(Found(record, state, _whole(graph, own) | (_whole(graph, pair) - late)))
        if late:
            found.append(Found(record, state, late - found[-1].nodes, backward=True))
    return found


def _whole(graph: Graph, ids: Iterable[int]) -> frozenset[int]:
    nodes = [graph.node_by_id[i] for i in ids if i in graph.node_by_id]
    return frozenset(n.id for n in all_nodes(nodes))


def items_of(nodes: Sequence[Node], sites: Collection[Found], weights: Mapping[int, int]) -> list[Item]:
    """The items of one stretch of the program, in the order of their last nodes.

    Args:
      nodes: in program order.
      sites: those that have nodes here; earlier ones are drawn where two want the same node, the other one is only counted.
      weights: node id -> what it costs; the heaviest of an item says where it stands.
    """
    item_of: dict[int, Item] = {}
    items = _of_sites(nodes, sites, weights, item_of)
    makers = {v.id: n for n in nodes for v in n.outputs}
    read_here = {v.id for n in nodes for v in n.values if not is_light(n)}
    for node in nodes:
        if node.id in item_of or is_light(node):
            continue
        item = _maker(node, makers, item_of) if read_here.isdisjoint(v.id for v in node.outputs) else None
        if item is None or not _is_told_with(node, item):
            items.append(item := _item([node], weights, None))
        else:  # what is only kept for the backward pass is told with what it is made of
            item.nodes.append(node)
        item_of[node.id] = item
    _take_in_light(nodes, item_of, items)
    for item in items:
        item.nodes.sort(key=lambda n: n.id)
    return sorted(items, key=lambda item: item.main.id)


def _of_sites(
    nodes: Sequence[Node], sites: Collection[Found], weights: Mapping[int, int], item_of: dict[int, Item]
) -> list[Item]:
    """An item for each site that has nodes left for it here; `item_of` learns of them."""
    by_id = {n.id: n for n in nodes}
    items: list[Item] = []
    for site in sites:
        here = [i for i in sorted(site.nodes) if i in by_id]
        mine = [by_id[i] for i in here if i not in item_of]
        if mine:
            items.append(_item(mine, weights, site))
            item_of.update((n.id, items[-1]) for n in mine)
        elif here:
            item_of[here[0]].sites.append(site)
    return items


def _maker(node: Node, makers: Mapping[int, Node], item_of: Mapping[int, Item]) -> Item | None:
    """The item that makes what a node reads, looked at through what only moves data."""
    waiting, seen = list(node.values), set()
    while waiting:
        maker = makers.get(waiting.pop().id)
        if maker is None or maker.id in seen:
            continue
        seen.add(maker.id)
        if maker.id in item_of:
            return item_of[maker.id]
        waiting += maker.values
    return None


def _is_told_with(node: Node, item: Item | None) -> bool:
    """Whether a node that nothing reads here says nothing by itself: work of the same function on what the item made."""
    if item is None or is_region(node) or node.primitive in _ALONE:
        return False
    last, own = frames_of(node)[-1:], item.frames[-1:]
    return node.scope == item.main.scope and [f.function for f in last] == [f.function for f in own]


def _item(nodes: list[Node], weights: Mapping[int, int], site: Found | None) -> Item:
    products = [n for n in nodes if n.primitive in PRODUCTS]
    solid = products or [n for n in nodes if not is_light(n)] or nodes
    main = max(solid, key=lambda n: (weights.get(n.id, 0), n.id))
    return Item(list(nodes), main, site, [site] if site is not None else [])


def _take_in_light(nodes: Sequence[Node], item_of: dict[int, Item], items: list[Item]) -> None:
    """What only moves data goes into the first item that reads it; what nothing here reads, into what it reads."""
    readers: dict[int, list[Node]] = {}
    makers = {v.id: n for n in nodes for v in n.outputs}
    for node in nodes:
        for value in node.values:
            readers.setdefault(value.id, []).append(node)
    for node in reversed(nodes):
        if node.id in item_of:
            continue
        read_by = (item_of.get(r.id) for v in node.outputs for r in readers.get(v.id, ()))
        _join(node, next((i for i in read_by if i is not None), None), item_of)
    for node in nodes:
        if node.id in item_of:
            continue
        item = _maker(node, makers, item_of)
        if item is None:
            items.append(item := Item([], node))
        _join(node, item, item_of)


def _join(node: Node, item: Item | None, item_of: dict[int, Item]) -> None:
    if item is not None:
        item.nodes.append(node)
        item_of[node.id] = item
