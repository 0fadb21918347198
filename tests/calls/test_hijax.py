"""Functions that close over nnx's variables that are objects to JAX (hijax): what may change is never read by a search."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend import core as jex_core

import fusionlab as fl
from fusionlab.graph.interpret.evaluate import evaluate
from fusionlab.graph.interpret.limits import CannotEvaluate

X = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), "float32")


class Model(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def forward(model):
    return model


def attend(model):
    def fn(x):
        q = model.up(x)
        return jax.nn.softmax(q @ q.T) @ q

    return fn


def sensitivity(model):
    return jax.value_and_grad(lambda x: (model(x) ** 2).mean())


def train_step(model):
    """The model's variables are read in the step, the loss differentiated by their values."""

    def fn(x):
        def loss(values):
            (w, b), (v, c) = values
            return ((jax.nn.relu(x @ w + b) @ v + c) ** 2).mean()

        return jax.value_and_grad(loss)([(layer.kernel[...], layer.bias[...]) for layer in (model.up, model.down)])

    return fn


def in_scan(model):
    return lambda x: jax.lax.scan(lambda carry, _: (model(carry), carry.sum()), x, None, length=3)


def in_cond(model):
    return lambda x: jax.lax.cond(x.sum() > 0, model, lambda x: 2 * model(x), x)


def in_while(model):
    return lambda x: jax.lax.while_loop(
        lambda state: state[0] < 3, lambda state: (state[0] + 1, model(state[1])), (0, x)
    )


PROGRAMS = {
    forward: {"gemm_epilogue": 2},
    attend: {"gemm_epilogue": 1, "dot_product_attention": 1},
    sensitivity: {"gemm_epilogue": 2, "gemm_epilogue_grad": 2},
    train_step: {"gemm_epilogue": 2, "gemm_epilogue_grad": 2},
    in_scan: {"gemm_epilogue": 2},
    in_cond: {"gemm_epilogue": 4},
    in_while: {"gemm_epilogue": 2},
}


@pytest.fixture
def model():
    with nnx.var_defaults(hijax=True):
        yield Model(nnx.Rngs(0))


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_a_function_that_closes_over_hijax_variables_is_searched_and_fused(model, make):
    fn = make(model)
    found = fl.find(fn, X)
    assert {p: n for p, n in found.counts().items() if isinstance(n, int) and n} == PROGRAMS[make]
    want = jax.jit(fn)(X)
    for got in (fl.fuse(fn)(X), jax.jit(fl.fuse(fn))(X)):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_captured_variable_cannot_be_evaluated(model):
    closed = jax.make_jaxpr(lambda x: x @ model.up.kernel[...])(X)
    assert isinstance(closed, jex_core.ClosedJaxpr) or hasattr(closed, "consts")
    with pytest.raises(CannotEvaluate, match="whose value may change"):
        evaluate(closed, [np.asarray(X, "float64")])


def test_an_argument_of_hijax_variables_is_taken_and_updated_as_under_jax_jit(model):
    def step(model, x):
        model.down.bias[...] = model.down.bias[...] + 1
        return model(x)

    want = model(X) + 1
    for fused in (fl.fuse(step), fl.fuse(jax.jit(step))):
        before = model.down.bias[...]
        np.testing.assert_allclose(fused(model, X), want, rtol=1e-5)
        np.testing.assert_array_equal(model.down.bias[...], before + 1)
        want = want + 1
