"""MultiFC: three dense layers and a product with a rank-3 weight, the model that GEMM-epilogue fusion is judged by.

    h    = act(x @ w1 + b1)
    h    = h @ w2 + b2                     no activation
    side = h @ matmul_y                    a bare product: nothing to fuse
    h    = act(h @ w3 + b3)
    out  = act(h @ matmul_y + ele_y) + side

`matmul_y` has shape [1, K, K]: a matrix in meaning but not in rank. So four groups fuse and no activation is left;
by rank alone (`strict_rank`), three fuse, one activation is left, and the last product is declined. Training
differentiates with respect to the six parameters w1, b1, w2, b2, w3, b3; `matmul_y` and `ele_y` are data.

Source: PaddlePaddle/Paddle pull request 39437, the test of its pass (batch 64, sequence 128, hidden 768, data uniform).
Letters: B batch, T sequence, K hidden.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .layers import Params, activation_named, dense, dense_init


def init(key: jax.Array, hidden: int = 768, dtype: Any = jnp.float32) -> Params:
    """`{"linear1": {"w": [K, K], "b": [K]}, "linear2": ..., "linear3": ...}`."""
    keys = jax.random.split(key, 3)
    return {f"linear{i}": dense_init(k, hidden, hidden, dtype) for i, k in enumerate(keys, start=1)}


def inputs(
    key: jax.Array, batch: int = 64, seq: int = 128, hidden: int = 768, dtype: Any = jnp.float32
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`x [B, T, K]`, `matmul_y [1, K, K]`, `ele_y [K]`, uniform in [-0.5, 0.5)."""
    shapes = (batch, seq, hidden), (1, hidden, hidden), (hidden,)
    keys = jax.random.split(key, 3)
    x, matmul_y, ele_y = (
        jax.random.uniform(k, s, jnp.float32, -0.5, 0.5).astype(dtype) for k, s in zip(keys, shapes, strict=True)
    )
    return x, matmul_y, ele_y


def apply(
    params: Params, x: jax.Array, matmul_y: jax.Array, ele_y: jax.Array, *, activation: str = "relu"
) -> jax.Array:
    """The model: `[B, T, K]` -> `[B, T, K]`. `activation` is a name of `layers.ACTIVATIONS`."""
    act = activation_named(activation)
    with jax.named_scope("linear1"):
        h = act(dense(params["linear1"], x))
    with jax.named_scope("linear2"):
        h = dense(params["linear2"], h)
    with jax.named_scope("side"):
        side = h @ matmul_y
    with jax.named_scope("linear3"):
        h = act(dense(params["linear3"], h))
    with jax.named_scope("head"):
        h = act(h @ matmul_y + ele_y)
    return h + side


def loss(params: Params, x: jax.Array, matmul_y: jax.Array, ele_y: jax.Array, *, activation: str = "relu") -> jax.Array:
    """The mean of the output, a scalar."""
    return jnp.mean(apply(params, x, matmul_y, ele_y, activation=activation))
