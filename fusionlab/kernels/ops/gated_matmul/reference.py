"""The meaning of `gated_matmul` in plain jnp, its tangent and its cotangent.

    gate = x . w,  up = x . v
    out = act(gate) * up

Products are summed in float32 (float64 for float64); activation and product are computed in that, and rounded once, to the operands' dtype.
A differentiated call keeps `gate` and `up`, rounded to the operands' dtype, as a program keeps them that writes them out.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ....device import Device
from ....graph.dtypes import arithmetic_dtype
from ...op.arrays import Named, for_product, wide
from ..gemm_epilogue.activations import ACTIVATIONS

Array = Any


def wide_product(
    x: Array,
    w: Array,
    *,
    w_contract: int,
    precision: Any,
    out_sharding: Any = None,
    device: Device | None = None,
    **_: Any,
) -> Array:
    """x (*M x K) . w (K x N, or N x K with `w_contract` 1), in the dtype of the arithmetic."""
    return _product(x, w, (((x.ndim - 1,), (w_contract,)), ((), ())), precision, out_sharding, device)


def _product(a: Array, b: Array, dimensions: Any, precision: Any, out_sharding: Any, device: Device | None) -> Array:
    dtype = arithmetic_dtype(a.dtype)
    a, b = for_product(a, b, dtype, device)
    return lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=dtype, out_sharding=out_sharding
    )


def forward(x: Array, w: Array, v: Array, *, residuals: bool, activation: str, **attrs: Any) -> list[Array]:
    """[out], and gate and up if asked for: two products."""
    return gated(wide_product(x, w, **attrs), wide_product(x, v, **attrs), x.dtype, activation, residuals)


def forward_concatenated(
    x: Array, w: Array, v: Array, *, residuals: bool, activation: str, w_contract: int, **attrs: Any
) -> list[Array]:
    """The same by one product, the weights side by side."""
    both = wide_product(x, jnp.concatenate([w, v], axis=1 - w_contract), w_contract=w_contract, **attrs)
    gate, up = jnp.split(both, [w.shape[1 - w_contract]], axis=-1)
    return gated(gate, up, x.dtype, activation, residuals)


def gated(gate: Array, up: Array, dtype: Any, activation: str, residuals: bool) -> list[Array]:
    """The epilogue of both products."""
    out = (ACTIVATIONS[activation].fn(gate) * up).astype(dtype)
    return [out, gate.astype(dtype), up.astype(dtype)] if residuals else [out]


def tangent(saved: Named, tangents: Named, shape: tuple[int, ...], shardings: Named, **attrs: Any) -> Array:
    """act'(gate) * dgate * up + act(gate) * dup, with dgate = dx . w + x . dw and dup = dx . v + x . dv, of the tangents given."""
    act, gate = ACTIVATIONS[attrs["activation"]].fn, wide(saved["gate"])
    parts = []
    if (moved := _sum_of(saved, tangents, "w", attrs)) is not None:
        parts.append(jax.jvp(act, (gate,), (moved,))[1] * wide(saved["up"]))
    if (moved := _sum_of(saved, tangents, "v", attrs)) is not None:
        parts.append(act(gate) * moved)
    return functools.reduce(jnp.add, parts).astype(saved["gate"].dtype)


def _sum_of(saved: Named, tangents: Named, slot: str, attrs: Any) -> Array | None:
    """The tangent of x . w (or of x . v), of the tangents given; None where neither x nor the weight moves."""
    parts = []
    if "x" in tangents:
        parts.append(wide_product(tangents["x"], saved[slot], **attrs))
    if slot in tangents:
        parts.append(wide_product(saved["x"], tangents[slot], **attrs))
    return functools.reduce(jnp.add, parts) if parts else None


def cotangent(saved: Named, ct: Array, wanted: tuple[str, ...], shardings: Named, **attrs: Any) -> list[Array]:
    """The gradients wanted: dgate = act'(gate) * up * ct and dup = act(gate) * ct, rounded to the operands' dtype for the products
    dx = dgate . w^T + dup . v^T, dw = x^T . dgate and dv = x^T . dup.
    """
    act, gate, pulled = ACTIVATIONS[attrs["activation"]].fn, wide(saved["gate"]), wide(ct)
    dtype = ct.dtype
    along: dict[str, Array] = {}
    if "x" in wanted or "w" in wanted:
        along["w"] = jax.vjp(act, gate)[1](wide(saved["up"]) * pulled)[0].astype(dtype)
    if "x" in wanted or "v" in wanted:
        along["v"] = (act(gate) * pulled).astype(dtype)
    across = attrs | {"w_contract": 1 - attrs["w_contract"]}
    rows = tuple(range(ct.ndim - 1))

    def gradient(slot: str) -> Array:
        sharding = shardings.get(slot)
        if slot == "x":
            parts = (wide_product(along[w], saved[w], out_sharding=sharding, **across) for w in ("w", "v"))
            return functools.reduce(jnp.add, parts).astype(dtype)
        pair = (along[slot], saved["x"]) if attrs["w_contract"] else (saved["x"], along[slot])
        return _product(*pair, ((rows, rows), ((), ())), attrs["precision"], sharding, attrs.get("device")).astype(
            dtype
        )

    return [gradient(slot) for slot in wanted]
