"""`dot_product_attention` on a GPU by FusionLab's own kernels (attention.cu): any mask, bias and factors, read in place, in any
precision.

The matrix of scores never exists, and no mask or bias is written out: one that broadcasts is read with strides of 0. Forward keeps the
statistics that the blockwise form keeps too; backward is one kernel for the query's gradient and one for those of key and value,
both without atomics, so with the same bits in every run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .....device import Device
from ....launch.ffi_call import launch
from ...passes import those
from ..layouts import AttentionSizes, lengths
from ..settings import Settings
from . import tiles
from .tiles import Strides, TiledAttention

Array = Any


def refuses(shapes: Mapping[str, Any], device: Device, **attrs: Any) -> str | None:
    """Why these kernels cannot run a call, or None."""
    return refuses_call(shapes, device, Settings.of(attrs))


def refuses_call(shapes: Mapping[str, Any], device: Device, form: Settings) -> str | None:
    return refuses_device(device) or _refuses_operands(shapes, form) or _refuses_role(form)


def refuses_device(device: Device) -> str | None:
    return tiles.SOURCE.refuses(device)


def _refuses_operands(shapes: Mapping[str, Any], form: Settings) -> str | None:
    for slot in those(shapes, "query", "key", "value", "ct"):
        if reason := _refuses_heads(slot, shapes[slot], form.layout):
            return reason
    for slot in those(shapes, "bias", "factors"):
        if np.dtype(shapes[slot].dtype).name not in tiles.OPERANDS:
            return f"{slot} has dtype {np.dtype(shapes[slot].dtype).name}, needed one of {', '.join(tiles.OPERANDS)}"
    unmade = None if _terms(form.precision) else f"no kernel for the precision {form.precision}"
    return _refuses_dropout(shapes, form) or unmade


def _refuses_heads(slot: str, a: Any, layout: str) -> str | None:
    """Why the kernels cannot read an operand with heads, or None."""
    dtype, size = np.dtype(a.dtype).name, AttentionSizes.of(a.shape, layout)
    if dtype not in tiles.CODES:
        return f"{slot} has dtype {dtype}, there are kernels for {', '.join(tiles.CODES)}"
    if math.prod(a.shape) == 0:
        return f"{slot} has shape {tuple(a.shape)}: there is nothing to compute"
    if size.features % 8 or size.features > tiles.MOST_FEATURES:
        return f"{size.features} features per head: there are kernels for multiples of 8 up to {tiles.MOST_FEATURES}"
    if max(size.heads, math.prod(size.batch)) > tiles.MOST_BLOCKS:
        return (
            f"{slot} has more than {tiles.MOST_BLOCKS} heads or batch entries, the most that a grid has along one axis"
        )
    return None


def _refuses_dropout(shapes: Mapping[str, Any], form: Settings) -> str | None:
    """Why the kernels cannot draw factors of this shape, or None."""
    drawn = form.dropout_shape
    if drawn is None or "query" not in shapes or "key" not in shapes:
        return None
    batch = AttentionSizes.of(shapes["query"].shape, form.layout).batch
    if drawn[-2:] != lengths(shapes, form.layout) or (drawn[:-3] != batch and math.prod(drawn[:-3]) != 1):
        return f"a dropout mask of the shape {drawn}: needed one drawn for every query and key, and for all batch axes or none"
    return None


def _refuses_role(form: Settings) -> str | None:
    if form.role == "tangent":
        return "forward mode has no kernel"
    if form.saves == "probabilities" and form.has_backward:
        return "the probabilities are kept for the backward, and these kernels never write them"
    if "sink" in form.present:
        return "a sink next to the scores, which these kernels do not sum"
    unsummed = those(form.wanted, "bias", "factors") if form.role == "cotangent" else ()
    return f"the gradient of the {unsummed[0]}, which no kernel sums" if unsummed else None


def _terms(precision: Any) -> int:
    """TF32 products for one of floats: 1 where XLA takes TF32 as well, 3 for the precision of float32, 0 for an algorithm by name."""
    if precision is None:
        return 1
    pair = precision if isinstance(precision, tuple) else (precision, precision)
    if not all(isinstance(p, lax.Precision) for p in pair):
        return 0
    return 1 if all(p == lax.Precision.DEFAULT for p in pair) else 3


def forward(given: Mapping[str, Array], form: Settings) -> list[Array]:
    """[out], and the rows' statistics if asked for."""
    query, value = given["query"], given["value"]
    sizes = AttentionSizes.of(query.shape, form.layout)
    call, operands = _described(given, form, value.shape)
    out = jax.ShapeDtypeStruct(sizes._replace(features=value.shape[-1]).shape(form.layout), query.dtype)
    statistic = jax.ShapeDtypeStruct((*sizes.batch, sizes.heads, sizes.length), np.float32)
    kept = form.saved_names if form.residuals else ()
    results = [out, *(out if name == "rounded_off" else statistic for name in kept)]
    return launch(tiles.forward_plan(call, form.saves if form.residuals else None), operands, results)


def cotangent(
    saved: Mapping[str, Array], ct: Array, wanted: tuple[str, ...], shardings: Mapping[str, Any], form: Settings
) -> list[Array]:
    """The gradients wanted, of query, key and value."""
    # The gradient of the value alone reads none: no kernel looks at it then.
    given = {"value": ct, **saved}
    q, k = saved["query"].shape, saved["key"].shape
    shapes = {"query": q, "key": k, "value": (*k[:-1], ct.shape[-1])}
    call, operands = _described(given, form, shapes["value"])
    kept = [saved[n] for n in form.statistics]
    operands += [*kept, _delta(saved, ct, form.layout, call.terms) if "out" in saved else kept[0], ct]
    found = {}
    for some in tiles.together(call, wanted):
        results = [jax.ShapeDtypeStruct(shapes[n], ct.dtype) for n in some]
        found |= dict(zip(some, launch(tiles.backward_plan(call, form.saves, some), operands, results), strict=True))
    return [found[n] for n in wanted]


def _delta(saved: Mapping[str, Array], ct: Array, layout: str, terms: int) -> Array:
    """rowsum(ct * out) as *B N T: one pass, which XLA fuses.

    Of the numbers that the kernels multiply, since they take it from a row's ct value^T: of a softmax near one key next to nothing is left
    then, and whatever either was rounded by alone would stand in its place.
    """
    out = saved["out"].astype(np.float32)
    if "rounded_off" in saved:
        out = out + saved["rounded_off"].astype(np.float32)
    wide = _tf32(ct) if ct.dtype == np.float32 and terms == 1 else ct.astype(np.float32)
    found = jnp.sum(out * wide, axis=-1)
    return jnp.swapaxes(found, -1, -2) if layout == "BTNH" else found


def _tf32(x: Array) -> Array:
    """As `cvt.rna.tf32` rounds: to 10 bits of mantissa, the nearest, ties away from 0."""
    bits = lax.bitcast_convert_type(x, np.uint32)
    nearest = lax.bitcast_convert_type((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000), np.float32)
    return jnp.where(jnp.isfinite(x), nearest, x)


def _described(
    given: Mapping[str, Any], form: Settings, value_shape: tuple[int, ...]
) -> tuple[TiledAttention, list[Array]]:
    """The call as the kernels see it, and its operands."""
    layout, arrays = form.layout, [given[n] for n in ("query", "key", "value")]
    q, k = (AttentionSizes.of(a.shape, layout) for a in arrays[:2])
    v = AttentionSizes.of(value_shape, layout)
    scores: dict[str, Any] = {}
    for slot in those(given, "bias", "mask", "factors"):
        arrays.append(_with_whole_batch(given[slot], q.batch))
        scores[slot] = np.dtype(arrays[-1].dtype).name, _score_strides(arrays[-1].shape)
    if "dropout_key" in given and form.dropout_shape is not None:
        arrays.append(given["dropout_key"])
        scores |= {"dropout": _score_strides(form.dropout_shape), "keep": form.keep}
    call = TiledAttention(
        dtype=np.dtype(arrays[0].dtype).name,
        batch=math.prod(q.batch),
        heads=q.heads,
        queries=q.length,
        keys=k.length,
        features=q.features,
        value_features=v.features,
        query=_strides(q, layout),
        key=_strides(k, layout),
        value=_strides(v, layout),
        out=_strides(q._replace(features=v.features), layout),
        group=q.heads // k.heads,
        factors_scale=form.factors_scale if {"factors", "dropout"} & scores.keys() else 1.0,
        terms=_terms(form.precision) if arrays[0].dtype == np.float32 else 1,
        **{name: getattr(form, name) for name in ("scale", "is_causal", "window", "softcap", "mask_value")},
        **scores,
    )
    return call, arrays


def _strides(sizes: AttentionSizes, layout: str) -> Strides:
    """(batch, head, row), in elements."""
    row = sizes.features * (sizes.heads if layout == "BTNH" else 1)
    head = sizes.features * (1 if layout == "BTNH" else sizes.length)
    return sizes.length * sizes.heads * sizes.features, head, row


def _with_whole_batch(a: Array, batch: tuple[int, ...]) -> Array:
    """An operand of the scores' shape that has either all batch axes or none: their index is one number in a kernel."""
    own = a.shape[:-3]
    if own == batch or math.prod(own) == 1:
        return a
    return jnp.broadcast_to(a, (*batch, *a.shape[-3:]))


def _score_strides(shape: tuple[int, ...]) -> Strides:
    """(batch, head, row, column) of an operand that broadcasts to the scores: 0 along an axis of size 1."""
    sizes = (math.prod(shape[:-3]), *shape[-3:])
    return tuple(0 if n == 1 else math.prod(sizes[i + 1 :]) for i, n in enumerate(sizes))
