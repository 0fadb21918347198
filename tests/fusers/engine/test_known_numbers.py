"""Numbers that a program needs are read wherever they stand: closed over, computed in the program, or arrays of one entry."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fusionlab as fl

from ..checks import EVERYWHERE, agree, as_exact, codes, counts_everywhere, differentiated, normal, primitives

X, G, B = normal((4, 24), (24,), (24,))
Q, K, V = normal((2, 3, 6, 8), (2, 3, 6, 8), (2, 3, 6, 8), seed=1)
LOW = np.tril(np.ones((6, 6), bool))
NORM, ATTENTION, LINEAR = "layer_norm", "dot_product_attention", "gemm_epilogue"
ARRAY, SCALAR, ENTRY = jnp.asarray(1e-6, jnp.float32), np.float32(1e-6), jnp.full((1, 1), 1e-6)
FILL, ZERO, QUARTER = jnp.asarray(-1e9, jnp.float32), jnp.zeros((1, 1, 1, 6)), jnp.asarray([0.25])


def rms(epsilon):
    return lambda x, g: x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon()) * g


def attention(change, values=lambda v: v):
    return lambda q, k, v: jax.nn.softmax(change(q @ k.swapaxes(-1, -2)), -1) @ values(v)


EPSILONS = {
    "a captured array": lambda: ARRAY,
    "a scalar of numpy": lambda: SCALAR,
    "an array of numpy": lambda: np.array([1e-6], np.float32),
    "an array of one entry": lambda: ENTRY,
    "computed from captured arrays": lambda: ARRAY * 1000 / jnp.float32(1000),
    "jnp.full": lambda: jnp.full((1,), 1e-6),
    "a captured array, cast": lambda: jnp.asarray(np.float64(1e-6)).astype(jnp.float32),
}


@pytest.mark.parametrize("name", EPSILONS)
def test_epsilon_is_a_number_wherever_it_stands(name):
    fn = rms(EPSILONS[name])
    found = as_exact(fn, X, G, passes=NORM)
    (site,) = found.candidates
    assert site.attrs["epsilon"] == pytest.approx(1e-6, rel=1e-6)
    assert set(site.leaves) == {"x", "scale"}
    assert "rsqrt" not in primitives(found.apply())
    assert counts_everywhere(fn, (X, G), NORM) == EVERYWHERE


SCORES = {
    "a captured fill": lambda s: jnp.where(LOW, s / 4, FILL),
    "a fill of numpy": lambda s: jnp.where(LOW, s / 4, np.float32(-1e9)),
    "a captured factor": lambda s: jnp.where(LOW, s * QUARTER, -1e9),
    "a captured divisor": lambda s: s / jnp.sqrt(jnp.asarray(16.0)),
    "ones less ones": lambda s: s / 4 + (1.0 - jnp.ones((1, 1, 1, 6))) * -1e4,
    "zeros": lambda s: s / 4 + jnp.zeros((6, 6)),
    "zeros, subtracted": lambda s: s / 4 - jnp.zeros((1, 6)),
    "captured zeros": lambda s: s / 4 + ZERO,
    "nothing times positions": lambda s: s / 4 + 0.0 * jnp.arange(6.0),
    "zeros, then a mask": lambda s: jnp.where(LOW, jnp.zeros((6, 6)) + s / 4, FILL),
    "a factor, zeros, a bias": lambda s: (s / 4 + jnp.zeros((6, 6))) + jnp.arange(6.0),
}


@pytest.mark.parametrize("name", SCORES)
def test_numbers_of_an_attention_are_read_and_a_mask_of_zeros_hides_nothing(name):
    fn = attention(SCORES[name])
    found = as_exact(fn, Q, K, V, passes=ATTENTION)
    assert len(found.candidates) == 1, found.rejections
    assert "exp" not in primitives(found.apply())
    assert any(n.startswith("bias") for n in found.candidates[0].leaves) == ("a bias" in name)
    assert counts_everywhere(fn, (Q, K, V), ATTENTION, 3) == EVERYWHERE


def test_zeros_that_are_added_to_an_operand_are_looked_through():
    found = agree(lambda x, w: jax.nn.relu((x + jnp.zeros(24)) @ w + jnp.zeros(5) + B[:5]), X, normal((24, 5))[0])
    assert found.counts()[LINEAR] == 1
    found = agree(lambda x, g: rms(lambda: 1e-6)(jnp.zeros((4, 24)) - x, g), X, G, passes=NORM)
    assert found.counts()[NORM] == 1


@pytest.mark.parametrize("bias", [jnp.ones(1), jnp.zeros(1), np.ones((1, 1), np.float32)])
def test_a_bias_of_one_feature_is_no_number(bias):
    w = normal((24, 1))[0]
    found = agree(lambda x: jnp.tanh(x @ w + bias), X)
    assert found.counts()[LINEAR] == 1
    assert "b" in found.candidates[0].leaves
    found = fl.find(lambda x: lax.scan(lambda c, _: (jnp.tanh(c @ w + bias) + c, None), x, None, length=2)[0], X)
    assert found.counts()[LINEAR] == 1


# -- numbers that are not known, and what is told of them ---------------------------------------------------------------


@pytest.mark.parametrize("loop", [False, True])
def test_an_epsilon_that_is_an_argument_is_told_by_its_name(loop):
    def one(x, eps):
        return rms(lambda: eps)(x, G)

    def fn(x, eps):
        return lax.scan(lambda c, _: (one(c, eps), None), x, None, length=2)[0] if loop else one(x, eps)

    found = agree(fn, X, jnp.float32(1e-6), passes=NORM)
    assert not found.candidates
    (rejection,) = found.rejections
    assert "epsilon is an argument of the program: close over it (eps)" in rejection.sentence
    assert rejection.edit is not None
    assert "close over eps" in rejection.edit


def test_a_fill_that_is_an_argument_is_told_by_its_name():
    def fn(q, k, v, options):
        return attention(lambda s: jnp.where(LOW, s / 4, options["fill"]))(q, k, v)

    found = fl.find(fn, Q, K, V, {"fill": -1e9}, passes=ATTENTION)
    assert codes(found) == ["mask"]
    assert "the score of masked keys is an argument of the program: close over it" in found.rejections[0].sentence
    assert "options['fill']" in found.rejections[0].sentence


NEAR = {
    "an epsilon for each row": rms(lambda: jnp.asarray([[1e-6], [1e-6], [1e-6], [2e-6]])),
    "an epsilon that a map is over": lambda x, g: jax.vmap(lambda row, e: rms(lambda: e)(row, g))(
        x, jnp.asarray([1e-6, 1e-3, 1e-6, 1e-6])
    ),
    "x less itself": lambda x, g: rms(lambda: (x - x)[0, 0] + 1e-6)(x, g),
    "an epsilon that is too large": rms(lambda: jnp.asarray(0.5)),
}


@pytest.mark.parametrize("name", NEAR)
def test_what_is_no_known_number_declines_a_norm(name):
    found = agree(NEAR[name], X, G, passes=NORM, factor=4)
    assert not found.candidates
    assert found.rejections


HALF = np.where(LOW, 0.0, -0.5).astype(np.float32)
NO_MASKS = {
    "half a mask": lambda s: s / 4 + HALF,
    "infinity times nothing": lambda s: s / 4 + jnp.asarray([0.0, jnp.inf] * 3) * 0.0,
}


@pytest.mark.parametrize("name", NO_MASKS)
def test_what_is_not_known_to_be_zero_stays_added(name):
    found = agree(attention(NO_MASKS[name]), Q, K, V, passes=ATTENTION)
    assert all("bias0" in c.leaves for c in found.candidates)


def test_an_epsilon_that_is_traced_around_stays_data():
    """The captured array is a tracer there: one number for each entry of the map."""

    def outer(e):
        fn = rms(lambda: e)
        assert not fl.find(fn, X, G, passes=NORM).candidates
        return fl.fuse(fn, passes=NORM)(X, G)

    got = jax.vmap(outer)(jnp.asarray([1e-6, 1e-2]))
    want = jax.vmap(lambda e: rms(lambda: e)(X, G))(jnp.asarray([1e-6, 1e-2]))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


# -- equal constants ------------------------------------------------------------------------------------------------------


def turned(x, table):
    angles = jnp.arange(6.0)[:, None] * table()
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * jnp.cos(angles) - second * jnp.sin(angles), second], -1)


def frequencies():
    return jnp.asarray(1e4 ** (-np.arange(4, dtype=np.float32) / 4))


def test_tables_made_of_numpy_in_each_call_are_one_constant():
    def fn(q, k):
        return turned(q, frequencies), turned(k, frequencies)

    block = fl.trace(fn, Q, K).top
    assert len(block.consts) == 1


def test_a_vector_made_twice_of_equal_constants_is_one_operand():
    """Both halves of the norm read a scale of their own, made alike: scale and shift by one vector."""

    def scale():
        return jnp.cos(jnp.asarray(np.arange(24, dtype=np.float32)))

    def fn(x, w, v):
        return jax.nn.silu(x @ w * scale() + 0) * (x @ v * scale())

    found = agree(fn, X, *normal((24, 24), (24, 24), seed=3))
    assert not [r for r in found.rejections if r.code == "uncertified"]


def test_a_vector_that_a_loop_is_given_twice_is_one_operand():
    def scale():
        return jnp.asarray(np.linspace(0.5, 1.5, 24, dtype=np.float32))

    def fn(x):
        inv = lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * inv * scale() + (B - x.mean(-1, keepdims=True) * (inv * scale()))

    def looped(xs):
        return lax.map(fn, xs)

    xs = jnp.stack([X, X[::-1]])
    (scan,) = [n for n in fl.trace(looped, xs).top.nodes if n.primitive == "scan"]
    assert len({a.id for a in scan.inputs}) < len(scan.inputs)
    found = as_exact(looped, xs, passes=NORM)
    (site,) = found.candidates
    assert set(site.leaves) == {"x", "scale", "bias"}
    step = differentiated(looped, (xs,))
    got, want = fl.fuse(step, passes=NORM)(xs), step(xs)
    np.testing.assert_allclose(got[1][0], want[1][0], rtol=1e-4, atol=1e-4)


def test_a_train_step_with_equal_constants_keeps_its_gradients():
    def fn(q, k, v):
        return attention(lambda s: s / 4)(turned(q, frequencies), turned(k, frequencies), v)

    assert agree(fn, Q, K, V, passes=ATTENTION).counts()[ATTENTION] == 1
    step = differentiated(fn, (Q, K, V))
    found = fl.find(step, Q, K, V, passes=ATTENTION)
    assert found.counts()[f"{ATTENTION}_grad"] == 1
