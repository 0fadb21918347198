"""The attention functions: their layouts, scale, softmax, masks and heads, each in several spellings.

`q` is `[batch, length, heads, head]` and `k` and `v` are `[batch, keys, heads, head]`; the functions return what `q` is
shaped like. Where nothing needs a square of scores, keys are of another length than queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
Attend = Callable[..., Array]


def scores_of(q: Array, k: Array) -> Array:
    return jnp.einsum("bthd,bshd->bhts", q, k)


def scale_of(q: Array) -> float:
    return 1 / math.sqrt(q.shape[-1])


def weighted(p: Array, v: Array) -> Array:
    return jnp.einsum("bhts,bshd->bthd", p, v)


def attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    softmax: Callable[[Array], Array] = jax.nn.softmax,
    change: Callable[[Array], Array] = lambda s: s,
) -> Array:
    """The plain spelling, with another softmax or with scores that `change` masks or biases."""
    return weighted(softmax(change(scores_of(q, k) * scale_of(q))), v)


# Layouts.


def bhsd(q: Array, k: Array, v: Array) -> Array:
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    p = jax.nn.softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]), axis=-1)
    return (p @ v).transpose(0, 2, 1, 3)


def merged_heads(q: Array, k: Array, v: Array) -> Array:
    batch, length, heads, head = q.shape
    q, k, v = (x.transpose(0, 2, 1, 3).reshape(batch * heads, x.shape[1], head) for x in (q, k, v))
    p = jax.nn.softmax(lax.batch_matmul(q, k.swapaxes(1, 2)) * scale_of(q))
    return lax.batch_matmul(p, v).reshape(batch, heads, length, head).transpose(0, 2, 1, 3)


def transposed_scores(q: Array, k: Array, v: Array) -> Array:
    s = jnp.einsum("bshd,bthd->bhst", k, q) * scale_of(q)
    return jnp.einsum("bhst,bshd->bthd", jax.nn.softmax(s, axis=2), v)


def mapped(q: Array, k: Array, v: Array) -> Array:
    """One head of one row, mapped over heads and batch."""
    one = lambda q, k, v: jax.nn.softmax(q @ k.T * scale_of(q)) @ v  # noqa: E731
    return jax.vmap(jax.vmap(one, 1, 1))(q, k, v)


# Scales.


def scale_on_query(q: Array, k: Array, v: Array) -> Array:
    return weighted(jax.nn.softmax(scores_of(q * scale_of(q), k)), v)


def scale_on_keys(q: Array, k: Array, v: Array) -> Array:
    return weighted(jax.nn.softmax(scores_of(q, k / math.sqrt(q.shape[-1]))), v)


def scale_on_both(q: Array, k: Array, v: Array) -> Array:
    root = q.shape[-1] ** -0.25
    return weighted(jax.nn.softmax(scores_of(q * root, k * root)), v)


def scale_absent(q: Array, k: Array, v: Array) -> Array:
    return weighted(jax.nn.softmax(scores_of(q, k)), v)


def scale_traced(q: Array, k: Array, v: Array, scale: Array) -> Array:
    return weighted(jax.nn.softmax(scores_of(q, k) * scale), v)


def scale_in_program(q: Array, k: Array, v: Array) -> Array:
    root = lax.sqrt(jnp.full((), q.shape[-1], jnp.float32)).astype(q.dtype)
    return weighted(jax.nn.softmax(scores_of(q, k) / root), v)


# Softmaxes.


def softmax_manual(s: Array) -> Array:
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def softmax_no_max(s: Array) -> Array:
    e = jnp.exp(s)
    return e / jnp.sum(e, axis=-1, keepdims=True)


def softmax_logsumexp(s: Array) -> Array:
    return jnp.exp(s - jax.nn.logsumexp(s, axis=-1, keepdims=True))


def softmax_exp_log(s: Array) -> Array:
    return jnp.exp(jax.nn.log_softmax(s))


def softmax_f32(s: Array) -> Array:
    return jax.nn.softmax(s.astype(jnp.float32)).astype(s.dtype)


def division_after(q: Array, k: Array, v: Array) -> Array:
    s = scores_of(q, k) * scale_of(q)
    e = jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))
    return weighted(e, v) / e.sum(-1).swapaxes(1, 2)[..., None]


# Masks: what they compute from, other than the scores, comes in as further arguments.


def causal_tril(q: Array, k: Array, v: Array) -> Array:
    mask = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    return attend(q, k, v, change=lambda s: jnp.where(mask, s, -jnp.inf))


def causal_iota(q: Array, k: Array, v: Array) -> Array:
    def change(s: Array) -> Array:
        rows, columns = lax.broadcasted_iota(jnp.int32, s.shape, 2), lax.broadcasted_iota(jnp.int32, s.shape, 3)
        return jnp.where(columns <= rows, s, jnp.finfo(s.dtype).min)

    return attend(q, k, v, change=change)


def causal_additive(q: Array, k: Array, v: Array) -> Array:
    bias = jnp.triu(jnp.full((q.shape[1], k.shape[1]), -1e9, q.dtype), 1)
    return attend(q, k, v, change=lambda s: s + bias)


def window(q: Array, k: Array, v: Array) -> Array:
    rows, columns = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None]
    mask = (columns <= rows) & (rows - columns < 4)
    return attend(q, k, v, change=lambda s: jnp.where(mask, s, -1e9))


def padding(q: Array, k: Array, v: Array, mask: Array) -> Array:
    return attend(q, k, v, change=lambda s: jnp.where(mask[:, None, None], s, -1e9))


def padding_additive(q: Array, k: Array, v: Array, mask: Array) -> Array:
    bias = (1 - mask.astype(q.dtype)) * -1e9
    return attend(q, k, v, change=lambda s: s + bias[:, None, None])


def softmax_where(q: Array, k: Array, v: Array, mask: Array) -> Array:
    return attend(q, k, v, softmax=partial(jax.nn.softmax, where=mask[:, None, None]))


def padding_then_causal(q: Array, k: Array, v: Array, mask: Array) -> Array:
    causal = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    return attend(q, k, v, change=lambda s: jnp.where(causal, jnp.where(mask[:, None, None], s, -1e9), -1e9))


def zeroed_after(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Probabilities of masked keys set to zero, after a masked softmax."""
    keep = mask[:, None, None]
    p = jax.nn.softmax(jnp.where(keep, scores_of(q, k) * scale_of(q), -1e9))
    return weighted(jnp.where(keep, p, 0), v)


def biased(q: Array, k: Array, v: Array, bias: Array) -> Array:
    return attend(q, k, v, change=lambda s: s + bias)


def alibi(q: Array, k: Array, v: Array) -> Array:
    rows, columns = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None]
    slopes = (2.0 ** -jnp.arange(1, q.shape[2] + 1)).astype(q.dtype)[:, None, None]

    def change(s: Array) -> Array:
        return jnp.where(columns <= rows, s + slopes * (columns - rows).astype(s.dtype), -1e9)

    return attend(q, k, v, change=change)


def relative(q: Array, k: Array, v: Array, table: Array) -> Array:
    """A learned bias for each head and distance, as T5 has it, and no scale. `table` is `[distances, heads]`."""
    distance = jnp.clip(jnp.arange(k.shape[1])[None] - jnp.arange(q.shape[1])[:, None], -5, 5) + 5
    return weighted(jax.nn.softmax(scores_of(q, k) + table[distance].transpose(2, 0, 1)), v)


def softcap(q: Array, k: Array, v: Array) -> Array:
    return attend(q, k, v, change=lambda s: jnp.tanh(s / 30.0) * 30.0)


def dropout_select(q: Array, k: Array, v: Array, key: Array) -> Array:
    def softmax(s: Array) -> Array:
        return jnp.where(jax.random.bernoulli(key, 0.9, s.shape), jax.nn.softmax(s) / 0.9, 0)

    return attend(q, k, v, softmax=softmax)


def dropout_multiply(q: Array, k: Array, v: Array, key: Array) -> Array:
    def softmax(s: Array) -> Array:
        return jax.nn.softmax(s) * (jax.random.bernoulli(key, 0.9, s.shape).astype(s.dtype) / 0.9)

    return attend(q, k, v, softmax=softmax)


# Heads.


def grouped_repeat(q: Array, k: Array, v: Array) -> Array:
    group = q.shape[2] // k.shape[2]
    return attend(q, jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2))


def grouped_axis(q: Array, k: Array, v: Array) -> Array:
    batch, length, heads, head = q.shape
    q = q.reshape(batch, length, k.shape[2], heads // k.shape[2], head)
    p = jax.nn.softmax(jnp.einsum("btkgd,bskd->bkgts", q, k) * scale_of(q))
    return jnp.einsum("bkgts,bskd->btkgd", p, v).reshape(batch, length, heads, head)


def one_key_head(q: Array, k: Array, v: Array) -> Array:
    k, v = k[:, :, 0], v[:, :, 0]
    p = jax.nn.softmax(jnp.einsum("bthd,bsd->bhts", q, k) * scale_of(q))
    return jnp.einsum("bhts,bsd->bthd", p, v)


def rotary(q: Array, k: Array, v: Array) -> Array:
    def rotate(x: Array) -> Array:
        half = x.shape[-1] // 2
        angles = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
        sin, cos = jnp.sin(angles)[:, None].astype(x.dtype), jnp.cos(angles)[:, None].astype(x.dtype)
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    return causal_tril(rotate(q), rotate(k), v)


def normed_heads(q: Array, k: Array, v: Array, query_gain: Array, key_gain: Array) -> Array:
    """Queries and keys pass an RMS norm of each head first."""

    def norm(x: Array, gain: Array) -> Array:
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain

    return attend(norm(q, query_gain), norm(k, key_gain), v)
