"""Values that leave one region and enter another: a scan's per-step results, a shard_map's results, further operands of a call."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..jax_compat import scan_counts, scan_numbers, split_closed, unspecified_sharding, varying_axes
from ..primitives import having
from .graph import Graph
from .in_shard_map import make_jaxpr
from .ir import Block, Node

# Regions that can be given further operands, and can return further results, without changing what they do.
CROSSED = having("mesh", "jit") | {"scan"}


class BlockTree:
    """The tree of blocks, and the block of each value.

    Attributes: `of_value` (value id -> path of the block that makes it or is given it), `owner` (path -> the node whose body the block
    is, and the block that holds the node).
    """

    def __init__(self, graph: Graph) -> None:
        self.of_value: dict[int, str] = {}
        self.owner: dict[str, tuple[Node, Block]] = {}
        for block in graph.blocks():
            values = (*block.inputs, *(v for v, _ in block.consts), *(v for n in block.nodes for v in n.outputs))
            self.of_value.update((v.id, block.path) for v in values)
            self.owner.update((b.path, (n, block)) for n in block.nodes for b in n.blocks)

    def up(self, path: str) -> list[str]:
        """A block's path and those of the blocks around it, innermost first."""
        found = [path]
        while found[-1] in self.owner:
            found.append(self.owner[found[-1]][1].path)
        return found

    def ways(self, forward: str, backward: str) -> tuple[list[str], list[str]]:
        """The blocks to leave and the blocks to enter on the way from one block to another, innermost first."""
        out, into = self.up(forward), self.up(backward)
        while out and into and out[-1] == into[-1]:
            out.pop()
            into.pop()
        return out, into

    def between(self, forward: str, backward: str) -> Iterator[Node]:
        """The nodes whose bodies are left and entered."""
        for way in self.ways(forward, backward):
            yield from (self.owner[path][0] for path in way)


def more_results(
    node: Node, params: dict[str, Any], avals: Sequence[Any], given: int = 0
) -> tuple[dict[str, Any], list[Any]]:
    """The parameters of a region whose body returns further values of these types, and their types outside; `given` is how many further
    operands it has been given."""
    if node.primitive == "scan":
        carried, outs = scan_counts(node.params)[1], len(node.outputs)
        xs = len(node.inputs) - sum(scan_counts(node.params)) + given
        changed = scan_numbers(params, *scan_counts(node.params), xs, outs - carried + len(avals))
        return params | changed, [stacked_type(a, node.params["length"]) for a in avals]
    if node.primitive == "shard_map":
        specs = [_spec(node, a) for a in avals]
        outside = [_whole(node, a, axes) for a, axes in zip(avals, map(_axes_of, specs), strict=True)]
        return params | {"out_specs": (*params["out_specs"], *specs)}, outside
    more = {"out_shardings": unspecified_sharding(), "out_layouts": None}
    return params | {k: (*params[k], *[v] * len(avals)) for k, v in more.items() if k in params}, list(avals)


def more_operands(node: Node, params: dict[str, Any], avals: Sequence[Any]) -> dict[str, Any]:
    """The parameters of a region whose body is given further values of these types."""
    if node.primitive == "scan":
        counts = scan_counts(node.params)
        xs = len(node.inputs) - sum(counts) + len(avals)
        return params | scan_numbers(params, *counts, xs, len(node.outputs) - counts[1])
    if node.primitive == "shard_map":
        return params | {"in_specs": (*params["in_specs"], *(_spec(node, a) for a in avals))}
    more = {"in_shardings": unspecified_sharding(), "in_layouts": None, "donated_invars": False, "prevent_cse": True}
    return params | {k: (*params[k], *[v] * len(avals)) for k, v in more.items() if isinstance(params.get(k), tuple)}


def stacked_type(aval: Any, length: int) -> Any:
    """The type of the per-step results of this type of a scan of so many steps."""
    closed = make_jaxpr(lambda x: jax.lax.broadcast(x, (length,)), [aval])
    return split_closed(closed)[0].outvars[0].aval


def _spec(node: Node, aval: Any) -> Any:
    """The sharding outside of a value of a shard_map's body: one piece per device, along its first axis."""
    manual = set(node.params["newly_manual_axes"])
    axes = tuple(a for a in node.params["mesh"].axis_names if a in manual)
    if node.params["check_vma"]:
        axes = tuple(a for a in axes if a in varying_axes(aval))
    return jax.sharding.PartitionSpec(*([axes] if axes else []))


def _axes_of(spec: Any) -> tuple[str, ...]:
    first = spec[0] if len(spec) else ()
    return (first,) if isinstance(first, str) else tuple(first or ())


def _whole(node: Node, aval: Any, axes: tuple[str, ...]) -> Any:
    pieces = math.prod(node.params["mesh"].shape[a] for a in axes)
    shape = (aval.shape[0] * pieces, *aval.shape[1:])
    return split_closed(jax.make_jaxpr(lambda: jnp.zeros(shape, aval.dtype))())[0].outvars[0].aval
