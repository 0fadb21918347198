"""A pre-LN transformer encoder in plain JAX: one block, an unrolled stack, and a training step with AdamW.

    x = x + attention(layer_norm(x))
    x = x + mlp(layer_norm(x))            mlp = gelu_tanh(x @ w1 + b1) @ w2 + b2

Letters: B batch, T query and S key positions (T = S here), H heads, D features per head, E = H * D, F feed-forward
width.

Source: Xiong et al., "On Layer Normalization in the Transformer Architecture", 2020; AdamW: Loshchilov and
Hutter, "Decoupled Weight Decay Regularization", 2019.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fusionlab.errors import ArgumentError, unknown_name

from .layers import Params, dense, dense_init, layer_norm, layer_norm_init

Spelling = Literal["einsum", "matmul"]
SPELLINGS = ("einsum", "matmul")


def init_block(key: jax.Array, embed: int = 256, ffn: int | None = None, dtype: Any = jnp.float32) -> Params:
    """Parameters of one block: `ln1`, `attention` (dense `q`, `k`, `v`, `out`), `ln2`, `mlp` (dense `fc1`, `fc2`).

    The four of `attention` are E -> E, `fc1` is E -> F, `fc2` F -> E; `ffn` is F, 4 * E when None.
    """
    ffn = 4 * embed if ffn is None else ffn
    keys = jax.random.split(key, 6)
    return {
        "ln1": layer_norm_init(embed, dtype),
        "attention": {
            n: dense_init(k, embed, embed, dtype) for n, k in zip(("q", "k", "v", "out"), keys[:4], strict=True)
        },
        "ln2": layer_norm_init(embed, dtype),
        "mlp": {"fc1": dense_init(keys[4], embed, ffn, dtype), "fc2": dense_init(keys[5], ffn, embed, dtype)},
    }


def init(
    key: jax.Array, layers: int = 2, embed: int = 256, ffn: int | None = None, dtype: Any = jnp.float32
) -> list[Params]:
    """Parameters of a stack: a list of `layers` blocks."""
    return [init_block(k, embed, ffn, dtype) for k in jax.random.split(key, layers)]


def inputs(key: jax.Array, batch: int = 1, seq: int = 128, embed: int = 256, dtype: Any = jnp.float32) -> jax.Array:
    """`x [B, T, E]`, standard normal."""
    return jax.random.normal(key, (batch, seq, embed), jnp.float32).astype(dtype)


def attention(
    params: Params, x: jax.Array, *, heads: int = 4, causal: bool = False, spelling: Spelling = "einsum"
) -> jax.Array:
    """Multi-head self-attention, `[B, T, E]` -> `[B, T, E]`.

    `spelling` chooses how the two products are written: "einsum" keeps `[B, T, H, D]` and contracts with `jnp.einsum`,
    "matmul" transposes to `[B, H, T, D]` and uses `@`. Same values, different programs. With `causal`, a query sees no
    later key.

    Raises:
      ArgumentError: E is not a multiple of `heads`.
      UnknownNameError: `spelling` is neither.
    """
    batch, seq, embed = x.shape
    if embed % heads:
        raise ArgumentError(f"heads: got {heads} for E = {embed}; needed E to be a multiple of heads")
    if spelling not in SPELLINGS:
        raise unknown_name("spelling", spelling, SPELLINGS)
    q, k, v = (dense(params[n], x).reshape(batch, seq, heads, embed // heads) for n in ("q", "k", "v"))
    attend = attend_einsum if spelling == "einsum" else _attend_matmul
    return dense(params["out"], attend(q, k, v, causal).reshape(batch, seq, embed))


def attend_einsum(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
    """`softmax(q k^T / sqrt(D)) v` on `[B, T, H, D]`."""
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
    if causal:
        scores = _mask_later(scores)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v)


def _attend_matmul(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
    """The same through `[B, H, T, D]` and `@`."""
    q, k, v = (jnp.swapaxes(a, 1, 2) for a in (q, k, v))
    scores = (q @ jnp.swapaxes(k, -1, -2)) / math.sqrt(q.shape[-1])
    if causal:
        scores = _mask_later(scores)
    return jnp.swapaxes(jax.nn.softmax(scores, axis=-1) @ v, 1, 2)


def _mask_later(scores: jax.Array) -> jax.Array:
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.where(seen, scores, jnp.finfo(scores.dtype).min)


def mlp(params: Params, x: jax.Array) -> jax.Array:
    """`gelu_tanh(x @ w1 + b1) @ w2 + b2`, `[B, T, E]` -> `[B, T, E]`."""
    return dense(params["fc2"], jax.nn.gelu(dense(params["fc1"], x)))


def block(
    params: Params, x: jax.Array, *, heads: int = 4, causal: bool = False, spelling: Spelling = "einsum"
) -> jax.Array:
    """One pre-LN block, `[B, T, E]` -> `[B, T, E]`; `heads`, `causal`, `spelling` as in `attention`."""
    with jax.named_scope("ln1"):
        h = layer_norm(params["ln1"], x)
    with jax.named_scope("attention"):
        x = x + attention(params["attention"], h, heads=heads, causal=causal, spelling=spelling)
    with jax.named_scope("ln2"):
        h = layer_norm(params["ln2"], x)
    with jax.named_scope("mlp"):
        return x + mlp(params["mlp"], h)


def encoder(
    params: list[Params], x: jax.Array, *, heads: int = 4, causal: bool = False, spelling: Spelling = "einsum"
) -> jax.Array:
    """Applies the blocks of `params` in order, unrolled, each in its scope `layer_0`, `layer_1`, ..."""
    for i, layer in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            x = block(layer, x, heads=heads, causal=causal, spelling=spelling)
    return x


def loss(
    params: list[Params],
    x: jax.Array,
    y: jax.Array,
    *,
    heads: int = 4,
    causal: bool = False,
    spelling: Spelling = "einsum",
) -> jax.Array:
    """Mean squared error of the encoder's output against `y` `[B, T, E]`, a scalar in float32."""
    error = encoder(params, x, heads=heads, causal=causal, spelling=spelling) - y
    return jnp.mean(jnp.square(error.astype(jnp.float32)))


def init_adam(params: list[Params]) -> tuple[Any, Any, jax.Array]:
    """The state of `train_step`'s Adam: first moments, second moments (both like `params`, zero), step 0 (int32)."""
    return jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32)


def train_step(
    params: list[Params],
    adam: tuple[Any, Any, jax.Array],
    x: jax.Array,
    y: jax.Array,
    *,
    heads: int = 4,
    causal: bool = False,
    spelling: Spelling = "einsum",
    learning_rate: float = 1e-3,
    weight_decay: float = 1e-2,
    max_norm: float = 1.0,
) -> tuple[list[Params], tuple[Any, Any, jax.Array], jax.Array]:
    """One step of AdamW on `loss`, gradients clipped to the global norm `max_norm`.

    Returns the new parameters, the new optimiser state, and the loss before the step. About 580 equations a layer.
    """
    value, grads = jax.value_and_grad(loss)(params, x, y, heads=heads, causal=causal, spelling=spelling)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
    shrink = jnp.minimum(1.0, max_norm / (norm + 1e-6))
    grads = jax.tree.map(lambda g: (g * shrink).astype(g.dtype), grads)

    first, second, step = adam
    step = step + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, grads)
    unbias1, unbias2 = 1 - 0.9**step, 1 - 0.999**step

    def update(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        delta = (m / unbias1) / (jnp.sqrt(v / unbias2) + 1e-8) + weight_decay * p
        return (p - learning_rate * delta).astype(p.dtype)

    return jax.tree.map(update, params, first, second), (first, second, step), value
