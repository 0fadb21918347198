"""Pass dot_product_attention: masks, biases, caps, factors and dropout become the op's operands, each with the meaning it has."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.fusers.engine.fully_masked_rows import NOTE

from ..checks import agree, normal, primitives

Q, K, V = normal((2, 6, 3, 4), (2, 7, 3, 4), (2, 7, 3, 5))  # B T H D, B S H D, B S H Dv
ATTENTION = "dot_product_attention"
BIAS, PER_HEAD, ROW = normal((2, 3, 6, 7), (3, 6, 7), (6, 1), seed=2)
SEEN = np.random.default_rng(0).random((2, 1, 6, 7)) < 0.6
SEEN[0, 0, 2] = False  # a row that sees nothing
KEYS = jnp.arange(7) < jnp.array([5, 7])[:, None, None, None]  # padding
CAUSAL = jnp.tril(jnp.ones((6, 7), bool))


def attention(change, weights=lambda p: p):
    """Attention whose scores are changed by `change` before the softmax, and its probabilities by `weights` after it."""

    def attend(q, k, v, *more):
        s = change(jnp.einsum("bthd,bshd->bhts", q, k) * 0.5, *more)
        return jnp.einsum("bhts,bshd->bthd", weights(jax.nn.softmax(s)), v)

    return attend


def fused(fn, *more, factor=2, args=(Q, K, V)):
    found = agree(fn, *args, *more, passes=ATTENTION, factor=factor)
    assert not found.rejections, found.rejections
    (site,) = found.candidates
    assert "exp" not in primitives(found.apply())
    return site


# name -> (the change, further arguments, what the formula says, the operands beside q, k and v)
CHANGES = {
    "mask, True sees": (lambda s, m: jnp.where(m, s, -1e9), (SEEN,), ", mask", {"mask0"}),
    "mask, True is hidden": (lambda s, m: jnp.where(m, -1e9, s), (~SEEN,), ", mask", {"mask0"}),
    "padding, -inf": (lambda s, m: jnp.where(m, s, -jnp.inf), (KEYS,), ", mask", {"mask0"}),
    "mask of keys alone": (lambda s, m: jnp.where(m, s, -1e9), (KEYS[1, 0],), ", mask", {"mask0"}),
    "bias of a score": (lambda s, b: s + b, (BIAS,), " + bias", {"bias0"}),
    "bias of a head": (lambda s, b: b + s, (PER_HEAD,), " + bias", {"bias0"}),
    "bias, subtracted": (lambda s, b: s - b, (PER_HEAD,), " + bias", {"bias0"}),
    "bias, halved": (lambda s, b: s + 0.5 * b, (PER_HEAD,), " + bias", {"bias0"}),
    "constant bias (ALiBi)": (
        lambda s: s - np.abs(np.arange(6.0)[:, None] - np.arange(7)).astype(np.float32),
        (),
        " + bias",
        {"bias0"},
    ),
    "mask as a bias": (lambda s, m: s + (1 - m.astype(jnp.float32)) * -1e9, (SEEN,), " + bias", {"bias0"}),
    "two masks": (
        lambda s, m, k: jnp.where(k, jnp.where(m, s, -1e9), -1e9),
        (SEEN, KEYS),
        ", mask",
        {"mask0", "mask1"},
    ),
    "mask and bias": (lambda s, m, b: jnp.where(m, s + b, -1e9), (SEEN, BIAS), " + bias, mask", {"mask0", "bias1"}),
    "-inf, then bias": (
        lambda s, m, b: jnp.where(m, s, -jnp.inf) + b,
        (KEYS, BIAS),
        " + bias, mask",
        {"mask1", "bias0"},
    ),
    "two biases": (lambda s, b, c: s + b + c, (BIAS, PER_HEAD), " + bias", {"bias0", "bias1"}),
    "causal and padding, -inf": (
        lambda s, m: jnp.where(CAUSAL, jnp.where(m, s, -jnp.inf), -jnp.inf),
        (KEYS,),
        ", mask, causal",
        {"mask1"},
    ),
    "causal and mask, -1e9": (
        lambda s, m: jnp.where(CAUSAL, jnp.where(m, s, -1e9), -1e9),
        (SEEN,),
        ", mask",
        {"mask0", "mask1"},
    ),
    "causal and bias": (lambda s, b: jnp.where(CAUSAL, s + b, -jnp.inf), (BIAS,), " + bias, causal", {"bias1"}),
    "a constant mask that differs between batch entries": (
        lambda s: jnp.where(np.arange(7) < np.array([4, 6])[:, None, None, None], s, -1e9),
        (),
        ", mask",
        {"mask0"},
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_happens_to_the_scores_becomes_operands(name):
    change, more, words, operands = CHANGES[name]
    site = fused(attention(change), *more)
    assert site.formula == f"softmax(0.5 * q @ k.T{words}) @ v"
    assert set(site.leaves) - {"q", "k", "v"} == operands
    assert site.concepts == ("attention", "attention_masked")


def test_a_row_that_sees_nothing_keeps_the_weights_the_program_gives_it():
    """All its scores are the fill: every key weighs the same, causal or not."""
    blind = jnp.zeros((6, 7), bool)
    fn = attention(lambda s, m: jnp.where(CAUSAL, jnp.where(m, s, -1e9), -1e9))
    got = fl.fuse(fn, passes=ATTENTION)(Q, K, V, blind)
    np.testing.assert_allclose(got, jnp.broadcast_to(V.mean(1, keepdims=True), got.shape), rtol=1e-5, atol=1e-6)


def test_masks_with_different_fills_are_declined():
    fn = attention(lambda s, m, k: jnp.where(k, jnp.where(m, s, -1e9), -1e30))
    (rejection,) = fl.find(fn, Q, K, V, SEEN, KEYS, passes=ATTENTION).rejections
    assert rejection.code == "mask"
    assert "its masks fill with different scores (-1e+30, -1e+09)" in rejection.sentence


def test_a_bias_added_to_masked_scores_is_declined_unless_they_are_minus_infinity():
    fn = attention(lambda s, m, b: jnp.where(m, s, -1e9) + b)
    (rejection,) = fl.find(fn, Q, K, V, SEEN, BIAS, passes=ATTENTION).rejections
    assert rejection.code == "mask"
    assert "the scores are added to after they are masked" in rejection.sentence


def test_a_mask_made_of_the_scores_is_read_outside():
    (rejection,) = fl.find(attention(lambda s: jnp.where(s > 0, s, -1e9)), Q, K, V, passes=ATTENTION).rejections
    assert rejection.code == "escapes"


# -- caps and factors -------------------------------------------------------------------------------------------------


def test_capped_scores_are_a_site():
    site = fused(attention(lambda s: 30 * jnp.tanh(s / 30)))
    assert site.attrs["softcap"] == pytest.approx(30)
    assert site.attrs["scale"] == pytest.approx(0.5)


def test_capped_then_masked_scores_are_a_site():
    site = fused(attention(lambda s, m: jnp.where(m, 5 * jnp.tanh(s / 5), -1e9)), SEEN)
    assert site.attrs["softcap"] == pytest.approx(5)


def test_scores_capped_after_their_mask_are_declined():
    fn = attention(lambda s, m: 5 * jnp.tanh(jnp.where(m, s, -1e9) / 5))
    (rejection,) = fl.find(fn, Q, K, V, SEEN, passes=ATTENTION).rejections
    assert rejection.code == "mask"
    assert "capped after they are masked" in rejection.sentence


FACTORS = {
    "a number": (lambda s, f: s * f, jnp.float32(0.7)),
    "divided by a number": (lambda s, f: s / f, jnp.float32(0.7)),
    "of a head": (lambda s, f: s * f, normal((3, 1, 1), seed=3)[0]),
    "of a row": (lambda s, f: f * s, ROW),
}


@pytest.mark.parametrize("name", FACTORS)
def test_a_traced_factor_on_the_scores_goes_to_the_queries(name):
    change, factor = FACTORS[name]
    # The factor's gradient sums over all scores, and mostly cancels.
    site = fused(attention(change), factor, factor=100)
    assert site.attrs["scale"] == pytest.approx(0.5)


def test_a_factor_of_a_key_is_declined():
    found = fl.find(attention(lambda s, f: s * f), Q, K, V, *normal((7,)), passes=ATTENTION)
    assert not found.candidates
    assert [r.code for r in found.rejections] == ["axes"]


def test_a_traced_factor_in_float32_on_bfloat16_queries_is_declined():
    def attend(q, k, v, f):
        s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * f
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s).astype(q.dtype), v)

    args = (*(a.astype(jnp.bfloat16) for a in (Q, K, V)), jnp.float32(0.7))
    (rejection,) = fl.find(attend, *args, passes=ATTENTION).rejections
    assert rejection.code == "dtype"
    assert "scaled by data" in rejection.sentence


def test_negated_scores_are_a_negative_scale():
    assert fused(attention(lambda s: -s)).attrs["scale"] == pytest.approx(-0.5)
    assert fused(attention(lambda s, m: jnp.where(m, -s, -1e9)), SEEN).attrs["scale"] == pytest.approx(-0.5)


# -- what happens to the probabilities --------------------------------------------------------------------------------

KEEP = np.random.default_rng(1).random((2, 3, 6, 7)) < 0.9
WEIGHTS = {
    "dropout, selected": lambda p, keep: jnp.where(keep, p / 0.9, 0.0),
    "dropout, multiplied": lambda p, keep: p * (keep.astype(p.dtype) / 0.9),
    "dropout, scaled last": lambda p, keep: p * keep / 0.9,
    "weights on heads": lambda p, keep: p * jnp.arange(1.0, 4.0)[:, None, None],
    "weights on heads, by einsum": lambda p, keep: jnp.einsum("bhts,h->bhts", p, jnp.arange(1.0, 4.0)),
    "zeroed after the softmax": lambda p, keep: jnp.where(keep, p, 0.0),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_what_happens_to_the_probabilities_becomes_factors(name):
    def attend(q, k, v, keep):
        p = WEIGHTS[name](jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) * 0.5), keep)
        return jnp.einsum("bhts,bshd->bthd", p, v)

    site = fused(attend, KEEP)
    assert "factors" in site.leaves
    assert site.concepts == ("attention", "attention_masked")


@pytest.mark.parametrize("implementation", [None, "xla", "xla_blockwise"])
def test_weights_of_a_row_that_sees_nothing_stay_zero_where_the_program_makes_them_zero(implementation):
    """softmax of a row of -inf is NaN; selecting 0 there is a common way out of it, and a product with 0 is none."""

    def attend(q, k, v, m):
        p = jax.nn.softmax(jnp.where(m, jnp.einsum("bthd,bshd->bhts", q, k), -jnp.inf))
        return jnp.einsum("bhts,bshd->bthd", jnp.where(m, p, 0.0), v)

    blind = jnp.asarray(SEEN)
    got = fl.fuse(attend, implementation=implementation)(Q, K, V, blind)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, attend(Q, K, V, blind), rtol=1e-5, atol=1e-6)
    out = fl.ops.dot_product_attention(
        Q, K, V, mask=blind, factors=blind, mask_value=-np.inf, implementation=implementation
    )
    assert np.isfinite(out).all()
    assert not np.asarray(out)[0, 2].any()


def test_weights_that_are_all_one_are_no_factors():
    site = fused(attention(lambda s: s, lambda p: jnp.einsum("bhts,h->bhts", p, jnp.ones(3))))
    assert set(site.leaves) == {"q", "k", "v"}
    assert site.concepts == ("attention", "attention_unmasked")


def test_dropout_drawn_inside_keeps_its_draw():
    def attend(q, k, v, key):
        p = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) * 0.5)
        return jnp.einsum("bhts,bshd->bthd", jnp.where(jax.random.bernoulli(key, 0.9, p.shape), p / 0.9, 0.0), v)

    key = jax.random.key(3)
    fn = fl.fuse(attend)
    assert fn.findings(Q, K, V, key).counts()[ATTENTION] == 1
    np.testing.assert_allclose(fn(Q, K, V, key), attend(Q, K, V, key), rtol=1e-5, atol=1e-6)


# -- heads that share keys --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 4, 6, 6), (2, 1, 6, 6), (1, 4, 1, 6), (6, 6)])
def test_query_heads_that_share_keys_take_masks_and_biases_of_any_shape(shape):
    q, k, v = normal((2, 6, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8), seed=5)
    (bias,) = normal(shape, seed=6)
    mask = np.random.default_rng(2).random(shape) < 0.7
    more = {"bias": bias, "mask": mask}

    def attend(q, k, v, bias, mask):
        return jax.nn.dot_product_attention(q, k, v, bias, mask)

    fused(attend, *more.values(), args=(q, k, v))


def test_masks_stay_on_their_heads_under_vmap_and_scan():
    fn = attention(lambda s, m: jnp.where(m, s, -1e9))
    stacked = tuple(jnp.stack([a, a * 0.5]) for a in (Q, K, V))
    masks = jnp.stack([jnp.asarray(SEEN), ~jnp.asarray(SEEN)])
    found = agree(jax.vmap(fn), *stacked, masks, passes=ATTENTION, factor=2)
    assert len(found.candidates) == 1
    found = agree(lambda *a: jax.lax.map(lambda x: fn(*x), a), *stacked, masks, passes=ATTENTION, factor=2)
    assert len(found.candidates) == 1


def _positions():
    return jnp.arange(6)


# name -> (what is made outside the loop, the scores in the loop from the scores and that)
MADE_OUTSIDE = {
    "a mask": (lambda: jnp.tril(jnp.ones((6, 6), bool)), lambda s, m: jnp.where(m, s, -1e9)),
    "a mask for every head": (lambda: jnp.tril(jnp.ones((2, 3, 6, 6), bool)), lambda s, m: jnp.where(m, s, -1e9)),
    "what is hidden": (lambda: jnp.triu(jnp.ones((6, 6)), 1) > 0, lambda s, m: jnp.where(m, -1e9, s)),
    "an array": (lambda: np.tril(np.ones((6, 6), bool)), lambda s, m: jnp.where(m, s, -1e9)),
    "numbers to add": (lambda: jnp.where(jnp.tril(jnp.ones((6, 6))) > 0, 0.0, -1e9), lambda s, m: s + m),
    "positions": (_positions, lambda s, m: jnp.where(m[:, None] >= m, s, -1e9)),
}


@pytest.mark.parametrize("name", MADE_OUTSIDE)
def test_a_causal_mask_made_outside_a_loop_is_the_ops_own(name):
    """Also where the loop is differentiated already, and another loop runs back."""
    make, masked = MADE_OUTSIDE[name]
    n = normal((2, 6, 3, 4), (2, 6, 3, 4), (2, 6, 3, 4), seed=1)

    def attend(q, k, v):
        made = make()

        def body(x, _):
            s = masked(jnp.einsum("bthd,bshd->bhts", x, k) * 0.5, made)
            return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v), None

        return jax.lax.scan(body, q, None, length=2)[0]

    step = jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(attend(*a))), (0, 1, 2))
    for fn in (attend, step):
        found = agree(fn, *n, passes=ATTENTION, factor=4)
        (site,) = found.candidates
        assert site.concepts == ("attention", "attention_causal")
        assert set(site.leaves) == {"q", "k", "v"}
        assert fn is attend or site.site.backward is not None


def test_a_mask_of_captured_floats_outside_a_loop_is_told_and_taken_as_data():
    """Floats that a program captures are weights as well, whose entries nobody reads in a search."""
    n, hidden = normal((2, 6, 3, 4), (2, 6, 3, 4), (2, 6, 3, 4), seed=1), np.triu(np.full((6, 6), -1e9, np.float32), 1)

    def attend(q, k, v):
        def body(x, _):
            s = jnp.einsum("bthd,bshd->bhts", x, k) * 0.5 + hidden
            return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v), None

        return jax.lax.scan(body, q, None, length=2)[0]

    found = agree(attend, *n, passes=ATTENTION, factor=4)
    (site,) = found.candidates
    assert site.concepts == ("attention", "attention_causal")
    assert "bias0" in site.leaves
    assert any("its mask is causal but computed outside the loop" in note for note in site.notes)


def test_a_finite_mask_outside_a_causal_one_of_minus_infinity_is_declined():
    """A row whose visible keys are all masked weighs the masked keys after it too, as many as the mask hides."""
    fn = attention(lambda s, m: jnp.where(m, jnp.where(CAUSAL, s, -jnp.inf), -1e9))
    (rejection,) = fl.find(fn, Q, K, V, SEEN, passes=ATTENTION).rejections
    assert rejection.code == "mask"
    assert "its masks fill with different scores" in rejection.sentence
    blind = jnp.zeros((6, 7), bool)
    np.testing.assert_allclose(fl.fuse(fn)(Q, K, V, blind), fn(Q, K, V, blind), rtol=1e-5, atol=1e-6)


def test_a_softmax_of_some_keys_takes_no_further_mask_and_a_mask_of_all_keys_is_none():
    def attend(change, keys):
        def fn(q, k, v):
            s = change(jnp.einsum("bthd,bshd->bhts", q, k) * 0.5)
            return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s, where=keys), v)

        return fn

    seen = np.asarray(KEYS)
    assert fused(attend(lambda s: s, seen)).concepts == ("attention", "attention_masked")
    assert fused(attend(lambda s: s, np.ones((6, 7), bool))).concepts == ("attention", "attention_unmasked")
    found = fl.find(attend(lambda s: jnp.where(CAUSAL, s, -1e9), seen), Q, K, V, passes=ATTENTION)
    assert [r.code for r in found.rejections] == ["mask"]


def test_a_selection_of_all_probabilities_keeps_their_factor():
    site = fused(attention(lambda s: s, lambda p: jnp.where(np.ones((6, 7), bool), p / 0.9, 0.0)))
    assert site.attrs["factors_scale"] == pytest.approx(1 / 0.9)


# -- a softmax that subtracts no maximum ----------------------------------------------------------------------------------------------


def by_hand(change):
    """Attention by exp(s) / sum(exp(s)): a row that sees no key is 0 / 0."""

    def attend(q, k, v, *more):
        e = jnp.exp(change(jnp.einsum("bthd,bshd->bhts", q, k) * 0.5, *more))
        return jnp.einsum("bhts,bshd->bthd", e / e.sum(-1, keepdims=True), v)

    return attend


def test_without_a_maximum_a_row_that_sees_no_key_is_zero_where_the_program_has_nan():
    fn = by_hand(lambda s, m: jnp.where(m, s, -1e9))
    args = (Q, K, V, jnp.asarray(SEEN))
    (site,) = fl.find(fn, *args, passes=ATTENTION).candidates
    assert "0 / 0" in site.notes[0]
    assert site.notes[1] == NOTE
    want, got = np.array(jax.jit(fn)(*args)), fl.fuse(fn, passes=ATTENTION)(*args)
    assert np.isnan(want[0, 2]).all()
    want[0, 2] = 0
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("keep", "fits"), [(CAUSAL, True), (np.asarray(CAUSAL) & ~np.eye(6, 7, dtype=bool), False)])
def test_without_a_maximum_a_constant_that_blinds_a_row_is_declined(keep, fits):
    fn = by_hand(lambda s: s + np.where(np.asarray(keep), 0, -1e9).astype(np.float32))
    found = fl.find(fn, Q, K, V, passes=ATTENTION)
    assert len(found.candidates) == fits
    if not fits:
        (r,) = found.rejections
        assert (r.code, "attention" in r.concepts) == ("mask", True)
        assert "some of its rows see no key" in r.sentence


@pytest.mark.parametrize("fills", [(-jnp.inf, -1e30), (jnp.float32(-jnp.inf), -1e30), (-1e9, -1e9)])
def test_a_causal_mask_that_is_made_twice_is_one(fills):
    def low():
        return jnp.tril(jnp.ones((6, 6), bool)) | (jnp.arange(6)[:, None] == 5)

    fn = attention(lambda s: jnp.where(low(), jnp.where(~low(), fills[0], s), fills[1]))
    assert ", causal" in fused(fn, args=(Q, K[:, :6], V[:, :6])).formula
