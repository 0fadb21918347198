"""`multi_transformer` on a CUDA device: the op against float64, layers found in a GPT and generated with, caches updated in place."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.models import gpt, transformer

PASSES = tuple(f"multi_transformer_{kind}{fused}" for kind in ("encoder", "decoder") for fused in ("", "_fuse_qkv"))
# Untied: a tied model of this width says the same few tokens for ever, and then nothing is compared.
CONFIG = gpt.Config(layers=3, embed=256, heads=4, vocab=512, longest=320, tied=False)


def error(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.max(np.abs(got - want)) / max(np.max(np.abs(want)), 1e-30))


# float32: the products may be of TF32, 10 bits, as jax.jit's are
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "allowed"), [(jnp.float32, 1e-3), (jnp.bfloat16, 3e-2), (jnp.float16, 1e-2)])
def test_an_encoder_is_right(dtype, allowed, causal):
    params = transformer.init(jax.random.key(0), 2, embed=1024, dtype=dtype)
    x = transformer.inputs(jax.random.key(1), 8, 128, 1024, dtype)
    fn = functools.partial(transformer.encoder, heads=16, causal=causal)
    fused = fl.fuse(fn, passes=PASSES)
    assert fused.findings(params, x).counts()["multi_transformer_encoder"] == 2
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(fn)(*jax.tree.map(lambda a: a.astype(jnp.float32), (params, x)))
    assert error(fused(params, x), exact) <= allowed
    assert error(fused(params, x), exact) <= 3 * error(jax.jit(fn)(params, x), exact) + 1e-6


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("projections", ["separate", "concatenated", "interleaved"])
def test_what_is_generated_is_the_same(projections, scanned):
    config = gpt.Config(**{**CONFIG.__dict__, "projections": projections, "scanned": scanned})
    params = gpt.init(jax.random.key(3), config)
    prompt = jax.random.randint(jax.random.key(2), (2, 16), 0, config.vocab)
    fn = functools.partial(gpt.generate, steps=256, config=config)
    with jax.default_matmul_precision("highest"):
        old = jax.jit(fn)(params, prompt)
        assert len(np.unique(old)) >= 50
        margin = float(gpt.smallest_margin(params, prompt, old, config=config))
        fused = fl.fuse(fn, passes=PASSES)
        new = fused(params, prompt)
        found = fused.findings(params, prompt)
    assert sum(found.counts().values()) == (2 if scanned else 6), found
    assert margin > 1e-3  # 0.012 on a CPU, of logits as large as 50
    np.testing.assert_array_equal(old, new)


def test_a_cache_is_updated_in_place():
    config = gpt.Config(layers=1, embed=256, heads=4, vocab=64, longest=4096)
    params, cache = gpt.init(jax.random.key(0), config), gpt.init_cache(8, config)
    fn = fl.fuse(functools.partial(gpt.decode, config=config), passes=PASSES)
    args = params, jnp.zeros(8, jnp.int32), cache, jnp.int32(7)
    compiled = jax.jit(lambda *a: fn(*a), donate_argnums=2).lower(*args).compile()
    size = sum(a.nbytes for a in jax.tree.leaves(cache))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 2
