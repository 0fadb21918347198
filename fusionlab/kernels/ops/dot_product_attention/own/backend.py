"""`dot_product_attention` on a GPU by kernels of our own (attention.cu): any mask, bias and factors where they stand, in any precision.

The matrix of scores never exists, and no mask or bias is written out: one that broadcasts is read with strides of 0. Forward keeps the
statistics that the blockwise form keeps too; backward is one kernel for the query's gradient and one for those of key and value, both
without atomics, so the same bits every time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .....device import Device
from ....launch.compile import why_missing
from ....launch.ffi_call import launch
from ....op.arrays import refuses_shardings
from ..layouts import AttentionSizes
from ..reference import residual_names, statistics
from . import tiles
from .tiles import Strides, TiledAttention

Array = Any

MIN_CAPABILITY = 80


def refuses(shapes: Mapping[str, Any], device: Device, **attrs: Any) -> str | None:
    """Why these kernels cannot run a call, or None."""
    return refuses_device(device) or _refuses_operands(shapes, **attrs) or _refuses_role(**attrs)


def refuses_device(device: Device) -> str | None:
    if device.platform != "cuda":
        return f"it needs a CUDA device, this is {device}"
    if device.arch and device.capability < MIN_CAPABILITY:
        return f"{device.arch} is older than sm_{MIN_CAPABILITY}, the oldest with the tensor-core instructions the kernels use"
    return None if device.simulated else why_missing()


def _refuses_operands(shapes: Mapping[str, Any], *, layout: str, precision: Any = None, **attrs: Any) -> str | None:
    if reason := refuses_shardings(shapes):
        return reason
    for slot in ("query", "key", "value", "ct"):
        if slot in shapes and (reason := _refuses_heads(slot, shapes[slot], layout)):
            return reason
    for slot in ("bias", "factors"):
        if slot in shapes and np.dtype(shapes[slot].dtype).name not in tiles.OPERANDS:
            return f"{slot} has dtype {np.dtype(shapes[slot].dtype).name}, needed one of {', '.join(tiles.OPERANDS)}"
    if reason := _refuses_dropout(shapes, layout, attrs.get("dropout_shape")):
        return reason
    return None if _terms(precision) else f"no kernel for the precision {precision}"


def _refuses_heads(slot: str, a: Any, layout: str) -> str | None:
    """Why the kernels cannot read an operand with heads, or None."""
    dtype, size = np.dtype(a.dtype).name, AttentionSizes.of(a.shape, layout)
    if dtype not in tiles.CODES:
        return f"{slot} has dtype {dtype}, there are kernels for {', '.join(tiles.CODES)}"
    if math.prod(a.shape) == 0:
        return f"{slot} has shape {tuple(a.shape)}: there is nothing to compute"
    if size.features % 8 or size.features > tiles.MOST_FEATURES:
        return f"{size.features} features a head: there are kernels for multiples of 8 up to {tiles.MOST_FEATURES}"
    if max(size.heads, math.prod(size.batch)) > tiles.MOST_BLOCKS:
        return (
            f"{slot} has more than {tiles.MOST_BLOCKS} heads or batch entries, the most that a grid has along one axis"
        )
    return None


def _refuses_dropout(shapes: Mapping[str, Any], layout: str, drawn: tuple[int, ...] | None) -> str | None:
    """Why the kernels cannot draw factors of this shape, or None."""
    if drawn is None or "query" not in shapes or "key" not in shapes:
        return None
    q = AttentionSizes.of(shapes["query"].shape, layout)
    rows = q.length, AttentionSizes.of(shapes["key"].shape, layout).length
    if drawn[-2:] != rows or (drawn[:-3] != q.batch and math.prod(drawn[:-3]) != 1):
        return f"a dropout mask of the shape {drawn}: needed one drawn for every query and key, and for all batch axes or none"
    return None


def _refuses_role(
    *,
    role: str = "call",
    residuals: bool = False,
    saves: str = "logsumexp",
    present: tuple[str, ...] = (),
    live: tuple[bool, ...] = (),
    **_: Any,
) -> str | None:
    if role == "tangent":
        return "forward mode has no kernel"
    if saves == "probabilities" and (residuals or role != "call"):
        return "the probabilities are what is kept for the backward, which these kernels never write"
    if "sink" in present:
        return "a sink beside the scores, which these kernels do not sum"
    wanted = tuple(itertools.compress(present, live))
    for slot in ("bias", "factors"):
        if role == "cotangent" and slot in wanted:
            return f"the gradient of the {slot}, which no kernel sums"
    return None


def _terms(precision: Any) -> int:
    """TF32 products for one of floats: 1 where XLA takes TF32 as well, 3 for the precision of float32, 0 for an algorithm by name."""
    if precision is None:
        return 1
    pair = precision if isinstance(precision, tuple) else (precision, precision)
    if not all(isinstance(p, lax.Precision) for p in pair):
        return 0
    return 1 if all(p == lax.Precision.DEFAULT for p in pair) else 3


def forward(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    factors: Array | None = None,
    dropout_key: Array | None = None,
    *,
    residuals: bool,
    saves: str,
    layout: str,
    **attrs: Any,
) -> list[Array]:
    """[out], and the rows' statistics if asked for."""
    sizes = AttentionSizes.of(query.shape, layout)
    optional = {"bias": bias, "mask": mask, "factors": factors, "dropout_key": dropout_key}
    call, operands = _described({"query": query, "key": key, "value": value, **optional}, layout, attrs)
    shape = sizes._replace(features=value.shape[-1]).shape(layout)
    out = jax.ShapeDtypeStruct(shape, query.dtype)
    statistic = jax.ShapeDtypeStruct((*sizes.batch, sizes.heads, sizes.length), np.float32)
    kept = residual_names(saves, None) if residuals else ()
    results = [out, *(out if name == "rounded_off" else statistic for name in kept)]
    return launch(tiles.forward_plan(call, saves if residuals else None), operands, results)


def cotangent(
    saved: Mapping[str, Array],
    ct: Array,
    wanted: tuple[str, ...],
    shardings: Mapping[str, Any],
    *,
    saves: str,
    layout: str,
    **attrs: Any,
) -> list[Array]:
    """The gradients wanted, of query, key and value."""
    value = saved.get("value", ct)  # the gradient of the value alone reads none: no kernel looks at it then
    given = {n: saved.get(n) for n in ("bias", "mask", "factors", "dropout_key")}
    like = _value_shape(saved["key"], ct)
    call, operands = _described(
        {"query": saved["query"], "key": saved["key"], "value": value, **given}, layout, attrs, value_shape=like
    )
    kept = [saved[n] for n in statistics(saves)]
    delta = _delta(saved, ct, layout, call.terms) if "out" in saved else kept[0]
    operands = [*operands, *kept, delta, ct]
    found = {}
    if "query" in wanted:
        found["query"] = launch(tiles.query_plan(call, saves), operands, [_like(saved["query"].shape, ct)])[0]
    asked = {"key": saved["key"].shape, "value": like}
    asked = {n: shape for n, shape in asked.items() if n in wanted}
    for some in tiles.together(call, tuple(asked)):
        plan = tiles.keys_plan(call, saves, key="key" in some, value="value" in some)
        grads = launch(plan, operands, [_like(asked[n], ct) for n in some])
        found |= dict(zip(some, grads, strict=True))
    return [found[n] for n in wanted]


def _like(shape: tuple[int, ...], ct: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, ct.dtype)


def _value_shape(key: Array, ct: Array) -> tuple[int, ...]:
    return (*key.shape[:-1], ct.shape[-1])


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
    given: Mapping[str, Any], layout: str, attrs: Mapping[str, Any], value_shape: tuple[int, ...] | None = None
) -> tuple[TiledAttention, list[Array]]:
    """The call as the kernels see it, and its operands."""
    query, key, value = (given[n] for n in ("query", "key", "value"))
    q, k = AttentionSizes.of(query.shape, layout), AttentionSizes.of(key.shape, layout)
    v = AttentionSizes.of(value_shape or value.shape, layout)
    arrays, scores = [query, key, value], {}
    for slot in ("bias", "mask", "factors"):
        if given[slot] is not None:
            arrays.append(_with_whole_batch(given[slot], q.batch))
            scores[slot] = np.dtype(arrays[-1].dtype).name, _score_strides(arrays[-1].shape)
    by_key, drawn = given["dropout_key"] is not None, {}
    if by_key:
        arrays.append(given["dropout_key"])
        drawn = {"dropout": _score_strides(attrs["dropout_shape"]), "keep": attrs["keep"]}
    call = TiledAttention(
        dtype=np.dtype(query.dtype).name,
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
        scale=attrs["scale"],
        is_causal=attrs["is_causal"],
        window=attrs["window"],
        softcap=attrs["softcap"],
        mask_value=attrs["mask_value"],
        factors_scale=attrs["factors_scale"] if "factors" in scores or by_key else 1.0,
        terms=_terms(attrs["precision"]) if query.dtype == np.float32 else 1,
        **drawn,
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
