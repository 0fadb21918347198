"""Layers of diffusers, flaxmodels, jax-models and nanodl, which are written on Flax's linen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from zoo.config import Part, Sizes
from zoo.model import Model, struct

from ..parts import LONGEST, QUADRUPLE, add, layer, mlp, packed
from .layers import Array, Params, dense, layer_norm, merge_heads, norms, products, spelled


def spatial(c: Sizes, dtype: Any, p: Params, x: Array, text: Array) -> Array:
    """diffusers: to itself, to a text, and a packed gate; heads are joined with the texts for the products."""

    def parted(x: Array) -> Array:
        x = x.reshape(c.batch, -1, c.heads, c.head)
        return jnp.transpose(x, (0, 2, 1, 3)).reshape(c.batch * c.heads, -1, c.head)

    def attention(name: str, x: Array, source: Array) -> Array:
        q = dense(p, f"{name}_query", x, dtype)
        k, v = (dense(p, f"{name}_{kind}", source, dtype) for kind in ("key", "value"))
        q, k, v = parted(q), parted(k), parted(v)
        scores = jnp.einsum("b i d, b j d->b i j", q, k) * c.head**-0.5
        o = jnp.einsum("b i j, b j d -> b i d", jax.nn.softmax(scores, 2), v)
        o = jnp.transpose(o.reshape(c.batch, c.heads, -1, c.head), (0, 2, 1, 3)).reshape(c.batch, -1, c.model)
        return dense(p, f"{name}_output", o, dtype)

    h = layer_norm(p, "first", x, dtype, 1e-5)
    x = attention("itself", h, h) + x
    x = attention("text", layer_norm(p, "second", x, dtype, 1e-5), text) + x
    linear, gate = jnp.split(dense(p, "up", layer_norm(p, "third", x, dtype, 1e-5), dtype), 2, axis=2)
    return dense(p, "down", linear * jax.nn.gelu(gate), dtype) + x


def gpt2(c: Sizes, dtype: Any, p: Params, x: Array) -> Array:
    """flaxmodels: norms give f32 whatever the parameters are."""
    wide = jnp.result_type(dtype, jnp.float32)
    h = layer_norm(p, "first", x, wide, 1e-5)
    q, k, v = (
        jnp.transpose(x.reshape(*x.shape[:2], c.heads, c.head), (0, 2, 1, 3))
        for x in jnp.split(dense(p, "query", h, wide), 3, axis=2)
    )
    causal = jnp.tril(jnp.ones((1, 1, LONGEST, LONGEST)))[:, :, : c.length, : c.length].astype(bool)
    scores = jnp.matmul(q, jnp.swapaxes(k, -1, -2)) / (float(c.head) ** 0.5)
    w = jax.nn.softmax(jnp.where(causal, scores, -1e4), -1)
    o = merge_heads(jnp.transpose(jnp.matmul(w, v), (0, 2, 1, 3)))
    x = dense(p, "output", o, wide) + x
    h = dense(p, "up", layer_norm(p, "second", x, wide, 1e-5), wide)
    h = 0.5 * h * (1.0 + jnp.tanh((2.0 / jnp.pi) ** 0.5 * (h + 0.044715 * jnp.power(h, 3.0))))
    return dense(p, "down", h, wide) + x


def encoder(c: Sizes, dtype: Any, p: Params, x: Array) -> Array:
    """jax-models: queries, keys and values of one product, as parts of an axis of three."""
    h = layer_norm(p, "first", x, dtype)
    q, k, v = jnp.transpose(dense(p, "query", h, dtype).reshape(*x.shape[:2], 3, c.heads, c.head), (2, 0, 3, 1, 4))
    w = jax.nn.softmax((q @ jnp.swapaxes(k, -2, -1)) * c.head**-0.5, -1)
    x = x + dense(p, "output", (w @ v).swapaxes(1, 2).reshape(x.shape), dtype)
    h = jax.nn.gelu(dense(p, "up", layer_norm(p, "second", x, dtype), dtype))
    return x + dense(p, "down", h, dtype)


def vit(c: Sizes, dtype: Any, p: Params, x: Array) -> Array:
    """nanodl: heads are cut across positions and features, norms stand behind."""
    q, k, v = jnp.array_split(dense(p, "query", x, dtype), 3, axis=-1)
    q, k, v = (x.reshape(c.batch, c.heads, c.length, c.head) for x in (q, k, v))
    scores = jnp.matmul(q, k.transpose(0, 1, 3, 2)) / jnp.sqrt(c.model)
    o = jnp.matmul(jax.nn.softmax(scores, -1), v).reshape(x.shape)
    x = layer_norm(p, "first", dense(p, "output", o, dtype) + x, dtype)
    h = dense(p, "down", jax.nn.gelu(dense(p, "up", x, dtype)), dtype)
    return layer_norm(p, "second", h + x, dtype)


def shapes(c: Sizes) -> dict[str, Any]:
    weights = {"query": (c.model, 3 * c.model), "output": (c.model, c.model)}
    return products(**weights, up=(c.model, c.hidden), down=(c.hidden, c.model)) | norms(c.model, "first", "second")


def spatial_shapes(c: Sizes, text: int) -> dict[str, Any]:
    square = ("itself_query", "itself_key", "itself_value", "text_query")
    weights = dict.fromkeys(square, (c.model, c.model)) | dict.fromkeys(("text_key", "text_value"), (text, c.model))
    biased = dict.fromkeys(("itself_output", "text_output"), (c.model, c.model))
    biased |= {"up": (c.model, 2 * c.hidden), "down": (c.hidden, c.model)}
    return products(bias=False, **weights) | products(**biased) | norms(c.model, "first", "second", "third")


C, V = Sizes(), Sizes(length=6, hidden=Sizes().model)
IMAGE = Sizes(model=64, head=16, hidden=256)
TEXT = 20
MODELS: tuple[Model, ...] = (
    spelled(
        "diffusers/spatial_transformer",
        spatial,
        spatial_shapes(IMAGE, TEXT),
        add(packed("gelu_tanh"), Part(linear=2, no_bias=6, attentions=("unmasked",) * 2, layer_norms=3, siblings=1)),
        IMAGE,
        lambda c, dtype: [struct((c.batch, c.keys, TEXT), dtype)],
        wide=True,
    ),
    spelled("flaxmodels/gpt2", gpt2, shapes(C), layer(mlp("gelu_tanh"), "causal", projections=2)),
    spelled(
        "jax-models/masked_autoencoder",
        encoder,
        shapes(QUADRUPLE),
        layer(mlp("gelu_tanh"), "unmasked", projections=2),
        QUADRUPLE,
    ),
    spelled(
        "nanodl/vit", vit, shapes(V), layer(mlp("gelu_tanh"), "unmasked", projections=2, evidence=(("root", 1),)), V
    ),
)
