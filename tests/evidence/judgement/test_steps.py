"""Train steps are judged as they are: no output of a right one is worse, and a small error of an optimiser is found."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp

import fusionlab as fl
from benchmarks.method.optimiser_steps import RATES, STEPS, loss_of, optimiser, pure_step
from fusionlab.evidence.comparison import measure
from fusionlab.evidence.errors import rounding
from fusionlab.evidence.errors.arrays import compare_arrays
from fusionlab.evidence.errors.numerics import explained_by_rounding, leaf_numerics, rounding_notes
from fusionlab.evidence.errors.reduction_sizes import ReductionSizes
from fusionlab.evidence.errors.rounding import GROWTH, RUNS, moved

ERRORS_ALONE = {"timing": False, "memory": False}
LAYERS, EMBED = 2, 32


@pytest.mark.dear
@pytest.mark.parametrize("style", STEPS)
@pytest.mark.parametrize("name", RATES)
def test_no_output_of_a_step_is_worse_and_nothing_is_differentiated_once_more(name, style):
    step, args = STEPS[style](name, LAYERS, EMBED)
    told = []
    found = fl.compare(step, fl.fuse(step), *args, **ERRORS_ALONE, progress=lambda *stage: told.append(stage[0]))
    assert found.numerics.ok, found.numerics.regressions
    assert {leaf.kind for leaf in found.numerics.leaves} == {"output"}
    assert found.differentiated
    assert not [stage for stage in told if "gradient" in stage and "errors of" not in stage]


def planted(name, wrong):
    """The step of that optimiser with an error."""
    tx = optimiser(name)

    def step(params, state, tokens):
        loss, gradients = jax.value_and_grad(loss_of)(params, tokens)
        if wrong == "gradient":
            gradients["blocks"][1]["up"]["w"] *= 1.01
        updates, state = tx.update(gradients, state, params)
        if wrong == "factor":
            updates = jax.tree.map(lambda u: 1.05 * u, updates)
        if wrong == "no bias correction":
            mu, nu = state[0].mu, state[0].nu
            adam = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + 1e-8), mu, nu)
            updates = jax.tree.map(lambda a, p: -RATES[name] * (a + 1e-4 * p), adam, params)
        return optax.apply_updates(params, updates), state, loss

    return step


@functools.cache
def right(name):
    return pure_step(name, LAYERS, EMBED)


@pytest.mark.dear
@pytest.mark.parametrize(
    ("name", "wrong"),
    [*((name, "gradient") for name in RATES), *((name, "factor") for name in RATES), ("adamw", "no bias correction")],
)
def test_a_small_error_of_an_optimiser_is_worse(name, wrong):
    step, args = right(name)
    found = measure(step, planted(name, wrong), *args, **ERRORS_ALONE).numerics
    worse = [leaf.name for leaf in found.regressions]
    if wrong == "gradient":  # what it touches and nothing else
        assert worse
        assert all("['blocks'][1]['up']['w']" in name for name in worse)
    else:
        assert len(worse) > 10
        assert all(name.startswith("out[0]") for name in worse)


# -- what rounding alone does ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def terms():
    """2000 terms of each of 64 sums that cancel, in an order in which no two that do are neighbours, and some that do not."""
    rng = np.random.default_rng(0)
    t = rng.standard_normal((1000, 64)).astype(np.float32)
    return jnp.asarray(rng.permutation(np.concatenate([t, -t]))), jnp.asarray(rng.standard_normal(64), jnp.float32)


def update(terms, whole):
    """As Adam's first one: of a gradient that is zero in theory, and of one that is not."""
    noise = terms.sum(0)
    return noise / (jnp.abs(noise) + 1e-8), whole / (jnp.abs(whole) + 1e-8), jnp.concatenate([noise, whole]) ** 2


def another_order(terms, whole):
    return update(terms.reshape(8, -1, 64).sum(1), whole)


def numerics(version, terms):
    return measure(update, version, *terms, grad=False, **ERRORS_ALONE).numerics


def times(factors):
    return lambda t, w: tuple(x * f for x, f in zip(another_order(t, w), factors, strict=True))


def test_another_order_of_a_sum_that_is_zero_in_theory_is_no_error(terms):
    assert numerics(another_order, terms).ok


@pytest.mark.parametrize(
    ("factors", "worse"),
    [((1, 1.01, 1), ["out[1]"]), ((1, 1, 1.01), ["out[2]"]), ((100, 1, 1), ["out[0]"])],
)
def test_a_real_error_beside_what_is_rounding_alone_is_worse(terms, factors, worse):
    assert [leaf.name for leaf in numerics(times(factors), terms).regressions] == worse


def leaf_of(after, before, want):
    (leaf,) = leaf_numerics("output", ["u"], [np.float32(before)], [np.float32(after)], [want], ReductionSizes(64))
    return leaf


def test_the_noise_is_measured_only_where_a_result_is_worse_and_no_longer_than_it_takes():
    want, runs = np.linspace(1, 2, 100), []

    def noisy(k):  # one element that rounding moves by a hundredth
        runs.append(k)
        return [np.float32(want + 0.01 * (np.arange(100) == 7) * (-1) ** k)]

    right = leaf_of(want, want, want)
    assert explained_by_rounding([right], [want], noisy) == [right]
    assert runs == []
    off = want + 0.02 * (np.arange(100) == 7)
    (leaf,) = explained_by_rounding([leaf_of(off, want, want)], [want], noisy)
    assert (leaf.ok, leaf.is_explained, leaf.noise.runs, runs) == (True, True, 1, [1])
    (note,) = rounding_notes([leaf, right])
    assert note.startswith("1 result is as sensitive to rounding in the original")


@pytest.mark.parametrize(
    ("off", "runs"),
    [
        (0.05 * (np.arange(100) == 7), RUNS),  # more than four times as far
        (0.009 * (np.arange(100) < 50), RUNS),  # no further, but in fifty elements
        (5.0 * (np.arange(100) == 7), RUNS),  # hopeless, but in one element
        (np.full(200, 5.0), 2),  # hopeless
    ],
)
def test_what_noise_does_not_explain_is_worse(off, runs):
    want = np.linspace(1, 2, len(off))
    noisy = lambda k: [np.float32(want + 0.01 * (np.arange(len(off)) == 7))]  # noqa: E731
    (leaf,) = explained_by_rounding([leaf_of(want + off, want, want)], [want], noisy)
    assert not leaf.ok
    assert leaf.noise.runs == runs
    assert rounding_notes([leaf]) == ()


def test_noise_explains_up_to_a_multiple_of_the_largest_error():
    want = np.linspace(1, 2, 100)
    one = np.arange(100) == 7
    error = lambda by: compare_arrays(np.float32(want + by * one), want, np.float32, 1e-6, 1e-6)  # noqa: E731
    (leaf,) = explained_by_rounding([leaf_of(want + 0.05 * one, want, want)], [want], lambda k: [want + 0.01 * k * one])
    assert leaf.noise.max_abs == pytest.approx(0.01 * leaf.noise.runs)
    assert leaf.noise.runs == 2
    assert leaf.noise.explains(error(0.99 * GROWTH * 0.02), leaf.before)
    assert not leaf.noise.explains(error(1.01 * GROWTH * 0.02), leaf.before)


@pytest.mark.parametrize(
    ("dtype", "sums", "by"),
    [
        (jnp.float32, ReductionSizes(8, coarsest="float32"), 2.0**-23),
        (jnp.bfloat16, ReductionSizes(8, coarsest="float32"), 2.0**-7),
        (jnp.float32, ReductionSizes(8, coarsest="bfloat16"), 2.0**-8),
        (jnp.float32, ReductionSizes(8, tf32=True, coarsest="float32"), 2.0**-11),
        (jnp.float32, ReductionSizes(8), 2.0**-23),
    ],
)
def test_arguments_are_moved_by_one_rounding_up_or_down(dtype, sums, by):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((40, 50)), dtype).at[0].set(0)
    args = {"x": x, "n": jnp.arange(3), "s": 2.0, "none": jnp.zeros((0, 2), dtype)}
    first, second = moved(args, 1, sums), moved(args, 2, sums)
    assert (first["s"], first["x"].dtype) == (2.0, dtype)
    np.testing.assert_array_equal(first["n"], args["n"])
    wide = lambda a: np.asarray(a, np.float64)  # noqa: E731
    np.testing.assert_array_equal(wide(first["x"][0]), 0)
    change = wide(first["x"])[1:] / wide(x)[1:] - 1
    assert by / 2 <= np.abs(change).min() <= np.abs(change).max() <= 2 * by
    assert 0.4 < (change > 0).mean() < 0.6
    assert 0.4 < (wide(first["x"]) == wide(second["x"]))[1:].mean() < 0.6


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5)])
def test_small_arguments_are_moved_on_the_host_to_the_same_numbers_and_nothing_is_compiled(dtype, shape, monkeypatch):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)
    compiled = []
    heard = lambda name, *_, **__: compiled.append(name)  # noqa: E731
    jax.clear_caches()
    moved([jnp.ones(11)], 3, ReductionSizes(8))  # which learns where new arrays lie
    jax.monitoring.register_event_duration_secs_listener(heard)
    on_host = moved([x], 3, ReductionSizes(8))
    jax.monitoring.unregister_event_duration_listener(heard)
    assert not [name for name in compiled if "backend_compile" in name]
    monkeypatch.setattr(rounding, "BLOCK", 0)
    (want,) = moved([x], 3, ReductionSizes(8))
    assert (on_host[0].dtype, on_host[0].shape) == (want.dtype, want.shape)
    np.testing.assert_array_equal(np.asarray(on_host[0]), np.asarray(want))
