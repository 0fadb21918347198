"""Layers of equimo, esm2quinox and jaxonmodels, which are written on Equinox: of one text, mapped; weights are `[out, in]`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from zoo.config import Sizes
from zoo.model import Model, Shape, struct

from ..parts import QUADRUPLE, layer, mlp, packed
from .layers import Array, Layer, Params, norms, scanned, spelled, stacked


def mapped(layer: Callable[..., Array]) -> Layer:
    """A layer of one text, for several."""
    return lambda c, dtype, p, x, *rest: jax.vmap(partial(layer, c, dtype, p))(x, *rest)


def linear(p: Params, name: str, x: Array) -> Array:
    return jax.vmap(lambda v: p[name] @ v + p[f"{name}_b"])(x)


def norm(p: Params, name: str, x: Array, epsilon: float) -> Array:
    def one(v: Array) -> Array:
        wide = v.astype(jnp.float32)
        mean, variance = jnp.mean(wide, keepdims=True), jnp.maximum(0.0, jnp.var(wide, keepdims=True))
        out = (wide - mean) * jax.lax.rsqrt(variance + epsilon)
        return (p[name].astype(jnp.float32) * out + p[f"{name}_b"].astype(jnp.float32)).astype(v.dtype)

    return jax.vmap(one)(x)


def dinov2(c: Sizes, dtype: Any, p: Params, x: Array) -> Array:
    """equimo: one product for queries, keys and values; a packed SwiGLU; a factor for each feature before each sum."""
    h = linear(p, "query", norm(p, "first", x, 1e-6)).reshape(c.length, 3, c.heads, c.head)
    q, k, v = jnp.transpose(h, (1, 2, 0, 3))
    scores = jnp.einsum("hqd,hkd->hqk", q, k) / jnp.sqrt(c.head).astype(dtype)
    w = jax.nn.softmax(scores.astype(jnp.float32), -1).astype(dtype)
    o = jnp.transpose(jnp.einsum("hqk,hkd->hqd", w, v), (1, 0, 2)).reshape(x.shape)
    x = x + linear(p, "output", o) * p["scale1"].reshape(1, -1)
    gate, up = jnp.split(linear(p, "up", norm(p, "second", x, 1e-6)), 2, axis=-1)
    return x + linear(p, "down", jax.nn.silu(gate) * up) * p["scale2"].reshape(1, -1)


def esm2(c: Sizes, dtype: Any, p: Params, x: Array, pad: Array) -> Array:
    """esm2quinox: Equinox's attention, mapped over heads, with its rotary embedding."""
    mask = jnp.broadcast_to(jnp.logical_not(pad), (c.length, c.length))
    frequency = 1.0 / 10_000.0 ** (jnp.arange(0.0, c.head, 2)[None] / c.head)
    angles = jnp.outer(jnp.arange(float(c.length)), frequency)
    cos, sin = (jnp.tile(f(angles).astype(dtype), (1, 2)) for f in (jnp.cos, jnp.sin))

    def turned(x: Array) -> Array:
        half = x.shape[-1] // 2
        return x * cos + jnp.concatenate([-x[..., half:], x[..., :half]], -1) * sin

    def attention(q: Array, k: Array, v: Array) -> Array:
        scores = jnp.einsum("sd,Sd->sS", q / math.sqrt(q.shape[-1]), k)
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
        return jnp.einsum("sS,Sd->sd", jax.nn.softmax(scores.astype(jnp.float32)).astype(dtype), v)

    h = norm(p, "first", x, 1e-5)
    q, k, v = (linear(p, name, h).reshape(c.length, c.heads, -1) for name in ("query", "key", "value"))
    q, k = (jax.vmap(turned, 1, 1)(x) for x in (q, k))
    x = x + linear(p, "output", jax.vmap(attention, 1, 1)(q, k, v).reshape(x.shape))
    h = jax.nn.gelu(linear(p, "up", norm(p, "second", x, 1e-5)), approximate=False)
    return x + linear(p, "down", h)


def clip(c: Sizes, dtype: Any, p: Params, x: Array) -> Array:
    """jaxonmodels: queries, keys and values by thirds of one weight."""
    h = norm(p, "first", x, 1e-5)
    weights, biases = jnp.split(p["query"], 3), jnp.split(p["query_b"], 3)
    projected = [h @ w.T for w in weights]
    q, k, v = (
        jnp.transpose((y + b).reshape(c.length, c.heads, c.head), (1, 0, 2))
        for y, b in zip(projected, biases, strict=True)
    )
    scores = jnp.matmul(q, jnp.transpose(k, (0, 2, 1))) / jnp.sqrt(c.head)
    o = jnp.transpose(jnp.matmul(jax.nn.softmax(scores, -1), v), (1, 0, 2)).reshape(x.shape)
    x = x + linear(p, "output", o)
    return x + linear(p, "down", jax.nn.gelu(linear(p, "up", norm(p, "second", x, 1e-5))))


def outward(**weights: tuple[int, int]) -> dict[str, Shape]:
    """The shapes of weights `[out, in]` and of their biases."""
    return {**weights} | {f"{n}_b": shape[:1] for n, shape in weights.items()}


def shapes(c: Sizes, **others: tuple[int, int]) -> dict[str, Shape]:
    square = {"query": (c.model, c.model), "output": (c.model, c.model)}
    weights = square | {"up": (c.hidden, c.model), "down": (c.model, c.hidden)} | others
    return outward(**weights) | norms(c.model, "first", "second")


D, Q = Sizes(length=12, hidden=88), QUADRUPLE
FUSED, SQRT = (3 * Q.model, Q.model), (("root", 1),)
MODELS: tuple[Model, ...] = (
    spelled(
        "equimo/dinov2",
        mapped(dinov2),
        shapes(D, query=FUSED, up=(2 * D.hidden, D.model)) | {"scale1": (D.model,), "scale2": (D.model,)},
        layer(packed("silu"), "unmasked", projections=2, evidence=SQRT),
        D,
    ),
    spelled(
        "esm2quinox/esm2",
        mapped(scanned(esm2)),
        stacked(shapes(Q, key=(Q.model, Q.model), value=(Q.model, Q.model))),
        layer(mlp("gelu_erf"), "masked"),
        Q,
        lambda c, _: [struct((c.batch, c.length), jnp.bool_)],
    ),
    spelled(
        "jaxonmodels/clip", mapped(clip), shapes(Q, query=FUSED), layer(mlp("gelu_tanh"), "unmasked", evidence=SQRT), Q
    ),
)
