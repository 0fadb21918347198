"""A train step as users of Equinox write it: a small vision transformer of one example, mapped over the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

WIDTH, HEADS, LAYERS, CLASSES, PATCHES = 384, 6, 6, 1000, 196
RULE = optax.adamw(1e-3)


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=first)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, activation=jax.nn.gelu, key=second)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jax.vmap(self.norm1)(x)
        x = x + self.attention(h, h, h)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))


class Classifier(eqx.Module):
    patches: eqx.nn.Linear
    positions: jax.Array
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, LAYERS + 3)
        self.patches = eqx.nn.Linear(768, WIDTH, key=keys[0])
        self.positions = jax.random.normal(keys[1], (PATCHES, WIDTH))
        self.blocks = [Block(k) for k in keys[3:]]
        self.head = eqx.nn.Linear(WIDTH, CLASSES, key=keys[2])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.vmap(self.patches)(x) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(0))


def compute_loss(model: Classifier, x: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), labels).mean()


def make_step(model: Classifier, state: Any, x: jax.Array, labels: jax.Array) -> tuple[Classifier, Any, jax.Array]:
    loss, grads = eqx.filter_value_and_grad(compute_loss)(model, x, labels)
    updates, state = RULE.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, loss


def start() -> tuple[Classifier, Any]:
    model = Classifier(jax.random.key(0))
    return model, RULE.init(eqx.filter(model, eqx.is_inexact_array))


def program() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    x, labels = jax.ShapeDtypeStruct((64, PATCHES, 768), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32)
    return eqx.filter_jit(make_step), (*eqx.filter_eval_shape(start), x, labels)
