"""Attention by blocks of query rows: the T x S matrix of scores never exists, one block of it does at a time.

A block of rows sees all its keys at once: it is small enough for the cache, so exponentials cost no memory traffic, and
nothing is rescaled between key blocks. The backward recomputes each block from the row's statistics. With `is_causal`, rows
are taken in up to 8 groups, each against the keys up to its own last row: 9/16 of the work. With a window a block takes the keys
from its first row's window to its last row's, and as many rows as a window has keys: twice the least work. Bias, mask and factors
are cut where they stand, so that one that broadcasts is never larger than given; a gradient of theirs is summed as the blocks come.

Measured on a CPU (2 cores, AVX-512, H = 64, S = 512 to 4096): blocks of 2 million scores forward and 1 million backward
are the fastest or within noise of it; key blocks with online rescaling cost a third more; dkey and dvalue accumulated
transposed, as query^T @ ds, take half the time of ds^T @ query. All is computed in the statistics dtype (float32 for
bfloat16). `python -m benchmarks attention_cpu` times the whole against the jitted composite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from .....graph.dtypes import arithmetic_dtype
from ..reference import finished, rounded, seen, statistics_of, through_softcap, weigh, weight_by
from ..settings import Settings
from .blocks import (
    Broadcast,
    Corner,
    GroupOperands,
    add_keys,
    divisor,
    heads,
    keys_from,
    power_of_two,
    put_rows,
    scan_heads,
    scan_rows,
    unheads,
)

Array = Any

_FORWARD_SCORES = 1 << 21
_BACKWARD_SCORES = 1 << 20
_CAUSAL_GROUPS = 8
_LEAST_ROWS = 16


def block_shape(
    heads: int,
    t: int,
    s: int,
    is_causal: bool,
    scores: int,
    group: int = 1,
    window: tuple[int, int] | None = None,
) -> tuple[int, int]:
    """(heads, query rows) of a block of about `scores` scores: whole heads where they fit, else rows of one head.

    The `group` heads that read one head of key and value stay together: one product serves them all, as if they were more rows.

    With `is_causal` a block has at most T/16 rows, so that each of the groups has two: XLA shares the scratch of a loop
    between loops, but gives straight-line blocks their own.
    """
    if window is not None:
        rows = max(1, min(t, power_of_two(max(_LEAST_ROWS, sum(window) + 1))))
        s = keys_of(rows, s, window)
    else:
        rows = power_of_two(max(_LEAST_ROWS, t // (2 * _CAUSAL_GROUPS))) if is_causal else t
        rows = max(1, min(t, rows))
    if group * rows * s <= scores:
        return group * divisor(heads // group, scores // (group * rows * s)), rows
    return group, min(rows, power_of_two(max(_LEAST_ROWS // group, scores // (group * s), 1)))


def keys_of(rows: int, s: int, window: tuple[int, int]) -> int:
    """How many keys so many neighbouring rows see."""
    return min(s, rows + sum(window))


def forward(given: Mapping[str, Array], form: Settings) -> list[Array]:
    """[out], and the rows' statistics if asked for."""
    query, key, value = (given[slot] for slot in ("query", "key", "value"))
    t, s = query.shape[-3], key.shape[-3]
    wide = arithmetic_dtype(query.dtype)
    q, form = _scaled(query, form)
    whole = _broadcasts(query, given)
    size, rows = _block_of(query, whole.kinds, s, _FORWARD_SCORES, form)
    can_be_blind = form.may_be_blind(t, s)

    def some_heads(carry: Any, operands: tuple) -> tuple[Any, tuple[Array, ...]]:
        (q, k, v), entries = operands
        cut = whole.of_group(entries)
        # The results are carried from block to block: that also keeps the groups in order, so their scratch is shared.
        kept = (jnp.zeros_like(q, shape=q.shape[:2]) for _ in form.statistics)
        results = jnp.zeros_like(q, shape=(*q.shape[:2], v.shape[-1])), *kept
        for start, stop, keys in _groups(t, s, rows, form.is_causal and form.window is None):
            seen_k, seen_v = k[:, :keys], v[:, :keys]

            def step(results: tuple, first: Array, q: Array, k: Array = seen_k, v: Array = seen_v) -> tuple[Array, ...]:
                corner, (k, v) = _seen_from(first, rows, (k, v), form)
                scores, _ = _scores(q, k, corner, cut, form)
                top, total, p = _softmax(scores, can_be_blind, cut("sink", corner, scores.shape))
                factors = cut("factors", corner, p.shape)
                sums = _by_key(weigh(p, factors, form), v, form)
                out = sums / total
                if factors is not None and factors.dtype == jnp.bool_:  # 0 also where what is left out is NaN
                    out = jnp.where(sums == 0, sums, out)
                found = out, *(a[..., 0] for a in statistics_of(top, total, form))
                return tuple(put_rows(into, a, first) for into, a in zip(results, found, strict=True))

            results = scan_rows(step, start, rows, q[:, start:stop], results)
        return carry, results

    arrays = (q, heads(key, wide), heads(value, wide)), whole.entry
    _, (out, *kept) = scan_heads(some_heads, size, arrays, ())
    out, off = rounded(unheads(out, query), value.dtype, form.residuals and form.keeps_rounded_off)
    return [out, *(a.reshape(*_leading(query), t) for a in kept), *off] if form.residuals else [out]


def cotangent(
    saved: Mapping[str, Array], ct: Array, wanted: tuple[str, ...], shardings: Mapping[str, Any], form: Settings
) -> list[Array]:
    """The gradients wanted, in order; each block of probabilities is recomputed from the rows' statistics."""
    query, key, scale = saved["query"], saved["key"], form.scale
    t, s = query.shape[-3], key.shape[-3]
    wide = arithmetic_dtype(query.dtype)
    q, form = _scaled(query, form)
    by_row = {"q": q, "ct": heads(ct, wide)}
    by_row |= {n: saved[n].reshape(-1, t) for n in form.statistics}
    by_key = {"k": heads(key, wide)}
    # The gradient of the value is of the probabilities and the cotangent alone.
    if wanted != ("value",):
        by_key["v"] = heads(saved["value"], wide)
    summed = {slot: Broadcast.of(shape, _leading(query)) for slot, shape, _ in form.broadcast if slot in wanted}
    whole = _broadcasts(query, saved, summed)
    size, rows = _block_of(query, whole.kinds, s, _BACKWARD_SCORES, form)

    def some_heads(shared: dict[str, Array], operands: tuple) -> tuple[dict[str, Array], dict[str, Array]]:
        rows_of, all_keys, entries = operands
        cut = whole.of_group(entries)
        sums = _zero_sums(wanted, rows_of, s, form.group) | shared
        for start, stop, keys in _groups(t, s, rows, form.is_causal and form.window is None):
            part = {n: a[:, start:stop] for n, a in rows_of.items()}
            step = _backward_step({n: a[:, :keys] for n, a in all_keys.items()}, rows, cut, wanted, form)
            sums = scan_rows(step, start, rows, part, sums)
        shared = {n: sums.pop(n) for n in shared}
        last = {"query": scale, "key": form.scale}
        sums = {n: a * last.get(n, 1.0) for n, a in sums.items()}
        return shared, {n: a if n == "query" else _t(a) for n, a in sums.items()}

    shared = {slot: jnp.zeros_like(by_row["q"], shape=kind.shape) for slot, kind in summed.items()}
    shared, grads = scan_heads(some_heads, size, (by_row, by_key, whole.entry), shared)
    found = {slot: shared[slot].reshape(shape).astype(own) for slot, shape, own in form.broadcast if slot in wanted}
    like = {"query": query, "key": key, "value": key}
    return [found[n] if n in found else unheads(grads[n], like[n]).astype(ct.dtype) for n in wanted]


def _backward_step(
    all_keys: dict[str, Array], rows: int, cut: GroupOperands, wanted: tuple[str, ...], form: Settings
) -> Callable[..., dict[str, Array]]:
    """A step over one block of rows: adds to the sums of the gradients (transposed for key and value), and puts dquery."""

    def step(sums: dict[str, Array], first: Array, part: dict[str, Array]) -> dict[str, Array]:
        corner, parts = _seen_from(first, rows, tuple(all_keys.values()), form)
        keys = dict(zip(all_keys, parts, strict=True))
        scores, tanh = _scores(part["q"], keys["k"], corner, cut, form)
        p, of_sink = _probabilities(scores, part, cut("sink", corner, scores.shape))
        factors = cut("factors", corner, p.shape)
        found = dict(sums)
        if "value" in wanted:
            found["value"] = add_keys(sums["value"], _over_rows(part["ct"], weigh(p, factors, form), form), corner.key)
        if wanted == ("value",):
            return found
        dw = _by_key(part["ct"], _t(keys["v"]), form)
        if "factors" in wanted:
            found["factors"] = cut.add("factors", sums["factors"], weigh(p, dw, form), corner)
        if not {"query", "key", "bias", "sink"} & set(wanted):
            return found
        # The sum is taken of these very numbers, not as rowsum(ct * out): of a saturated softmax dp cancels to nothing, and what
        # out was rounded by would be left.
        dp = weigh(dw, factors, form)
        mean = jnp.sum(p * dp, axis=-1, keepdims=True)
        if "sink" in wanted and of_sink is not None:
            found["sink"] = cut.add("sink", sums["sink"], -of_sink * mean, corner)
        ds = seen(p * (dp - mean), p.shape, cut("mask", corner, p.shape), form, *corner)
        if "bias" in wanted:
            found["bias"] = cut.add("bias", sums["bias"], ds, corner)
        ds = through_softcap(ds, tanh)
        if "key" in wanted:
            found["key"] = add_keys(sums["key"], _over_rows(part["q"], ds, form), corner.key)
        if "query" in wanted:
            found["query"] = put_rows(sums["query"], _by_key(ds, keys["k"], form), first)
        return found

    return step


def _scaled(query: Array, form: Settings) -> tuple[Array, Settings]:
    """The query with the scale where that rounds nothing, and a form with what is left of it for the scores.

    A GPU multiplies in TF32: operands that it would take as they are, it would round once scaled, and a score of 1e3 by 0.5.
    """
    q = heads(query, arithmetic_dtype(query.dtype))
    if abs(math.frexp(form.scale)[0]) == 0.5:  # a power of two
        return q * form.scale, replace(form, scale=1.0)
    return q, form


def _broadcasts(
    query: Array, given: Mapping[str, Array], gradients: Mapping[str, Broadcast] | None = None
) -> GroupOperands:
    """Those that are given, each as (entries, T or 1, S or 1), and how their gradients are cut."""
    found = {slot: given[slot] for slot in ("bias", "mask", "factors", "sink") if slot in given}
    kinds = {slot: Broadcast.of(a.shape, _leading(query)) for slot, a in found.items()}
    wholes = {slot: a.reshape(kinds[slot].shape) for slot, a in found.items()}
    kinds |= {"d_" + slot: kind for slot, kind in (gradients or {}).items()}
    return GroupOperands(kinds, wholes, {slot: kind.entry for slot, kind in kinds.items()})


def _leading(query: Array) -> tuple[int, ...]:
    return (*query.shape[:-3], query.shape[-2])


def _block_of(query: Array, kinds: Mapping[str, Broadcast], s: int, scores: int, form: Settings) -> tuple[int, int]:
    """`block_shape` of a call. What broadcasts is cut in one piece only within one entry of the batch."""
    *batch, heads = _leading(query)
    together = heads if kinds else heads * math.prod(batch)
    return block_shape(together, query.shape[-3], s, form.is_causal, scores, form.group, form.window)


def _zero_sums(wanted: tuple[str, ...], rows_of: dict[str, Array], s: int, group: int) -> dict[str, Array]:
    q, ct = rows_of["q"], rows_of["ct"]
    heads = q.shape[0] // group
    shapes = {"query": q.shape, "key": (heads, q.shape[2], s), "value": (heads, ct.shape[2], s)}
    # Made from the operand, so that inside shard_map it varies over the same mesh axes.
    return {n: jnp.zeros_like(q, shape=shapes[n]) for n in wanted if n in shapes}


def _groups(t: int, s: int, rows: int, is_causal: bool) -> Iterator[tuple[int, int, int]]:
    """Row ranges and how many keys each sees: (start, stop, keys)."""
    if not is_causal:
        yield 0, t, s
        return
    size = -(-t // (rows * _CAUSAL_GROUPS)) * rows
    for start in range(0, t, size):
        stop = min(start + size, t)
        yield start, stop, min(stop, s)


def _seen_from(first: Array, rows: int, by_key: tuple[Array, ...], form: Settings) -> tuple[Corner, tuple[Array, ...]]:
    """The keys, of those in `by_key` (axis 1), that a block of up to `rows` rows from row `first` on sees; with the block's corner."""
    if form.window is None:
        return Corner(first, jnp.zeros_like(first)), by_key
    s = by_key[0].shape[1]
    keys = keys_of(rows, s, form.window)
    at = jnp.clip(first - form.window[0], 0, s - keys)
    return Corner(first, at), tuple(keys_from(a, at, keys) for a in by_key)


def _scores(q: Array, k: Array, corner: Corner, cut: GroupOperands, form: Settings) -> tuple[Array, Array | None]:
    """Scores of a block, and the tanh of the softcap."""
    scores = _by_key(q, _t(k), form) * form.scale
    bias, mask = (cut(slot, corner, scores.shape) for slot in ("bias", "mask"))
    return finished(scores, bias, mask, form, *corner)


def _softmax(scores: Array, can_be_blind: bool, sink: Array | None) -> tuple[Array, Array, Array]:
    """(the largest score, the sum, not yet divided exponentials) of each row; of one that sees no key (0, 1, 0): its result is 0.

    A sink is one score more, that has no place among the exponentials.
    """
    top = jnp.max(scores, axis=-1, keepdims=True)
    logit = None if sink is None else sink.astype(top.dtype)
    if logit is not None:
        top = jnp.maximum(top, logit)
    blind = top == -jnp.inf if can_be_blind else None
    if blind is not None:
        top = jnp.where(blind, 0, top)
    p = jnp.exp(scores - top)
    total = jnp.sum(p, axis=-1, keepdims=True)
    if logit is not None:
        total = total + jnp.exp(logit - top)
    return top, total if blind is None else jnp.where(blind, 1, total), p


def _probabilities(scores: Array, part: Mapping[str, Array], sink: Array | None) -> tuple[Array, Array | None]:
    """Of rows with all their keys, and the weight of their sink; scaled to 1 together, since a logsumexp of 1e3 is rounded by 1e-4, which
    each of them would carry."""
    p = weight_by(part, scores)
    of_sink = None if sink is None else weight_by(part, sink.astype(scores.dtype))
    total = jnp.sum(p, axis=-1, keepdims=True)
    if of_sink is not None:
        total = total + of_sink
    by_total = 1 / jnp.where(total == 0, 1.0, total)
    return p * by_total, None if of_sink is None else of_sink * by_total


def _by_key(rows: Array, keys: Array, form: Settings) -> Array:
    """rows @ keys, where `form.group` heads of rows meet one of keys: they are more rows to it."""
    a = rows.reshape(keys.shape[0], form.group * rows.shape[1], rows.shape[2])
    return jnp.matmul(a, keys, precision=form.precision).reshape(*rows.shape[:-1], keys.shape[-1])


def _over_rows(a: Array, b: Array, form: Settings) -> Array:
    """a^T @ b, summed over the rows of all heads that share one of keys."""
    a, b = (x.reshape(x.shape[0] // form.group, form.group * x.shape[1], x.shape[2]) for x in (a, b))
    return jnp.matmul(_t(a), b, precision=form.precision)


def _t(a: Array) -> Array:
    return jnp.swapaxes(a, -1, -2)
