"""Layers of Penzai: everything is mapped over the axes that it does not name, and numbers are arrays made before."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from zoo.config import GROUPED, Part, Sizes
from zoo.model import Model

from ..parts import gated, layer, mlp
from .layers import Array, Params, norms, products, scanned, spelled, stacked

LOW = -2.3819763e38


def number(value: float, dtype: Any) -> Array:
    """A number as an array that is there before the program is traced."""
    with jax.ensure_compile_time_eval():
        return jnp.asarray(value, dtype)


def each(function: Any, x: Array) -> Array:
    """A function of the features, for each text and position."""
    return jax.vmap(jax.vmap(function))(x)


def scaled(x: Array, scale: Array) -> Array:
    return jnp.einsum("bte,e->bte", x, scale)


def rms_norm(scale: Array, x: Array, dtype: Any) -> Array:
    epsilon = number(1e-6, dtype)
    return scaled(each(lambda v: v * jax.lax.rsqrt(jnp.mean(jnp.square(v)) + epsilon), x), scale)


def layer_norm(p: Params, name: str, x: Array) -> Array:
    standard = each(partial(jax.nn.standardize, epsilon=1e-5), x)
    return scaled(standard, p[name]) + p[f"{name}_b"]


def turned(x: Array, positions: Array) -> Array:
    """Rotary embedding of `[batch, length, ..., head]`."""

    def one(v: Array, position: Array) -> Array:
        width = v.shape[-1]
        angle = position / 10_000.0 ** (2 * jnp.arange(0, width // 2) / width)
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        first, second = jnp.split(v, 2)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin])

    for _ in range(x.ndim - 3):
        one = jax.vmap(one, (0, None))
    return jax.vmap(jax.vmap(one), (0, None))(x, positions).astype(x.dtype)


def masked(scores: Array, mask: Array, low: Array) -> Array:
    """The weights, `[query, batch, ..., key]`, of scores `[batch, query, ..., key]`."""
    chosen, weigh = jnp.where, jax.nn.softmax
    for _ in range(scores.ndim - 3):
        chosen, weigh = jax.vmap(chosen, (None, 0, None)), jax.vmap(weigh, 1)
    chosen, weigh = jax.vmap(chosen, (None, 0, None)), jax.vmap(weigh, 1)  # texts
    chosen = jax.vmap(jax.vmap(chosen, (0, -1, None)), (0, 1, None))  # keys, queries
    return jax.vmap(weigh)(chosen(mask, scores, low))


def causal(positions: Array) -> Array:
    later = positions[:, None] >= positions[None, :]
    return later & (positions >= 0)[None, :]


def window(positions: Array, size: int) -> Array:
    near = positions[:, None] - positions[None, :] < size
    return (positions[:, None] >= positions[None, :]) & near & (positions >= 0)[None, :]


def gate(p: Params, x: Array, activation: Any) -> Array:
    return jnp.einsum("bte,ed->btd", activation(x @ p["gate"]) * (x @ p["up"]), p["down"])


def gemma(c: Sizes, dtype: Any, p: Params, x: Array) -> Array:
    """One head of keys and values, which has no axis; the layer's input is embeddings times a number."""
    x = x * number(c.model**0.5, dtype)
    positions = jnp.arange(c.length)
    h = rms_norm(p["first"], x, dtype)
    q = turned(jnp.einsum("bte,ehp->bthp", h, p["query"]), positions) * number(c.head**-0.5, dtype)
    k, v = turned(jnp.einsum("bte,ep->btp", h, p["key"]), positions), jnp.einsum("bte,ep->btp", h, p["value"])
    scores = jnp.einsum("bthp,bsp->bths", q, k)
    w = masked(scores, causal(positions), number(LOW, dtype))
    o = jnp.einsum("tbhs,bsp->bthp", w, v)
    x = x + jnp.einsum("bthp,hpe->bte", o, p["output"])
    return x + gate(p, rms_norm(p["second"], x, dtype), partial(jax.nn.gelu, approximate=True))


def mistral(c: Sizes, dtype: Any, p: Params, x: Array) -> Array:
    """Groups of heads have an axis of their own, which keys and values lack; a sliding window."""
    positions = jnp.arange(c.length)
    h = rms_norm(p["first"], x, dtype)
    q = turned(jnp.einsum("bte,ehqp->bthqp", h, p["query"]), positions) * number(c.head**-0.5, dtype)
    k = turned(jnp.einsum("bte,ehp->bthp", h, p["key"]), positions)
    v = jnp.einsum("bte,ehp->bthp", h, p["value"])
    scores = jnp.einsum("bthqp,bshp->bthqs", q, k)
    w = masked(scores, window(positions, 4), number(LOW, dtype))
    o = jnp.einsum("tbhqs,bshp->bthqp", w, v)
    x = x + jnp.einsum("bthqp,hqpe->bte", o, p["output"])
    return x + gate(p, rms_norm(p["second"], x, dtype), jax.nn.silu)


def affine(p: Params, name: str, equation: str, x: Array) -> Array:
    return jnp.einsum(equation, x, p[name]) + p[f"{name}_b"]


def gpt_neox(c: Sizes, dtype: Any, p: Params, x: Array) -> Array:
    """Both parts of one value; half of each head is turned."""
    positions = jnp.arange(c.length)
    h = layer_norm(p, "first", x)
    q, k, v = (affine(p, name, "bte,ehp->bthp", h) for name in ("query", "key", "value"))
    q, k = (jnp.concatenate([turned(x[..., :4], positions), x[..., 4:]], -1) for x in (q, k))
    scores = jnp.einsum("bthp,bshp->bths", q * number(c.head**-0.5, dtype), k)
    o = jnp.einsum("tbhs,bshp->bthp", masked(scores, causal(positions), number(LOW, dtype)), v)
    attended = affine(p, "output", "bthp,hpe->bte", o)
    h = jax.nn.gelu(affine(p, "up", "bte,ed->btd", layer_norm(p, "second", x)), approximate=False)
    return x + attended + affine(p, "down", "bte,ed->btd", h)


def shapes(c: Sizes, query: tuple[int, ...], key: tuple[int, ...]) -> dict[str, Any]:
    pair = dict.fromkeys(("key", "value"), (c.model, *key))
    wide = dict.fromkeys(("gate", "up"), (c.model, c.hidden))
    heads = {"query": (c.model, *query), "output": (*query, c.model), "down": (c.hidden, c.model)}
    return products(bias=False, **heads, **pair, **wide) | norms(c.model, "first", "second", shift=False)


def neox_shapes(c: Sizes) -> dict[str, Any]:
    heads = dict.fromkeys(("query", "key", "value"), (c.model, c.heads, c.head))
    others = {"output": (c.heads, c.head, c.model), "up": (c.model, c.hidden), "down": (c.hidden, c.model)}
    biases = {f"{name}_b": (c.heads, c.head) for name in heads}
    return products(**others) | heads | biases | norms(c.model, "first", "second")


def part(activation: str, mask: str) -> Part:
    return layer(gated(activation), mask, bias=False, norms="rms_norms", evidence=SCALES)


SCALES = (("dot", 2),)
G, C = GROUPED, Sizes()
MODELS: tuple[Model, ...] = (
    spelled("penzai/gemma", gemma, shapes(G, (G.heads, G.head), (G.head,)), part("gelu_tanh", "causal"), G),
    spelled(
        "penzai/mistral",
        scanned(mistral),
        stacked(shapes(G, (G.kv_heads, 3, G.head), (G.kv_heads, G.head))),
        part("silu", "masked"),
        G,
    ),
    spelled(
        "penzai/gpt_neox", gpt_neox, neox_shapes(C), layer(mlp("gelu_erf"), "causal", whole=False, evidence=SCALES)
    ),
)
