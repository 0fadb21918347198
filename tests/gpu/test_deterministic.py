"""`fl.Strategy(deterministic=True)` on a CUDA device: every pass at once, forward and backward, the same bits in a hundred runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl

B, S, H, D, F = 4, 512, 8, 64, 1024
M = H * D
SHAPES = {"qkv": (M, 3 * M), "out": (M, M), "up": (M, F), "gate": (M, F), "down": (F, M), "scale": (M,), "bias": (F,)}


def drawn(dtype):
    rng = np.random.default_rng(0)
    arrays = {name: jnp.asarray(rng.normal(size=s) / np.sqrt(s[0]), dtype) for name, s in SHAPES.items()}
    arrays["experts"] = jnp.asarray(rng.normal(size=(4, M, M)) / np.sqrt(M), dtype)
    return arrays, jnp.asarray(rng.normal(size=(B, S, M)), dtype)


def norm(x, scale):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def block(p, x):
    """A layer with a site of every pass by default."""
    q, k, v = (a.reshape(B, S, H, D).swapaxes(1, 2) for a in jnp.split(norm(x, p["scale"]) @ p["qkv"], 3, -1))
    scores = (q @ k.swapaxes(-1, -2)) * D**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((S, S), bool)), scores, -jnp.inf)
    mixed = jax.nn.softmax(scores.astype(jnp.float32), -1).astype(x.dtype) @ v
    x = x + mixed.swapaxes(1, 2).reshape(x.shape) @ p["out"]
    h = norm(x, p["scale"])
    x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    x = x + jax.nn.gelu(h @ p["up"] + p["bias"]) @ p["down"]
    rows = x.reshape(-1, M)
    x = x + jax.lax.ragged_dot(rows, p["experts"], jnp.asarray([100, 300, 0, B * S - 400])).reshape(x.shape)
    return h + p["scale"] * (x - h)


def loss(p, x):
    return (block(p, x).astype(jnp.float32) ** 2).mean()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "differentiated", [False, True], ids=["fused, then differentiated", "differentiated, then fused"]
)
def test_the_same_bits_a_hundred_times(differentiated, dtype):
    p, x = drawn(dtype)
    passes = fl.Strategy(deterministic=True)
    step = jax.value_and_grad(loss)
    run = jax.jit(fl.fuse(step, passes=passes) if differentiated else jax.value_and_grad(fl.fuse(loss, passes=passes)))
    counts = fl.find(step if differentiated else loss, p, x, passes=passes).counts()
    assert counts["dot_product_attention"] == 1
    assert counts["layer_norm"] + counts["gemm_epilogue"] + counts.get("grouped_matmul", 0) >= 3
    first = [np.asarray(a) for a in jax.tree.leaves(run(p, x))]
    for _ in range(100):
        again = jax.tree.leaves(run(p, x))
        assert all(a.tobytes() == np.asarray(b).tobytes() for a, b in zip(first, again, strict=True))
    plain = jax.tree.leaves(jax.jit(step)(p, x))
    for a, b in zip(first, plain, strict=True):
        scale = float(jnp.abs(b.astype(jnp.float32)).max())
        np.testing.assert_allclose(a.astype(np.float32), np.asarray(b, np.float32), rtol=0, atol=4e-2 * scale)
