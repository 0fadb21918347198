"""Layers of the Flax models in transformers; parameters are f32 and cast where they are used."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from zoo.config import GROUPED, Part, Sizes
from zoo.model import Model, key_struct

from ..parts import LONGEST, gated, layer, mlp
from .layers import (
    Array,
    Params,
    attention_weights,
    causal_and_padding,
    causal_positions,
    dense,
    layer_norm,
    mask_bias,
    merge_heads,
    norms,
    padding,
    products,
    rotate_half,
    spelled,
    split_heads,
)

DROPPED = 0.1


def projected(p: Params, x: Array, heads: int, dtype: Any) -> tuple[Array, ...]:
    return tuple(split_heads(dense(p, name, x, dtype), heads) for name in ("query", "key", "value"))


def weighted(w: Array, v: Array) -> Array:
    return merge_heads(jnp.einsum("...hqk,...khd->...qhd", w, v))


def opt(c: Sizes, dtype: Any, p: Params, x: Array, mask: Array) -> Array:
    """Norms first; the feed-forward part is of rows of all texts."""
    h = layer_norm(p, "first", x, dtype, 1e-5)
    q, k, v = projected(p, h, c.heads, dtype)
    bias = causal_and_padding(causal_positions(LONGEST), mask, LONGEST, dtype)
    x = x + dense(p, "output", weighted(attention_weights(q, k, bias, dtype), v), dtype)
    rows = x.reshape(-1, x.shape[-1])
    h = layer_norm(p, "second", rows, dtype, 1e-5)
    h = dense(p, "down", jax.nn.relu(dense(p, "up", h, dtype)), dtype)
    return (rows + h).reshape(x.shape)


def gpt_neo(c: Sizes, dtype: Any, p: Params, x: Array, mask: Array) -> Array:
    """A local layer; queries times the root of their width, by which the attention divides them."""
    h = layer_norm(p, "first", x, dtype, 1e-5)
    q = dense(p, "query", h, dtype) * jnp.sqrt(c.head).astype(dtype)
    k, v = (dense(p, name, h, dtype) for name in ("key", "value"))
    q, k, v = (split_heads(x, c.heads) for x in (q, k, v))
    causal = causal_positions(LONGEST)
    bias = causal_and_padding(causal ^ jnp.tril(causal, -4), mask, LONGEST, dtype)
    x = dense(p, "output", weighted(attention_weights(q, k, bias, dtype), v), dtype) + x
    h = layer_norm(p, "second", x, dtype, 1e-5)
    return x + dense(p, "down", jax.nn.gelu(dense(p, "up", h, dtype)), dtype)


def rms_norm(scale: Array, x: Array, dtype: Any) -> Array:
    variance = jnp.power(x.astype(jnp.float32), 2).mean(-1, keepdims=True)
    return scale * (x / jnp.sqrt(variance + 1e-6)).astype(dtype)


def turned(q: Array, k: Array, dtype: Any) -> tuple[Array, Array]:
    """Rotary embeddings from a table that NumPy made, at positions that are data of the program."""
    width, positions = q.shape[-1], jnp.broadcast_to(jnp.arange(q.shape[1])[None], q.shape[:2])
    angles = np.outer(np.arange(LONGEST), 1.0 / 10000 ** (np.arange(0, width, 2) / width)).astype("float32")
    both = np.concatenate((angles, angles), -1)[:, None]
    table = jnp.array(np.concatenate((np.sin(both), np.cos(both)), -1))[positions]
    sin, cos = jnp.split(table, 2, -1)
    q, k = ((x * cos + rotate_half(x) * sin).astype(dtype) for x in (q, k))
    return q, k


def grouped(c: Sizes, dtype: Any, p: Params, x: Array, bias: Array) -> Array:
    """Grouped heads, repeated; with bf16, scores are of widened queries and keys."""
    q = split_heads(dense(p, "query", x, dtype), c.heads)
    k, v = (split_heads(dense(p, name, x, dtype), c.kv_heads) for name in ("key", "value"))
    q, k = turned(q, k, dtype)
    k, v = (jnp.repeat(x, c.heads // c.kv_heads, 2) for x in (k, v))
    weights = attention_weights(q, k, bias, jnp.float32).astype(dtype)
    return dense(p, "output", weighted(weights, v), dtype)


def gate(p: Params, x: Array, activation: Any, dtype: Any) -> Array:
    up = dense(p, "up", x, dtype)
    return dense(p, "down", up * activation(dense(p, "gate", x, dtype)), dtype)


def gemma(c: Sizes, dtype: Any, p: Params, x: Array, mask: Array) -> Array:
    """The first layer, whose input is embeddings times a number."""
    x = x * c.model**0.5
    bias = causal_and_padding(causal_positions(LONGEST), mask, LONGEST, dtype)
    x = x + grouped(c, dtype, p, rms_norm(1 + p["first"], x, dtype), bias)
    return x + gate(p, rms_norm(1 + p["second"], x, dtype), jax.nn.gelu, dtype)


def mistral(c: Sizes, dtype: Any, p: Params, x: Array, mask: Array) -> Array:
    bias = causal_and_padding(jnp.triu(causal_positions(LONGEST), -4), mask, LONGEST, dtype)
    x = x + grouped(c, dtype, p, rms_norm(p["first"], x, dtype), bias)
    return x + gate(p, rms_norm(p["second"], x, dtype), jax.nn.silu, dtype)


def bloom(c: Sizes, dtype: Any, p: Params, x: Array, mask: Array) -> Array:
    """A head's query, key and value side by side; slopes times positions that padding does not count."""
    base = jnp.array(2 ** (-(2 ** -(math.log2(c.heads) - 3))), jnp.float32)
    slopes = lax.pow(base, jnp.arange(1, 1 + c.heads, dtype=jnp.float32))
    alibi = slopes[..., None] * ((mask.cumsum(-1) - 1) * mask)[:, None, :]
    alibi = jnp.expand_dims(alibi, 2).astype(dtype)
    h = layer_norm(p, "first", x, dtype, 1e-5)
    q, k, v = jnp.split(split_heads(dense(p, "query", h, dtype), c.heads), 3, -1)
    bias = causal_and_padding(causal_positions(c.length), mask, c.length, dtype) + alibi
    weights = attention_weights(q, k, bias, jnp.float32).astype(dtype)
    x = dense(p, "output", weighted(weights, v), dtype) + x
    h = dense(p, "up", layer_norm(p, "second", x, dtype, 1e-5), dtype)
    h = h * 0.5 * (1.0 + jnp.tanh(0.79788456 * h * (1 + 0.044715 * h * h)))
    return dense(p, "down", h, dtype) + x


def dropped(x: Array, key: Array) -> Array:
    keep = jax.random.bernoulli(key, 1 - DROPPED, x.shape)
    return lax.select(keep, x / (1 - DROPPED), jnp.zeros_like(x))


def by_heads(w: Array, heads: Array) -> Array:
    """Weights of attention times a number for each head, as an einsum."""
    return jnp.einsum("...hqk,h->...hqk", w, heads)


def electra(c: Sizes, dtype: Any, p: list[Params], x: Array, mask: Array, key: Array) -> Array:
    """Two layers with dropout of weights, which all texts and heads share, and of both parts; the layers' heads in one array."""
    heads = jnp.ones((len(p), c.heads)).astype(jnp.int32)
    for i, one in enumerate(p):
        x = electra_layer(c, dtype, one, x, mask, jax.random.split(jax.random.fold_in(key, i), 3), heads[i])
    return x


def electra_layer(c: Sizes, dtype: Any, p: Params, x: Array, mask: Array, keys: Array, heads: Array) -> Array:
    q, k, v = projected(p, x, c.heads, dtype)
    w = attention_weights(q, k, mask_bias(jnp.expand_dims(mask, (-3, -2)), dtype), dtype)
    keep = jax.random.bernoulli(keys[0], 1 - DROPPED, (1, 1, *w.shape[-2:]))
    w = w * (keep.astype(dtype) / jnp.asarray(1 - DROPPED, dtype))
    h = dropped(dense(p, "output", weighted(by_heads(w, heads), v), dtype), keys[1])
    x = layer_norm(p, "first", h + x, dtype, 1e-12)
    h = jax.nn.gelu(dense(p, "up", x, dtype), approximate=False)
    return layer_norm(p, "second", dropped(dense(p, "down", h, dtype), keys[2]) + x, dtype, 1e-12)


def bart(c: Sizes, dtype: Any, p: Params, x: Array, mask: Array) -> Array:
    """A layer of the encoder, norms behind."""
    q, k, v = projected(p, x, c.heads, dtype)
    w = attention_weights(q, k, mask_bias(jnp.expand_dims(mask, (-3, -2)), dtype), dtype)
    x = layer_norm(p, "first", x + dense(p, "output", weighted(w, v), dtype), dtype, 1e-5)
    h = jax.nn.gelu(dense(p, "up", x, dtype), approximate=False)
    return layer_norm(p, "second", x + dense(p, "down", h, dtype), dtype, 1e-5)


def roformer(c: Sizes, dtype: Any, p: Params, x: Array, mask: Array) -> Array:
    """Neighbours are turned as pairs, by einsums with a table for each pair twice."""
    q, k, v = projected(p, x, c.heads, dtype)
    angles = np.outer(np.arange(LONGEST), 1.0 / 10000 ** (np.arange(0, c.head, 2) / c.head))
    table = jnp.array(np.concatenate((np.sin(angles), np.cos(angles)), -1), jnp.float32)[: c.length]
    sin, cos = (jnp.stack([t, t], -1).reshape(c.length, c.head) for t in jnp.split(table, 2, -1))

    def turned(x: Array) -> Array:
        pairs = jnp.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
        return jnp.einsum("bslh,...sh->bslh", x, cos) + jnp.einsum("bslh,...sh->bslh", pairs, sin)

    w = attention_weights(turned(q), turned(k), mask_bias(jnp.expand_dims(mask, (-3, -2)), dtype), dtype)
    w = by_heads(w, jnp.ones((1, c.heads)).astype(jnp.int32)[0])
    x = layer_norm(p, "first", dense(p, "output", weighted(w, v), dtype) + x, dtype, 1e-12)
    h = jax.nn.gelu(dense(p, "up", x, dtype), approximate=False)
    return layer_norm(p, "second", dense(p, "down", h, dtype) + x, dtype, 1e-12)


def shapes(c: Sizes, **others: Any) -> dict[str, Any]:
    """The products and norms of a plain layer."""
    square = dict.fromkeys(("query", "key", "value", "output"), (c.model, c.model))
    weights = square | {"up": (c.model, c.hidden), "down": (c.hidden, c.model)} | others
    return products(**weights) | norms(c.model, "first", "second")


def gated_shapes(c: Sizes) -> dict[str, Any]:
    pair = dict.fromkeys(("key", "value"), (c.model, c.kv_heads * c.head))
    wide = dict.fromkeys(("gate", "up"), (c.model, c.hidden))
    weights = {"query": (c.model, c.model), "output": (c.model, c.model), "down": (c.hidden, c.model)} | pair | wide
    return products(bias=False, **weights) | norms(c.model, "first", "second", shift=False)


def without(names: tuple[str, ...], of: dict[str, Any]) -> dict[str, Any]:
    return {name: shape for name, shape in of.items() if name not in names}


C = Sizes()
BLOOM = Sizes(hidden=4 * C.model)
SQRT = (("root", 1),)
RMS: dict[str, Any] = {"norms": "rms_norms"}
PLAIN = layer(mlp("gelu_erf"), "masked", evidence=SQRT)
HEADS = (*SQRT, ("dot", 1))
NEO = layer(mlp("gelu_tanh"), "masked", projections=0, linear=1, no_bias=3, siblings=1, evidence=(("root", 2),))
KEYED = lambda c, dtype: [*padding(c, dtype), key_struct()]  # noqa: E731


def _spelled(
    name: str, function: Any, of: dict[str, Any], part: Part, sizes: Sizes = C, inputs: Any = padding, times: int = 0
) -> Model:
    return spelled(f"transformers/{name}", function, of, part, sizes, inputs, wide=True, times=times)


MODELS: tuple[Model, ...] = (
    _spelled("opt", opt, shapes(C), layer(mlp("relu"), "masked", evidence=SQRT)),
    _spelled("gpt_neo", gpt_neo, without(("query_b", "key_b", "value_b"), shapes(C)), NEO),
    _spelled(
        "gemma",
        gemma,
        gated_shapes(GROUPED),
        layer(gated("gelu_tanh"), "masked", bias=False, evidence=SQRT, **RMS),
        GROUPED,
    ),
    _spelled(
        "mistral",
        mistral,
        gated_shapes(GROUPED),
        layer(gated("silu"), "masked", bias=False, evidence=SQRT, **RMS),
        GROUPED,
    ),
    _spelled(
        "bloom",
        bloom,
        without(("key", "value", "key_b", "value_b"), shapes(BLOOM, query=(C.model, 3 * C.model))),
        layer(mlp("gelu_tanh"), "masked", projections=2, evidence=SQRT),
        BLOOM,
    ),
    _spelled(
        "electra",
        electra,
        shapes(C),
        layer(mlp("gelu_erf"), "masked", whole=False, evidence=HEADS),
        inputs=KEYED,
        times=2,
    ),
    _spelled("bart", bart, shapes(C), PLAIN),
    _spelled("roformer", roformer, shapes(C), layer(mlp("gelu_erf"), "masked", evidence=(*SQRT, ("dot", 5)))),
)
