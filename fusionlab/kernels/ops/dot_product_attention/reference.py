"""The meaning of `dot_product_attention` in plain jnp, its tangent and its cotangent.

Letters, as `jax.nn.dot_product_attention`: query is *B T N H, key is *B S K H, value is *B S K Hv, out is *B T N Hv; scores
s and probabilities p are *B N T S. bias, mask and factors have the rank of the scores; their axes of size 1 broadcast.
Query head n reads head n // (N / K) of key and value; the gradients of those are summed over the query heads that read them.

    s = scale * query @ key^T                 s = softcap * tanh(s / softcap), s + bias, where(mask, s, mask_value): each if given
    p = softmax(s)                            s = -inf where t < s, if is_causal: after all else; and, with a window
                                              (left, right), where s < t - left or s > t + right
    out = (p * factors * factors_scale) @ value
With a sink (*B N T 1), a logit more in each row, p = exp(s) / (sum of exp(s) + exp(sink)): its own weight, exp(sink) by the same sum, is
dropped. Sources: Xiao et al. 2023, arXiv:2309.17453, section 3.3; gpt-oss. Its statistics are of the scores and the sink together.
A row all of whose scores are -inf, which sees no key, has p = 0: its result is 0 and so are its gradients, where a softmax is 0 / 0.

Scores and statistics are float32 for float32, bfloat16 and float16 operands, float64 for float64. What is kept for the backward
(`saves`, see `Settings.saved_names`):
  "probabilities": p (*B N T S, in the operands' dtype), as JAX's own gradient of a softmax does, with a softcap its tanh, and with a
    sink its weight (*B N T): what is left to 1 of p as it was rounded is another number.
  "logsumexp": the log of the sum of exp(s) over a row, *B N T; the backward recomputes p = exp(s - logsumexp).
    Of a row that sees no key it is kept as 0, so that p = exp(-inf) is 0.
  "max_and_log_sum": the row's largest score, and the log of the sum of exp(s - row_max). Where a whole row is masked by -1e9,
    logsumexp is -1e9 + log(S), which float32 rounds to -1e9: p would be 1 in place of 1 / S.
  Either of these with "_and_rounded_off": also the rounding error of out, in its dtype. rowsum(ct * out) needs it: where a softmax is
    near one key, dp - rowsum(p * dp) is far below what out was rounded by.
With dp the cotangent of p, the softmax gives ds = p * (dp - rowsum(p * dp)), and rowsum(p * dp) = rowsum(ct * out). Source:
Dao et al. 2022, arXiv:2205.14135, appendix B.2. The weight of a sink has the cotangent 0: dsink = -weight * rowsum(p * dp).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ....graph.dtypes import arithmetic_dtype
from ...op.arrays import summed_to
from .settings import Settings

Array = Any


def rounded(wide: Array, dtype: Any, keeps: bool) -> tuple[Array, list[Array]]:
    """A result in its dtype, and what it was rounded by if that is kept."""
    narrow = wide.astype(dtype)
    if not keeps:
        return narrow, []
    info = jnp.finfo(dtype)  # by this operation, since XLA may leave out a cast there and back
    return narrow, [(wide - lax.reduce_precision(wide, info.nexp, info.nmant)).astype(dtype)]


def _dot(a: Array, b: Array, axes: str, form: Settings, dtype: Any, sharding: Any = None) -> Array:
    """einsum in `dtype`, where n are query heads and k those of key and value.

    `sharding` gives, on explicit mesh axes, the sharding of a sum over the query heads that share one. 16-bit operands are widened first,
    unless the device is known to take them: a CPU has no such product for every layout. The numbers are the same, since products of 16-bit
    floats are exact in float32.
    """
    if form.device is None or form.device.platform == "cpu":
        a, b = a.astype(dtype), b.astype(dtype)
    if form.group == 1:
        return _product(a, b, axes.replace("k", "n"), form.precision, dtype)
    product = functools.partial(jnp.einsum, precision=form.precision, preferred_element_type=dtype)
    *sides, result = re.split(",|->", axes)
    a, b = (_by_key_head(x, side, form.group) if "n" in side else x for x, side in zip((a, b), sides, strict=True))
    if "n" not in result:
        return product(axes.replace("n", "kg"), a, b, out_sharding=sharding)
    out = product(axes.replace("n", "kg"), a, b)
    at = result.index("n") - len(result)  # never the last axis
    return out.reshape(*out.shape[: at - 1], out.shape[at - 1] * out.shape[at], *out.shape[at + 1 :])


def _product(a: Array, b: Array, axes: str, precision: Any, dtype: Any) -> Array:
    """What einsum makes of heads n and one axis each that is summed over, a's own and b's own, without its parsing, which takes as long to
    trace as all else in an attention. `axes` as "...tnh,...snh->...nts".
    """
    sides, result = axes.replace(".", "").split("->")
    mine, theirs = sides.split(",")
    (summed,) = set(mine) & set(theirs) - {"n"}
    own = str.maketrans("", "", "n" + summed)
    # Where the operands change places, the result needs no transpose.
    if result != "n" + (mine + theirs).translate(own):
        a, b, mine, theirs = b, a, theirs, mine
    free = a.ndim - len(mine)
    at, heads = ([free + side.index(x) for side in (mine, theirs)] for x in (summed, "n"))
    batch = [(*range(free), n) for n in heads]
    numbers = ((at[:1], at[1:]), (batch[0], batch[1]))
    out = lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=dtype)
    # `dot_general` puts the batch first, then what is left of its first operand, then of its second.
    found = "n" + (mine + theirs).translate(own)
    return lax.transpose(out, (*range(free), *(free + found.index(x) for x in result)))


def _by_key_head(x: Array, axes: str, group: int) -> Array:
    """With the axis n of query heads as two: heads of the key, and the query heads that read each."""
    at = x.ndim + axes.index("n") - len(axes)
    return x.reshape(*x.shape[:at], x.shape[at] // group, group, *x.shape[at + 1 :])


def _scores(given: Mapping[str, Array], form: Settings) -> tuple[Array, Array | None]:
    """Scores as *B N T S, and the tanh of the softcap if there is one."""
    query, key = given["query"], given["key"]
    products = _dot(query, key, "...tnh,...skh->...nts", form, arithmetic_dtype(query.dtype))
    return finished(products * form.scale, given.get("bias"), given.get("mask"), form)


def finished(
    scores: Array, bias: Array | None, mask: Array | None, form: Settings, first: Any = 0, at: Any = 0
) -> tuple[Array, Array | None]:
    """Scaled products of queries and keys as scores, and the tanh of the softcap if there is one; `first` and `at` as for `near`."""
    tanh = None
    if form.softcap is not None:
        tanh = jnp.tanh(scores / form.softcap)
        scores = form.softcap * tanh
    if bias is not None:
        scores = scores + bias.astype(scores.dtype)
    if mask is not None:
        scores = jnp.where(mask, scores, form.mask_value)
    if form.is_local:
        scores = jnp.where(near(scores.shape, form, first, at), scores, -jnp.inf)
    return scores, tanh


def near(shape: tuple[int, ...], form: Settings, first: Any = 0, at: Any = 0) -> Array:
    """True where a row may see a key for its number, aligned at the top left; `first` is that of the first row, `at` of the first key."""
    row = first + lax.broadcasted_iota(jnp.int32, shape[-2:], 0)
    key = at + lax.broadcasted_iota(jnp.int32, shape[-2:], 1)
    seen = [key <= row] if form.is_causal else []
    if form.window is not None:
        left, right = form.window
        seen = [key <= row + right, key >= row - left]
    return functools.reduce(jnp.logical_and, seen)


def _softmax(scores: Array, sink: Array | None) -> tuple[Array, Array, Array | None, Array | None]:
    """The probabilities, the maximum of each row, and with a sink the sum of its exponentials and the sink's own weight."""
    if sink is not None:
        return _softmax_with_sink(scores, sink.astype(scores.dtype))
    return jax.nn.softmax(scores, axis=-1), lax.stop_gradient(jnp.max(scores, axis=-1)), None, None


def forward(given: Mapping[str, Array], form: Settings) -> list[Array]:
    """[out], and what is saved for the backward if asked for."""
    value, factors = given["value"], given.get("factors")
    scores, tanh = _scores(given, form)
    p, top, total, weight = _softmax(scores, given.get("sink"))
    blind = top == -jnp.inf if form.may_be_blind(*scores.shape[-2:]) else None
    # Softmax makes NaN of a row of nothing but -inf.
    if blind is not None:
        p = jnp.where(blind[..., None], 0, p)
    probabilities = p.astype(value.dtype)
    weights = probabilities if factors is None else weigh(p, factors, form).astype(value.dtype)
    out = _dot(weights, value, "...nts,...skh->...tnh", form, arithmetic_dtype(value.dtype))
    out, off = rounded(out, value.dtype, form.keeps_rounded_off)
    if not form.residuals:
        return [out]
    if form.saves == "probabilities":
        known: dict[str, Any] = {"probabilities": probabilities, "tanh": tanh, "sink_weight": weight}
        return [out, *(known[name] for name in form.saved_names)]
    # `jax.nn.softmax` does not give the sum that it divides by.
    if total is None:
        total = jnp.sum(jnp.exp(scores - top[..., None]), axis=-1)
    kept = statistics_of(top, total, form)
    # Of rows that see nothing they are 0.
    return [out, *(kept if blind is None else (jnp.where(blind, 0, a) for a in kept)), *off]


def statistics_of(top: Array, total: Array, form: Settings) -> tuple[Array, ...]:
    """The statistics that are saved of rows with this maximum and this sum of exponentials below it."""
    log_sum = jnp.log(total)
    return (top + log_sum,) if form.statistics == ("logsumexp",) else (top, log_sum)


def weight_by(saved: Mapping[str, Array], logits: Array) -> Array:
    """The weights of logits in a softmax of which the statistics are saved."""
    if "logsumexp" in saved:
        return jnp.exp(logits - saved["logsumexp"][..., None])
    return jnp.exp(logits - saved["row_max"][..., None] - saved["log_sum"][..., None])


def _softmax_with_sink(scores: Array, sink: Array) -> tuple[Array, Array, Array, Array]:
    """(p, the largest of each row's scores and its sink, the sum of the exponentials of all of them below that, the sink's weight)."""
    top = lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink))
    least = jnp.where(top == -jnp.inf, 0, top)  # of a row that sees no key, with a sink of minus infinity
    e, of_sink = jnp.exp(scores - least), jnp.exp(sink - least)
    total = jnp.sum(e, axis=-1, keepdims=True) + of_sink
    total = jnp.where(total == 0, 1, total)
    return e / total, top[..., 0], total[..., 0], (of_sink / total)[..., 0]


def weigh(p: Array, factors: Array | None, form: Settings) -> Array:
    """p * factors * factors_scale in p's dtype; where booleans are False it is 0, whatever p is (a NaN of the row's included)."""
    if factors is None:
        return p
    weights = jnp.where(factors, p, 0) if factors.dtype == jnp.bool_ else p * factors.astype(p.dtype)
    return weights if form.factors_scale == 1.0 else weights * form.factors_scale


def _recomputed(saved: Mapping[str, Array], form: Settings) -> tuple[Array, Array | None, Array | None]:
    """Probabilities *B N T S in the statistics dtype, the weight *B N T 1 of a sink, and the tanh of the softcap where it is known."""
    if "probabilities" in saved:
        p, weight = saved["probabilities"], saved.get("sink_weight")
        return p.astype(arithmetic_dtype(p.dtype)), None if weight is None else weight[..., None], saved.get("tanh")
    scores, tanh = _scores(saved, form)
    sink = saved["sink"].astype(scores.dtype) if "sink" in saved else None
    return weight_by(saved, scores), None if sink is None else weight_by(saved, sink), tanh


def tangent(saved: Mapping[str, Array], tangents: Mapping[str, Array], form: Settings) -> Array:
    """dweights @ value + weights @ dvalue, with weights = p * factors * factors_scale, dp = p * (ds - rowsum(p * ds)) and
    ds = dbias + scale * (1 - tanh^2) * (dquery @ key^T + query @ dkey^T); the row has the weight of a sink and dsink, too."""
    p, of_sink, tanh = _recomputed(saved, form)
    dtype, factors = p.dtype, saved.get("factors")
    parts = []
    if "value" in tangents:
        weights = weigh(p, factors, form)
        parts.append(_dot(weights, tangents["value"].astype(dtype), "...nts,...skh->...tnh", form, dtype))
    moved = []
    ds = _tangent_of_scores(saved, tangents, tanh, dtype, form)
    if ds is not None:
        dsink = tangents["sink"].astype(dtype) if "sink" in tangents else 0.0
        dp, _ = _through_softmax(p, seen(ds, p.shape, saved.get("mask"), form), of_sink, dsink)
        moved.append(weigh(dp, factors, form))
    if "factors" in tangents:
        moved.append(weigh(p, tangents["factors"], form))
    if moved:
        values = saved["value"].astype(dtype)
        parts.append(_dot(sum(moved[1:], moved[0]), values, "...nts,...skh->...tnh", form, dtype))
    return sum(parts[1:], parts[0]).astype((tangents if "value" in tangents else saved)["value"].dtype)


def _tangent_of_scores(
    saved: Mapping[str, Array], tangents: Mapping[str, Array], tanh: Array | None, dtype: Any, form: Settings
) -> Array | None:
    """Before mask and causal mask; axes that only a bias's tangent lacks have size 1, and all where a sink alone moves. None where
    nothing does."""
    pairs = []
    if "query" in tangents:
        pairs.append((tangents["query"], saved["key"]))
    if "key" in tangents:
        pairs.append((saved["query"], tangents["key"]))
    parts = []
    if pairs:
        moved = [_dot(q, k, "...tnh,...skh->...nts", form, dtype) * form.scale for q, k in pairs]
        parts.append(through_softcap(sum(moved[1:], moved[0]), tanh))
    if "bias" in tangents:
        parts.append(tangents["bias"].astype(dtype))
    if "sink" in tangents and not parts:
        parts.append(jnp.zeros_like(tangents["sink"], dtype))
    return sum(parts[1:], parts[0]) if parts else None


def _through_softmax(
    p: Array, moved: Array, of_sink: Array | None = None, sink_moved: Array | float = 0.0
) -> tuple[Array, Array | None]:
    """The softmax's Jacobian, which is symmetric, applied to `moved`, and to `sink_moved` where a row has the weight `of_sink` of a
    sink: a row of the result, both parts together, sums to 0.

    Rounded, one sums to (1 - sum of p) times what all of `moved` shares, which may be far larger than what its entries differ
    by; the product with the keys (forward: values) multiplies it by what those share. So the sum is taken off once more. A
    maximum that is differentiated does the same; `jax.nn.softmax`, which stops the maximum's gradient, does not.
    """
    if of_sink is None:
        found = p * (moved - jnp.sum(p * moved, axis=-1, keepdims=True))
        return found - p * jnp.sum(found, axis=-1, keepdims=True), None
    mean = jnp.sum(p * moved, axis=-1, keepdims=True) + of_sink * sink_moved
    found, beside = p * (moved - mean), of_sink * (sink_moved - mean)
    left = jnp.sum(found, axis=-1, keepdims=True) + beside
    return found - p * left, beside - of_sink * left


def through_softcap(moved: Array, tanh: Array | None) -> Array:
    """The softcap's derivative, by its tanh (None: there is no softcap), applied to `moved`."""
    return moved if tanh is None else moved * (1.0 - jnp.square(tanh))


def seen(moved: Array, shape: tuple[int, ...], mask: Array | None, form: Settings, *corner: Any) -> Array:
    """0 where a row of scores of this shape does not see a key: not even a NaN of the row's reaches that key's gradient; the corner as for
    `near`."""
    if mask is not None:
        moved = jnp.where(mask, moved, 0.0)
    return jnp.where(near(shape, form, *corner), moved, 0.0) if form.is_local else moved


def cotangent(
    saved: Mapping[str, Array], ct: Array, wanted: tuple[str, ...], shardings: Mapping[str, Any], form: Settings
) -> list[Array]:
    """The gradients wanted, in order. With weights = p * factors * factors_scale and dw = ct @ value^T: dvalue = weights^T @ ct,
    dfactors = p * dw * factors_scale, dp = dw * factors * factors_scale, dbias = ds; with dr = scale * (1 - tanh^2) * ds,
    dquery = dr @ key, dkey = dr^T @ query."""
    p, of_sink, tanh = _recomputed(saved, form)
    dtype, factors = p.dtype, saved.get("factors")
    ct_wide = ct.astype(dtype)
    grads = {}
    if "value" in wanted:
        weights = weigh(p, factors, form)
        grads["value"] = _dot(weights, ct_wide, "...nts,...tnh->...skh", form, dtype, shardings.get("value"))
    if wanted != ("value",):
        dw = _dot(ct_wide, saved["value"].astype(dtype), "...tnh,...skh->...nts", form, dtype)
        if "factors" in wanted:
            grads["factors"] = weigh(p, dw, form)
        if {"query", "key", "bias", "sink"} & set(wanted):
            ds, dsink = _through_softmax(p, weigh(dw, factors, form), of_sink)
            ds = seen(ds, p.shape, saved.get("mask"), form)
            grads |= {"bias": ds, "sink": dsink}
            ds = through_softcap(ds, tanh) * form.scale
            if "query" in wanted:
                grads["query"] = _dot(ds, saved["key"].astype(dtype), "...nts,...skh->...tnh", form, dtype)
            if "key" in wanted:
                queries = saved["query"].astype(dtype)
                grads["key"] = _dot(ds, queries, "...nts,...tnh->...skh", form, dtype, shardings.get("key"))
    dtypes = dict.fromkeys(wanted, ct.dtype)
    for slot, shape, own in form.broadcast:
        if slot in wanted:
            grads[slot], dtypes[slot] = summed_to(grads[slot], shape, shardings.get(slot)), own
    return [grads[slot].astype(dtypes[slot]) for slot in wanted]
