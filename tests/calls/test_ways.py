"""What a call may have beside arrays, mixed and in every order: objects of nnx that share Variables, states, fixed leaves, numbers that an
outer jit fixes, methods, other threads."""

from __future__ import annotations

import functools
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import export

import fusionlab as fl
from fusionlab.errors import ArgumentError
from fusionlab.testing import assert_equivalent
from fusionlab.verbs import fused as fused_module

from .cells import data, params

W, B = params().values()
X = data()


class Layer(nnx.Module):
    def __init__(self):
        self.w, self.b, self.seen = nnx.Param(W + 0), nnx.Param(B + 0), nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        return jax.nn.relu(x @ self.w + self.b)

    @nnx.jit
    def step(self, x):
        self.seen[...] += 1
        return self(x)


class Tied(nnx.Module):
    def __init__(self):
        self.first, self.second = Layer(), Layer()
        self.second.w = self.first.w

    def __call__(self, x):
        return self.second(self.first(x))


def counted(layer, x, mode="train"):
    if layer is not None:
        layer.seen[...] += 1
    return jax.nn.relu(x @ W + B)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


WAYS = {
    "fuse": fl.fuse,
    "fuse(nnx.jit)": lambda f: fl.fuse(nnx.jit(f)),
    "nnx.jit(fuse)": lambda f: nnx.jit(fl.fuse(f)),
}


@pytest.mark.whole
@pytest.mark.parametrize("way", WAYS)
def test_variables_that_are_shared_stay_shared(way):
    def norm(m, x):
        grads = nnx.grad(lambda m: jnp.square(m(x)).sum())(m)
        return sum(jnp.square(g).sum() for g in jax.tree.leaves(grads)) ** 0.5

    def twice(a, b, x):
        return a(x) * (2 if a.w is b.w else 1)

    def create():
        m = Tied()
        return m, nnx.ModelAndOptimizer(m, optax.sgd(0.1))

    close(WAYS[way](norm)(Tied(), X), norm(Tied(), X))
    layer = Layer()
    close(WAYS[way](twice)(layer, layer, X), twice(layer, layer, X))
    model, optimizer = WAYS[way](create)()
    assert optimizer.model is model
    assert model.first.w is model.second.w


@pytest.mark.parametrize("order", [("none", "text"), ("text", "none"), ("absent", "none", "absent", "text", "none")])
def test_state_and_fixed_leaves_in_any_order(order):
    fused, layer = fl.fuse(counted), Layer()
    for how in order:
        fused(*{"none": (layer, X), "text": (layer, X, "eval"), "absent": (None, X, "eval")}[how])
    assert layer.seen[...] == len([how for how in order if how != "absent"])


def test_state_beside_a_model_of_equinox_and_under_static_arguments_of_nnx():
    model, layer = eqx.nn.MLP(8, 8, 8, 1, key=jax.random.key(0)), Layer()
    fused = fl.fuse(lambda layer, model, x: counted(layer, jax.vmap(model)(x)))
    for _ in range(3):
        fused(layer, model, X)
    outer = nnx.jit(fl.fuse(counted), static_argnums=2)
    for _ in range(2):
        outer(layer, X, "eval")
    assert layer.seen[...] == 5


def test_a_second_thread_during_the_first_trace_loses_nothing():
    started, go = threading.Event(), threading.Event()

    def slow(layer, x):
        if x.shape[0] == 5:
            started.set()
            assert go.wait(60)
        return counted(layer, x)

    fused, one, other = fl.fuse(slow), Layer(), Layer()
    thread = threading.Thread(target=fused, args=(one, jnp.ones((5, 8))))
    thread.start()
    assert started.wait(60)
    fused(other, X)
    go.set()
    thread.join()
    assert one.seen[...] == other.seen[...] == 1


def test_a_plain_call_before_makes_no_transformation_silent():
    fused, layer = fl.fuse(counted), Layer()
    fused(layer, X)
    with pytest.raises(ArgumentError, match=r"a transformation of JAX's own.*layer\.seen"):
        jax.checkpoint(fused)(layer, X)
    assert layer.seen[...] == 1
    both = fl.fuse(lambda layer, x: (layer, layer(x)))
    jax.vmap(both, in_axes=(None, 0))(layer, jnp.stack([X, X]))
    assert both(layer, X)[0] is layer


def test_a_model_of_an_outer_trace_is_only_read():
    layer, fused = Layer(), fl.fuse(lambda layer, x: layer(x))
    close(jax.jit(lambda x: fused(layer, x))(X), layer(X))
    close(layer.w[...], W)
    (b,) = export.symbolic_shape("b")
    export.export(jax.jit(lambda x: fused(layer, x)))(jax.ShapeDtypeStruct((b, 8), jnp.float32))


def test_a_method_a_module_and_a_partial_see_what_they_hold():
    layer = Layer()
    called = [fl.fuse(layer.__call__), fl.fuse(layer), fl.fuse(functools.partial(Layer.__call__, layer))]
    for fused in called:
        close(fused(X), layer(X))
    layer.w[...] = 2 * layer.w[...]
    for fused in called:
        close(fused(X), layer(X))
    assert fl.find(layer, X).counts()["gemm_epilogue"] == 1
    assert fl.find(layer.step, X).counts()["gemm_epilogue"] == 1
    fl.fuse(layer.step)(X)
    assert layer.seen[...] == 1
    cached = nnx.cached_partial(type(layer).step, layer)
    close(fl.fuse(cached)(X), layer(X))
    assert layer.seen[...] == 2
    assert fl.find(cached, X).counts()["gemm_epilogue"] == 1


def test_a_method_under_jit_keeps_its_options():
    class Model:
        @functools.partial(jax.jit, static_argnums=0, static_argnames="n", donate_argnums=1)
        def step(self, x, n=2):
            for _ in range(n):
                x = jax.nn.relu(x @ W + B)
            return x

    model, x = Model(), X + 0
    close(fl.fuse(model.step)(x, n=4), model.step(X + 0, n=4))
    assert x.is_deleted()


def state_step(graph, state, x):
    model, optimizer = nnx.merge(graph, state)
    loss, grads = nnx.value_and_grad(lambda m: jnp.square(m(x)).mean())(model)
    optimizer.update(model, grads)
    return loss, nnx.state((model, optimizer))


@pytest.mark.parametrize(
    "way", [fl.fuse, lambda f: fl.fuse(jax.jit(f)), lambda f: jax.jit(fl.fuse(f))], ids=["plain", "outside", "inside"]
)
def test_a_state_is_a_value_that_is_taken_and_returned(way):
    model = Layer()
    graph, state = nnx.split((model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)))
    want = jax.jit(state_step)(graph, state, X)
    jax.tree.map(close, way(state_step)(graph, state, X), want)
    assert fl.find(state_step, graph, state, X).counts()["gemm_epilogue_grad"] == 1

    def lost(graph, state, x):
        return counted(nnx.merge(graph, state)[0], x)

    with pytest.raises(ArgumentError, match=r"changes state.*seen.*does not return it"):
        way(lost)(graph, state, X)


class Scanned(nnx.Module):
    """Layers in a scan, which sets every Variable of theirs; with `counts` one of them to another value."""

    def __init__(self, counts=False):
        self.w, self.b = nnx.Param(jnp.full((3, 16, 16), 0.1)), nnx.Param(jnp.zeros((3, 16)))
        self.seen, self.counts = nnx.Variable(jnp.zeros(3)), counts

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x, layer):
            if layer.counts:
                layer.seen[...] += 1
            return jax.nn.relu(x @ layer.w[...] + layer.b[...])

        return run(x, self)


@pytest.mark.dear
def test_what_a_scan_sets_to_what_it_was_is_not_lost():
    graph, state = nnx.split(Scanned())

    def loss(state, x):
        return nnx.merge(graph, state)(x).sum()

    x = jnp.linspace(-1, 1, 64).reshape(4, 16)
    want = jax.value_and_grad(loss)(state, x)
    for step in (jax.value_and_grad(fl.fuse(loss)), fl.fuse(jax.value_and_grad(loss))):
        jax.tree.map(close, step(state, x), want)
    assert fl.find(loss, state, x).counts()["gemm_epilogue"] == 1
    graph, state = nnx.split(Scanned(counts=True))
    with pytest.raises(ArgumentError, match=r"changes state\['seen'\].*does not return it"):
        fl.fuse(loss)(state, x)


def test_a_state_may_hold_arrays_as_they_are():
    state = nnx.State({"w": W, "layer": {"b": nnx.Param(B)}})
    fused = fl.fuse(lambda state, x: jax.nn.relu(x @ state["w"] + state["layer"]["b"]))
    close(fused(state, X), jax.nn.relu(X @ W + B))
    assert fused.findings(state, X).counts()["gemm_epilogue"] == 1


def test_the_sites_of_a_method_under_jit_are_told_apart():
    class Model:
        @functools.partial(jax.jit, static_argnums=(0, 2))
        def step(self, x, n):
            return jax.nn.relu(x @ W + B) * n

    method = Model().step
    assert len(fl.errors_by_site(method, X, 3)) == 1
    effort = {"samples": 3, "budget_s": 0.1, "grad": False}
    for original in (method, lambda x, n: method(x, n)):
        assert fl.compare(original, fl.fuse(method), X, 3, **effort).numerics.ok


def test_an_object_that_is_returned_under_jit_is_not_lost():
    changed = jax.jit(lambda layer, x: (counted(layer, x), layer)[1])
    assert fl.fuse(changed)(Layer(), X).seen[...] == 1


def test_a_check_touches_state_once():
    fused, layer = fl.fuse(counted, check=True), Layer()
    for _ in range(2):
        fused(layer, X)
    assert layer.seen[...] == 2
    fl.fuse(lambda x, act: act(x @ W + B), check=True)(X, jax.nn.relu)


def test_results_that_are_no_arrays_are_compared():
    def layer(x, act, count=1):
        return {"y": act(x @ W + B), "count": count}

    assert_equivalent(layer, (X, jax.nn.relu), fused=layer, grad=False)
    with pytest.raises(ArgumentError, match="got 2 in the result, needed the original's 1"):
        assert_equivalent(layer, (X, jax.nn.relu), fused=functools.partial(layer, count=2), grad=False)


class Settings:
    def __init__(self):
        self.scale = 2.0


def test_an_object_that_may_change_is_refused_and_inside_of_a_trace_read_each_time():
    settings = Settings()
    fused = fl.fuse(lambda x, settings: settings.scale * jax.nn.relu(x @ W + B))
    with pytest.raises(
        ArgumentError, match=r"settings: got a Settings.*may change from call to call.*register_dataclass"
    ):
        fused(X, settings)
    for settings.scale in (2.0, 5.0):
        close(jax.jit(lambda x: fused(x, settings))(X), settings.scale * jax.nn.relu(X @ W + B))


def test_a_method_without_its_object_is_refused_with_the_way_to_fuse_it():
    class Model:
        def __init__(self):
            self.bias = B

        def step(self, x):
            return jax.nn.relu(x @ W + self.bias)

    with pytest.raises(
        ArgumentError, match=r"self: got a Model.*for a method, fuse that of the object \(model\.step\)"
    ):
        fl.fuse(Model.step)(Model(), X)
    close(fl.fuse(Model().step)(X), jax.nn.relu(X @ W + B))


def test_zeros_of_either_sign_are_two_programs():
    fused = fl.fuse(lambda x, sign, note: jnp.copysign(1.0, sign) * jax.nn.relu(x @ W + B))
    close(fused(X, 0.0, "n"), -fused(X, -0.0, "n"))


@pytest.mark.parametrize("jit", [jax.jit, nnx.jit])
def test_numbers_that_an_outer_jit_fixes_are_fixed(jit):
    def repeated(x, times):
        for _ in range(times):
            x = jax.nn.relu(x @ W + B)
        return x

    fused = jit(fl.fuse(repeated), static_argnums=1)
    for times in (2, 3):
        close(fused(X, times), repeated(X, times))


def never_at_numbers(x):
    if isinstance(x.shape[0], int):
        raise ValueError("never")
    return jax.nn.relu(x @ W + B)


def test_symbolic_sizes_are_tried_at_numbers_that_the_program_takes():
    table = jnp.ones((16, 8))
    (t,) = export.symbolic_shape("t", constraints=["t<=16"])
    rows = jax.ShapeDtypeStruct((t, 8), jnp.float32)
    at_most = fl.fuse(lambda x: jax.nn.relu((x + table[: x.shape[0]]) @ W + B))
    found = at_most.findings(rows)
    assert [r.code for r in found.rejections if r.pass_name == "gemm_epilogue"] == ["symbolic"]
    export.export(jax.jit(at_most))(rows)
    export.export(jax.jit(fl.fuse(never_at_numbers)))(rows)
    assert "traces at none of the sizes tried" in fl.find(never_at_numbers, rows).notes[0]


@pytest.fixture
def searches(monkeypatch):
    made, real = [], fused_module.find_in
    monkeypatch.setattr(fused_module, "find_in", lambda *a, **k: made.append(1) or real(*a, **k))
    return made


def test_fused_twice_it_is_under_one_jit(searches):
    twice = fl.fuse(fl.fuse(lambda x: jax.nn.relu(x @ W + B)))
    twice(X)
    before = len(searches)
    twice(X)
    assert len(searches) == before
    x = X + 0
    fl.fuse(fl.fuse(jax.jit(lambda x: jax.nn.relu(x @ W + B), donate_argnums=0)))(x)
    assert x.is_deleted()


def test_a_text_in_one_call_makes_numbers_of_others_no_programs_of_their_own(searches):
    fused = fl.fuse(lambda x, rate, note=None: rate * jax.nn.relu(x @ W + B))
    fused(X, 0.1, "note")
    for rate in (0.1, 0.2, 0.3):
        fused(X, rate)
        fused(X, np.float64(rate), "note")
    assert len(searches) == 3


def test_a_call_with_fixed_leaves_is_lowered_compiled_and_shaped():
    fused = fl.fuse(lambda x, act: act(x @ W + B))
    close(fused.lower(X, jax.nn.relu).compile()(X, jax.nn.relu), fused(X, jax.nn.relu))
    assert fused.eval_shape(X, jax.nn.relu).shape == X.shape
