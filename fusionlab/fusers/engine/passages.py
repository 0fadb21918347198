"""Nodes between two parts of a site that compute nothing: reshapes, a cast from 16 bits to float32, and the cast that undoes it.

A reshape or a transpose commutes with elementwise functions, so the op returns its result in the product's layout and the views follow.
An added value after the views is a bias if, traced back through them, it varies along the features only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...graph.canonical.nodes import nonunit
from ...graph.canonical.rules import reshape_groups
from ...graph.declined import Declined
from ...graph.matching.region import CASTS, VIEWS, widens
from ...graph.program.ir import Node, Value
from .layout import real_axes
from .site import Site

_HALVES = ("bfloat16", "float16")
_REARRANGING = VIEWS - {"pvary"}


@dataclass(frozen=True)
class Passage:
    """A chain of nodes, each the only reader of the one before: its end, and the views on the way."""

    end: Value
    views: tuple[Node, ...] = ()


def passage(site: Site, value: Value) -> Passage:
    """The passage from a value through views that keep all its entries, and one cast from 16 bits to float32."""
    views: list[Node] = []
    while (user := _only_reader(site, value)) is not None:
        if _keeps_entries(user):
            views.append(user)
        elif not (is_half(value.dtype) and widens(user) and np.dtype(user.outputs[0].dtype) == np.float32):
            break
        value = user.outputs[0]
    return Passage(value, tuple(views))


def rounding(site: Site, value: Value, dtype: Any) -> Passage | None:
    """The passage from a value through views to its only reader, a cast that rounds it to `dtype`."""
    views: list[Node] = []
    while (user := _only_reader(site, value)) is not None:
        value = user.outputs[0]
        if user.primitive in CASTS:
            return Passage(value, tuple(views)) if value.dtype == dtype else None
        if not _keeps_entries(user):
            return None
        views.append(user)
    return None


def is_half(dtype: Any) -> bool:
    """Whether a dtype is a 16-bit float."""
    return np.dtype(dtype).name in _HALVES


def narrow(site: Site, value: Any) -> Any:
    """The 16-bit dtype of a value, or from which it is widened to float32; None for any other value."""
    if not isinstance(value, Value):
        return None
    maker = site.search.block.producer.get(value.id)
    while maker is not None and (_keeps_entries(maker) or widens(maker)) and isinstance(maker.inputs[0], Value):
        if is_half(value.dtype):
            break
        value = maker.inputs[0]
        maker = site.search.block.producer.get(value.id)
    return np.dtype(value.dtype) if is_half(value.dtype) else None


def _only_reader(site: Site, value: Value) -> Node | None:
    user = site.only_reader(value)
    return user if user is not None and not user.blocks else None


def _keeps_entries(node: Node) -> bool:
    if node.primitive == "reshape" and node.params["dimensions"] is not None:
        return False  # a reshape that transposes first
    return (
        node.primitive in _REARRANGING
        and len(node.inputs) == 1
        and _size(node.inputs[0].shape) == _size(node.outputs[0].shape)
    )


def _size(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def replayed(views: Sequence[Node], x: Any) -> Any:
    """The views applied to an array."""
    for node in views:
        x = node.eqn.primitive.bind(x, **node.eqn.params)
    return x


# -- a bias behind views --------------------------------------------------------------------------------------------------


def thin_shape(site: Site, value: Any, rank: int) -> tuple[int, ...] | None:
    """The shape of an operand at that rank, with 1 for each axis along which it is broadcast; None for a number."""
    ref = site.view.read(value)
    if site.view.is_literal(ref):
        return None
    dims = iter(ref.dims)
    thin = tuple(1 if n == 1 or next(dims) < 0 else n for n in value.shape)
    return (1,) * (rank - len(thin)) + thin


def shapes_before(views: Sequence[Node], thin: tuple[int, ...]) -> list[tuple[int, ...]] | None:
    """The shapes, from the last of the views back, in which an operand behind them broadcasts to what each reads; None where it cannot."""
    found = []
    for node in reversed(views):
        before = _before(node, thin)
        if before is None:
            return None
        found.append(thin := before)
    return found


def _before(node: Node, thin: tuple[int, ...]) -> tuple[int, ...] | None:
    whole, after = node.inputs[0].shape, node.outputs[0].shape
    if node.primitive == "transpose":
        at = node.params["permutation"]
        return tuple(thin[at.index(i)] for i in range(len(whole)))
    rows, columns = iter(real_axes(whole)), iter(real_axes(after))
    before = [1] * len(whole)
    for old, new in reshape_groups(nonunit(whole), nonunit(after)):
        axes = list(itertools.islice(rows, old))
        varies = {thin[d] != 1 for d in itertools.islice(columns, new)}
        if len(varies) > 1:
            return None
        for d in axes if True in varies else ():
            before[d] = whole[d]
    return tuple(before)


def unplaced(site: Site, bound: Value, other: Value, views: Sequence[Node], array: Any) -> Any:
    """A bound bias in the shape in which it broadcasts to the operand of the first view.

    Raises:
      Declined: it is bound with axes along which it is broadcast.
    """
    dims, wanted = site.view.ref[bound.id].dims, [d for d in site.view.ref[other.id].dims if d >= 0]
    if any(d < 0 for d in dims):
        raise Declined(f"{bound!r} is broadcast before it is added")
    thin = thin_shape(site, other, len(views[-1].outputs[0].shape))
    shapes = None if thin is None else shapes_before(views, thin)
    assert thin is not None
    assert shapes is not None
    array = jnp.reshape(array, [n for n in bound.shape if n != 1])
    array = jnp.reshape(jnp.transpose(array, [dims.index(d) for d in wanted]), thin)
    return _undone(views, shapes, array)


def _undone(views: Sequence[Node], shapes: Sequence[tuple[int, ...]], x: Any) -> Any:
    """An operand after the views in the form before them: the last view is undone first. `shapes` as in `shapes_before`."""
    for node, shape in zip(reversed(views), shapes, strict=True):
        if node.primitive == "transpose":
            x = jnp.transpose(x, [int(i) for i in np.argsort(node.params["permutation"])])
        else:
            x = jnp.reshape(x, shape)
    return x
