"""Attention by blocks of query rows: the T x S matrix of scores never exists, one block of it does at a time.

A block of rows sees all its keys at once: it is small enough for the cache, so exponentials cost no memory traffic, and
nothing is rescaled between key blocks. The backward recomputes each block from logsumexp. With `is_causal`, rows are
taken in up to 8 groups, each against the keys up to its own last row: 9/16 of the work.

Measured on a CPU (2 cores, AVX-512, H = 64, S = 512 to 4096): blocks of 2 million scores forward and 1 million backward
are the fastest or within noise of it; key blocks with online rescaling cost a third more; dkey and dvalue accumulated
transposed, as query^T @ ds, take half the time of ds^T @ query. All is computed in the statistics dtype (float32 for
bfloat16). `python -m benchmarks attention_cpu` times the whole against the jitted composite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .reference import statistics_dtype

Array = Any

_FORWARD_SCORES = 1 << 21
_BACKWARD_SCORES = 1 << 20
_CAUSAL_GROUPS = 8
_LEAST_ROWS = 16


def block_shape(heads: int, t: int, s: int, is_causal: bool, scores: int) -> tuple[int, int]:
    """(heads, query rows) of a block of about `scores` scores: whole heads where they fit, else rows of one head.

    With `is_causal` a block has at most T/16 rows, so that each of the groups has two: XLA shares the scratch of a loop
    between loops, but gives straight-line blocks their own.
    """
    rows = _power_of_two(max(_LEAST_ROWS, t // (2 * _CAUSAL_GROUPS))) if is_causal else t
    rows = max(1, min(t, rows))
    if rows * s <= scores:
        return _divisor(heads, scores // (rows * s)), rows
    return 1, min(rows, _power_of_two(max(_LEAST_ROWS, scores // s)))


def _power_of_two(n: int) -> int:
    """The largest power of two up to n."""
    return 1 << (n.bit_length() - 1)


def _divisor(n: int, most: int) -> int:
    """The largest divisor of n up to `most`."""
    return max((d for d in range(1, min(n, most) + 1) if n % d == 0), default=1)


def forward(
    query: Array,
    key: Array,
    value: Array,
    *,
    residuals: bool,
    scale: float,
    is_causal: bool,
    precision: Any,
    **_: Any,
) -> list[Array]:
    """[out], and logsumexp if asked for."""
    t, s = query.shape[-3], key.shape[-3]
    wide = statistics_dtype(query.dtype)
    q = _heads(query, wide) * scale
    heads, rows = block_shape(q.shape[0], t, s, is_causal, _FORWARD_SCORES)

    def some_heads(operands: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v = operands
        # The results are carried from block to block: that also keeps the groups in order, so their scratch is shared.
        results = jnp.zeros_like(q, shape=(*q.shape[:2], v.shape[-1])), jnp.zeros_like(q, shape=q.shape[:2])
        for start, stop, keys in _groups(t, s, rows, is_causal):
            seen_k, seen_v = k[:, :keys], v[:, :keys]

            def step(results: Any, first: Array, q: Array, k: Array = seen_k, v: Array = seen_v) -> tuple[Array, Array]:
                scores = _scores(q, k, first, is_causal, precision)
                top = jnp.max(scores, axis=-1, keepdims=True)
                p = jnp.exp(scores - top)
                total = jnp.sum(p, axis=-1, keepdims=True)
                found = _mm(p, v, precision) / total, (top + jnp.log(total))[..., 0]
                return _put_rows(results[0], found[0], first), _put_rows(results[1], found[1], first)

            results = _scan_rows(step, start, rows, q[:, start:stop], results)
        return results

    out, logsumexp = _map_heads(some_heads, heads, (q, _heads(key, wide), _heads(value, wide)))
    out = _unheads(out, query).astype(value.dtype)
    return [out, logsumexp.reshape(*query.shape[:-3], query.shape[-2], t)] if residuals else [out]


def cotangent(
    saved: Mapping[str, Array],
    ct: Array,
    wanted: tuple[str, ...],
    shardings: Mapping[str, Any],
    *,
    scale: float,
    is_causal: bool,
    precision: Any,
    **_: Any,
) -> list[Array]:
    """The gradients wanted, in order; each block of probabilities is recomputed from logsumexp."""
    query, key = saved["query"], saved["key"]
    t, s = query.shape[-3], key.shape[-3]
    wide = statistics_dtype(query.dtype)
    by_row = {"q": _heads(query, wide) * scale, "ct": _heads(ct, wide), "lse": saved["logsumexp"].reshape(-1, t)}
    by_key = {"k": _heads(key, wide)}
    if "query" in wanted or "key" in wanted:
        by_row["delta"] = jnp.sum(_heads(saved["out"], wide) * by_row["ct"], axis=-1)
        by_key["v"] = _heads(saved["value"], wide)
    heads, rows = block_shape(by_row["q"].shape[0], t, s, is_causal, _BACKWARD_SCORES)

    def some_heads(operands: tuple[dict[str, Array], dict[str, Array]]) -> dict[str, Array]:
        rows_of, keys_of = operands
        sums = _zero_sums(wanted, rows_of, s)
        for start, stop, keys in _groups(t, s, rows, is_causal):
            part = {n: a[:, start:stop] for n, a in rows_of.items()}
            step = _backward_step({n: a[:, :keys] for n, a in keys_of.items()}, wanted, is_causal, precision)
            sums = _scan_rows(step, start, rows, part, sums)
        return {n: a * scale if n == "query" else _t(a) for n, a in sums.items()}

    grads = _map_heads(some_heads, heads, (by_row, by_key))
    like = {"query": query, "key": key, "value": key}
    return [_unheads(grads[slot], like[slot]).astype(ct.dtype) for slot in wanted]


def _backward_step(keys_of: dict[str, Array], wanted: tuple[str, ...], is_causal: bool, precision: Any) -> Callable:
    """A step over one block of rows: adds to the transposed sums of dkey and dvalue, and puts the block's dquery."""

    def step(sums: dict[str, Array], first: Array, part: dict[str, Array]) -> dict[str, Array]:
        scores = _scores(part["q"], keys_of["k"], first, is_causal, precision)
        p = jnp.exp(scores - part["lse"][..., None])
        found = dict(sums)
        if "value" in wanted:
            found["value"] = _add_keys(sums["value"], _mm(_t(part["ct"]), p, precision))
        if wanted == ("value",):
            return found
        ds = p * (_mm(part["ct"], _t(keys_of["v"]), precision) - part["delta"][..., None])
        if is_causal:  # not even a NaN of the row's reaches a key it does not see
            ds = jnp.where(_seen(ds.shape, first), ds, 0.0)
        if "key" in wanted:
            found["key"] = _add_keys(sums["key"], _mm(_t(part["q"]), ds, precision))  # the scale is in q
        if "query" in wanted:
            found["query"] = _put_rows(sums["query"], _mm(ds, keys_of["k"], precision), first)
        return found

    return step


def _zero_sums(wanted: tuple[str, ...], rows_of: dict[str, Array], s: int) -> dict[str, Array]:
    q, ct = rows_of["q"], rows_of["ct"]
    shapes = {"query": q.shape, "key": (q.shape[0], q.shape[2], s), "value": (q.shape[0], ct.shape[2], s)}
    # Made from the operand, so that inside shard_map it varies over the same mesh axes.
    return {n: jnp.zeros_like(q, shape=shapes[n]) for n in wanted}


def _put_rows(whole: Array, block: Array, first: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(whole, block, first, axis=1)


def _add_keys(whole: Array, part: Array) -> Array:
    """Adds to the first keys (last axis)."""
    keys = part.shape[-1]
    return whole + part if keys == whole.shape[-1] else whole.at[..., :keys].add(part)


def _groups(t: int, s: int, rows: int, is_causal: bool) -> Iterator[tuple[int, int, int]]:
    """Row ranges and how many keys each sees: (start, stop, keys)."""
    if not is_causal:
        yield 0, t, s
        return
    size = -(-t // (rows * _CAUSAL_GROUPS)) * rows
    for start in range(0, t, size):
        stop = min(start + size, t)
        yield start, stop, min(stop, s)


def _scores(q: Array, k: Array, first: Array, is_causal: bool, precision: Any) -> Array:
    """Scores of a block of rows, the first of which is row `first`; the scale is in q already."""
    scores = _mm(q, _t(k), precision)
    if not is_causal:
        return scores
    return jnp.where(_seen(scores.shape, first), scores, -jnp.inf)


def _seen(shape: tuple[int, ...], first: Array) -> Array:
    """True where a row of a block, the first of which is row `first`, sees a key."""
    row = first + lax.broadcasted_iota(jnp.int32, shape, 1)
    return lax.broadcasted_iota(jnp.int32, shape, 2) <= row


def _mm(a: Array, b: Array, precision: Any) -> Array:
    return jnp.matmul(a, b, precision=precision)


def _t(a: Array) -> Array:
    return jnp.swapaxes(a, -1, -2)


def _map_heads(function: Callable, size: int, arrays: Any) -> Any:
    """`function` over groups of `size` heads; `size` divides their number."""
    count = jax.tree.leaves(arrays)[0].shape[0]
    if count == size:
        return function(arrays)
    grouped = jax.tree.map(lambda a: a.reshape(count // size, size, *a.shape[1:]), arrays)
    return jax.tree.map(lambda a: a.reshape(count, *a.shape[2:]), lax.map(function, grouped))


def _scan_rows(step: Callable, start: int, rows: int, arrays: Any, carry: Any) -> Any:
    """Runs `carry = step(carry, first row, block)` over blocks of the arrays' rows (axis 1); the last may be shorter."""
    count = jax.tree.leaves(arrays)[0].shape[1]
    whole, rest = divmod(count, rows)
    if whole > 1:
        blocks = jax.tree.map(lambda a: _split_rows(a, whole, rows), arrays)
        firsts = jnp.asarray(start + rows * np.arange(whole), jnp.int32)
        carry, _ = lax.scan(lambda c, x: (step(c, *x), None), carry, (firsts, blocks))
    elif whole:
        carry = step(carry, jnp.int32(start), jax.tree.map(lambda a: a[:, :rows], arrays))
    if rest:
        tail = jax.tree.map(lambda a: a[:, whole * rows :], arrays)
        carry = step(carry, jnp.int32(start + whole * rows), tail)
    return carry


def _split_rows(a: Array, count: int, rows: int) -> Array:
    return jnp.moveaxis(a[:, : count * rows].reshape(a.shape[0], count, rows, *a.shape[2:]), 1, 0)


def _heads(a: Array, dtype: Any) -> Array:
    """*B L N D -> (B N) L D in `dtype`."""
    return jnp.swapaxes(a, -2, -3).reshape(-1, a.shape[-3], a.shape[-1]).astype(dtype)


def _unheads(a: Array, like: Array) -> Array:
    """(B N) L D -> *B L N D, with *B and N as `like` has them."""
    return jnp.swapaxes(a.reshape(*like.shape[:-3], like.shape[-2], *a.shape[1:]), -2, -3)
