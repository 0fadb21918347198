"""A bias's gradient that the norm behind the linear layer gives with its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from fusionlab.graph.rewriting.bias_gradients import with_row_sums
from fusionlab.ops import gemm_epilogue, layer_norm
from tests.fusers.checks import normal
from tests.kernels.transformations import assert_agree, assert_same

H, W, B, R, G, Y = normal((6, 8), (8, 16), (16,), (6, 16), (16,), (6, 16))
ARGS = H, W, B, R, G


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def giving(f):
    """The program with such sums given by the norms, as a rewritten one has them."""

    def run(*args):
        closed, result = jax.make_jaxpr(f, return_shape=True)(*args)
        jaxpr = closed.jaxpr.replace(eqns=with_row_sums(list(closed.jaxpr.eqns), closed.jaxpr.outvars))
        return jax.tree.unflatten(
            jax.tree.structure(result), jaxpr_as_fun(closed.replace(jaxpr=jaxpr))(*jax.tree.leaves(args))
        )

    return run


def block(h, w, b, r, g):
    return layer_norm(gemm_epilogue(h, w, b), g, residual=r)


def backward(fn, wanted=(0, 1, 2, 3, 4)):
    return jax.grad(lambda *args: jnp.sum(jnp.sin(fn(*args))), wanted)


def live(fn, *args):
    """The slots that each cotangent of the program gives, such sums given by the norms."""
    eqns = jax.make_jaxpr(giving(fn))(*args).jaxpr.eqns
    ops = [e for e in eqns if e.primitive.name.endswith("_cotangent")]
    return [
        (e.primitive.op.name, tuple(s for s, moves in zip(e.params["present"], e.params["live"], strict=True) if moves))
        for e in ops
    ]


def with_shift(*slots):
    return [("layer_norm", ("x", "scale", "shift", "residual")), ("gemm_epilogue", slots)]


def test_the_bias_gradient_is_the_norms():
    assert live(backward(block), *ARGS) == with_shift("x", "w")
    assert_same(giving(backward(block))(*ARGS), backward(block)(*ARGS), 1e-6)


def test_where_it_is_all_that_is_wanted_nothing_is_left_of_the_linear_layers():
    fn = backward(block, 2)
    assert live(fn, *ARGS) == [("layer_norm", ("x", "shift"))]
    assert_same(giving(fn)(*ARGS), fn(*ARGS), 1e-6)


@pytest.mark.parametrize("view", ["rows split", "rows merged", "unit axis"])
def test_rows_may_be_viewed_otherwise_in_between(view):
    def fn(h, w, b, r, g):
        y = gemm_epilogue(h, w, b)
        if view == "rows split":
            return layer_norm(y.reshape(2, 3, 16), g, residual=r.reshape(2, 3, 16))
        if view == "unit axis":
            return layer_norm(y.reshape(1, 6, 16), g, residual=r.reshape(1, 6, 16))
        return layer_norm(gemm_epilogue(h.reshape(2, 3, 8), w, b).reshape(6, 16), g, residual=r)

    assert live(backward(fn), *ARGS) == with_shift("x", "w")
    assert_same(giving(backward(fn))(*ARGS), backward(fn)(*ARGS), 1e-6)


def two(h, w, b, r, g):
    """Two linear layers whose sum a norm takes: both biases have one gradient, which is given once."""
    return layer_norm(gemm_epilogue(h, w, b), g, residual=gemm_epilogue(jnp.cos(h), w, 2 * b))


STAY = {
    "with an activation": lambda h, w, b, r, g: layer_norm(gemm_epilogue(h, w, b, activation="relu"), g, residual=r),
    "read elsewhere too": lambda h, w, b, r, g: (lambda y: layer_norm(y, g, residual=r) + jnp.sin(y))(
        gemm_epilogue(h, w, b)
    ),
    "no residual, and so no sum": lambda h, w, b, r, g: layer_norm(gemm_epilogue(h, w, b), g) * r,
    "a shift of its own": lambda h, w, b, r, g: layer_norm(gemm_epilogue(h, w, b), g, shift=g, residual=r),
    "columns mixed with rows": lambda h, w, b, r, g: (
        layer_norm(gemm_epilogue(h, w, b).reshape(16, 6), jnp.ones(6), residual=r.reshape(16, 6)) * g[:, None]
    ),
    "as many columns, but turned": lambda h, w, b, r, g: layer_norm(
        jnp.zeros((16, 16)).at[:6].set(gemm_epilogue(h, w, b)).T, g, residual=jnp.zeros((16, 16)).at[:6].set(r)
    ),
    "over another axis": lambda h, w, b, r, g: layer_norm(gemm_epilogue(h, w, b), residual=r, axis=0) * g,
}


@pytest.mark.parametrize("name", STAY)
def test_any_other_stays(name):
    fn = backward(STAY[name])
    found = dict(live(fn, *ARGS))
    assert "bias" in found["gemm_epilogue"]
    assert name == "a shift of its own" or "shift" not in found["layer_norm"]
    assert_same(giving(fn)(*ARGS), fn(*ARGS), 1e-6)


def test_of_two_biases_one_is_given():
    fn = backward(two)
    found = live(fn, *ARGS)
    assert [slots for op, slots in found if op == "layer_norm"] == [("x", "scale", "shift", "residual")]
    assert sorted("bias" in slots for op, slots in found if op == "gemm_epilogue") == [False, True]
    assert_same(giving(fn)(*ARGS), fn(*ARGS), 1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_it_is_nearer_to_the_sum_of_what_was_not_rounded(dtype):
    args = [a.astype(dtype) for a in ARGS]
    exact = backward(block, 2)(*(a.astype(jnp.float32) for a in args))
    error = [
        np.abs(np.asarray(f(*args), np.float64) - exact).max() for f in (giving(backward(block, 2)), backward(block, 2))
    ]
    assert giving(backward(block, 2))(*args).dtype == dtype
    assert error[0] <= 1.5 * error[1]


def test_the_types_stay_those_of_the_bias():
    """A bias of another dtype than x is the norm's to take, one that is wider than its arithmetic is not."""
    norm = jax.make_jaxpr(backward(block))(*ARGS).jaxpr.eqns
    (eqn,) = [e for e in norm if e.primitive.name == "layer_norm_cotangent"]
    for dtype, able in (("float32", True), ("bfloat16", True), ("float64", False), ("int32", False)):
        found = eqn.primitive.summing(eqn.params, 0, dtype)
        assert (found is not None) == able
    params, place = eqn.primitive.summing(eqn.params, 0, "bfloat16")
    assert params["present"] == ("x", "scale", "shift", "residual")
    assert params["dtypes"] == ("float32", "float32", "bfloat16", "float32")
    assert place == 2
    assert eqn.primitive.summing(params, 0, "bfloat16") is None


@pytest.mark.parametrize(
    "name", ["jit", "no_jit", "jvp", "linearize", "linear_transpose_of_vjp", "vmap_first", "vmap_second", "scan"]
)
def test_it_takes_the_transformations(name, x64):
    def gradients(norm):
        def of(h, w, b, r, g):
            dh, dw, db, dr, dg = jax.vjp(norm, h, w, b, r, g)[1](jnp.sin(r) + Y.astype(r.dtype))
            return dr * (db + dg) + jnp.sum(dh) * jnp.sum(dw)

        return of

    def plain(h, w, b, r, g):
        total = h @ w + b + r
        centred = total - total.mean(-1, keepdims=True)
        return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * g

    args = tuple(a.astype("float64") for a in ARGS)
    f = giving(gradients(block))
    assert live(gradients(block), *args) == with_shift("x", "w")
    assert_agree(f, gradients(plain), args, (name,), 1e-9)
