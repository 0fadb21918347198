"""Which results of a train step are its next arguments, in whatever order it takes and returns them, and which is the loss."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fusionlab.errors import ArgumentError
from fusionlab.evidence.training.step import Call, Step

P = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
OPT = ({"m": jax.tree.map(jnp.zeros_like, P), "v": jax.tree.map(jnp.zeros_like, P)}, jnp.zeros((), jnp.int32))
X, Y = jnp.ones((2, 4)), jnp.ones((2, 3))


class State(NamedTuple):
    params: dict
    opt: tuple
    key: jax.Array


def loss_of(params, x):
    return jnp.sum((x @ params["w"] + params["b"]) ** 2)


def updated(params, x, rate=0.1):
    loss, grads = jax.value_and_grad(loss_of)(params, x)
    return jax.tree.map(lambda p, g: p - rate * g, params, grads), loss, grads


def moved(opt):
    return jax.tree.map(lambda x: x + 1, opt)


def bound(step, *state, batch=X, place=None, loss=None, next_state=None, kwargs=None, **static):
    static = {"static_argnums": (), "static_argnames": ()} | static
    return Step(Call.of(step, state, kwargs or {}, batch, place, **static), batch, loss, next_state)


def whole(state, batch):
    params, loss, _ = updated(state.params, batch)
    return State(params, moved(state.opt), jax.random.split(state.key)[0]), loss


STEPS = {
    "state, loss": (lambda p, x: updated(p, x)[:2], (P,), 2),
    "loss, state": (lambda p, x: updated(p, x)[1::-1], (P,), 2),
    "state, dict": (lambda p, x: (updated(p, x)[0], {"loss": updated(p, x)[1], "norm": 1.0 * x.sum()}), (P,), 2),
    "params, opt, loss": (lambda p, o, x: (updated(p, x)[0], moved(o), updated(p, x)[1]), (P, OPT), 7),
    "opt, params": (lambda o, p, x: (updated(p, x)[1], updated(p, x)[0], moved(o)), (OPT, P), 7),
    "a state of its own": (whole, (State(P, OPT, jax.random.key(0)),), 8),
    "a rate that stays": (lambda p, rate, x: updated(p, x, rate)[:2], (P, jnp.float32(0.1)), 2),
    "gradients deeper than the state": (lambda p, x: (updated(p, x)[0], (updated(p, x)[1], updated(p, x)[2])), (P,), 2),
    "under jit": (jax.jit(lambda p, x: updated(p, x)[:2], donate_argnums=0), (P,), 2),
    "a partial": (functools.partial(lambda rate, p, x: updated(p, x, rate)[:2], 0.1), (P,), 2),
    "one array": (lambda w, x: (w - x.sum(), x.sum()), (jnp.ones(3),), 1),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_state_and_the_loss_are_found(name):
    step, state, count = STEPS[name]
    found = bound(step, *state)
    assert len(found.state) == count
    _, made = found.program(X)
    new, loss = jax.jit(made())(found.initial, found.rest, found.arrays_of(X))
    assert [(x.shape, x.dtype) for x in new] == [(leaf.shape, leaf.dtype) for leaf in found.state]
    assert float(loss) == (6.0 * 16 if name != "one array" else 8.0)
    if name != "one array":
        at = next(i for i, leaf in enumerate(found.state) if leaf.name.endswith("['w']") and "[0]" not in leaf.name)
        assert np.allclose(new[at], updated(P, X)[0]["w"])


def test_a_batch_is_one_argument_or_several_or_several_by_name():
    def several(p, x, y):
        return updated(p, x + y.sum())[:2]

    def one(p, pair):
        return several(p, *pair)

    for step in (several, one):
        found = bound(step, P, batch=(X, Y))
        assert found.arrays_of((X, Y)) == (X, Y)
        assert len(found.state) == 2
        assert not found.fixed_names
    named = bound(several, P, batch={"y": Y, "x": X})
    assert named.arrays_of({"y": Y, "x": X}) == (X, Y)
    first = bound(lambda x, p: updated(p, x)[:2], P, place=0)
    assert [leaf.name for leaf in first.state] == ["p['b']", "p['w']"]
    with pytest.raises(ArgumentError, match="do not fit its parameters"):
        bound(several, P, batch=X)


def test_what_is_the_same_at_every_step_is_named():
    assert bound(*STEPS["a rate that stays"][:1], *STEPS["a rate that stays"][1]).fixed_names == ["rate"]


def test_objects_of_nnx_change_in_place():
    class Model(nnx.Module):
        def __init__(self):
            self.w, self.seen = nnx.Param(jnp.ones((4, 3))), nnx.Variable(jnp.zeros(()))

    def step(model, x):
        def loss(m):
            return jnp.sum((x @ m.w) ** 2)

        value, grads = nnx.value_and_grad(loss)(model)
        model.w[...] = model.w[...] - 0.1 * grads.w[...]
        model.seen[...] = model.seen[...] + 1
        return value

    model = Model()
    for fn in (step, nnx.jit(step)):
        found = bound(fn, model)
        assert [leaf.name for leaf in found.state] == ["model.seen", "model.w"]
        new, loss = jax.jit(found.program(X)[1]())(found.initial, found.rest, (X,))
        assert float(loss) == 96
        assert float(new[0]) == 1
    assert float(model.seen[...]) == 0  # the user's own object is as it was


def test_the_loss_is_named_or_made_where_several_numbers_may_be_it():
    def step(p, x):
        new, loss, _ = updated(p, x)
        return new, {"total": loss, "other": 2 * loss}, x

    with pytest.raises(ArgumentError, match=r"got 2 numbers that may be the loss .*out\[1\]\['other'\].*loss="):
        bound(step, P)
    for loss in ("out[1]['total']", "total", lambda out: out[1]["total"], lambda out: out[1]["other"] / 2):
        found = bound(step, P, loss=loss)
        _, value = jax.jit(found.program(X)[1]())(found.initial, found.rest, (X,))
        assert float(value) == 96
    with pytest.raises(ArgumentError, match=r"loss: got 'perplexity', needed the name of one number"):
        bound(step, P, loss="perplexity")
    with pytest.raises(ArgumentError, match="needed the loss, one float"):
        bound(lambda p, x: (updated(p, x)[0], x), P)


def test_what_is_no_step_is_one_clear_error():
    with pytest.raises(ArgumentError, match=r"got p of 2 arrays .*no argument has its next value"):
        bound(lambda p, x: loss_of(p, x), P)
    with pytest.raises(
        ArgumentError, match=r"like p, but for p\['b'\]: float32\[3\], which becomes out\[0\]\['b'\]: bfloat16\[3\]"
    ):
        bound(lambda p, x: (jax.tree.map(lambda a: a.astype(jnp.bfloat16), p), loss_of(p, x)), P)

    def with_gradients(p, x):
        new, loss, grads = updated(p, x)
        return grads, new, loss

    with pytest.raises(ArgumentError, match=r"2 results with the structure of p \(out\[0\], out\[1\]\).*next_state="):
        bound(with_gradients, P)
    found = bound(with_gradients, P, next_state=lambda out: out[1])
    new, _ = jax.jit(found.program(X)[1]())(found.initial, found.rest, (X,))
    assert np.allclose(new[1], updated(P, X)[0]["w"])
    with pytest.raises(ArgumentError, match="next_state: got 1 array"):
        bound(with_gradients, P, next_state=lambda out: out[2])
    with pytest.raises(ArgumentError, match="got 2 results with the structure of x"):
        bound(lambda x, batch: (x - 1.0, x * batch.sum()), jnp.float32(1))


def test_batches_of_another_shape_are_another_program():
    found = bound(*STEPS["state, loss"][:1], P)
    first, second = found.program(X)[0], found.program(X[:1])[0]
    assert first != second
    assert found.program(X[1:])[0] == second
    with pytest.raises(ArgumentError, match="got a batch of 2 arrays, needed 1"):
        found.program((X, X))
