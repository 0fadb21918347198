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

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ....graph.dtypes import arithmetic_dtype
from ...op.arrays import Named
from ..norms import gradients, means, through_statistics

Array = Any

GROUP_ACTIVATIONS = ("none", "silu")


def _grouped(x: Array, groups: int) -> Array:
    """[*B, *P, G, K]."""
    return x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)


def _axes(rank: int, batch_axes: int) -> tuple[int, ...]:
    """Of what is grouped, of x of this rank: positions and the channels of a group."""
    return (*range(batch_axes, rank - 1), rank)


def forward(
    x: Array, scale: Array | None = None, bias: Array | None = None, *, residuals: bool, **attrs: Any
) -> list[Array]:
    """[out], and mean and rstd if residuals are asked for."""
    axes = _axes(x.ndim, attrs["batch_axes"])
    wide = _grouped(x.astype(arithmetic_dtype(x.dtype)), attrs["groups"])
    mean = means(wide, axes)
    centred = wide - mean
    rstd = lax.rsqrt(means(jnp.square(centred), axes) + attrs["epsilon"])
    h = _affine((centred * rstd).reshape(x.shape), scale, bias)
    out = (jax.nn.silu(h) if attrs["activation"] == "silu" else h).astype(x.dtype)
    return [out, jnp.squeeze(mean, axes), jnp.squeeze(rstd, axes)] if residuals else [out]


def _affine(xhat: Array, scale: Array | None, bias: Array | None) -> Array:
    h = xhat if scale is None else xhat * scale.astype(xhat.dtype)
    return h if bias is None else h + bias.astype(h.dtype)


class _Saved:
    """What was saved of a call, made ready for its derivatives.

    Attributes: `xhat`, of the shape of x; None where nothing of it is read. `scale`, `bias`: those that are read.
    """

    def __init__(self, saved: Named, attrs: Named):
        self.attrs, self.scale, self.bias, self.xhat = attrs, saved.get("scale"), saved.get("bias"), None
        if "x" in saved:
            x = saved["x"]
            self.axes = _axes(x.ndim, attrs["batch_axes"])
            mean, self.rstd = (jnp.expand_dims(saved[name], self.axes) for name in ("mean", "rstd"))
            self.grouped = (_grouped(x.astype(self.rstd.dtype), attrs["groups"]) - mean) * self.rstd
            self.xhat = self.grouped.reshape(x.shape)

    def through_statistics(self, u: Array) -> Array:
        """rstd * P(u): u a change of x, or the cotangent of xhat."""
        left = through_statistics(_grouped(u, self.attrs["groups"]), self.grouped, self.axes)
        return (left * self.rstd).reshape(u.shape)

    def through_activation(self, t: Array) -> Array:
        """act'(h) * t."""
        if self.attrs["activation"] == "none":
            return t
        h = _affine(self.xhat, self.scale, self.bias)
        return t * (jax.nn.sigmoid(h) * (1 + h * jax.nn.sigmoid(-h)))  # 1 - sigmoid(h) would cancel


def tangent(saved: Named, tangents: Named, shape: tuple[int, ...], shardings: Named, **attrs: Any) -> Array:
    """act'(h) * (scale * rstd * P(dx) + xhat * dscale + dbias), of the tangents given."""
    dtype, known = attrs["dtypes"][0], _Saved(saved, attrs)
    moving = {slot: t.astype(arithmetic_dtype(dtype)) for slot, t in tangents.items()}
    parts = []
    if "x" in moving:
        parts.append(_affine(known.through_statistics(moving["x"]), known.scale, None))
    if "scale" in moving:
        parts.append(known.xhat * moving["scale"])
    if "bias" in moving:
        parts.append(jnp.broadcast_to(moving["bias"], shape, out_sharding=shardings.get("out")))
    return known.through_activation(sum(parts[1:], parts[0])).astype(dtype)


def cotangent(saved: Named, ct: Array, wanted: tuple[str, ...], shardings: Named, **attrs: Any) -> list[Array]:
    """The gradients wanted, in order, of u = ct * act'(h): dx = rstd * P(u * scale); summed over all but channels, dscale = u * xhat and
    dbias = u."""
    known = _Saved(saved, attrs)
    u = known.through_activation(ct.astype(arithmetic_dtype(attrs["dtypes"][0])))
    rows = tuple(range(u.ndim - 1))
    grads: dict[str, Array] = {}
    if "x" in wanted:
        grads["x"] = known.through_statistics(_affine(u, known.scale, None))
    if "scale" in wanted:
        grads["scale"] = jnp.sum(u * known.xhat, axis=rows)
    if "bias" in wanted:
        grads["bias"] = jnp.sum(u, axis=rows)
    return gradients(grads, wanted, shardings, attrs["present"], attrs["dtypes"])
