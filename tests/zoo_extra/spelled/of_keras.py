"""Layers of Keras 3: norms as scale and shift, biases of heads; with bf16 variables are f32 and cast where they are used."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from zoo.config import GROUPED, Sizes
from zoo.model import Model, struct

from ..parts import gated, layer, mlp
from .layers import Array, Params, norms, products, spelled


def layer_norm(p: Params, name: str, x: Array, dtype: Any, epsilon: float) -> Array:
    """x times a factor, plus a shift that has the mean in it."""
    x = x.astype(jnp.float32)
    mean, variance = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
    scale, shift = p[name].reshape(1, 1, -1), p[f"{name}_b"].reshape(1, 1, -1)
    factor = jax.lax.rsqrt(variance + epsilon) * scale
    return (x * factor + (-mean * factor + shift)).astype(dtype)


def rms_norm(scale: Array, x: Array, dtype: Any) -> Array:
    x = x.astype(jnp.float32)
    factor = jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)
    return (x * factor * scale).astype(dtype)


def dense(p: Params, name: str, x: Array, dtype: Any) -> Array:
    y = jnp.matmul(x, p[name].astype(dtype))
    bias = p.get(f"{name}_b")
    return y if bias is None else y + bias.astype(dtype)


def heads(p: Params, name: str, x: Array, dtype: Any) -> Array:
    y = jnp.einsum("abc,cde->abde", x, p[name].astype(dtype))
    bias = p.get(f"{name}_b")
    return y if bias is None else y + bias.astype(dtype)


def joined(p: Params, x: Array, dtype: Any) -> Array:
    y = jnp.einsum("abcd,cde->abe", x, p["output"].astype(dtype))
    bias = p.get("output_b")
    return y if bias is None else y + bias.astype(dtype)


def step_by_step(p: Params, x: Array, dtype: Any, mask: Array | None = None) -> Array:
    """Attention as it is computed where dropout may be: weights of masked keys are set to zero once more."""
    q, k, v = (heads(p, name, x, dtype) for name in ("query", "key", "value"))
    q = q * jnp.asarray(1 / q.shape[-1] ** 0.5, dtype)
    scores = jnp.einsum("aecd,abcd->acbe", k, q)
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9 if dtype != jnp.float16 else -3e4)
    w = jax.nn.softmax(scores, -1)
    if mask is not None:
        w = jnp.where(mask, w, 0.0)
    return joined(p, jnp.einsum("acbe,aecd->abcd", w, v), dtype)


def bert(c: Sizes, dtype: Any, p: Params, x: Array, mask: Array) -> Array:
    """Norms behind, a mask over keys."""
    seen = jnp.expand_dims(jnp.expand_dims(mask, 1), -3)
    x = layer_norm(p, "first", x + step_by_step(p, x, dtype, seen), dtype, 1e-12)
    h = jax.nn.gelu(dense(p, "up", x, dtype), approximate=False)
    return layer_norm(p, "second", x + dense(p, "down", h, dtype), dtype, 1e-12)


def gpt(c: Sizes, dtype: Any, p: Params, x: Array) -> Array:
    h = layer_norm(p, "first", x, dtype, 1e-5)
    q, k, v = (heads(p, name, h, dtype) for name in ("query", "key", "value"))
    x = x + joined(p, jax.nn.dot_product_attention(q, k, v, scale=1 / c.head**0.5, is_causal=True), dtype)
    h = jax.nn.gelu(dense(p, "up", layer_norm(p, "second", x, dtype, 1e-5), dtype), approximate=True)
    return x + dense(p, "down", h, dtype)


def vit(c: Sizes, dtype: Any, p: Params, x: Array) -> Array:
    x = x + step_by_step(p, layer_norm(p, "first", x, dtype, 1e-6), dtype)
    h = jax.nn.gelu(dense(p, "up", layer_norm(p, "second", x, dtype, 1e-6), dtype), approximate=False)
    return x + dense(p, "down", h, dtype)


def grouped(c: Sizes, dtype: Any, p: Params, x: Array) -> Array:
    """Grouped heads, repeated; no biases."""
    h = rms_norm(p["first"], x, dtype)
    q, k, v = (heads(p, name, h, dtype) for name in ("query", "key", "value"))
    k, v = (jnp.repeat(x, c.heads // c.kv_heads, axis=2) for x in (k, v))
    x = x + joined(p, jax.nn.dot_product_attention(q, k, v, scale=1 / c.head**0.5, is_causal=True), dtype)
    h = rms_norm(p["second"], x, dtype)
    return x + dense(p, "down", jax.nn.silu(dense(p, "gate", h, dtype)) * dense(p, "up", h, dtype), dtype)


def attending(c: Sizes, kv_heads: int, bias: bool) -> dict[str, Any]:
    shapes: dict[str, Any] = {"query": (c.model, c.heads, c.head), "output": (c.heads, c.head, c.model)}
    shapes |= dict.fromkeys(("key", "value"), (c.model, kv_heads, c.head))
    biases = {"query_b": (c.heads, c.head), "key_b": (kv_heads, c.head), "value_b": (kv_heads, c.head)}
    return shapes | (biases | {"output_b": (c.model,)} if bias else {})


C, G, V = Sizes(), GROUPED, Sizes(length=6)
PLAIN = attending(C, C.heads, True) | products(up=(C.model, C.hidden), down=(C.hidden, C.model))
PLAIN |= norms(C.model, "first", "second")
WIDE = dict.fromkeys(("gate", "up"), (G.model, G.hidden))
GATED = attending(G, G.kv_heads, False) | products(bias=False, down=(G.hidden, G.model), **WIDE)
GATED |= norms(G.model, "first", "second", shift=False)
_spelled = partial(spelled, wide=True)
MODELS: tuple[Model, ...] = (
    _spelled(
        "keras/bert",
        bert,
        PLAIN,
        layer(mlp("gelu_erf"), "masked"),
        inputs=lambda c, _: [struct((c.batch, c.length), jnp.bool_)],
    ),
    _spelled("keras/gpt", gpt, PLAIN, layer(mlp("gelu_tanh"), "causal")),
    _spelled("keras/vit", vit, PLAIN, layer(mlp("gelu_erf"), "unmasked"), V),
    _spelled("keras/grouped_decoder", grouped, GATED, layer(gated("silu"), "causal", bias=False, norms="rms_norms"), G),
)
