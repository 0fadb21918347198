"""The meaning of `group_norm` in plain jnp: GroupNorm and the activation behind it, their tangent and their cotangent.

Letters: x is [*B, *P, C], B the axes of the batch (`batch_axes` of them), P positions, and its channels are G groups of K neighbours;
scale and bias are C; out is as x; the residuals `mean` and `rstd`, the reciprocal of the standard deviation, are [*B, G]. All is computed
in float32 for float32, bfloat16 and float16 x, in float64 for float64, and rounded once, to the dtype of the result.

    xhat = (x - mean) * rstd, mean = mean(x), rstd = 1 / sqrt(mean((x - mean)^2) + epsilon), means over P and K
    out = act(h), h = xhat * scale + bias

As of LayerNorm d xhat = rstd * P(dx), with P symmetric: P(u) = u - mean(u) - xhat * mean(xhat * u).
Source: Wu and He 2018, arXiv:1803.08494, equations 1 to 3 and 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ....graph.dtypes import arithmetic_dtype

Array = Any

GROUP_ACTIVATIONS = ("none", "silu")


def _grouped(x: Array, groups: int) -> Array:
    """[*B, *P, G, K]."""
    return x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)


def _means(u: Array, batch_axes: int) -> Array:
    """Of what is grouped: over positions and the channels of a group, those axes kept."""
    axes = (*range(batch_axes, u.ndim - 2), u.ndim - 1)
    return jnp.mean(u, axis=axes, keepdims=True)


def _over_positions(statistic: Array, rank: int, batch_axes: int) -> Array:
    """[*B, G] as it broadcasts against what is grouped, of x of this rank."""
    return jnp.expand_dims(statistic, (*range(batch_axes, rank - 1), rank))


def _activated(h: Array, activation: str) -> Array:
    return jax.nn.silu(h) if activation == "silu" else h


def _slope(h: Array, activation: str) -> Array | None:
    """The derivative of the activation; None where it is 1."""
    if activation == "none":
        return None
    sigma = jax.nn.sigmoid(h)
    return sigma * (1 + h * jax.nn.sigmoid(-h))  # 1 - sigma would cancel


def forward(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    residuals: bool,
    groups: int,
    epsilon: float,
    activation: str,
    batch_axes: int,
    **_: Any,
) -> list[Array]:
    """[out], and mean and rstd if residuals are asked for."""
    wide = _grouped(x.astype(arithmetic_dtype(x.dtype)), groups)
    mean = _means(wide, batch_axes)
    centred = wide - mean
    rstd = lax.rsqrt(_means(jnp.square(centred), batch_axes) + epsilon)
    h = _affine((centred * rstd).reshape(x.shape), scale, bias)
    out = _activated(h, activation).astype(x.dtype)
    if not residuals:
        return [out]
    gone = (*range(batch_axes, x.ndim - 1), x.ndim)
    return [out, jnp.squeeze(mean, gone), jnp.squeeze(rstd, gone)]


def _affine(xhat: Array, scale: Array | None, bias: Array | None) -> Array:
    h = xhat if scale is None else xhat * scale.astype(xhat.dtype)
    return h if bias is None else h + bias.astype(h.dtype)


def _saved_xhat(saved: Mapping[str, Array], groups: int, batch_axes: int) -> Array:
    """xhat, grouped."""
    x, mean, rstd = (saved[name] for name in ("x", "mean", "rstd"))
    mean, rstd = (_over_positions(s, x.ndim, batch_axes) for s in (mean, rstd))
    return (_grouped(x.astype(rstd.dtype), groups) - mean) * rstd


def _through_statistics(u: Array, xhat: Array, rstd: Array, batch_axes: int) -> Array:
    """rstd * P(u) of what is grouped: u a change of x, or the cotangent of xhat.

    xhat is rounded, and its mean no zero: what that leaves of P(u) would be summed up where a norm feeds another.
    """
    share = _means(xhat * u, batch_axes)
    left = u - _means(u, batch_axes) - (xhat - _means(xhat, batch_axes)) * share
    return left * _over_positions(rstd, u.ndim - 1, batch_axes)


def tangent(
    saved: Mapping[str, Array],
    tangents: Mapping[str, Array],
    shape: tuple[int, ...],
    shardings: Mapping[str, Any],
    *,
    groups: int,
    activation: str,
    batch_axes: int,
    dtypes: tuple[str, ...],
    **_: Any,
) -> Array:
    """act'(h) * (scale * rstd * P(dx) + xhat * dscale + dbias), of the tangents given."""
    wide = arithmetic_dtype(dtypes[0])
    moving = {slot: t.astype(wide) for slot, t in tangents.items()}
    parts = []
    xhat = _saved_xhat(saved, groups, batch_axes) if "x" in saved else None
    if "x" in moving:
        through = _through_statistics(_grouped(moving["x"], groups), xhat, saved["rstd"], batch_axes).reshape(shape)
        parts.append(through * saved["scale"].astype(wide) if "scale" in saved else through)
    if "scale" in moving:
        assert xhat is not None
        parts.append(xhat.reshape(shape) * moving["scale"])
    if "bias" in moving:
        parts.append(jnp.broadcast_to(moving["bias"], shape, out_sharding=shardings.get("out")))
    moved = sum(parts[1:], parts[0])
    if activation != "none":
        assert xhat is not None
        moved = moved * _slope(_affine(xhat.reshape(shape), saved.get("scale"), saved.get("bias")), activation)
    return moved.astype(dtypes[0])


def cotangent(
    saved: Mapping[str, Array],
    ct: Array,
    wanted: tuple[str, ...],
    shardings: Mapping[str, Any],
    *,
    groups: int,
    activation: str,
    batch_axes: int,
    dtypes: tuple[str, ...],
    present: tuple[str, ...],
    **_: Any,
) -> list[Array]:
    """The gradients wanted, in order, of u = ct * act'(h): dx = rstd * P(u * scale); summed over all but channels, dscale = u * xhat and
    dbias = u."""
    u = ct.astype(arithmetic_dtype(dtypes[0]))
    xhat = _saved_xhat(saved, groups, batch_axes) if "x" in saved else None
    if activation != "none":
        assert xhat is not None
        u = u * _slope(_affine(xhat.reshape(u.shape), saved.get("scale"), saved.get("bias")), activation)
    rows = tuple(range(u.ndim - 1))
    grads: dict[str, Array] = {}
    if "x" in wanted:
        inner = _grouped(u * saved["scale"].astype(u.dtype) if "scale" in saved else u, groups)
        grads["x"] = _through_statistics(inner, xhat, saved["rstd"], batch_axes).reshape(u.shape)
    if "scale" in wanted:
        assert xhat is not None
        grads["scale"] = jnp.sum(u * xhat.reshape(u.shape), axis=rows)
    if "bias" in wanted:
        grads["bias"] = jnp.sum(u, axis=rows)
    for slot in wanted:
        if slot in shardings:
            grads[slot] = jax.sharding.reshard(grads[slot], shardings[slot])
    as_given: dict[str, str] = dict(zip(present, dtypes, strict=True))
    return [grads[slot].astype(as_given[slot]) for slot in wanted]
