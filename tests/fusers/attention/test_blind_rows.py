"""Query rows that see no key: 0 in the fused op; a program that has NaN there and asks for them stays as it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.fusers.engine.fully_masked_rows import NOTE

from ..checks import normal

ATTENTION = "dot_product_attention"
Q, K, V = normal((2, 6, 3, 4), (2, 7, 3, 4), (2, 7, 3, 4))
SEEN = jnp.asarray(np.random.default_rng(0).random((2, 1, 6, 7)) < 0.7).at[0, 0, 2].set(False)


def attend(q, k, v, m, fill=-jnp.inf):
    s = jnp.where(m, jnp.einsum("bthd,bshd->bhts", q, k) * 0.5, fill)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v)


def by_bias(q, k, v, m):
    s = jnp.einsum("bthd,bshd->bhts", q, k) * 0.5 + jnp.where(m, 0.0, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v)


@pytest.mark.parametrize("implementation", ["xla", "xla_blockwise"])
@pytest.mark.parametrize("fn", [attend, by_bias])
def test_a_row_that_sees_no_key_is_zero_forward_and_backward_and_said_so(fn, implementation):
    (site,) = fl.find(fn, Q, K, V, SEEN, passes=ATTENTION).candidates
    assert NOTE in site.notes
    want = np.array(fn(Q, K, V, SEEN))
    assert np.isnan(want[0, 2]).all()
    want[0, 2] = 0
    got, pull = jax.vjp(lambda *a: fl.fuse(fn, implementation=implementation)(*a, SEEN), Q, K, V)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    ct = jnp.ones_like(got)
    seen = SEEN.at[0, 0, 2].set(True)  # for that row alone any gradient would do: its cotangent is taken away
    _, plain = jax.vjp(lambda *a: fn(*a, seen), Q, K, V)
    for g, w in zip(pull(ct), plain(ct.at[0, 2].set(0)), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


def test_a_row_masked_with_a_finite_number_keeps_its_mean_and_has_no_note():
    fn = lambda *a: attend(*a, fill=-1e9)  # noqa: E731
    (site,) = fl.find(fn, Q, K, V, SEEN, passes=ATTENTION).candidates
    assert NOTE not in site.notes
    got = fl.fuse(fn)(Q, K, V, SEEN)
    np.testing.assert_allclose(got[0, 2], V[0].mean(0), rtol=1e-5, atol=1e-6)


W = normal((4, 4), seed=1)[0]


def scanned(q, k, v, m):
    def body(x, _):
        return attend(x, k, v, m), None

    found = jax.lax.scan(body, q, None, length=2)[0]
    return jnp.where(jnp.isnan(found), 7.0, found)


ASKING = {
    "isnan": lambda *a: (lambda o: jnp.where(jnp.isnan(o), 7.0, o))(attend(*a)),
    "isfinite": lambda *a: (lambda o: jnp.where(jnp.isfinite(o), o, 7.0))(attend(*a)),
    "x != x": lambda *a: (lambda o: jnp.where(o != o, 7.0, o))(attend(*a)),
    "x == x": lambda *a: (lambda o: jnp.where(o == o, o, 7.0))(attend(*a)),
    "nan_to_num": lambda *a: jnp.nan_to_num(attend(*a), nan=7.0),
    "after a projection": lambda *a: (lambda o: jnp.where(jnp.isnan(o), 7.0, o))(attend(*a) @ W),
    "in a branch": lambda *a: jax.lax.cond(
        a[0].sum() > -1e9, lambda o: jnp.where(jnp.isnan(o), 7.0, o), lambda o: o, attend(*a)
    ),
    "after the loop it stands in": scanned,
    "by a bias": lambda *a: (lambda o: jnp.where(jnp.isnan(o), 7.0, o))(by_bias(*a)),
}


NONE_HIDDEN = jnp.where(SEEN, 0.0, -jnp.inf)


def biased(q, k, v, bias):
    s = jnp.einsum("bthd,bshd->bhts", q, k) * 0.5 + bias
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v)


def asked(o):
    return jnp.where(jnp.isnan(o), 7.0, o)


def asked_by_the_next_turn(q, k, v, m):
    return jax.lax.scan(lambda x, _: (attend(asked(x), k, v, m), None), q, None, length=2)[0]


def two_finite_masks(q, k, v, m):
    least = jnp.finfo(jnp.float32).min
    hidden = (1 - m.astype(jnp.float32)) * least
    s = jnp.einsum("bthd,bshd->bhts", q, k) * 0.5 + hidden + hidden
    return asked(jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v))


ASKING |= {
    "by a bias that is data": lambda q, k, v, m: asked(biased(q, k, v, NONE_HIDDEN + q[0, 0, 0, 0] * 0)),
    "by a bias that is captured": lambda q, k, v, m: asked(biased(q, k, v, np.asarray(NONE_HIDDEN))),
    "by a logarithm": lambda q, k, v, m: asked(biased(q, k, v, jnp.log(m.astype(jnp.float32)))),
    "by a bias made outside of a checkpoint": lambda q, k, v, m: asked(
        jax.checkpoint(biased)(q, k, v, jnp.where(m, 0.0, -jnp.inf))
    ),
    "by a number that a cast makes infinite": lambda q, k, v, m: asked(
        biased(
            *(a.astype(jnp.bfloat16) for a in (q, k, v)),
            jnp.where(m, 0.0, jnp.finfo(jnp.float32).min).astype(jnp.bfloat16),
        )
    ),
    "by masks that add up": two_finite_masks,
    "by the loop's next turn": asked_by_the_next_turn,
}


@pytest.mark.parametrize("name", ASKING)
def test_a_program_that_asks_where_the_nan_are_stays_as_it_is(name):
    fn = ASKING[name]
    found = fl.find(fn, Q, K, V, SEEN, passes=ATTENTION)
    assert not found.candidates
    (rejection,) = found.rejections
    assert rejection.code == "mask"
    assert "tests for NaN" in rejection.sentence
    assert "-1e9" in rejection.edit
    want = jax.jit(fn)(Q, K, V, SEEN)
    if name != "by the loop's next turn":  # there it is asked before the last turn's attention
        assert (want == 7).any()
    got = fl.fuse(fn)(Q, K, V, SEEN)
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=1e-5, atol=1e-6)


def test_a_question_after_a_reduction_or_of_something_else_is_none():
    def model(q, k, v, m):
        other = jnp.where(jnp.isnan(q), 0.0, q)
        return jax.nn.logsumexp(attend(other, k, v, m).sum()), jnp.isfinite(k).all()

    (site,) = fl.find(model, Q, K, V, SEEN, passes=ATTENTION).candidates
    assert NOTE in site.notes


def test_a_comparison_counts_the_rows_and_calls_them_no_regression():
    found = fl.compare(attend, fl.fuse(attend), Q, K, V, SEEN, timing=False, memory=False).numerics
    out = found.leaves[0]
    assert (out.filled, out.filled_rows) == (3 * 4, 3)  # of each of 3 heads
    assert not found.regressions
    (note,) = (n for n in found.notes if n.startswith("output"))
    assert f"12 of {out.size} elements (3 whole rows) are NaN in the original" in note
    assert {leaf.name for leaf in found.leaves if leaf.kind == "gradient" and leaf.filled} == {"v"}, (
        "its weights in the row are NaN; what it adds to other gradients is masked"
    )
    seen = SEEN.at[0, 0, 2, 0].set(True)
    assert not any(
        leaf.filled
        for leaf in fl.compare(attend, fl.fuse(attend), Q, K, V, seen, timing=False, memory=False).numerics.leaves
    )


@pytest.mark.parametrize(
    "bias",
    [
        lambda m: jnp.where(m, 0.0, -1e9),
        lambda m: (1 - m.astype(jnp.float32)) * -1e9,
        lambda m: (1 - m.astype(jnp.float32)) * jnp.finfo(jnp.float32).min,
        lambda m: np.linspace(-3, 3, 42, dtype=np.float32).reshape(6, 7),
    ],
)
def test_a_bias_that_is_known_to_be_finite_has_no_note_and_may_be_asked(bias):
    fn = lambda q, k, v, m: asked(biased(q, k, v, bias(m)))  # noqa: E731
    (site,) = fl.find(fn, Q, K, V, SEEN, passes=ATTENTION).candidates
    assert NOTE not in site.notes
    np.testing.assert_allclose(fl.fuse(fn)(Q, K, V, SEEN), fn(Q, K, V, SEEN), rtol=1e-5, atol=1e-6)


def test_a_maximum_that_is_asked_in_a_loop_is_none():
    def model(q, k, v, m):
        def turn(x, _):
            o = attend(x, k, v, m)
            return o, jax.nn.logsumexp(o)

        return jax.lax.scan(turn, q, None, length=2)

    (site,) = fl.find(model, Q, K, V, SEEN, passes=ATTENTION).candidates
    assert NOTE in site.notes
