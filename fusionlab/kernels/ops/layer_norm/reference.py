"""The meaning of `layer_norm` in plain jnp: LayerNorm and RMSNorm, their tangent and their cotangent.

Letters: x is *R with N at `axis`; residual is as x; scale, bias and shift are N; out and sum are as x; the residuals `mean` (LayerNorm
alone) and `rstd`, the reciprocal of the standard deviation, are *R. All is computed in float32 for float32, bfloat16 and float16 x, in
float64 for float64, and rounded to the dtype of the result: out once, the sum once. What is normalised is the rounded sum, so that
out is the norm of the sum that a call gives or saves, and backward reads that one array instead of two.

    sum = round(x + shift + residual), those that there are; s is the sum, or x where there are neither
    LayerNorm: xhat = (s - mean) * rstd, mean = mean(s), rstd = 1 / sqrt(mean((s - mean)^2) + epsilon)
    RMSNorm:   xhat = s * rstd,                          rstd = 1 / sqrt(mean(s^2) + epsilon)
    out = xhat * scale + bias

Both have the Jacobian d xhat = rstd * P(ds), with P symmetric: P(u) = u - xhat * mean(xhat * u), less mean(u) for LayerNorm.
Sources: Ba et al. 2016, arXiv:1607.06450, equations 3 and 4; Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from ....graph.dtypes import arithmetic_dtype
from ...op.arrays import Named
from ..norms import gradients, means, through_statistics

Array = Any

SUMMANDS = ("x", "shift", "residual")  # of what is normalised


def _along(v: Array, rank: int, axis: int) -> Array:
    """A vector of N as an array of this rank, N at `axis`."""
    return jnp.expand_dims(v, tuple(d for d in range(rank) if d != axis))


def _scaled(u: Array, scale: Array | None, axis: int) -> Array:
    """u, or u * scale where there is one."""
    return u if scale is None else u * _along(scale.astype(u.dtype), u.ndim, axis)


def summed(x: Array, shift: Array | None, residual: Array | None, axis: int) -> Array:
    """x + shift + residual, rounded once, to the dtype of x; x itself where there are neither."""
    if shift is None and residual is None:
        return x
    total = x.astype(arithmetic_dtype(x.dtype))
    if shift is not None:
        total = total + _along(shift.astype(total.dtype), x.ndim, axis)
    if residual is not None:
        total = total + residual.astype(total.dtype)
    return total.astype(x.dtype)


def forward(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    shift: Array | None = None,
    residual: Array | None = None,
    *,
    residuals: bool,
    **attrs: Any,
) -> list[Array]:
    """[out], the sum if the call gives it or if it is saved, and mean (LayerNorm alone) and rstd if residuals are asked for."""
    axis, is_centred = attrs["axis"], attrs["kind"] == "layer"
    x = summed(x, shift, residual, axis)
    sums = [x] if attrs["gives_sum"] or (residuals and residual is not None) else []
    wide = x.astype(arithmetic_dtype(x.dtype))
    mean = [means(wide, (axis,))] if is_centred else []
    centred = wide - mean[0] if mean else wide
    rstd = lax.rsqrt(means(jnp.square(centred), (axis,)) + attrs["epsilon"])
    out = _scaled(centred * rstd, scale, axis)
    if bias is not None:
        out = out + _along(bias.astype(out.dtype), x.ndim, axis)
    saved = (jnp.squeeze(s, axis) for s in (*mean, rstd)) if residuals else ()
    return [out.astype(x.dtype), *sums, *saved]


def _saved_xhat(saved: Named, axis: int) -> Array:
    """xhat in the statistics' dtype, of the sum where it was saved."""
    s = saved["sum"] if "sum" in saved else summed(saved["x"], saved.get("shift"), None, axis)
    wide = s.astype(saved["rstd"].dtype)
    if "mean" in saved:
        wide = wide - jnp.expand_dims(saved["mean"], axis)
    return wide * jnp.expand_dims(saved["rstd"], axis)


def of_statistics(saved: Named, axis: int) -> Array:
    """out, from the operands and the statistics, and from the sum where it was saved."""
    out = _scaled(_saved_xhat(saved, axis), saved.get("scale"), axis)
    if "bias" in saved:
        out = out + _along(saved["bias"].astype(out.dtype), out.ndim, axis)
    return out.astype(saved["x"].dtype)


def tangent(saved: Named, tangents: Named, shape: tuple[int, ...], shardings: Named, **attrs: Any) -> Any:
    """scale * rstd * P(ds) + xhat * dscale + dbias, of the tangents given, ds = dx + dshift + dresidual.

    Of a call that gives the sum a dict, with ds too.
    """
    axis, dtype = attrs["axis"], attrs["dtypes"][0]
    moving = {slot: t.astype(arithmetic_dtype(dtype)) for slot, t in tangents.items()}

    def whole(vector: Array) -> Array:
        return jnp.broadcast_to(_along(vector, len(shape), axis), shape, out_sharding=shardings.get("out"))

    moved = _moved(moving, whole)
    parts = []
    if moved is not None or "scale" in moving:
        xhat = _saved_xhat(saved, axis)
        if moved is not None:
            through = through_statistics(moved, xhat, (axis,), attrs["kind"] == "layer")
            parts.append(_scaled(through * jnp.expand_dims(saved["rstd"], axis), saved.get("scale"), axis))
        if "scale" in moving:
            parts.append(xhat * _along(moving["scale"], len(shape), axis))
    if "bias" in moving:
        parts.append(whole(moving["bias"]))
    out = sum(parts[1:], parts[0]).astype(dtype)
    if not attrs["gives_sum"]:
        return out
    return {"out": out, "sum": jnp.zeros_like(out) if moved is None else moved.astype(dtype)}


def _moved(moving: Named, whole: Callable[[Array], Array]) -> Any:
    """ds: the sum of the tangents of what is summed up before the norm; None without any."""
    terms = [whole(moving[slot]) if slot == "shift" else moving[slot] for slot in SUMMANDS if slot in moving]
    return sum(terms[1:], terms[0]) if terms else None


def cotangent(saved: Named, ct: Any, wanted: tuple[str, ...], shardings: Named, **attrs: Any) -> list[Array]:
    """The gradients wanted, in order: dx = dresidual = rstd * P(ct * scale) + ct_sum; summed over rows, dshift = dx, dscale = ct * xhat and
    dbias = ct.

    `ct` is a dict with "out", "sum" or both where the call gives the sum.
    """
    cts = dict(ct) if isinstance(ct, Mapping) else {"out": ct}
    cts = {name: c.astype(arithmetic_dtype(attrs["dtypes"][0])) for name, c in cts.items()}
    grads = _gradients(saved, cts, wanted, attrs["kind"], attrs["axis"])
    return gradients(grads, wanted, shardings, attrs["present"], attrs["dtypes"])


def _gradients(saved: Named, cts: Named, wanted: tuple[str, ...], kind: str, axis: int) -> dict[str, Array]:
    """In the dtype of the arithmetic; x and residual share theirs."""
    like = next(iter(cts.values()))
    rows = tuple(d for d in range(like.ndim) if d != axis)
    of_out = cts.get("out", jnp.zeros_like(like))
    grads: dict[str, Array] = {}
    moves = not set(SUMMANDS).isdisjoint(wanted)
    if moves or "scale" in wanted:
        xhat = _saved_xhat(saved, axis)
        if moves:
            inner = _scaled(of_out, saved.get("scale"), axis)
            dx = through_statistics(inner, xhat, (axis,), kind == "layer") * jnp.expand_dims(saved["rstd"], axis)
            dx = dx + cts["sum"] if "sum" in cts else dx
            grads |= {"x": dx, "residual": dx}
            if "shift" in wanted:
                grads["shift"] = jnp.sum(dx, axis=rows)
        if "scale" in wanted:
            grads["scale"] = jnp.sum(of_out * xhat, axis=rows)
    if "bias" in wanted:
        grads["bias"] = jnp.sum(of_out, axis=rows)
    return grads
