"""Layers of attnax and tunix, which are written on Flax's nnx."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from zoo.config import GROUPED, Sizes
from zoo.model import Model, struct

from ..parts import LONGEST, gated, layer
from .layers import Array, Params, dense, norms, products, spelled

LOW = -2.3819763e38


def decoder(c: Sizes, dtype: Any, p: Params, x: Array) -> Array:
    """attnax: biases everywhere, a gated feed-forward part with them, a rotary table of which rows are taken."""

    def norm(name: str, x: Array) -> Array:
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * p[name]

    positions = jnp.broadcast_to(jnp.arange(c.length)[None].astype(jnp.int32), (c.batch, c.length))
    rows = jnp.arange(c.length)
    mask = (rows[:, None] >= rows[None, :])[None, None]
    h = norm("first", x)
    split = {"query": c.heads, "key": c.kv_heads, "value": c.kv_heads}
    q, k, v = (
        jnp.transpose(dense(p, name, h, dtype).reshape(c.batch, c.length, n, c.head), (0, 2, 1, 3))
        for name, n in split.items()
    )
    q, k = (by_table(x, positions) for x in (q, k))
    k, v = (jnp.repeat(x, c.heads // c.kv_heads, axis=1) for x in (k, v))
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * jax.lax.rsqrt(jnp.asarray(c.head, q.dtype))
    w = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min), -1)
    o = jnp.transpose(jnp.einsum("bhqk,bhkd->bhqd", w, v), (0, 2, 1, 3)).reshape(x.shape)
    x = x + dense(p, "output", o, dtype)
    h = norm("second", x)
    return x + dense(p, "down", jax.nn.silu(dense(p, "gate", h, dtype)) * dense(p, "up", h, dtype), dtype)


def by_table(x: Array, positions: Array) -> Array:
    half = x.shape[-1] // 2
    frequency = 1.0 / (10_000.0 ** (jnp.arange(0, half, dtype=x.dtype) / half))
    angles = jnp.outer(jnp.arange(LONGEST, dtype=x.dtype), frequency)
    cos, sin = (f(angles).astype(x.dtype)[positions][:, None] for f in (jnp.cos, jnp.sin))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], -1)


def gate(p: Params, x: Array, activation: Any, dtype: Any) -> Array:
    return dense(p, "down", activation(dense(p, "gate", x, dtype)) * dense(p, "up", x, dtype), dtype)


def qwen2(c: Sizes, dtype: Any, p: Params, x: Array, positions: Array, mask: Array) -> Array:
    """tunix: the biases of heads that are joined and parted again; the norm divides by the root."""

    def norm(name: str, x: Array) -> Array:
        x = x.astype(jnp.float32)
        root = jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        return (p[name].astype(jnp.float32) * (x / root)).astype(dtype)

    frequency = 1.0 / 1_000_000 ** (jnp.arange(0, c.head, 2, dtype=jnp.float32) / c.head)
    angles = jnp.einsum("BT,k->BTk", positions, frequency, precision=jax.lax.Precision.HIGHEST)
    sin, cos = (f(angles).astype(dtype)[:, :, None] for f in (jnp.sin, jnp.cos))

    def turned(x: Array) -> Array:
        first, second = x[..., : c.head // 2], x[..., c.head // 2 :]
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def heads(name: str, x: Array) -> Array:
        y = jnp.einsum("BTD,DNH->BTNH", x, p[name])
        return (jnp.reshape(y, (*y.shape[:2], -1)) + p[f"{name}_b"]).reshape(y.shape)

    h = norm("first", x)
    q, k, v = (heads(name, h) for name in ("query", "key", "value"))
    q, k = turned(q), turned(k)
    q = q.reshape(c.batch, c.length, c.kv_heads, c.heads // c.kv_heads, c.head)
    scores = jnp.einsum("BTHGD,BSHD->BHGTS", q, k) * c.head**-0.5
    scores = jnp.where(mask[:, None, None], scores, LOW)
    w = jax.nn.softmax(scores.astype(jnp.float32), -1).astype(dtype)
    o = jnp.einsum("BHGTS,BSHD->BTHGD", w, v).reshape(c.batch, c.length, c.heads, c.head)
    x = jnp.einsum("BTNH,NHD->BTD", o, p["output"]) + x
    return x + gate(p, norm("second", x), jax.nn.silu, dtype)


def by_positions(x: Array, positions: Array, base: float) -> Array:
    width = x.shape[-1]
    scale = base ** (2 * jnp.arange(0, width // 2, dtype=jnp.float32) / width)
    angles = (positions[..., None] / scale[None, None])[..., None, :]
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def llama3(c: Sizes, dtype: Any, p: Params, x: Array, positions: Array, mask: Array) -> Array:
    """tunix: groups of heads joined for the mask and parted again; the norm's scale comes first."""

    def norm(name: str, x: Array) -> Array:
        root = jnp.sqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-5)
        return (p[name] * x / root).astype(x.dtype)

    h = norm("first", x)
    q, k, v = (jnp.einsum("BTD,DNH->BTNH", h, p[name]) for name in ("query", "key", "value"))
    q, k = (by_positions(x, positions, 1_000_000) for x in (q, k))
    groups = (c.batch, c.kv_heads, c.heads // c.kv_heads, c.length, c.length)
    q = q.reshape(c.batch, c.length, c.kv_heads, c.heads // c.kv_heads, c.head)
    scores = jnp.einsum("BTHGD,BSHD->BHGTS", q, k) * c.head**-0.5
    scores = scores.reshape(c.batch, c.heads, c.length, c.length)
    scores = jnp.where(jnp.expand_dims(mask, -3), scores, LOW)
    w = jax.nn.softmax(scores.astype(jnp.float32), -1).astype(k.dtype).reshape(groups)
    o = jnp.einsum("BHGTS,BSHD->BTHGD", w, v).reshape(c.batch, c.length, c.heads, c.head)
    x = jnp.einsum("BTNH,NHD->BTD", o, p["output"]) + x
    return x + gate(p, norm("second", x), jax.nn.silu, dtype)


def gemma2(c: Sizes, dtype: Any, p: Params, x: Array, positions: Array, mask: Array) -> Array:
    """tunix: a local layer; keys and values of one product, scores capped, norms on both sides; embeddings times a root."""

    def norm(name: str, x: Array) -> Array:
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-06)
        return x * (1 + jnp.expand_dims(p[name], (0, 1)))

    x = x * jnp.sqrt(x.shape[-1]).astype(x.dtype)
    h = norm("first", x)
    q = jnp.einsum("BTD,NDH->BTNH", h, p["query"])
    k, v = jnp.einsum("BSD,CKDH->CBSKH", h, p["pair"])
    q = by_positions(q, positions, 10_000) * c.head**-0.5
    k = by_positions(k, positions, 10_000)
    groups = (c.batch, c.length, c.kv_heads, c.heads // c.kv_heads)
    scores = jnp.einsum("BTKGH,BSKH->BTKGS", q.reshape(*groups, c.head), k)
    scores = scores.reshape(c.batch, c.length, c.heads, c.length)
    scores = jnp.tanh(scores / 50.0) * 50.0
    keys, own = jnp.arange(c.length)[None, None], positions[:, :, None]
    near = keys >= own - 4 + 1
    near *= keys <= own + 4 - 1
    w = jax.nn.softmax(jnp.where(jnp.expand_dims(near * mask, -2), scores, LOW), -1).astype(k.dtype)
    o = jnp.einsum("BTKGS,BSKH->BTKGH", w.reshape(*groups, c.length), v)
    o = jnp.einsum("BTNH,NHD->BTD", o.reshape(c.batch, c.length, c.heads, c.head), p["output"])
    x = norm("behind", o) + x
    return norm("last", gate(p, norm("second", x), jax.nn.gelu, dtype)) + x


def positioned(c: Sizes, dtype: Any) -> list[Any]:
    seen = struct((c.batch, c.length, c.length), jnp.bool_)
    return [struct((c.batch, c.length), jnp.int32), seen]


C = GROUPED
WIDE = {"gate": (C.model, C.hidden), "up": (C.model, C.hidden), "down": (C.hidden, C.model)}
KEYS = (C.model, C.kv_heads, C.head)
HEADS = {"query": (C.model, C.heads, C.head), "key": KEYS, "value": KEYS, "output": (C.heads, C.head, C.model)}
GATED = products(bias=False, **WIDE) | norms(C.model, "first", "second", shift=False)
FLAT = dict.fromkeys(("key", "value"), (C.model, C.kv_heads * C.head)) | {"query": (C.model, C.model)}
BIASES = {"query_b": (C.model,), "key_b": (C.kv_heads * C.head,), "value_b": (C.kv_heads * C.head,)}
SQRT, RMS = (("root", 1),), "rms_norms"
_spelled = partial(spelled, sizes=C)
MODELS: tuple[Model, ...] = (
    _spelled(
        "attnax/decoder",
        decoder,
        products(output=(C.model, C.model), **FLAT, **WIDE) | norms(C.model, "first", "second", shift=False),
        layer(gated("silu", bias=True), "causal", norms=RMS, evidence=SQRT),
    ),
    _spelled(
        "google-tunix/qwen2",
        qwen2,
        GATED | HEADS | BIASES,
        layer(
            gated("silu"), "masked", projections=0, linear=3, no_bias=1, siblings=1, norms=RMS, evidence=(("dot", 1),)
        ),
        inputs=positioned,
    ),
    _spelled(
        "google-tunix/gemma2",
        gemma2,
        GATED
        | {"query": (C.heads, C.model, C.head), "pair": (2, C.kv_heads, C.model, C.head), "output": HEADS["output"]}
        | norms(C.model, "behind", "last", shift=False),
        layer(
            gated("gelu_tanh"),
            "masked",
            projections=3,
            bias=False,
            whole=False,
            norms=RMS,
            rms_norms=2,
            evidence=(("tanh", 1), ("root", 1)),
        ),
        inputs=positioned,
    ),
    _spelled(
        "google-tunix/llama3",
        llama3,
        GATED | HEADS,
        layer(gated("silu"), "masked", bias=False, norms=RMS),
        inputs=positioned,
    ),
)
