"""The parts shared by the models: a dense layer, layer normalisation, activations by name.

Letters: `*B` any leading axes, `K` features in, `N` features out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fusionlab.errors import unknown_name

Params = dict[str, Any]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "none": lambda x: x,
    "relu": jax.nn.relu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_erf": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
}


def activation_named(name: str) -> Callable[[jax.Array], jax.Array]:
    """The activation called `name`.

    Raises:
      UnknownNameError: no such activation; the message lists the valid ones.
    """
    if name not in ACTIVATIONS:
        raise unknown_name("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]


def dense_init(key: jax.Array, features_in: int, features_out: int, dtype: Any = jnp.float32) -> Params:
    """`{"w": [K, N], "b": [N]}`, both uniform; the bias is not zero, so that dropping it shows.

    `w` is Glorot uniform (limit sqrt(6 / (K + N))), `b` uniform in [-0.1, 0.1).
    """
    key_w, key_b = jax.random.split(key)
    limit = math.sqrt(6 / (features_in + features_out))
    return {
        "w": jax.random.uniform(key_w, (features_in, features_out), jnp.float32, -limit, limit).astype(dtype),
        "b": jax.random.uniform(key_b, (features_out,), jnp.float32, -0.1, 0.1).astype(dtype),
    }


def dense(params: Params, x: jax.Array) -> jax.Array:
    """`x @ w + b`: `*B K` -> `*B N`."""
    return x @ params["w"] + params["b"]


def layer_norm_init(features: int, dtype: Any = jnp.float32) -> Params:
    """`{"scale": ones [K], "bias": zeros [K]}`."""
    return {"scale": jnp.ones((features,), dtype), "bias": jnp.zeros((features,), dtype)}


def layer_norm(params: Params, x: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    """`(x - mean) / sqrt(var + epsilon) * scale + bias` over the last axis; shape and dtype of `x`."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    var = jnp.var(x, axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + epsilon) * params["scale"] + params["bias"]
