"""Pass dot_product_attention: a dropout mask of jax.random becomes its key, and the op drops what the program drops, to the bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.graph.backward import pair as paired
from fusionlab.graph.certify.certify import ProofOutcome

from ..checks import agree, close, codes, normal, primitives

ATTENTION = "dot_product_attention"
B, T, S, N, H = 2, 6, 7, 3, 8
Q, K, V = normal((B, T, N, H), (B, S, N, H), (B, S, N, H))
# The weights of each head, one key a feature: the mask shows in the result.
EYE = jnp.broadcast_to(jnp.eye(S, H)[None, :, None], (B, S, N, H))
KEY = jax.random.key(3)
RATE = 0.3
bernoulli = jax.random.bernoulli


def attending(weights, change=lambda s: s):
    def attend(q, k, v, *more):
        p = jax.nn.softmax(change(jnp.einsum("bthd,bshd->bhts", q, k) * 0.5))
        return jnp.einsum("bhts,bshd->bthd", weights(p, *more), v)

    return attend


def drops(fn, *more, args=(Q, K, V), passes=ATTENTION):
    """Asserts one site that has the key of its mask, the same values and gradients, and the very same mask; returns it."""
    found = agree(fn, *args, *more, passes=passes, factor=2)
    assert not found.rejections, found.rejections
    (site,) = found.candidates
    assert "dropout_key" in site.leaves, site.notes
    assert "factors" not in site.leaves
    assert "random_bits" not in primitives(found.apply())
    assert not site.notes
    shown = (*args[:2], EYE)
    want = fn(*shown, *more)
    assert 0 < np.mean(np.asarray(want[..., :S]) == 0) < 1
    np.testing.assert_array_equal(fl.fuse(fn, passes=passes)(*shown, *more) == 0, want == 0)
    return site


SPELLINGS = {
    "selected": lambda p, key: jnp.where(bernoulli(key, 1 - RATE, p.shape), p / (1 - RATE), 0),
    "selected of zeros": lambda p, key: jax.lax.select(
        bernoulli(key, 1 - RATE, p.shape), p / (1 - RATE), jnp.zeros_like(p)
    ),
    "multiplied": lambda p, key: p * (bernoulli(key, 1 - RATE, p.shape).astype(p.dtype) / (1 - RATE)),
    "multiplied, scaled last": lambda p, key: bernoulli(key, 1 - RATE, p.shape) * p / (1 - RATE),
    "factors selected": lambda p, key: p * jnp.where(bernoulli(key, 1 - RATE, p.shape), 1 / (1 - RATE), 0.0),
    "not scaled": lambda p, key: jnp.where(bernoulli(key, 1 - RATE, p.shape), p, 0.0),
    "a key made of it": lambda p, key: jnp.where(bernoulli(jax.random.fold_in(key, 7), 1 - RATE, p.shape), p, 0.0),
    "one of a split": lambda p, key: jnp.where(bernoulli(jax.random.split(key)[1], 1 - RATE, p.shape), p, 0.0),
    "every other": lambda p, key: jnp.where(bernoulli(key, shape=p.shape), 2 * p, 0.0),
    "jitted": lambda p, key: jnp.where(jax.jit(lambda k: bernoulli(k, 1 - RATE, p.shape))(key), p / (1 - RATE), 0),
    "by hand": lambda p, key: jnp.where(jax.random.uniform(key, p.shape) < 1 - RATE, p / (1 - RATE), 0),
    "probability in an array": lambda p, key: jnp.where(bernoulli(key, jnp.float32(1 - RATE), p.shape), p, 0),
    "one matrix for all": lambda p, key: p * bernoulli(key, 1 - RATE, (1, 1, T, S)) / (1 - RATE),
    "one matrix for all, no unit axes": lambda p, key: jnp.where(bernoulli(key, 1 - RATE, (T, S)), p, 0.0),
    "a matrix for each batch entry": lambda p, key: jnp.where(bernoulli(key, 1 - RATE, (B, 1, T, S)), p, 0.0),
    "a matrix for each batch entry, broadcast": lambda p, key: jnp.where(
        jnp.broadcast_to(bernoulli(key, 1 - RATE, (B, T, S))[:, None], p.shape), p, 0.0
    ),
    "a matrix for each head": lambda p, key: jnp.where(bernoulli(key, 1 - RATE, (N, T, S)), p, 0.0),
    "whole keys": lambda p, key: jnp.where(bernoulli(key, 1 - RATE, (B, 1, 1, S)), p, 0.0),
}
SHAPES = {
    "one matrix for all": (1, 1, T, S),
    "one matrix for all, no unit axes": (1, 1, T, S),
    "a matrix for each batch entry": (B, 1, T, S),
    "a matrix for each batch entry, broadcast": (B, 1, T, S),
    "a matrix for each head": (1, N, T, S),
    "whole keys": (B, 1, 1, S),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_mask_that_jax_random_draws_becomes_its_key(name):
    site = drops(attending(SPELLINGS[name]), KEY)
    keep = 0.5 if name == "every other" else 1 - RATE
    scaled = name.startswith(("selected", "multiplied", "factors", "every", "jitted", "by hand", "one matrix for all"))
    scaled = scaled and name != "one matrix for all, no unit axes"
    assert site.attrs["keep"] == float(np.float32(keep))
    assert site.attrs.get("factors_scale", 1.0) == pytest.approx(1 / keep if scaled else 1.0)
    assert site.attrs.get("dropout_shape") == SHAPES.get(name)
    assert site.concepts == ("attention", "attention_masked")
    assert f"bernoulli(key, {keep:.6g})" in site.formula


def test_legacy_keys_are_keys():
    drops(attending(SPELLINGS["selected"]), jax.random.PRNGKey(3))


@pytest.mark.parametrize("implementation", ["xla", "xla_blockwise"])
def test_every_implementation_drops_the_same(implementation):
    fn, shown = attending(SPELLINGS["one matrix for all"]), (Q, K, EYE, KEY)
    got = fl.fuse(fn, passes=ATTENTION, implementation=implementation)(*shown)
    np.testing.assert_array_equal(got == 0, fn(*shown) == 0)


def test_masked_and_causal_scores_keep_their_masks():
    seen = np.random.default_rng(0).random((B, 1, T, S)) < 0.7
    fn = attending(SPELLINGS["multiplied"], lambda s: jnp.where(seen, s, -1e9))
    assert ", mask" in drops(fn, KEY).formula
    causal = jnp.tril(jnp.ones((T, S), bool))
    assert ", causal" in drops(attending(SPELLINGS["selected"], lambda s: jnp.where(causal, s, -jnp.inf)), KEY).formula


def test_bfloat16_factors_are_scaled_as_the_program_rounds_them():
    args = tuple(a.astype(jnp.bfloat16) for a in (Q, K, V))
    site = drops(attending(SPELLINGS["multiplied"]), KEY, args=args)
    assert site.attrs["factors_scale"] == float(jnp.bfloat16(1) / jnp.bfloat16(1 - RATE))


def test_heads_before_length_are_drawn_as_they_stand():
    def attend(q, k, v, key):
        p = jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2))
        return jnp.where(bernoulli(key, 1 - RATE, p.shape), p, 0.0) @ v

    args = tuple(jnp.swapaxes(a, 1, 2) for a in (Q, K, V))
    found = agree(attend, *args, KEY, passes=ATTENTION, factor=2)
    (site,) = found.candidates
    assert "dropout_key" in site.leaves
    assert site.attrs["layout"] == "BNTH"


def test_merged_heads_are_drawn_in_the_order_of_their_entries():
    """(B * N, T, S), as in fairseq: the op's batch axes and heads are one of theirs."""

    def attend(q, k, v, key):
        q, k, v = (jnp.swapaxes(a, 1, 2).reshape(B * N, -1, H) for a in (q, k, v))
        p = jax.nn.softmax(jnp.einsum("xtd,xsd->xts", q, k))
        out = jnp.einsum("xts,xsd->xtd", jnp.where(bernoulli(key, 1 - RATE, p.shape), p, 0.0), v)
        return jnp.swapaxes(out.reshape(B, N, T, H), 1, 2)

    drops(attend, KEY)


def test_a_mapped_site_under_one_key_has_it():
    """Each of the batch drops the same entries: the mask has no axis of it."""
    fn = jax.vmap(attending(SPELLINGS["selected"]), (0, 0, 0, None))
    args = tuple(jnp.stack([a, a + 1, a - 1]) for a in (Q, K, V))
    found = agree(fn, *args, KEY, passes=ATTENTION, factor=2)
    (site,) = found.candidates
    assert site.attrs["dropout_shape"] == (1, B, N, T, S)
    shown = (*args[:2], jnp.stack([EYE] * 3), KEY)
    np.testing.assert_array_equal(fl.fuse(fn, passes=ATTENTION)(*shown) == 0, fn(*shown) == 0)


def test_a_fused_function_may_be_mapped():
    fn = attending(SPELLINGS["selected"])
    stacked = jnp.stack([Q, Q + 1]), jnp.stack([K, K + 1]), jnp.stack([EYE, EYE])
    for keys, axis in ((KEY, None), (jax.random.split(KEY, 2), 0)):
        want, got = (jax.vmap(f, (0, 0, 0, axis))(*stacked, keys) for f in (fn, fl.fuse(fn, passes=ATTENTION)))
        np.testing.assert_array_equal(got == 0, want == 0)
        close(got, want, 2)


@pytest.mark.parametrize("remat", [False, True])
def test_layers_of_a_scan_have_their_keys(remat):
    def layer(x, key):
        return attending(SPELLINGS["selected"])(x, x, x, key) * 0.5, None

    def model(x, keys):
        return jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, keys)[0]

    keys = jax.random.split(KEY, 3)
    found = agree(model, Q, keys, passes=ATTENTION, factor=4)
    (site,) = found.candidates
    assert "dropout_key" in site.leaves, site.notes


def test_a_mask_read_elsewhere_is_drawn_for_that_alone():
    def fn(q, k, v, key):
        keep = bernoulli(key, 1 - RATE, (B, N, T, S))
        return attending(lambda p: jnp.where(keep, p / (1 - RATE), 0))(q, k, v), keep

    found = agree(fn, Q, K, V, KEY, passes=ATTENTION, factor=2)
    (site,) = found.candidates
    assert "dropout_key" in site.leaves
    assert "random_bits" in primitives(found.apply())
    got, want = fl.fuse(fn, passes=ATTENTION)(Q, K, EYE, KEY), fn(Q, K, EYE, KEY)
    np.testing.assert_array_equal(got[1], want[1])
    np.testing.assert_array_equal(got[0] == 0, want[0] == 0)


# -- differentiated programs ------------------------------------------------------------------------------------------


def stepping(fn):
    def step(q, k, v, key):
        return jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(fn(*a, key))), (0, 1, 2))(q, k, v)

    return step


@pytest.mark.parametrize("name", ["selected", "multiplied", "multiplied, scaled last", "one matrix for all"])
def test_the_backward_pass_of_a_train_step_drops_the_same(name):
    step = stepping(attending(SPELLINGS[name]))
    fused = fl.fuse(step)
    found = fused.findings(Q, K, V, KEY)
    (site,) = (c for c in found.candidates if c.pass_name == ATTENTION)
    assert site.backward is not None
    assert site.backward.stays is None
    assert "dropout_key" in site.leaves, site.notes
    assert "random_bits" not in primitives(found.apply())
    close(fused(Q, K, V, KEY), step(Q, K, V, KEY), 2)


def test_a_backward_pass_that_computes_it_again_drops_the_same():
    step = stepping(jax.checkpoint(attending(SPELLINGS["selected"])))
    fused = fl.fuse(step)
    (site,) = fused.findings(Q, K, V, KEY).candidates
    assert "dropout_key" in site.leaves, site.notes
    close(fused(Q, K, V, KEY), step(Q, K, V, KEY), 2)


def test_a_backward_pass_that_cannot_be_fused_under_the_key_is_fused_with_the_mask(monkeypatch):
    prove = paired.prove_gradients

    def unless_keyed(region, *rest):
        return (
            ProofOutcome("gradient", "so the test has it") if "dropout_key" in region.leaves else prove(region, *rest)
        )

    monkeypatch.setattr(paired, "prove_gradients", unless_keyed)
    step = stepping(attending(SPELLINGS["selected"]))
    (site,) = (c for c in fl.fuse(step).findings(Q, K, V, KEY).candidates if c.pass_name == ATTENTION)
    assert "factors" in site.leaves
    assert site.backward is not None
    assert site.backward.stays is None


def test_the_backward_pass_of_a_scan_drops_the_same():
    def layer(x, key):
        return attending(SPELLINGS["selected"])(x, x, x, key) * 0.5, None

    def step(x, keys):
        return jax.value_and_grad(lambda x: jnp.sum(jnp.sin(jax.lax.scan(layer, x, keys)[0])))(x)

    keys = jax.random.split(KEY, 3)
    fused = fl.fuse(step)
    (site,) = (c for c in fused.findings(Q, keys).candidates if c.pass_name == ATTENTION)
    assert site.backward is not None
    assert site.backward.stays is None
    assert "dropout_key" in site.leaves
    close(fused(Q, keys), step(Q, keys), 4)


# -- what is not the mask of a key ------------------------------------------------------------------------------------


def keep_of(p, key, rate=1 - RATE):
    return bernoulli(key, rate, p.shape)


RBG = jax.random.key(3, impl="rbg")
LEFT = {
    "another generator": (SPELLINGS["selected"], RBG, "drawn from a key<rbg>"),
    "what is dropped": (lambda p, key: jnp.where(keep_of(p, key), 0.0, p), KEY, None),
    "the mask's contrary": (lambda p, key: jnp.where(~keep_of(p, key), p, 0.0), KEY, "True where an entry is dropped"),
    "the contrary as a factor": (lambda p, key: p * (1.0 - keep_of(p, key)), KEY, ""),
    "and another mask": (lambda p, key: jnp.where(keep_of(p, key) & (p.shape[-1] > jnp.arange(7)), p, 0.0), KEY, ""),
    "and a mask of another key": (
        lambda p, key: jnp.where(keep_of(p, key) & keep_of(p, jax.random.fold_in(key, 1)), p, 0.0),
        KEY,
        "combined with something else",
    ),
    "a probability for each entry": (
        lambda p, key: jnp.where(bernoulli(key, jnp.linspace(0.3, 0.9, S), p.shape), p, 0.0),
        KEY,
        "not bit for bit",
    ),
    "a traced probability": (lambda p, key: jnp.where(bernoulli(key, jnp.mean(p), p.shape), p, 0.0), KEY, ""),
    "another range": (
        lambda p, key: jnp.where(jax.random.uniform(key, p.shape, minval=-1.0) < 0.4, p, 0.0),
        KEY,
        "not bit for bit",
    ),
    "up to the probability": (
        lambda p, key: jnp.where(jax.random.uniform(key, p.shape) <= 0.7, p, 0.0),
        KEY,
        "not bit for bit",
    ),
    "above the probability": (
        lambda p, key: jnp.where(jax.random.uniform(key, p.shape) > 0.7, p, 0.0),
        KEY,
        "not bit for bit",
    ),
    "a multiple of the number drawn": (
        lambda p, key: jnp.where(2 * jax.random.uniform(key, p.shape) < 1.4, p, 0.0),
        KEY,
        "not bit for bit",
    ),
    "a number drawn in bfloat16": (
        lambda p, key: jnp.where(jax.random.uniform(key, p.shape, jnp.bfloat16) < 0.7, p, 0.0),
        KEY,
        "not bit for bit",
    ),
    "a number rounded to bfloat16": (
        lambda p, key: jnp.where(jax.random.uniform(key, p.shape).astype(jnp.bfloat16) < 0.7, p, 0.0),
        KEY,
        "not bit for bit",
    ),
    "more bits": (lambda p, key: jnp.where(bernoulli(key, 0.7, p.shape, mode="high"), p, 0.0), KEY, "not bit for bit"),
    "a normal number": (
        lambda p, key: jnp.where(jax.random.normal(key, p.shape) < 0.7, p, 0.0),
        KEY,
        "not bit for bit",
    ),
    "heads before batch": (
        lambda p, key: jnp.where(jnp.swapaxes(bernoulli(key, 0.7, (N, B, T, S)), 0, 1), p, 0.0),
        KEY,
        "order of the op's scores",
    ),
    "keys before queries": (
        lambda p, key: jnp.where(jnp.swapaxes(bernoulli(key, 0.7, (B, N, S, T)), 2, 3), p, 0.0),
        KEY,
        "order of the op's scores",
    ),
    "turned around": (lambda p, key: jnp.where(keep_of(p, key)[..., ::-1], p, 0.0), KEY, "not 0|rev|changes it"),
    "a part of a larger draw": (
        lambda p, key: jnp.where(bernoulli(key, 0.7, (B, N, T, S + 1))[..., :S], p, 0.0),
        KEY,
        "broadcast against another operand",
    ),
    "a key for each batch entry": (
        lambda p, key: jnp.where(jax.vmap(lambda k: bernoulli(k, 0.7, p.shape[1:]))(jax.random.split(key, B)), p, 0.0),
        KEY,
        "not bit for bit",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_any_other_mask_stays_what_it_is(name):
    weights, key, why = LEFT[name]
    fn = attending(weights)
    found = fl.fuse(fn, passes=ATTENTION).findings(Q, K, V, key)
    assert all("dropout_key" not in c.leaves for c in found.candidates)
    for one in found.candidates if why is not None else ():
        if not codes(found):
            assert "dropout mask is an operand" in " ".join(one.notes)
            assert any(part in one.notes[-1] for part in why.split("|")), one.notes
    got, want = (f(Q, K, EYE, key) for f in (fl.fuse(fn, passes=ATTENTION), fn))
    np.testing.assert_array_equal(got == 0, want == 0)
    close(got, want, 2)


def test_bits_that_hang_on_the_whole_shape_are_not_drawn_again():
    fn = attending(SPELLINGS["selected"])
    with jax.threefry_partitionable(False):
        (site,) = fl.find(fn, Q, K, V, KEY, passes=ATTENTION).candidates
        assert "factors" in site.leaves
        np.testing.assert_array_equal(fl.fuse(fn, passes=ATTENTION)(Q, K, EYE, KEY) == 0, fn(Q, K, EYE, KEY) == 0)


def test_bits_of_a_float64_are_not_drawn_again():
    with jax.enable_x64(True):
        args = tuple(jnp.asarray(a, jnp.float32) for a in (Q, K, EYE))
        fn = attending(lambda p, key: jnp.where(bernoulli(key, 1 - RATE, p.shape), p, 0.0))
        (site,) = fl.find(fn, *args, KEY, passes=ATTENTION).candidates
        assert "factors" in site.leaves
        drops(
            attending(lambda p, key: jnp.where(bernoulli(key, np.float32(1 - RATE), p.shape), p, 0.0)), KEY, args=args
        )


def test_a_row_that_sees_nothing_is_what_it_is_with_any_factors():
    seen = np.random.default_rng(0).random((B, 1, T, S)) < 0.7
    fn = attending(SPELLINGS["multiplied"], lambda s: jnp.where(seen & (jnp.arange(T) != 2)[:, None], s, -jnp.inf))
    (site,) = fl.find(fn, Q, K, V, KEY, passes=ATTENTION).candidates
    assert "dropout_key" in site.leaves
    got, want = (f(Q, K, V, KEY) for f in (fl.fuse(fn, passes=ATTENTION), fn))
    assert not np.asarray(got[:, 2]).any()
    close(np.delete(got, 2, 1), np.delete(want, 2, 1), 2)


def test_a_mask_drawn_outside_of_a_loop_is_an_operand_of_its_body():
    def model(x, key):
        keep = bernoulli(key, 1 - RATE, (B, N, T, T))
        body = attending(lambda p: jnp.where(keep, p, 0.0))
        return jax.lax.scan(lambda x, _: (body(x, x, x), None), x, None, length=2)[0]

    (site,) = agree(model, Q, KEY, passes=ATTENTION, factor=4).candidates
    assert "factors" in site.leaves


def test_the_same_program_under_two_probabilities_is_two_sites():
    """Nothing that is remembered of one site speaks for another whose mask is drawn otherwise."""

    def fn(q, k, v, key):
        one = attending(lambda p: jnp.where(bernoulli(key, 0.7, p.shape), p, 0.0))(q, k, v)
        return one + attending(lambda p: jnp.where(bernoulli(key, 0.4, p.shape), p, 0.0))(q + 1, k, v)

    found = fl.fuse(fn, passes=ATTENTION).findings(Q, K, V, KEY)
    assert sorted(c.attrs["keep"] for c in found.candidates) == [float(np.float32(x)) for x in (0.4, 0.7)]
    close(fl.fuse(fn, passes=ATTENTION)(Q, K, V, KEY), fn(Q, K, V, KEY), 2)
