"""Keys and values whose heads are repeated for the queries: told from the equations that repeat them.

`jnp.repeat(k, G, axis)`, and a broadcast along a new axis after the heads with a reshape that merges the two, make of head n // G head n.
The fused op reads heads so without any copy. `jnp.tile`, and a broadcast along a new axis before the heads, make head n % K of it: those
stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ....graph.canonical.axes import merged_axes
from ....graph.canonical.view import View
from ....graph.matching.match import Match
from ....graph.matching.region import Region, dead_with, look_through
from ....graph.program.explicit_axes import is_split_in_type
from ....graph.program.ir import Block, Node, Value
from ....graph.program.scopes import in_backward, in_differentiated
from ...engine.layout import Axes


@dataclass(frozen=True)
class Repeated:
    """A key or value before its heads are repeated: its `axes` by class, where `head` has only `count` entries."""

    axes: Axes
    head: int
    count: int


def without_repeats(view: View, found: Match, region: Region) -> tuple[Region, Mapping[str, Repeated]] | None:
    """The region as a function of the keys and values before their heads are repeated; None where they are not, or where the repeated
    ones are needed anyway, by what is no backward pass, or where explicit mesh axes may split heads of the queries that share one.
    """
    if any(is_split_in_type(v.aval) for v in region.inputs):
        return None
    leaves, made, by_name = dict(region.leaves), dict[int, Node](), dict[str, Repeated]()
    for name in ("k", "v"):
        source = _source(view, found, region, name)
        if source is None:
            return None
        leaves[name], by_name[name], nodes = source
        made |= {n.id: n for n in nodes}
    heads = {(one.head, one.count) for one in by_name.values()}
    if len(heads) > 1 or next(iter(heads))[0] not in found.letters["b"]:
        return None
    inner = {n.id: n for n in region.nodes}
    support = {n.id: n for n in region.support} | {i: n for i, n in made.items() if i not in inner}
    dead = dead_with(region.block, inner, support, leaves.values())
    if not all(_stays_for_a_backward(region.block, made[i], {*inner, *support}) for i in made if i not in dead):
        return None
    inner |= dead
    whole = replace(
        region,
        leaves=leaves,
        nodes=tuple(inner[i] for i in sorted(inner)),
        support=tuple(support[i] for i in sorted(support) if i not in inner),
    )
    return whole, by_name


def _source(view: View, found: Match, region: Region, name: str) -> tuple[Value, Repeated, list[Node]] | None:
    """What a leaf repeats the heads of, and the nodes that do."""
    leaf = region.leaves[name]
    merge = region.block.producer.get(leaf.id)
    if merge is None or merge.primitive != "reshape" or view.nodes[view.ref[leaf.id].nid].op != "reshape":
        return None
    spread = merge.inputs[0]
    node = view.nodes[view.ref[leaf.id].nid]
    if not isinstance(spread, Value) or view.ref[spread.id].nid != node.operands[0].nid:
        return None
    value, crossed = look_through(view, spread)
    ref = view.ref[value.id]
    if any(d < 0 for d in ref.dims) or ref.coef != view.ref[leaf.id].coef:
        return None
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
    if head is None:
        return None
    dims = iter(ref.dims)
    axes = tuple(None if n == 1 else class_of[next(dims)] for n in value.shape)
    return value, Repeated(axes, head, value.shape[axes.index(head)]), [merge, *crossed]


def _stays_for_a_backward(block: Block, node: Node, inside: set[int]) -> bool:
    """Whether no code of the user's own reads what a node makes; what a body returns in a differentiated program may be kept for that."""
    outside = [u for v in node.outputs for u in block.users.get(v.id, ()) if u.id not in inside]
    kept = bool(block.path) and in_differentiated(node)
    return (kept or not any(v.id in block.returned for v in node.outputs)) and all(map(in_backward, outside))
