"""The meaning of `gemm_epilogue` in plain jnp: act(x @ w + bias), its tangent and its cotangent.

Letters: x is *M with K at axis `x_contract`; w is K N, or N K when `w_contract` is 1; bias is N; out is *M N.
Each product is the `dot_general` that `x @ w` emits: operands and result in one dtype, no explicit accumulation dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .activations import ACTIVATIONS

Array = Any


def _product(x: Array, w: Array, x_axis: int, w_axis: int, precision: Any, sharding: Any = None) -> Array:
    contract = (((x_axis,), (w_axis,)), ((), ()))
    return lax.dot_general(x, w, contract, precision=precision, preferred_element_type=x.dtype, out_sharding=sharding)


def forward(
    x: Array,
    w: Array,
    bias: Array | None = None,
    x_saved: Array | None = None,
    *,
    residuals: bool,
    activation: str,
    x_contract: int,
    w_contract: int,
    precision: Any,
    **_: Any,
) -> list[Array]:
    """[act(x @ w + bias)], and the activation's residual if asked for and if it has one."""
    return epilogue(_product(x, w, x_contract, w_contract, precision), bias, activation, residuals)


def epilogue(product: Array, bias: Array | None, activation: str, residuals: bool) -> list[Array]:
    """[act(product + bias)], and the activation's residual if asked for and if it has one."""
    act = ACTIVATIONS[activation]
    h = product if bias is None else product + bias
    return [act.fn(h), act.save(h)] if residuals and act.save else [act.fn(h)]


def tangent(
    saved: Mapping[str, Array],
    tangents: Mapping[str, Array],
    shape: tuple[int, ...],
    shardings: Mapping[str, Any],
    *,
    activation: str,
    x_contract: int,
    w_contract: int,
    precision: Any,
    x_activation: str | None,
    **_: Any,
) -> Array:
    """act'(h) * (dx @ w + x @ dw + dbias), of the tangents given; with `x_activation` that of its pre-activation for dx."""
    act = ACTIVATIONS[activation]
    parts = []
    if "x" in tangents:
        dx = _beyond(x_activation, saved, tangents["x"])
        parts.append(_product(dx, saved["w"], x_contract, w_contract, precision))
    if "w" in tangents:
        parts.append(_product(saved["x"], tangents["w"], x_contract, w_contract, precision))
    if "bias" in tangents:
        parts.append(jnp.broadcast_to(tangents["bias"], shape, out_sharding=shardings.get("out")))
    return act.scale(saved.get(act.residual), functools.reduce(jnp.add, parts))


def cotangent(
    saved: Mapping[str, Array],
    ct: Array,
    wanted: tuple[str, ...],
    shardings: Mapping[str, Any],
    *,
    activation: str,
    x_contract: int,
    w_contract: int,
    precision: Any,
    x_activation: str | None,
    **_: Any,
) -> list[Array]:
    """The gradients wanted, in order: dh = act'(h) * ct; dx = dh @ w^T, dw = x^T @ dh, dbias = sum of dh over rows."""
    act = ACTIVATIONS[activation]
    dh = act.scale(saved.get(act.residual), ct)
    last = dh.ndim - 1
    grads = {}
    if "x" in wanted:
        sharding = _axis_to_last(shardings.get("x"), x_contract)
        dx = _product(dh, saved["w"], last, 1 - w_contract, precision, sharding)
        grads["x"] = _beyond(x_activation, saved, jnp.moveaxis(dx, last, x_contract))
    if "w" in wanted:
        x = saved["x"]
        rows = (tuple(i for i in range(x.ndim) if i != x_contract), tuple(range(last)))
        sides = ((x, rows[0]), (dh, rows[1])) if w_contract == 0 else ((dh, rows[1]), (x, rows[0]))
        (left, left_rows), (right, right_rows) = sides
        grads["w"] = lax.dot_general(
            left,
            right,
            ((left_rows, right_rows), ((), ())),
            precision=precision,
            preferred_element_type=x.dtype,
            out_sharding=shardings.get("w"),
        )
    if "bias" in wanted:
        grads["bias"] = jnp.sum(dh, axis=tuple(range(last)))
    return [grads[slot] for slot in wanted]


def _beyond(activation: str | None, saved: Mapping[str, Array], t: Array) -> Array:
    """A tangent or cotangent of x, taken through the activation that made x."""
    return t if activation is None else ACTIVATIONS[activation].scale(saved["x_saved"], t)


def _axis_to_last(sharding: Any, axis: int) -> Any:
    """The explicit sharding of an array whose `axis` (negative: counted from the end) is moved last."""
    if sharding is None:
        return None
    spec = list(sharding.spec)
    spec.append(spec.pop(axis))
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))
