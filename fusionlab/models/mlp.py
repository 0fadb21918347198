"""A two-layer perceptron: `act(x @ w1 + b1) @ w2 + b2`.

Letters: `*B` any leading axes, K features in, F hidden, N features out.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .layers import Params, activation_named, dense, dense_init


def init(
    key: jax.Array, features_in: int = 64, hidden: int = 256, features_out: int = 64, dtype: Any = jnp.float32
) -> Params:
    """`{"fc1": {"w": [K, F], "b": [F]}, "fc2": {"w": [F, N], "b": [N]}}`."""
    key1, key2 = jax.random.split(key)
    return {"fc1": dense_init(key1, features_in, hidden, dtype), "fc2": dense_init(key2, hidden, features_out, dtype)}


def apply(params: Params, x: jax.Array, *, activation: str = "relu") -> jax.Array:
    """`*B K` -> `*B N`. `activation` is a name of `layers.ACTIVATIONS`."""
    with jax.named_scope("fc1"):
        h = activation_named(activation)(dense(params["fc1"], x))
    with jax.named_scope("fc2"):
        return dense(params["fc2"], h)


def loss(params: Params, x: jax.Array, y: jax.Array, *, activation: str = "relu") -> jax.Array:
    """Mean squared error against `y` (`*B N`), a scalar in float32."""
    error = apply(params, x, activation=activation) - y
    return jnp.mean(jnp.square(error.astype(jnp.float32)))
