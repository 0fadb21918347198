"""The meaning of `grouped_matmul`: `jax.lax.ragged_dot_general`, and JAX's own derivatives of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = Any


def dimensions(kind: str, w_contract: int) -> lax.RaggedDotDimensionNumbers:
    """Which axes a product of a kind contracts, and along which its groups lie."""
    if kind == "weights":  # the groups are parts of the axis that is summed over
        return lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    return lax.RaggedDotDimensionNumbers((((1,), (1 + w_contract,)), ((), ())), (0,), (0,))


def forward(
    x: Array,
    w: Array,
    group_sizes: Array,
    *,
    residuals: bool,
    kind: str,
    w_contract: int,
    precision: Any,
    out: str | None,
    **attrs: Any,
) -> list[Array]:
    """[out]: nothing else is kept."""
    numbers = dimensions(kind, w_contract)
    return [lax.ragged_dot_general(x, w, group_sizes, numbers, precision=precision, preferred_element_type=out)]


def tangent(
    saved: Mapping[str, Array], tangents: Mapping[str, Array], shape: Any, shardings: Any, **attrs: Any
) -> Array:
    """dx . w + x . dw, group by group, of the tangents given: it is linear in each."""
    parts = [forward(**{**saved, slot: moved}, residuals=False, **attrs)[0] for slot, moved in tangents.items()]
    return functools.reduce(jnp.add, parts)


def cotangent(
    saved: Mapping[str, Array], ct: Array, wanted: Sequence[str], shardings: Any, **attrs: Any
) -> list[Array]:
    """The gradients of x and w that are wanted, each JAX's own."""
    return [_gradient(slot, saved, ct, attrs) for slot in wanted]


def _gradient(slot: str, saved: Mapping[str, Array], ct: Array, attrs: Mapping[str, Any]) -> Array:
    def product(moving: Array) -> Array:
        return forward(**{**saved, slot: moving}, residuals=False, **attrs)[0]

    other = saved["w" if slot == "x" else "x"]
    moving = jax.ShapeDtypeStruct(dict(attrs["extents"])[slot], other.dtype)
    return jax.linear_transpose(product, moving)(ct)[0]
