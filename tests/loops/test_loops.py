"""The train loops of five libraries, fused: they train as the original does, and every verb sees the step that the loop runs."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.graph.interpret.promote import promote
from fusionlab.kernels.op.op import meaning_of

from .loops import LOOPS, STEPS, batches, keras_data, keras_fit, keras_model, keras_state

ROUNDING = 8 * np.finfo(np.float32).eps  # of a leaf's largest entry: what is this near to float64 is not told apart


KERAS = "keras"
EVERY = [*LOOPS, KERAS]


@pytest.fixture
def library(name, require):
    require(name != KERAS or importlib.util.find_spec(KERAS), "Keras (pip install 'fusionlab[zoo]')")


def trained(loop, make, steps, dtype=jnp.float32):
    """(losses, the arrays of the last state, whether the first state's arrays are deleted)."""
    step, state, losses = make(), loop.start(), []
    first = [x for x in jax.tree.leaves(loop.arrays(state)) if isinstance(x, jax.Array)]
    for batch in batches(dtype)[:steps]:
        loss, state = loop.step(step, state, batch)
        losses.append(float(loss))
    return losses, loop.arrays(state), [x.is_deleted() for x in first]


def in_float64(loop, steps, dtype=jnp.float32):
    """The arrays of the last state of the same loop in float64."""
    pure = loop.pure()
    return of_all_batches(lambda state, batch: pure(state, batch)[1], loop.arrays(loop.start()), batches(dtype)[:steps])


def of_all_batches(step, first, data):
    """The last state in float64; `step`: (state, a batch) -> state."""
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *data)

    def run(state, stacked):
        return jax.lax.scan(lambda state, batch: (step(state, batch), None), state, stacked)[0]

    return promote(run, first, stacked, inline=meaning_of).values(first, stacked)


def plain(x):
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def assert_as_near(zero, got, original, exact, rounding=ROUNDING):
    """Every leaf of `got` is as near to float64 as the original's is; integers and keys are equal."""
    named = jax.tree_util.tree_flatten_with_path(original)[0]
    for (path, o), g, e in zip(named, jax.tree.leaves(got), jax.tree.leaves(exact), strict=True):
        name, o, g, e = jax.tree_util.keystr(path), plain(o), plain(g), plain(e)
        if o.dtype.kind in "iub":
            np.testing.assert_array_equal(g, o, err_msg=name)
            continue
        if any(part in name for part in zero):
            continue
        ours, theirs = (np.linalg.norm(a.astype(np.float64) - e) for a in (g, o))
        assert ours <= 2 * theirs + rounding * np.linalg.norm(e), name


def follow(name, steps):
    loop = LOOPS[name]()
    want, original, gone = trained(loop, loop.original, steps)
    got, fused, gone_too = trained(loop, loop.fused, steps)
    assert steps < STEPS or np.mean(want[-4:]) < 0.95 * np.mean(want[:4])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert gone_too == gone
    assert all(gone) == loop.donates
    assert_as_near(loop.zero, fused, original, in_float64(loop, steps))


@pytest.mark.whole
@pytest.mark.parametrize("name", ["nnx", "optax"])
def test_three_steps_of_a_loop_train_as_the_original_does(name):
    follow(name, 3)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("name", EVERY)
def test_twenty_steps_of_a_loop_train_as_the_original_does(name):
    if name == KERAS:
        follow_fit(STEPS)
    else:
        follow(name, STEPS)


def follow_fit(steps):
    (want, original), (got, fused) = (keras_fit(is_fused, steps) for is_fused in (False, True))
    assert np.mean(want[-4:]) < np.mean(want[:4])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    model = keras_model(fused=False)
    data = [keras_data(batch) for batch in batches()[:steps]]
    exact = of_all_batches(lambda state, batch: model.train_step(state, batch)[1], keras_state(model), data)
    assert_as_near((), *(state[:3] for state in (fused, original, exact)))


def test_a_leaf_whose_gradient_is_zero_in_theory_has_one_that_is_rounding_alone():
    loop = LOOPS["nnx"]()
    step = loop.fused()
    state = loop.start()
    loop.step(step, state, batches()[0])
    moments = state[1].opt_state[0].nu["first"]["bias"].get_value()
    kernel = state[1].opt_state[0].nu["first"]["kernel"].get_value()
    assert float(jnp.sqrt(moments.max())) < 1e-5 * float(jnp.sqrt(kernel.max()))


@pytest.mark.whole
@pytest.mark.parametrize("name", LOOPS)
def test_the_loops_own_step_has_the_sites_of_its_pure_form(name):
    loop = LOOPS[name]()
    state, batch = loop.start(), batches()[0]
    own = fl.find(loop.original(), *loop.call(state, batch))
    pure = fl.find(loop.pure(), loop.arrays(state), batch)
    told = [(c.pass_name, c.formula, c.backward is not None and c.backward.is_fused) for c in own.candidates]
    assert told == [(c.pass_name, c.formula, c.backward is not None and c.backward.is_fused) for c in pure.candidates]
    assert own.counts() == pure.counts()
    assert own.counts()["gemm_epilogue_grad"] == loop.sites
    assert abs(len(own.graph) - len(pure.graph)) <= 0.02 * len(pure.graph)


def own_step(name):
    """(the loop's step, the same fused, its arguments, the leaves that it updates, whether it donates)."""
    if name == KERAS:
        model = keras_model(fused=False)
        state = keras_state(model)
        return model.train_step, fl.fuse(model.train_step), (state, keras_data(batches()[0])), state, False
    loop = LOOPS[name]()
    state = loop.start()
    return loop.original(), loop.fused(), loop.call(state, batches()[0]), loop.arrays(state), loop.donates


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("name", EVERY)
def test_the_loops_own_step_is_compared_with_its_update(name):
    original, fused, args, state, donates = own_step(name)
    told = fl.compare(original, fused, *args, grad=False, timing=False)
    assert not told.numerics.regressions
    kinds = [jnp.result_type(x) for x in jax.tree.leaves(state)]
    assert sum(leaf.dtype == "float32" for leaf in told.numerics.leaves) > kinds.count(jnp.float32)
    assert (told.memory.before.alias > 0) == donates
    assert told.memory.after.alias == told.memory.before.alias


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("name", EVERY)
def test_the_loops_own_step_is_explored_with_its_update(name):
    original, _, args, *_ = own_step(name)
    lab = fl.explore(original, *args)
    assert sum(n.primitive == "sqrt" for n in lab.graph.nodes()) >= 3  # Adam's
    assert lab.findings.counts()["gemm_epilogue"] == lab.findings.counts()["gemm_epilogue_grad"] == 3
