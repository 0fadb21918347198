"""The meaning of `gemm_epilogue` in plain jnp: act(x @ w + bias), its tangent and its cotangent.

Letters: x is *M with K at axis `x_contract`; w is K N, or N K when `w_contract` is 1; bias is N; out is *M N.
Each product is the `dot_general` that `x @ w` emits: operands and result in one dtype, no explicit accumulation dtype.

Of operands of 16 bits a program may go on in float32 (`wide`): from the "product" on, which is not rounded then, or from its "epilogue".
Bias, activation and derivative are computed in float32, and each result is rounded once: to the operands' dtype, or not at all (`out`).
Where the product is not rounded, neither is what is kept of it, nor the gradient that goes back through it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ....device import Device
from ...op.arrays import Named, for_product
from .activations import ACTIVATIONS

Array = Any


def product(
    x: Array,
    w: Array,
    x_axis: int,
    w_axis: int,
    precision: Any,
    sharding: Any = None,
    wide: str | None = None,
    device: Device | None = None,
) -> Array:
    contract = (((x_axis,), (w_axis,)), ((), ()))
    result = jnp.float32 if wide == "product" else x.dtype
    x, w = for_product(x, w, result, device)
    return lax.dot_general(x, w, contract, precision=precision, preferred_element_type=result, out_sharding=sharding)


def widened(a: Any, wide: str | None) -> Any:
    """As the epilogue and its derivative compute with it: a mask stays one, and what is not there is not."""
    return a if wide is None or a is None or not jnp.issubdtype(a.dtype, jnp.floating) else a.astype(jnp.float32)


def forward(x: Array, w: Array, bias: Array | None = None, x_saved: Array | None = None, **attrs: Any) -> list[Array]:
    """[act(x @ w + bias)], and the activation's residual if asked for and if it has one."""
    sides = attrs["x_contract"], attrs["w_contract"]
    summed = product(x, w, *sides, attrs["precision"], wide=attrs.get("wide"), device=attrs.get("device"))
    return epilogue(summed, bias, x.dtype, **attrs)


def epilogue(summed: Array, bias: Array | None, dtype: Any, *, residuals: bool, **attrs: Any) -> list[Array]:
    """[act(product + bias)], and the activation's residual if asked for and if it has one.

    `dtype` is the operands', which may be another than the product's.
    """
    act, wide = ACTIVATIONS[attrs["activation"]], attrs.get("wide")
    summed, bias = widened(summed, wide), widened(bias, wide)
    h = summed if bias is None else summed + bias
    outs = [act.fn(h).astype(attrs.get("out") or dtype)]
    if not (residuals and act.save):
        return outs
    saved = act.save(h)
    saved = saved.astype(dtype) if wide == "epilogue" and act.residual == "preactivation" else saved
    return [*outs, pack(saved) if attrs["packed"] else saved]


def mask_pitch(columns: int) -> int:
    """Bytes of a row of a packed mask: one bit a column, in multiples of 128 columns.

    That is how cuBLASLt lays out the mask of its RELU_AUX epilogue (cuBLAS documentation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD).
    """
    return -(-columns // 128) * 16


def pack(mask: Array) -> Array:
    """A bool mask (*M, N) as uint8 (*M, mask_pitch(N)): column j is bit j % 8 of byte j // 8; the bits beyond N are 0."""
    bits = jnp.packbits(mask, axis=-1, bitorder="little")
    missing = mask_pitch(mask.shape[-1]) - bits.shape[-1]
    return jnp.pad(bits, [(0, 0)] * (mask.ndim - 1) + [(0, missing)])


def unpacked(saved: Array | None, shape: tuple[int, ...]) -> Array | None:
    """A residual as its activation takes it: a packed mask as the bool mask of that shape, any other as it is."""
    if saved is None or saved.dtype != jnp.uint8:
        return saved
    return jnp.unpackbits(saved, axis=-1, count=shape[-1], bitorder="little").astype(bool)


def tangent(saved: Named, tangents: Named, shape: tuple[int, ...], shardings: Named, **attrs: Any) -> Array:
    """act'(h) * (dx @ w + x @ dw + dbias), of the tangents given; with `x_activation` that of its pre-activation for dx."""
    act, wide = ACTIVATIONS[attrs["activation"]], attrs.get("wide")
    sides = attrs["x_contract"], attrs["w_contract"], attrs["precision"]
    multiplied = functools.partial(product, wide=wide, device=attrs.get("device"))
    parts = []
    if "x" in tangents:
        dx = beyond(attrs["x_activation"], saved, tangents["x"])
        parts.append(multiplied(dx, saved["w"], *sides))
    if "w" in tangents:
        parts.append(multiplied(saved["x"], tangents["w"], *sides))
    if "bias" in tangents:
        parts.append(jnp.broadcast_to(tangents["bias"], shape, out_sharding=shardings.get("out")))
    dtype = next(iter(tangents.values())).dtype
    moved = functools.reduce(jnp.add, (widened(part, wide) for part in parts))
    return act.scale(widened(unpacked(saved.get(act.residual), shape), wide), moved).astype(attrs.get("out") or dtype)


def cotangent(saved: Named, ct: Array, wanted: tuple[str, ...], shardings: Named, **attrs: Any) -> list[Array]:
    """The gradients wanted, in order: dh = act'(h) * ct; dx = dh @ w^T, dw = x^T @ dh, dbias = sum of dh over rows."""
    act, wide = ACTIVATIONS[attrs["activation"]], attrs.get("wide")
    if wide is None:
        return gradients(saved, act.scale(unpacked(saved.get(act.residual), ct.shape), ct), wanted, shardings, **attrs)
    dtype = ct.dtype if attrs.get("out") is None else saved["w" if "w" in saved else "x"].dtype
    dh = act.scale(widened(unpacked(saved.get(act.residual), ct.shape), wide), widened(ct, wide))
    dbias = jnp.sum(dh, axis=tuple(range(dh.ndim - 1))).astype(dtype) if "bias" in wanted else None
    if wide == "epilogue":
        return gradients(saved, dh.astype(dtype), wanted, shardings, dbias, **attrs)
    whole = {slot: widened(a, wide) if slot in ("x", "w") else a for slot, a in saved.items()}
    return [a.astype(dtype) for a in gradients(whole, dh, wanted, shardings, dbias, **attrs)]


def gradients(
    saved: Named, dh: Array, wanted: tuple[str, ...], shardings: Named, dbias: Array | None = None, **attrs: Any
) -> list[Array]:
    """The gradients wanted of that of the pre-activation, dh; `dbias` where it is known already."""
    x_contract, w_contract, precision = attrs["x_contract"], attrs["w_contract"], attrs["precision"]
    last = dh.ndim - 1
    grads = {}
    if "x" in wanted:
        sharding = _axis_to_last(shardings.get("x"), x_contract)
        dx = product(dh, saved["w"], last, 1 - w_contract, precision, sharding)
        grads["x"] = beyond(attrs["x_activation"], saved, jnp.moveaxis(dx, last, x_contract))
    if "w" in wanted:
        x = saved["x"]
        of_x, of_dh = tuple(i for i in range(x.ndim) if i != x_contract), tuple(range(last))
        sides, rows = ((dh, x), (of_dh, of_x)) if w_contract else ((x, dh), (of_x, of_dh))
        how = {"precision": precision, "preferred_element_type": x.dtype, "out_sharding": shardings.get("w")}
        grads["w"] = lax.dot_general(*sides, (rows, ((), ())), **how)
    if "bias" in wanted:
        grads["bias"] = jnp.sum(dh, axis=tuple(range(last))) if dbias is None else dbias
    return [grads[slot] for slot in wanted]


def beyond(activation: str | None, saved: Named, t: Array) -> Array:
    """A tangent or cotangent of x, taken through the activation that made x."""
    if activation is None:
        return t
    return ACTIVATIONS[activation].scale(unpacked(saved["x_saved"], t.shape), t)


def _axis_to_last(sharding: Any, axis: int) -> Any:
    """The explicit sharding of an array whose `axis` (negative: counted from the end) is moved last."""
    if sharding is None:
        return None
    spec = list(sharding.spec)
    spec.append(spec.pop(axis))
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))
