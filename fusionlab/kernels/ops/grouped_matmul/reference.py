"""The meaning of `grouped_matmul`: `jax.lax.ragged_dot_general`, and JAX's own derivatives of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

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
    """The gradients of x and w that are wanted, as JAX has them."""
    found = []
    for slot in wanted:
        kind, x, w, contract = as_product(slot, saved, ct, attrs["kind"], attrs["w_contract"])
        other = saved["w" if slot == "x" else "x"]
        more = {"kind": kind, "w_contract": contract, "out": other.dtype.name, "residuals": False}
        found += forward(x, w, saved["group_sizes"], **attrs | more)
    return found


def as_product(
    slot: str, saved: Mapping[str, Array], ct: Array, kind: str, w_contract: int
) -> tuple[str, Array, Array, int]:
    """The gradient of a slot as a product again: its kind, x and w, and the axis of w that is contracted."""
    if kind == "weights":  # ct is a matrix for each group
        return ("rows", saved["w"], ct, 1) if slot == "x" else ("rows", saved["x"], ct, 0)
    if slot == "x":
        return "rows", ct, saved["w"], 1 - w_contract
    return ("weights", ct, saved["x"], 0) if w_contract else ("weights", saved["x"], ct, 0)
