"""From axis letters to arrays: bringing a site's operands into the fused op's layout, and its result back.

An axis of a raw value is described by its class number in the match (equal classes are the same axis), or None for a unit axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...graph.canonical.nodes import nonunit
from ...graph.canonical.view import CanonicalView
from ...graph.declined import Declined
from ...graph.matching.match import Match
from ...graph.matching.region import VIEWS, Region
from ...graph.program.ir import Node, Value

AxisClasses = tuple[int | None, ...]
Groups = Sequence[Sequence[int]]  # of the axes of an op's operand: the classes that each merges, in order

BROADCAST = -1  # in place of a class: the value repeats itself along this axis


def input_positions(region: Region) -> dict[str, int]:
    """Leaf -> its position among the site's inputs."""
    position = {v.id: i for i, v in enumerate(region.inputs)}
    return {name: position[v.id] for name, v in region.leaves.items()}


def axes_of(match: Match, view: CanonicalView, pattern_node: int, value: Value, broadcast: bool = False) -> AxisClasses:
    """The class of each axis of `value`, which shows the target node bound to `pattern_node`.

    Raises:
      Declined: the value is broadcast along an axis its node does not have, and `broadcast` does not allow it.
    """
    dims = iter(view.ref[value.id].dims)
    out: list[int | None] = []
    for size in value.shape:
        if size == 1:
            out.append(None)
            continue
        d = next(dims)
        if d < 0 and broadcast:
            out.append(BROADCAST)
            continue
        if d < 0:
            raise Declined(f"{value!r} is broadcast along an axis of size {size}")
        out.append(match.axes[pattern_node, d])
    return tuple(out)


def axes_beside(match: Match, view: CanonicalView, region: Region, leaf: str) -> AxisClasses:
    """The axes of a leaf's raw value; where it is broadcast, the axes of the operand that it meets in the site.

    A mask `a & b`, with `a` broadcast over the batch and `b` broadcast over the rows, is an array of its own that the site reads in full;
    a value that is broadcast where the site reads it is not, and keeps `BROADCAST` there.
    """
    value = region.leaves[leaf]
    if regrouped_as(match, view, leaf, value) is not None:
        return axes_of_leaf(match, view, leaf)
    axes = axes_of(match, view, match.leaf_id(leaf), value, broadcast=True)
    of_node = {t: p for p, t in match.nodes.items()}
    inside = {n.id for n in (*region.nodes, *region.support)}
    return tuple(_met(match, view, inside, of_node, value, d) if c == BROADCAST else c for d, c in enumerate(axes))


def regrouped_as(match: Match, view: CanonicalView, leaf: str, value: Value) -> Callable[[Any], Any] | None:
    """How to make a leaf from `value` where the program has no such reshape (see `graph.regroup`); None where it has the leaf.

    The result has the axes of the leaf's node, in their order (`axes_of_leaf`).

    Raises:
      Declined: the value is broadcast along an axis.
    """
    node, ref = view.nodes[match.leaves[leaf]], view.ref[value.id]
    if ref.nid == node.id or node.op != "reshape":
        return None
    if min(ref.dims, default=0) < 0:
        raise Declined(f"{value!r} is broadcast along an axis and reshaped in the site")
    (edge,) = node.operands
    present = [a for a in edge.axes if a >= 0]

    def regroup(x: Any) -> Any:
        whole = x[tuple(0 if n == 1 else slice(None) for n in x.shape)]
        whole = whole.transpose([ref.dims.index(a) for a in present])
        sizes = iter(whole.shape)
        thin = whole.reshape([next(sizes) if a >= 0 else 1 for a in edge.axes])
        as_array = np if isinstance(x, np.ndarray) else jnp
        full = as_array.broadcast_to(thin, [n if a >= 0 else ~a for a, n in zip(edge.axes, thin.shape, strict=True)])
        return full.reshape(node.shape)

    return regroup


def axes_of_leaf(match: Match, view: CanonicalView, leaf: str) -> AxisClasses:
    """The class of each axis of a leaf's node."""
    pid = match.leaf_id(leaf)
    return tuple(match.axes[pid, d] for d in range(len(view.nodes[match.nodes[pid]].shape)))


def constant_with_axes(
    match: Match, view: CanonicalView, leaf: str, value: Value, array: np.ndarray
) -> tuple[np.ndarray, AxisClasses]:
    """The constant of a leaf bound to `value`, as an array with its axes."""
    regroup = regrouped_as(match, view, leaf, value)
    if regroup is not None:
        return regroup(array), axes_of_leaf(match, view, leaf)
    return array, axes_of(match, view, match.leaf_id(leaf), value, broadcast=True)


def _met(
    match: Match, view: CanonicalView, inside: set[int], of_node: Mapping[int, int], value: Value, axis: int
) -> int | None:
    """The class of the axis that an axis of `value` meets where the site reads it, through views; else `BROADCAST`."""
    for node in view.block.users.get(value.id, ()):
        result = node.outputs[0]
        if node.id not in inside:
            continue
        if node.primitive in VIEWS:
            at = moved(node, axis)
            met = BROADCAST if at is None else _met(match, view, inside, of_node, result, at)
        else:
            pattern_node = of_node.get(view.ref[result.id].nid)
            alike = pattern_node is not None and result.shape == value.shape
            met = axes_of(match, view, pattern_node, result, broadcast=True)[axis] if alike else BROADCAST  # type: ignore[arg-type]
        if met != BROADCAST:
            return met
    return BROADCAST


def moved(node: Node, axis: int) -> int | None:
    """The position to which a view moves an axis of its operand; None for a reshape that makes other axes."""
    if node.primitive == "broadcast_in_dim":
        return int(node.params["broadcast_dimensions"][axis])
    if node.primitive == "transpose":
        return [int(p) for p in node.params["permutation"]].index(axis)
    before, after = node.inputs[0].shape, node.outputs[0].shape
    if nonunit(before) != nonunit(after):
        return None
    return real_axes(after)[len(nonunit(before[:axis]))]


def real_axes(shape: Sequence[int]) -> list[int]:
    """The axes whose size is not 1."""
    return [d for d, n in enumerate(shape) if n != 1]


def _flat(groups: Groups) -> list[int]:
    """The classes of all groups, in order."""
    return [c for group in groups for c in group]


def present(axes: AxisClasses) -> list[int]:
    """The classes of the axes that are not unit axes, in order."""
    return [c for c in axes if c is not None]


def ordered_classes(axes: AxisClasses, classes: Sequence[int | None]) -> tuple[int, ...]:
    """The classes, in the order they have in `axes`; those it lacks come last."""
    present = [c for c in axes if c is not None and c in classes]
    return tuple(present + [c for c in classes if c is not None and c not in present])


def permutes(have: AxisClasses, groups: Groups) -> bool:
    """Whether `arrange` and `restore` transpose an array with axes `have`; missing classes are broadcast in place."""
    kept = present(have)
    return kept != [c for c in _flat(groups) if c in kept]


def arrange(x: Any, have: AxisClasses, groups: Groups, sizes: Mapping[int, int]) -> Any:
    """`x` with one axis per group: each group's classes merged in order; a class `x` lacks is broadcast, an empty group is 1."""
    order, kept = _flat(groups), present(have)
    merged = [math.prod(sizes[c] for c in group) for group in groups]
    if kept == order:
        return jnp.reshape(x, merged)
    x = jnp.reshape(x, [s for s, c in zip(x.shape, have, strict=True) if c is not None])
    x = jnp.transpose(x, [kept.index(c) for c in order if c in kept])
    return jnp.reshape(_broadcast(x, kept, order, sizes), merged)


def _broadcast(x: Any, kept: Sequence[int], order: Sequence[int], sizes: Mapping[int, int]) -> Any:
    """`x`, which has only the classes `kept` of `order`, broadcast to all of them."""
    if all(c in kept for c in order):
        return x
    x = jnp.reshape(x, [sizes[c] if c in kept else 1 for c in order])
    return jnp.broadcast_to(x, [sizes[c] for c in order])


def arrange_thin(x: Any, have: AxisClasses, groups: Groups, sizes: Mapping[int, int]) -> Any:
    """As `arrange`, with an axis of 1 for each group of which `x` has no class, to be broadcast where it is used."""
    x = x[tuple(0 if c is None or c == BROADCAST else slice(None) for c in have)]
    kept = tuple(c for c in have if c is not None and c != BROADCAST)
    return arrange(x, kept, [group if any(c in kept for c in group) else () for group in groups], sizes)


def restore(x: Any, groups: Groups, want: AxisClasses, shape: Sequence[int], sizes: Mapping[int, int]) -> Any:
    """The inverse: from one axis per group to the axes `want` with `shape`."""
    order, wanted = _flat(groups), present(want)
    if order != wanted:
        x = jnp.transpose(jnp.reshape(x, [sizes[c] for c in order]), [order.index(c) for c in wanted])
    return jnp.reshape(x, shape)
