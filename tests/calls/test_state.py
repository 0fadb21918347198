"""What a function changes in objects of nnx is changed by the fused function, too, as `nnx.jit` has it, and is part of what is seen."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fusionlab as fl
from fusionlab.errors import ArgumentError, TraceError
from fusionlab.testing import assert_equivalent, assert_fused

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.float32)
KERNEL = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32) / 3


class Layer(nnx.Module):
    def __init__(self):
        self.w, self.b = nnx.Param(jnp.asarray(KERNEL)), nnx.Param(jnp.zeros(8))
        self.seen = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        return jax.nn.relu(x @ self.w + self.b)


class Pair(nnx.Module):
    """Two layers that share a kernel."""

    def __init__(self):
        self.first, self.second = Layer(), Layer()
        self.second.w = self.first.w

    def __call__(self, x):
        return self.second(self.first(x))


class Stack(nnx.Module):
    """Layers on an axis of their own, scanned."""

    def __init__(self):
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(_):
            return Layer()

        self.layers = make(jnp.zeros(3))

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer, x):
            layer.seen[...] += x.sum()
            return layer(x)

        return run(self.layers, x)


def shared(model, x):
    model.first.w[...] = model.first.w[...] * 0.9
    return model(x)


def written_twice(model, x):
    model.seen[...] += 1
    y = model(x)
    model.seen[...] *= 3
    return y


def in_one_branch(model, x):
    def on(model):
        model.seen[...] += 1

    nnx.cond(x.sum() > -1e9, on, lambda model: None, model)
    return model(x)


def read_after_the_write(model, x):
    model.b[...] = model.b[...] + 1
    return model(x) + model.b


def set_to_an_equal_value(model, x):
    model.seen[...] = jnp.zeros(())
    return model(x)


def exchanged(model, x):
    model.w[...], model.seen[...] = model.w[...].T, model.b[...].sum()
    return model(x)


def deleted(model, x):
    y = model(x)
    del model.seen
    return y


def added(model, x):
    model.more = nnx.Variable(x.sum())
    return model(x)


def of_a_module(model, x):
    return model(x), model


def remat(model, x):
    return nnx.remat(lambda m, x: m(x))(model, x)


def remat_and_count(model, x):
    def count(m, x):
        m.seen[...] += 1
        return m(x)

    return nnx.remat(count)(model, x)


def scanned(model, x):
    return model(x)


def attribute(model, x):
    model.name = "called"
    return model(x)


# name -> function, model, the values that it changes
CASES = {
    "a shared kernel": (shared, Pair, ["model.first.w"]),
    "written twice": (written_twice, Layer, ["model.seen"]),
    "in one branch": (in_one_branch, Layer, ["model.seen"]),
    "read after the write": (read_after_the_write, Layer, ["model.b"]),
    "set to an equal value": (set_to_an_equal_value, Layer, ["model.seen"]),
    "exchanged": (exchanged, Layer, ["model.seen", "model.w"]),
    "deleted": (deleted, Layer, None),
    "added": (added, Layer, None),
    "the model is a result": (of_a_module, Layer, []),
    "remat that changes nothing": (remat, Layer, []),
    "remat that counts": (remat_and_count, Layer, ["model.seen"]),
    "scanned": (scanned, Stack, ["model.layers.seen"]),
    "an attribute": (attribute, Layer, None),
}
CALLS = {
    "plain": fl.fuse,
    "outside": lambda fn: fl.fuse(nnx.jit(fn)),
    "inside": lambda fn: nnx.jit(fl.fuse(fn)),
}


def state_of(model):
    flat = jax.tree_util.tree_flatten_with_path(nnx.state(model))[0]
    return {jax.tree_util.keystr(path): as_numpy(x) for path, x in flat}


def as_numpy(x):
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def same(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-6, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", CASES)
def test_state_is_left_as_nnx_jit_leaves_it(name, call):
    fn, make, _ = CASES[name]
    first, second = make(), make()
    want, got = nnx.jit(fn)(first, X), CALLS[call](fn)(second, X)
    same(state_of(second), state_of(first))
    assert vars(first).keys() == vars(second).keys()
    assert getattr(second, "name", None) == getattr(first, "name", None)
    if name == "the model is a result":
        assert got[1] is second
        got, want = got[0], want[0]
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
    if make is Pair:
        assert second.second.w is second.first.w


@pytest.mark.parametrize("name", [n for n, (_, _, changed) in CASES.items() if changed is not None])
def test_what_is_changed_is_a_result_of_the_graph_and_what_is_not_is_none(name):
    fn, make, changed = CASES[name]
    model = make()
    before = state_of(model)
    graph = fl.trace(nnx.jit(fn), model, X)
    assert len(graph.top.outputs) == 1 + len(changed)
    same(state_of(model), before)
    assert "model.w" in graph.in_names or make is not Layer


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.drop, self.last = nnx.Dropout(0.1, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(jax.nn.gelu(self.norm(self.first(x)))))


def train_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: jnp.square(model(x)).mean())(model)
    optimizer.update(model, grads)
    return loss


def made():
    model = Classifier(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


@pytest.mark.parametrize("graph", [True, False])
def test_the_loss_inside_of_nnx_value_and_grad_is_fused_with_its_statistics(graph):
    def step(model, optimizer, x, around):
        loss, grads = nnx.value_and_grad(around(lambda model, x: jnp.square(model(x)).mean()))(model, x)
        optimizer.update(model, grads)
        return loss

    wanted, found = made(), made()
    for _ in range(2):
        want = nnx.jit(lambda *a: step(*a, lambda f: f))(*wanted, X)
        got = nnx.jit(lambda *a: step(*a, fl.fuse), **({} if graph else {"graph": False}))(*found, X)
        np.testing.assert_allclose(got, want, rtol=1e-5)
    same(state_of(found[0]), state_of(wanted[0]))


def test_every_verb_sees_the_update():
    args = *made(), X
    found = fl.find(train_step, *args)
    assert str(fl.find(nnx.jit(train_step), *args).graph.top) == str(found.graph.top)
    assert found.counts()["gemm_epilogue"] == found.counts()["gemm_epilogue_grad"] == 2
    assert any(node.primitive == "sqrt" for node in found.graph.nodes()), "AdamW's root"
    assert_fused(
        nnx.jit(train_step), args, expect={"gemm_epilogue": 2, "gemm_epilogue_grad": 2}, passes=["gemm_epilogue"]
    )
    assert_equivalent(nnx.jit(train_step), args, grad=False)
    quick = {"grad": False, "timing": False}
    told = fl.compare(nnx.jit(train_step), fl.fuse(train_step), *args, **quick)
    names = [leaf.name for leaf in told.numerics.leaves]
    assert {"out", "model.first.kernel", "model.norm.mean", "model.drop.rngs.count", "optimizer.step"} <= {*names}
    assert not told.numerics.regressions
    assert len(fl.errors_by_site(train_step, *args, grad=False, passes=["gemm_epilogue"])) == 2
    assert fl.tune(train_step, *args).calls >= 1


def test_a_step_that_loses_its_update_is_not_equivalent():
    def lost(model, optimizer, x):
        return train_step(nnx.clone(model), nnx.clone(optimizer), x)

    with pytest.raises(ArgumentError, match="structure"):
        fl.compare(nnx.jit(train_step), nnx.jit(lost), *made(), X, grad=False, timing=False)


@pytest.mark.parametrize("verb", ["find", "trace", "compare", "tune", "fuse"])
def test_a_jit_that_loses_state_is_one_sentence(verb):
    args, jitted = (*made(), X), jax.jit(train_step)
    calls = {
        "find": lambda: fl.find(jitted, *args),
        "trace": lambda: fl.trace(jitted, *args),
        "compare": lambda: fl.compare(jitted, fl.fuse(jitted), *args),
        "tune": lambda: fl.tune(jitted, *args),
        "fuse": lambda: fl.fuse(jitted)(*args),
    }
    with pytest.raises(
        ArgumentError, match=r"train_step: got it under jax\.jit, .*model\.drop\.rngs\.count .*nnx\.jit\(train_step\)"
    ):
        calls[verb]()


@pytest.mark.parametrize("around", [jax.jit, jax.grad, jax.checkpoint])
def test_a_transformation_of_jax_around_it_that_loses_state_is_one_sentence(around):
    def loss(model, x):
        model.seen[...] += 1
        return model(x).sum()

    with pytest.raises(ArgumentError, match=r"a transformation of JAX's own, which loses .*model\.seen"):
        around(fl.fuse(loss))(Layer(), X)


def test_a_function_of_the_users_may_split_and_merge_around_a_fused_step():
    fused, model = fl.fuse(written_twice), Layer()

    @jax.jit
    def outer(graphdef, state, x):
        model = nnx.merge(graphdef, state)
        return fused(model, x), nnx.state(model)

    _, state = outer(*nnx.split(model), X)
    assert float(state["seen"][...]) == 3


def test_an_error_of_the_functions_own_is_told_as_one():
    def bad(model, x):
        raise ValueError("mine")

    with pytest.raises(TraceError, match="bad does not trace: ValueError: mine"):
        fl.find(bad, Layer(), X)
    with pytest.raises(ValueError, match="mine"):
        fl.fuse(bad)(Layer(), X)


def test_nothing_of_flax_is_imported_where_nobody_has():
    program = (
        "import sys, jax.numpy as jnp, fusionlab as fl; f = lambda x: x @ x; x = jnp.ones((4, 4)); fl.fuse(f)(x); fl.find(f, x); "
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'flax', 'equinox'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], env=os.environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
