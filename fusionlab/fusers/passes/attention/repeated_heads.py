"""Keys and values whose heads are repeated for the queries, recognised by the equations that repeat them.

`jnp.repeat(k, G, axis)`, and a broadcast along a new axis after the heads with a reshape that merges the two, make head n from head
n // G. The fused op reads heads that way without a copy. `jnp.tile`, and a broadcast along a new axis before the heads, make head n from
head n % K; those are left as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ....graph.canonical.axes import merged_axes
from ....graph.canonical.nodes import CNode
from ....graph.canonical.view import CanonicalView
from ....graph.matching.match import Match
from ....graph.matching.region import Region, look_through
from ....graph.program.explicit_axes import is_split_in_type
from ....graph.program.ir import Block, Node, Value
from ....graph.program.scopes import in_backward, in_differentiated
from ...engine.layout import AxisClasses
from .regions import grown


@dataclass(frozen=True)
class Repeated:
    """A key or value before its heads are repeated: its `axes` by class, where `head` has only `count` entries."""

    axes: AxisClasses
    head: int
    count: int


def without_repeats(view: CanonicalView, found: Match, region: Region) -> tuple[Region, Mapping[str, Repeated]] | None:
    """The region as a function of the keys and values before their heads are repeated; None if they are not repeated, if anything besides
    a backward pass also needs the repeated ones, or if explicit mesh axes may split query heads that share a key head.
    """
    if any(is_split_in_type(v.aval) for v in region.inputs):
        return None
    leaves, makers, by_name = dict(region.leaves), list[Node](), dict[str, Repeated]()
    for name in ("k", "v"):
        source = _source(view, found, region, name)
        if source is None:
            return None
        leaves[name], by_name[name], nodes = source
        makers += nodes
    k, v = by_name["k"], by_name["v"]
    if (k.head, k.count) != (v.head, v.count) or k.head not in found.letters["b"]:
        return None
    whole = grown(region, leaves, makers)
    dead = whole.node_ids - region.node_ids
    return (whole, by_name) if _stay_for_a_backward(whole, [n for n in makers if n.id not in dead]) else None


def _source(view: CanonicalView, found: Match, region: Region, name: str) -> tuple[Value, Repeated, list[Node]] | None:
    """The value whose heads a leaf repeats, and the nodes that repeat them."""
    leaf = region.leaves[name]
    found_merge = _merge_of(view, leaf)
    if found_merge is None:
        return None
    merge, spread = found_merge
    value, crossed = look_through(view, spread)
    ref = view.ref[value.id]
    if any(d < 0 for d in ref.dims) or ref.coef != view.ref[leaf.id].coef:
        return None
    classes = _classes_before(found, name, view.nodes[view.ref[leaf.id].nid])
    if classes is None:
        return None
    class_of, head = classes
    dims = iter(ref.dims)
    axes = tuple(None if n == 1 else class_of[next(dims)] for n in value.shape)
    return value, Repeated(axes, head, value.shape[axes.index(head)]), [merge, *crossed]


def _merge_of(view: CanonicalView, leaf: Value) -> tuple[Node, Value] | None:
    """The reshape that makes a leaf, in the program and in the view alike, and its operand; None where none does."""
    merge = view.block.producer.get(leaf.id)
    node = view.nodes[view.ref[leaf.id].nid]
    if merge is None or merge.primitive != "reshape" or node.op != "reshape":
        return None
    spread = merge.inputs[0]
    if not isinstance(spread, Value) or view.ref[spread.id].nid != node.operands[0].nid:
        return None
    return merge, spread


def _classes_before(found: Match, name: str, node: CNode) -> tuple[dict[int, int], int] | None:
    """(the axis class of each axis that a reshape reads, that of the heads, whose axis it merges with one that they are repeated along);
    None where it merges or splits others.
    """
    class_of: dict[int, int] = {}
    head: int | None = None
    for before, after in merged_axes(node):
        if len(after) != 1 or before[0] < 0:
            return None
        if len(before) == 2 and before[1] < 0 and head is None:
            head = found.axes[found.leaf_id(name), after[0]]
        elif len(before) != 1:
            return None
        class_of[before[0]] = found.axes[found.leaf_id(name), after[0]]
    return None if head is None else (class_of, head)


def _stay_for_a_backward(region: Region, nodes: Iterable[Node]) -> bool:
    """Whether the results of these nodes of a region, or of its support, are read only in it and by backward passes."""
    inside = {n.id for n in (*region.nodes, *region.support)}
    return all(_stays_for_a_backward(region.block, n, inside) for n in nodes)


def _stays_for_a_backward(block: Block, node: Node, inside: set[int]) -> bool:
    """Whether no code of the user's own reads a node's result; a body in a differentiated program may return it for the backward pass."""
    outside = [u for v in node.outputs for u in block.users.get(v.id, ()) if u.id not in inside]
    kept = bool(block.path) and in_differentiated(node)
    return (kept or not any(v.id in block.returned for v in node.outputs)) and all(map(in_backward, outside))
