"""Sites as they are drawn: the matched operations, and their backward passes as sites of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusionlab.fusers.engine.outcomes import Candidate, Rejection
from fusionlab.graph.cost.traffic import is_region
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Node, all_nodes, type_text
from fusionlab.graph.program.scopes import frames_of

from .nodes import PRODUCTS, is_light, is_recomputed

Place = tuple[Any, ...]
Sizes = tuple[tuple[int, ...], ...]


@dataclass(eq=False)
class Found:
    """A site as it is drawn: its record, its nodes, and whether these are its backward pass."""

    record: Candidate | Rejection
    nodes: frozenset[int]
    backward: bool = False

    @property
    def state(self) -> str:
        """ "candidate" or "declined": as it is while nothing is applied."""
        return "candidate" if isinstance(self.record, Candidate) else "declined"


def sites_of(graph: Graph, records: Iterable[Candidate | Rejection], backward: Collection[int]) -> list[Found]:
    """Every site, its backward pass as one of its own; candidates come first.

    Args:
      graph: the program; a region that belongs to a site brings what is inside.
      records: candidates and rejections.
      backward: ids of the nodes of the backward phase. What forward computes for the backward pass belongs to the site itself.
    """
    found = []
    late_ids = frozenset(backward)
    for record in records:
        own = _whole(graph, record.node_ids if isinstance(record, Candidate) else (record.site_ids or record.node_ids))
        pair = _whole(graph, record.backward.node_ids if record.backward is not None else ())
        if not own <= late_ids:  # of a site that reaches into the backward pass, what is there is its backward pass
            own, pair = own - late_ids, pair | (own & late_ids)
        late = pair & late_ids
        if late:  # what follows of its backward pass, such as the layout of a gradient, may be in the update's phase
            late |= frozenset(i for i in pair if i > min(late))
        found.append(Found(record, own | (pair - late)))
        if late:
            found.append(Found(record, late - found[-1].nodes, backward=True))
    return found


def _whole(graph: Graph, ids: Iterable[int]) -> frozenset[int]:
    nodes = [graph.node_by_id[i] for i in ids if i in graph.node_by_id]
    return frozenset(n.id for n in all_nodes(nodes))


# The backward pass of a declined site ------------------------------------------------------------------------------------


def declined_backward(graph: Graph, found: Sequence[Found], backward: Collection[int]) -> Iterator[Found]:
    """The backward passes of declined sites, whose nodes no record lists.

    JAX gives a node of the backward pass the source line and scope of the node that it differentiates: those are taken that have the
    places of the site. Equal layers share their places; then the nodes fall into equal pieces, the last layer's first.
    """
    alone = [s for s in found if s.state == "declined" and not s.backward and s.record.backward is None]
    if not alone:
        return
    late = frozenset(backward)
    at = _by_place(graph, late.difference(*(site.nodes for site in found)))
    for sites in _unshared(graph, [*_of_equal_places(graph, alone)], late):
        mine = _differentiated(graph, sites[0], at)
        for site, piece in zip(reversed(sites), _pieces(mine, len(sites)), strict=False):
            yield Found(site.record, frozenset(n.id for n in piece), backward=True)
            _remove(piece, at)


def _unshared(graph: Graph, each: Sequence[list[Found]], backward: Collection[int]) -> Iterator[list[Found]]:
    """Sites at whose places no other layer does the same: else nobody could say whose the nodes of the backward pass are."""
    twins = _twins(graph, [_main(graph, sites[0]) for sites in each], backward)
    for sites in each:
        main = _work(_main(graph, sites[0]))
        if sum(_work(n) == main for site in sites for n in _solid(graph, site)) >= twins[main]:
            yield sites


def _main(graph: Graph, site: Found) -> Node:
    solid = _solid(graph, site)
    return next((n for n in solid if n.primitive in PRODUCTS), solid[0])


def _work(node: Node) -> Place:
    """Equal for nodes that do the same at the same place, the first time or again."""
    return node.primitive, _type(node), is_recomputed(node), _place(node)


def _type(node: Node) -> str:
    """Of its first result; "" of what has none."""
    return type_text(node.outputs[0].aval) if node.outputs else ""


def _twins(graph: Graph, nodes: Sequence[Node], backward: Collection[int]) -> Counter[Place]:
    """How many nodes of the whole program do what each of these does, the backward pass of such work left out."""
    primitives = {n.primitive for n in nodes}
    asked = {_work(n) for n in nodes}
    same = (n for n in graph.nodes() if n.primitive in primitives and (n.id not in backward or is_recomputed(n)))
    return Counter(work for work in map(_work, same) if work in asked)


def _remove(nodes: Iterable[Node], at: Mapping[Place, list[Node]]) -> None:
    for node in nodes:
        at[_place(node)].remove(node)


def _place(node: Node) -> Place:
    return node.scope, frames_of(node)


def _by_place(graph: Graph, ids: Collection[int]) -> Mapping[Place, list[Node]]:
    """Nodes of the backward pass that differentiate, by their places; none that only compute again what forward did."""
    found: dict[Place, list[Node]] = {}
    for nid in sorted(ids):
        node = graph.node_by_id[nid]
        if not is_region(node) and not is_recomputed(node):
            found.setdefault(_place(node), []).append(node)
    return found


def _of_equal_places(graph: Graph, sites: Sequence[Found]) -> Iterator[list[Found]]:
    """Sites that stand at the same places, in program order; of those that are computed twice, the second time."""
    found: dict[frozenset[Place], list[Found]] = {}
    for site in sorted(sites, key=lambda s: min(s.nodes, default=0)):
        places = frozenset(_place(n) for n in _solid(graph, site))
        if places:
            found.setdefault(places, []).append(site)
    for each in found.values():
        again = [s for s in each if any(is_recomputed(n) for n in _solid(graph, s))]
        yield again or each


def _solid(graph: Graph, site: Found) -> list[Node]:
    return [n for n in map(graph.node_by_id.__getitem__, sorted(site.nodes)) if not is_light(n) and not is_region(n)]


def _differentiated(graph: Graph, site: Found, at: Mapping[Place, Sequence[Node]]) -> list[Node]:
    """Nodes at the places of a site; of products, those of the sizes of its own: another one on its line is not its."""
    solid = _solid(graph, site)
    sizes = {_sizes(n) for n in solid if n.primitive in PRODUCTS}
    here = [n for place in dict.fromkeys(map(_place, solid)) for n in at.get(place, ())]
    mine = [n for n in here if n.primitive not in PRODUCTS or _sizes(n) in sizes]
    return sorted(mine, key=lambda n: n.id) if any(not is_light(n) for n in mine) else []


def _sizes(product: Node) -> Sizes:
    """The shapes of operands and result, whatever their order: a product and the two of its backward pass have the same."""
    shapes = [v.shape for v in (*product.values, *product.outputs)]
    return tuple(sorted(tuple(sorted(d for d in shape if d > 1)) for shape in shapes))


def _pieces(nodes: Sequence[Node], count: int) -> list[Sequence[Node]]:
    """Nodes cut into so many equal pieces; none where they do not fall into such."""
    size, rest = divmod(len(nodes), count)
    if not size or rest:
        return []
    pieces = [nodes[k * size : (k + 1) * size] for k in range(count)]
    alike = {frozenset(Counter((n.primitive, _type(n)) for n in p).items()) for p in pieces}
    return pieces if len(alike) == 1 else []
