"""The meaning of `layer_norm` in plain jnp: LayerNorm and RMSNorm, their tangent and their cotangent.

Letters: x is *R with N at `axis`; scale and bias are N; out is as x; the residuals `mean` (LayerNorm alone) and `rstd`, the
reciprocal of the standard deviation, are *R. All is computed in float32 for float32, bfloat16 and float16 x, in float64 for
float64, and rounded once, to the dtype of the result.

    LayerNorm: xhat = (x - mean) * rstd, mean = mean(x), rstd = 1 / sqrt(mean((x - mean)^2) + epsilon)
    RMSNorm:   xhat = x * rstd,                          rstd = 1 / sqrt(mean(x^2) + epsilon)
    out = xhat * scale + bias

Both have the Jacobian d xhat = rstd * P(dx), with P symmetric: P(u) = u - xhat * mean(xhat * u), less mean(u) for LayerNorm.
Sources: Ba et al. 2016, arXiv:1607.06450, equations 3 and 4; Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = Any


def statistics_dtype(dtype: Any) -> Any:
    """The dtype of statistics and arithmetic for x of `dtype`."""
    return jnp.promote_types(dtype, jnp.float32)


def _mean(u: Array, axis: int) -> Array:
    return jnp.mean(u, axis=axis, keepdims=True)


def _along(v: Array, rank: int, axis: int) -> Array:
    """A vector of N as an array of this rank, N at `axis`."""
    return jnp.expand_dims(v, tuple(d for d in range(rank) if d != axis))


def _normalised(x: Array, mean: Array | None, rstd: Array, axis: int) -> Array:
    """xhat of x in the statistics' dtype; `mean` and `rstd` lack `axis`."""
    wide = x.astype(rstd.dtype)
    if mean is not None:
        wide = wide - jnp.expand_dims(mean, axis)
    return wide * jnp.expand_dims(rstd, axis)


def forward(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    residuals: bool,
    kind: str,
    epsilon: float,
    axis: int,
    **_: Any,
) -> list[Array]:
    """[out], and mean (LayerNorm alone) and rstd if asked for."""
    wide = x.astype(statistics_dtype(x.dtype))
    mean = _mean(wide, axis) if kind == "layer" else None
    centred = wide if mean is None else wide - mean
    rstd = lax.rsqrt(_mean(jnp.square(centred), axis) + epsilon)
    out = centred * rstd
    if scale is not None:
        out = out * _along(scale.astype(out.dtype), x.ndim, axis)
    if bias is not None:
        out = out + _along(bias.astype(out.dtype), x.ndim, axis)
    if not residuals:
        return [out.astype(x.dtype)]
    return [out.astype(x.dtype), *(jnp.squeeze(s, axis) for s in (mean, rstd) if s is not None)]


def _through_statistics(u: Array, xhat: Array, kind: str, axis: int) -> Array:
    """P(u): what of a change of x (or of the cotangent of xhat) the statistics leave."""
    left = u - xhat * _mean(xhat * u, axis)
    return left - _mean(u, axis) if kind == "layer" else left


def tangent(
    saved: Mapping[str, Array],
    tangents: Mapping[str, Array],
    shape: tuple[int, ...],
    shardings: Mapping[str, Any],
    *,
    kind: str,
    axis: int,
    dtypes: tuple[str, ...],
    **_: Any,
) -> Array:
    """scale * rstd * P(dx) + xhat * dscale + dbias, of the tangents given."""
    wide = statistics_dtype(dtypes[0])
    moving = {slot: t.astype(wide) for slot, t in tangents.items()}
    parts = []
    if "x" in moving or "scale" in moving:
        xhat = _normalised(saved["x"], saved.get("mean"), saved["rstd"], axis)
        if "x" in moving:
            moved = _through_statistics(moving["x"], xhat, kind, axis) * jnp.expand_dims(saved["rstd"], axis)
            parts.append(moved * _along(saved["scale"].astype(wide), len(shape), axis) if "scale" in saved else moved)
        if "scale" in moving:
            parts.append(xhat * _along(moving["scale"], len(shape), axis))
    if "bias" in moving:
        bias = _along(moving["bias"], len(shape), axis)
        parts.append(jnp.broadcast_to(bias, shape, out_sharding=shardings.get("out")))
    return sum(parts[1:], parts[0]).astype(dtypes[0])


def cotangent(
    saved: Mapping[str, Array],
    ct: Array,
    wanted: tuple[str, ...],
    shardings: Mapping[str, Any],
    *,
    kind: str,
    axis: int,
    dtypes: tuple[str, ...],
    present: tuple[str, ...],
    **_: Any,
) -> list[Array]:
    """The gradients wanted, in order: dx = rstd * P(ct * scale), dscale = sum of ct * xhat over rows, dbias = sum of ct."""
    ct = ct.astype(statistics_dtype(dtypes[0]))
    rows = tuple(d for d in range(ct.ndim) if d != axis)
    grads: dict[str, Array] = {}
    if "x" in wanted or "scale" in wanted:
        xhat = _normalised(saved["x"], saved.get("mean"), saved["rstd"], axis)
        if "x" in wanted:
            inner = ct * _along(saved["scale"].astype(ct.dtype), ct.ndim, axis) if "scale" in saved else ct
            grads["x"] = _through_statistics(inner, xhat, kind, axis) * jnp.expand_dims(saved["rstd"], axis)
        if "scale" in wanted:
            grads["scale"] = jnp.sum(ct * xhat, axis=rows)
    if "bias" in wanted:
        grads["bias"] = jnp.sum(ct, axis=rows)
    for slot in wanted:
        if slot in shardings:  # one of x, scale and bias may be sharded along the features while another is not
            grads[slot] = jax.sharding.reshard(grads[slot], shardings[slot])
    as_given: dict[str, str] = dict(zip(present, dtypes, strict=True))
    return [grads[slot].astype(as_given[slot]) for slot in wanted]
