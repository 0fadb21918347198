"""Backward passes of norms in a train step: they add up their cotangents themselves, and give the bias gradients of the layers before."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

import fusionlab as fl
from fusionlab.kernels.ops.layer_norm import choosing

from ..checks import close, jit, normal, weighed

PASSES = ["gemm_epilogue", "layer_norm"]
X, W, V = normal((4, 6, 32), (32, 48), (48, 32))
B, C, G, D = (a[0] for a in normal((1, 48), (1, 32), (1, 32), (1, 32), seed=1))
PARAMS = {"w": W * 0.2, "v": V * 0.2, "b": B, "c": C, "g": 1 + 0.1 * G, "d": D}


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch):
    monkeypatch.setattr(choosing, "LEAST", 1)


def norm(h, p):
    mean = h.mean(-1, keepdims=True)
    return (h - mean) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5) * p["g"] + p["d"]


def layer(p, x):
    """Post-LN: x goes into the product and around it, so that its cotangent is a sum."""
    return norm(x + (jax.nn.relu(x @ p["w"] + p["b"]) @ p["v"] + p["c"]), p)


def stack(p, x):
    for i in range(3):
        x = layer({**p, "c": p["c"] * (i + 1)}, x)
    return x


def stepped(fn):
    def step(p, x):
        return jax.value_and_grad(lambda p, x: weighed(fn)(p, x), (0, 1))(p, x)

    return step


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns") and not hasattr(eqn.primitive, "op"):
                yield from equations(inner)


def backward_of(closed, op):
    """(as how many arrays the cotangent is given, the gradients given) of each backward pass, in program order."""
    found = [e for e in equations(closed.jaxpr) if e.primitive.name == f"{op}_cotangent"]
    live = [[s for s, moves in zip(e.params["present"], e.params["live"], strict=True) if moves] for e in found]
    return [(e.params.get("given", (1,))[0], slots) for e, slots in zip(found, live, strict=True)]


def fused(fn, *args, factor=60.0):
    """The rewritten program of a train step; it has the step's values, and its own derivative the step's derivative."""
    closed = fl.find(fn, *args, device="sm_90", passes=PASSES).rewritten()
    run = jaxpr_as_fun(closed)

    def rewritten(*args):
        return jax.tree.unflatten(jax.tree.structure(fn(*args)), run(*jax.tree.leaves(args)))

    close(jax.jit(rewritten)(*args), jax.jit(fn)(*args), factor)
    return closed, rewritten


def test_a_stack_of_layers_adds_nothing_up_and_sums_no_bias_that_a_norm_can():
    closed, _ = fused(stepped(stack), PARAMS, X)
    norms, linear = backward_of(closed, "layer_norm"), backward_of(closed, "gemm_epilogue")
    assert [count for count, _ in norms] == [1, 2, 2]
    assert all("shift" in slots for _, slots in norms)
    assert [slots for _, slots in linear] == [["x", "w"], ["x", "w", "bias"]] * 3
    sums = [e for e in equations(closed.jaxpr) if e.primitive.name == "add_any" and e.outvars[0].aval.shape == X.shape]
    assert len(sums) == 1  # the gradient of x, which no norm reads


def test_the_rewritten_step_can_be_transformed():
    _, rewritten = fused(stepped(stack), PARAMS, X)
    step = stepped(stack)
    moved = jax.tree.map(jnp.cos, (PARAMS, X))
    pushed = [jit(lambda p, m, f=f: jax.jvp(f, p, m))((PARAMS, X), moved) for f in (rewritten, step)]
    close(*pushed, 200)
    rows = jnp.stack([X, X * 0.5])
    close(*(jit(jax.vmap(f, (None, 0)))(PARAMS, rows) for f in (rewritten, step)), 60)

    def second(f):
        return lambda p, x: jnp.sum(jnp.sin(f(p, x)[1][0]["v"]))

    close(*(jit(jax.grad(second(f), (0, 1)))(PARAMS, X) for f in (rewritten, step)), 200)


def test_in_a_scan_too():
    def looped(p, x):
        return lax.scan(lambda h, c: (layer({**p, "c": c}, h), None), x, jnp.stack([p["c"], 2 * p["c"]]))[0]

    closed, _ = fused(stepped(looped), PARAMS, X)
    assert all("shift" in slots for _, slots in backward_of(closed, "layer_norm"))
    assert ["x", "w"] in [slots for _, slots in backward_of(closed, "gemm_epilogue")]


def test_in_a_shard_map_too():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def sharded(p, x):
        return jax.shard_map(stack, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))(p, x)

    closed, _ = fused(stepped(sharded), PARAMS, X)
    assert [count for count, _ in backward_of(closed, "layer_norm")] == [1, 2, 2]


def test_what_is_read_elsewhere_too_stays_a_sum():
    """The cotangent of the first layer's result is wanted as well."""

    def step(p, x):
        between = layer(p, x)
        pulled, ct = jax.vjp(lambda h: weighed(layer)(p, h), between)[1], jnp.ones(())
        (of_between,) = pulled(ct)
        return of_between, jax.vjp(lambda p, x: layer(p, x), p, x)[1](of_between)

    closed, _ = fused(step, PARAMS, X)
    assert {count for count, _ in backward_of(closed, "layer_norm")} == {1}


def test_a_bias_that_nobody_learns_is_not_summed():
    def frozen(p, x):
        return stack({**p, "c": lax.stop_gradient(p["c"])}, x)

    closed, _ = fused(stepped(frozen), PARAMS, X)
    assert not any("shift" in slots for _, slots in backward_of(closed, "layer_norm"))
    assert [count for count, _ in backward_of(closed, "layer_norm")] == [1, 2, 2]


# -- a norm in float32 that each of its readers rounds for itself ------------------------------------------------------------


def rms(p, x):
    wide = x.astype(jnp.float32)
    return p["g"] * (wide / jnp.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def one_more(p, x):
    return rms({"g": 1 + p["g"]}, x)


def with_mean(p, x):
    return norm(x.astype(jnp.float32), p)


def read_twice(norm):
    """Two products of the norm, each of it rounded again, with weights that are rounded too."""

    def fn(p, x):
        h = norm(p, x)
        first, second = (h.astype(x.dtype) @ w.astype(x.dtype) for w in (p["w"], p["v"].T))
        return jnp.tanh(first) + second

    return fn


def looped(fn):
    return lambda p, x: lax.scan(lambda c, one: (c, fn(p, one)), 0.0, jnp.stack([x, -x]))[1]


@pytest.mark.parametrize("kind", [rms, one_more, with_mean])
def test_a_norm_that_each_reader_rounds_is_fused_with_its_backward_pass(kind):
    fn, x = read_twice(kind), X.astype(jnp.bfloat16)
    mapped = lambda p, x: jax.vmap(lambda one: fn(p, one))(jnp.stack([x, -x]))  # noqa: E731
    for program in (fn, looped(fn), mapped):
        for step in (program, stepped(program)):
            found = fl.find(step, PARAMS, x, passes="layer_norm")
            assert [c.root.dtype for c in found.candidates] == [jnp.float32], found.rejections
            assert (found.candidates[0].backward is not None) == (step is not program)
            close(*(jit(f)(PARAMS, x) for f in (fl.fuse(step, passes="layer_norm"), step)), 4, 2e-2)


def test_a_norm_that_is_read_in_float32_too_is_cast_for_the_others():
    def fn(p, x):
        h = rms(p, x)
        return h.astype(x.dtype) @ p["w"].astype(x.dtype), jnp.sin(h)

    (site,) = fl.find(stepped(fn), PARAMS, X.astype(jnp.bfloat16), passes="layer_norm").candidates
    assert site.root.dtype == jnp.float32
    assert site.backward is not None


@pytest.mark.parametrize("inner", [lambda h: h, lambda h: lax.stop_gradient(h)])
def test_what_each_reader_rounds_is_no_norm_if_more_than_the_norm_reads_its_root(inner):
    def fn(p, x):
        wide = x.astype(jnp.float32)
        root = jnp.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
        h = p["g"] * (wide / root).astype(x.dtype)
        return h.astype(x.dtype) @ p["w"].astype(x.dtype), h.astype(x.dtype).sum(), inner(root)

    found = fl.find(stepped(fn), PARAMS, X.astype(jnp.bfloat16), passes="layer_norm")
    assert not found.candidates
    assert [r.code for r in found.rejections] == ["escapes"]
