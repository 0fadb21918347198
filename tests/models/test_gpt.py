"""The GPT: against NumPy in float64, decode against a recomputation of everything, and its spellings against each other."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.errors import ArgumentError, UnknownNameError
from fusionlab.models import gpt

KEY = jax.random.key(1)
TINY = gpt.Config(layers=2, embed=32, heads=4, ffn=48, vocab=37, longest=24)
PROJECTIONS = ("separate", "concatenated", "interleaved")
SPELLINGS = [
    dataclasses.replace(TINY, projections=p, scanned=s) for p, s in itertools.product(PROJECTIONS, (False, True))
]
NAMES = [f"{c.projections}-{'scanned' if c.scanned else 'unrolled'}" for c in SPELLINGS]
each_spelling = pytest.mark.parametrize("config", SPELLINGS, ids=NAMES)


def tokens_of(config, batch, length, seed=2):
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, config.vocab)


def functions(config):
    """prefill, decode and generate of one configuration, compiled."""
    parts = (functools.partial(f, config=config) for f in (gpt.prefill, gpt.decode))
    return *(jax.jit(f) for f in parts), jax.jit(functools.partial(gpt.generate, config=config), static_argnums=2)


def np_norm(p, x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def np_logits(params, tokens, heads):
    """All logits of a model with separate projections and unrolled layers, one head after another, in float64."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    length = tokens.shape[1]
    hidden = np.triu(np.ones((length, length), bool), 1)
    x = p["tokens"][tokens] + p["positions"][:length]
    for layer in p["layers"]:
        a, h = layer["attention"], np_norm(layer["ln1"], x)
        q, k, v = (np.split(h @ a[n]["w"] + a[n]["b"], heads, -1) for n in "qkv")
        mixed = []
        for i in range(heads):
            scores = np.where(hidden, -np.inf, q[i] @ k[i].swapaxes(1, 2) / math.sqrt(q[i].shape[-1]))
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed.append(weights / weights.sum(-1, keepdims=True) @ v[i])
        x = x + np.concatenate(mixed, -1) @ a["out"]["w"] + a["out"]["b"]
        up = np_norm(layer["ln2"], x) @ layer["mlp"]["fc1"]["w"] + layer["mlp"]["fc1"]["b"]
        up = 0.5 * up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        x = x + up @ layer["mlp"]["fc2"]["w"] + layer["mlp"]["fc2"]["b"]
    return np_norm(p["norm"], x) @ p.get("head", p["tokens"].T)


@pytest.mark.parametrize("tied", [True, False])
def test_prefill_computes_its_formula(tied):
    config = dataclasses.replace(TINY, tied=tied)
    params, tokens = gpt.init(KEY, config), tokens_of(config, 3, 10)
    logits, _ = functions(config)[0](params, tokens, gpt.init_cache(3, config))
    assert ("head" in params) is not tied
    np.testing.assert_allclose(logits, np_logits(params, tokens, config.heads), atol=5e-5)


@each_spelling
def test_every_spelling_is_the_same_function(config):
    tokens = tokens_of(TINY, 2, 9)
    want = np_logits(gpt.init(KEY, TINY), tokens, TINY.heads)
    got, _ = functions(config)[0](gpt.init(KEY, config), tokens, gpt.init_cache(2, config))
    np.testing.assert_allclose(got, want, atol=5e-5)


def test_every_spelling_is_another_program():
    def text(config):
        args = jax.eval_shape(lambda: (gpt.init(KEY, config), tokens_of(config, 2, 9), gpt.init_cache(2, config)))
        return str(jax.make_jaxpr(functools.partial(gpt.prefill, config=config))(*args))

    assert len({text(c) for c in SPELLINGS}) == len(SPELLINGS)


@each_spelling
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_decode_equals_recomputing_everything(config, dtype):
    params, tokens = gpt.init(KEY, config, dtype), tokens_of(config, 3, config.longest)
    prefill, decode, _ = functions(config)
    want, filled = prefill(params, tokens, gpt.init_cache(3, config, dtype=dtype))
    _, cache = prefill(params, tokens[:, :7], gpt.init_cache(3, config, dtype=dtype))
    error = 2e-5 if dtype == jnp.float32 else 6e-2  # bf16 logits reach 8, where neighbours are 2^-5 apart
    for step in range(7, config.longest):  # up to the last position that the cache has
        logits, cache = decode(params, tokens[:, step], cache, step)
        assert (logits.shape, logits.dtype) == ((3, config.vocab), dtype)
        got, wanted = np.asarray(logits, np.float64), np.asarray(want[:, step], np.float64)
        np.testing.assert_allclose(got, wanted, atol=error * max(1, np.abs(wanted).max() / 4))
    for got, wanted in zip(jax.tree.leaves(cache), jax.tree.leaves(filled), strict=True):
        np.testing.assert_allclose(*(np.asarray(a, np.float64) for a in (got, wanted)), atol=error)


def test_decoding_from_the_first_token_on_needs_no_prefill():
    params, tokens = gpt.init(KEY, TINY), tokens_of(TINY, 2, 5)
    prefill, decode, _ = functions(TINY)
    want, _ = prefill(params, tokens, gpt.init_cache(2, TINY))
    cache = gpt.init_cache(2, TINY, size=5)
    for step in range(5):
        logits, cache = decode(params, tokens[:, step], cache, step)
        np.testing.assert_allclose(logits, want[:, step], atol=2e-5)


@each_spelling
def test_only_the_positions_of_the_call_are_written(config):
    params, tokens = gpt.init(KEY, config), tokens_of(config, 2, 6)
    prefill, decode, _ = functions(config)
    empty = jax.tree.map(lambda a: a + 7, gpt.init_cache(2, config))  # what was there before stays
    _, filled = prefill(params, tokens, empty)
    _, further = decode(params, tokens[:, 0], filled, 11)
    for before, after in zip(jax.tree.leaves(filled), jax.tree.leaves(further), strict=True):
        before, after = np.moveaxis(before, -3, 0), np.moveaxis(after, -3, 0)
        np.testing.assert_array_equal(before[6:], np.full_like(before[6:], 7))
        assert not np.any(before[:6] == 7)
        changed = np.any(before != after, axis=tuple(range(1, before.ndim)))
        np.testing.assert_array_equal(changed, np.arange(config.longest) == 11)


def test_a_cache_of_any_size_gives_the_same_logits():
    params, tokens = gpt.init(KEY, TINY), tokens_of(TINY, 2, 9)
    prefill, decode, _ = functions(TINY)
    results = []
    for size in (9, 13, 24):
        _, cache = prefill(params, tokens[:, :8], gpt.init_cache(2, TINY, size))
        assert gpt.cache_size(cache) == size
        results.append(decode(params, tokens[:, 8], cache, 8)[0])
    for other in results[1:]:
        np.testing.assert_allclose(results[0], other, atol=1e-5)


@pytest.mark.parametrize("scanned", [False, True])
def test_a_donated_cache_is_updated_in_place(scanned):
    config = dataclasses.replace(TINY, scanned=scanned)
    args = gpt.init(KEY, config), jnp.zeros((2,), jnp.int32), gpt.init_cache(2, config), jnp.int32(3)
    step = jax.jit(functools.partial(gpt.decode, config=config), donate_argnums=2)
    memory = step.lower(*args).compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(a.nbytes for a in jax.tree.leaves(args[2]))


@each_spelling
def test_generate_takes_the_likeliest_token_of_a_full_recomputation(config):
    params, prompt = gpt.init(KEY, config), tokens_of(config, 2, 5)
    prefill, _, generate = functions(config)
    steps = config.longest - 5 + 1  # the last token needs no position
    got = generate(params, prompt, steps)
    assert (got.shape, got.dtype) == ((2, steps), jnp.int32)
    logits, _ = prefill(params, jnp.concatenate([prompt, got[:, :-1]], 1), gpt.init_cache(2, config))
    np.testing.assert_array_equal(got, jnp.argmax(logits[:, 4:], -1))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scanned", [False, True])
def test_256_steps_do_not_end_in_a_loop(tied, scanned):
    config = gpt.Config(tied=tied, scanned=scanned)
    params, prompt = gpt.init(KEY, config), tokens_of(config, 2, 8)
    out = functions(config)[2](params, prompt, 256)
    margin = float(gpt.smallest_margin(params, prompt, out, config=config))
    distinct = [len(np.unique(row)) for row in out]
    print(f"distinct tokens {distinct}, smallest difference of the best two logits {margin:.1e}")
    assert min(distinct) >= 50
    assert margin > 2e-4  # far above what rounding does to float32 logits of this size
    assert np.mean(out[0] == out[1]) < 0.9  # what is said depends on the prompt, not on the position alone


@pytest.mark.parametrize("steps", [1, 6])
def test_the_smallest_margin_is_that_of_the_steps_alone(steps):
    params, prompt = gpt.init(KEY, TINY), tokens_of(TINY, 2, 5)
    out = functions(TINY)[2](params, prompt, steps)
    logits = np_logits(params, jnp.concatenate([prompt, out], 1), TINY.heads)[:, 4 : 4 + steps]
    best = np.sort(logits, -1)
    want = (best[..., -1] - best[..., -2]).min()
    np.testing.assert_allclose(gpt.smallest_margin(params, prompt, out, config=TINY), want, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_dtype_asked_for_holds_throughout(dtype):
    params, cache = gpt.init(KEY, TINY, dtype), gpt.init_cache(2, TINY, dtype=dtype)
    assert {a.dtype for a in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    result = jax.eval_shape(functools.partial(gpt.prefill, config=TINY), params, tokens_of(TINY, 2, 4), cache)
    assert {a.dtype for a in jax.tree.leaves(result)} == {jnp.dtype(dtype)}


def test_bad_arguments_are_refused_by_name():
    params, prompt = gpt.init(KEY, TINY), tokens_of(TINY, 2, 5)
    cache = gpt.init_cache(2, TINY, 12)
    with pytest.raises(ArgumentError, match=r"heads: got 5 for E = 32"):
        dataclasses.replace(TINY, heads=5)
    with pytest.raises(ArgumentError, match=r"layers: got 0"):
        gpt.Config(layers=0)
    with pytest.raises(UnknownNameError, match=r"Did you mean 'interleaved'"):
        gpt.Config(projections="interleave")  # pyright: ignore
    with pytest.raises(ArgumentError, match=r"size: got 25.*24 positions"):
        gpt.init_cache(2, TINY, 25)
    with pytest.raises(ArgumentError, match=r"tokens: got 13 for a cache of 12"):
        gpt.prefill(params, tokens_of(TINY, 2, 13), cache, config=TINY)
    for step in (-1, 12):
        with pytest.raises(ArgumentError, match=rf"step: got {step} for a cache of 12; needed 0 to 11"):
            gpt.decode(params, prompt[:, 0], cache, step, config=TINY)
    for steps in (0, 21):
        with pytest.raises(ArgumentError, match=rf"steps: got {steps} after 5 tokens; needed 1 to 20"):
            gpt.generate(params, prompt, steps, config=TINY)
