"""Rows 1 to 5, 7, 9, 10, 16 and 59 of the acceptance table: the GEMM-epilogue op and what may be swapped for it. Rows 1, 5, 6 and 8 have
their part on a GPU in tests/gpu."""

from __future__ import annotations

import contextlib
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fusionlab as fl
from fusionlab.errors import ArgumentError, UnknownNameError

from . import reference
from .reference import uniform

DTYPES = {"float16": 1e-3, "float32": 1e-6, "float64": 1e-6}  # dtype -> absolute tolerance
# layout -> (X's shape, Y's shape, X's contracted axis, Y's contracted axis)
LAYOUTS = {
    "NN": ((8, 4), (4, 128), 1, 0),
    "TN": ((4, 8), (4, 128), 0, 0),
    "NT": ((8, 4), (128, 4), 1, 1),
    "TT": ((4, 8), (128, 4), 0, 1),
}


def x64(dtype):
    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


def found_and_run(fn, *args):
    """(the one site found in fn, what the fused function gives)."""
    found = fl.find(fn, *args, passes="gemm_epilogue")
    assert not found.rejections, found.rejections
    (site,) = found.candidates
    return site, fl.fuse(fn)(*args)


ACTS = {"none": lambda h: h, "relu": jax.nn.relu, "gelu_tanh": jax.nn.gelu}


@pytest.mark.whole
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ACTS)
def test_row_01_linear_with_bias_and_activation_is_one_call(act, dtype):
    x, y, b = uniform((8, 4), (4, 128), (128,))
    with x64(dtype):
        given = [jnp.asarray(a, dtype) for a in (x, y, b)]
        want = reference.VALUE[act](np.asarray(given[0], np.float64) @ np.asarray(given[1], np.float64) + given[2])

        def model(x, y, b):
            return ACTS[act](x @ y + b)

        site, fused = found_and_run(model, *given)
        assert site.attrs["activation"] == act
        assert [n.primitive for n in fl.trace(fl.fuse(model), *given).nodes() if not n.blocks] == ["gemm_epilogue"]
        np.testing.assert_allclose(np.asarray(fused, np.float64), want, rtol=0, atol=DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_row_02_all_four_operand_layouts_are_supported_and_found(layout, dtype):
    x_shape, y_shape, x_contract, y_contract = LAYOUTS[layout]
    x, y, b = uniform(x_shape, y_shape, (128,))
    with x64(dtype):
        x, y, b = (a.astype(dtype) for a in (x, y, b))
        want = np.maximum(np.tensordot(*(a.astype(np.float64) for a in (x, y)), [[x_contract], [y_contract]]) + b, 0)
        assert 0.2 < np.mean(want == 0) < 0.8  # negative pre-activations are there
        op = fl.ops.gemm_epilogue(x, y, b, activation="relu", x_contract=x_contract, w_contract=y_contract)

        def model(x, y, b):
            return jax.nn.relu((x.T if x_contract == 0 else x) @ (y.T if y_contract == 1 else y) + b)

        site, fused = found_and_run(model, *map(jnp.asarray, (x, y, b)))
        assert site.attrs["activation"] == "relu"
        for out in (op, fused):
            assert (out.shape, str(out.dtype)) == ((8, 128), dtype)
            np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=0, atol=DTYPES[dtype])


@pytest.mark.whole
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leading", [False, True], ids=["X(2,2,8,4)", "X(4,2,2,8)"])
def test_row_03_inputs_of_rank_above_two_are_flattened_also_with_a_leading_contraction(leading, dtype):
    x, y, b = uniform((4, 2, 2, 8) if leading else (2, 2, 8, 4), (4, 128), (128,), seed=1)
    with x64(dtype):
        x, y, b = (a.astype(dtype) for a in (x, y, b))
        axis = 0 if leading else 3
        want = np.maximum(np.tensordot(x.astype(np.float64), y.astype(np.float64), [[axis], [0]]) + b, 0)
        op = fl.ops.gemm_epilogue(x, y, b, activation="relu", x_contract=axis)

        def model(x, y, b):
            return jax.nn.relu(lax.dot_general(x, y, (((axis,), (0,)), ((), ()))) + b)

        site, fused = found_and_run(model, *map(jnp.asarray, (x, y, b)))
        assert site.attrs["x_contract"] == axis
        for out in (op, fused):
            assert (out.shape, str(out.dtype)) == ((2, 2, 8, 128), dtype)
            np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=0, atol=DTYPES[dtype])


def test_row_04_seven_bad_arguments_are_refused_each_by_name_and_differently():
    x, y, b = (jnp.asarray(a, jnp.float32) for a in uniform((8, 4), (4, 128), (128,)))
    op = fl.ops.gemm_epilogue
    bad = {
        "W rank 3": (lambda: op(x, y[None], b), ArgumentError, r"w has shape \(1, 4, 128\), rank 3; needed a matrix"),
        "X rank 1": (lambda: op(x[0], y, b), ArgumentError, r"x has shape \(4,\), rank 1; needed rank 2 or more"),
        "bias rank 2": (lambda: op(x, y, b[None]), ArgumentError, r"bias has shape \(1, 128\), rank 2; needed rank 1"),
        "bias length": (lambda: op(x, y, b[:127]), ArgumentError, r"bias has length 127, needed N = 128"),
        "K mismatch": (lambda: op(x, y[:3], b), ArgumentError, r"x \(8, 4\) has 4 entries .* needed the same K"),
        "unknown act": (lambda: op(x, y, b, activation="gelu"), UnknownNameError, r"unknown activation 'gelu'; valid: .*gelu_tanh"),
        "aux with act none": (lambda: op(x, y, b, return_residual=True), ArgumentError, r"return_residual=True with activation 'none'"),
    }  # fmt: skip
    messages = set()
    for call, error, message in bad.values():
        for run in (call, jax.jit(call)):
            with pytest.raises(error, match=message) as caught:
                run()
        messages.add(str(caught.value))
    assert len(messages) == 7


@pytest.mark.whole
@pytest.mark.parametrize("act", ["none", "relu", "gelu_tanh"])
def test_row_07_the_three_gradients_are_those_of_jax_vjp_in_double_precision(act):
    jax_act = {"none": lambda h: h, "relu": jax.nn.relu, "gelu_tanh": jax.nn.gelu}[act]
    x, y, b = uniform((8, 4), (4, 128), (128,), seed=2)
    ct = np.random.default_rng(3).integers(-20, 20, (8, 128)).astype(np.float64)
    h = x @ y + b
    dh = ct * reference.SLOPE[act](h)
    by_hand = (dh @ y.T, x.T @ dh, dh.sum(0))

    def plain(x, y, b):
        return jax_act(x @ y + b)

    with jax.enable_x64(True):
        args = [jnp.asarray(a) for a in (x, y, b)]
        value, pull = jax.vjp(plain, *args)
        assert fl.find(plain, *args).candidates[0].attrs["activation"] == act
        for fn in (partial(fl.ops.gemm_epilogue, activation=act), fl.fuse(plain)):
            got, got_pull = jax.vjp(fn, *args)
            np.testing.assert_allclose(got, value, rtol=1e-5)
            for g, w, hand in zip(got_pull(jnp.asarray(ct)), pull(jnp.asarray(ct)), by_hand, strict=True):
                assert g.dtype == np.float64
                np.testing.assert_allclose(g, w, rtol=1e-5)
                np.testing.assert_allclose(g, hand, rtol=1e-5, atol=1e-12)


def test_row_05_the_right_residual_is_saved_and_inference_saves_nothing():
    x, y, b = (jnp.asarray(a, jnp.float32) for a in uniform((8, 4), (4, 128), (128,)))
    op = fl.ops.gemm_epilogue
    mask = jax.tree.leaves(jax.vjp(partial(op, activation="relu"), x, y, b)[1])
    assert [m.shape for m in mask if m.dtype == bool] == [(8, 128)]
    np.testing.assert_array_equal(next(m for m in mask if m.dtype == bool), np.asarray(x @ y + b) > 0)
    kept = jax.tree.leaves(jax.vjp(partial(op, activation="gelu_tanh"), x, y, b)[1])
    (h,) = [m for m in kept if m.shape == (8, 128)]
    np.testing.assert_allclose(h, x @ y + b, rtol=1e-6)
    (node,) = jax.make_jaxpr(partial(op, activation="relu"))(x, y, b).eqns
    assert [v.aval.shape for v in node.outvars] == [(8, 128)]


def test_row_09_a_gradient_nobody_asks_for_is_not_computed():
    x, w1, b1, w2 = (jnp.asarray(a, jnp.float32) for a in uniform((8, 4), (4, 16), (16,), (16, 6)))

    def loss(params, x):
        return jnp.sum(jax.nn.gelu(x @ params[0] + params[1]) @ params[2])

    def count(grad, *args):
        text = jax.jit(grad).lower(*args).compile().as_text()
        return text.count(" dot("), len(re.findall(r"= f32\[(?:6|16)\]\S* reduce\(", text))

    fused = fl.fuse(loss)
    # Two products forward, where only the first's result is read; backward dW2, dh and dW1, and no dX; one sum, of the one bias.
    dots, sums = count(jax.grad(fused), (w1, b1, w2), x)
    assert (dots, sums) == (4, 1)
    assert count(jax.grad(fused, (0, 1)), (w1, b1, w2), x)[0] == 5  # with dX


def test_row_16_bfloat16_and_what_is_computed_in_are_told():
    x, y, b = uniform((8, 4), (4, 128), (128,), seed=4)
    for act, jax_act in ACTS.items():
        given = [jnp.asarray(a, jnp.bfloat16) for a in (x, y, b)]
        exact = [np.asarray(a, np.float64) for a in given]
        h = exact[0] @ exact[1] + exact[2]
        ct = np.random.default_rng(5).integers(-4, 4, h.shape)
        dh = ct * reference.SLOPE[act](h)
        value, pull = jax.vjp(fl.fuse(lambda x, y, b, f=jax_act: f(x @ y + b)), *given)
        found = (value, *pull(jnp.asarray(ct, jnp.bfloat16)))
        for got, want in zip(
            found, (reference.VALUE[act](h), dh @ exact[1].T, exact[0].T @ dh, dh.sum(0)), strict=True
        ):
            assert got.dtype == jnp.bfloat16
            assert np.max(np.abs(np.asarray(got, np.float64) - want)) <= 1e-2 * max(1, np.max(np.abs(want)))

    def told(dtype, device, precision=None):
        args = [jax.ShapeDtypeStruct(s, dtype) for s in ((8, 4), (4, 128), (128,))]

        def model(x, y, b):
            return jax.nn.relu(jnp.matmul(x, y, precision=precision) + b)

        found = fl.find(model, *args, device=device)
        return found.explain(found.candidates[0].id)

    assert "products in bfloat16, summed in float32" in told(jnp.bfloat16, "sm_90")
    assert "products in float32 rounded to TF32" in told(jnp.float32, "sm_90")
    assert "products in float32, summed in float32" in told(jnp.float32, "sm_90", "highest")
    assert "products in float32, summed in float32" in told(jnp.float32, "cpu")


@pytest.mark.whole
@pytest.mark.parametrize("device", ["cpu", "sm_70", "sm_80", "sm_90", "sm_100", "sm_120"])
def test_row_59_every_device_has_a_decision_and_a_reason(device):
    sizes = ((8192, 768), (768, 3072), (3072,))
    for dtype in (jnp.bfloat16, jnp.float32):
        args = [jax.ShapeDtypeStruct(s, dtype) for s in sizes]
        for act in ACTS.values():
            found = fl.find(lambda x, y, b, f=act: f(x @ y + b), *args, device=device)
            (site,) = found.candidates
            verdicts = {b.name: b for b in site.backends}
            assert set(verdicts) == {"xla", "cublaslt", "cuda"}
            assert all(b.reason for b in verdicts.values())
            assert sum(b.verdict in ("chosen", "same code") for b in verdicts.values()) == 1
            if device in ("cpu", "sm_70"):
                assert site.same_code
                assert {verdicts[n].verdict for n in ("cublaslt", "cuda")} == {"unavailable"}
            if device != "sm_90":  # nothing was measured there: what may be slower stays off
                assert site.backend.name == "xla"


def test_row_10_an_erf_model_is_never_given_tanh_and_the_gap_is_what_the_panel_shows():
    """Each form has its own fused activation, so neither is ever swapped for the other."""
    points = np.linspace(-6, 6, 2401)
    assert np.max(np.abs(reference.gelu_tanh(points) - reference.gelu_erf(points))) == pytest.approx(4.73e-4, rel=0.01)
    assert np.max(np.abs(reference.gelu_tanh_slope(points) - reference.gelu_erf_slope(points))) == pytest.approx(
        8.68e-4, rel=0.01
    )

    x, w, b = jnp.asarray(points, jnp.float32)[:, None], jnp.ones((1, 1)), jnp.zeros(1)

    def model(x, w, b, approximate):
        return jax.nn.gelu(x @ w + b, approximate=approximate)

    for approximate, own, other in ((False, "gelu_erf", "gelu_tanh"), (True, "gelu_tanh", "gelu_erf")):
        fn = partial(model, approximate=approximate)
        found = fl.find(fn, x, w, b, passes="gemm_epilogue")
        assert [c.attrs["activation"] for c in found.candidates] == [own]
        out = np.asarray(fl.fuse(fn)(x, w, b), np.float64)[:, 0]
        assert np.max(np.abs(out - reference.VALUE[own](points))) < 1e-6
        assert np.max(np.abs(out - reference.VALUE[other](points))) > 4e-4

    # The panel's numbers for the swap nobody asked for: what an erf model would lose, forward and in dx.
    swapped = partial(fl.ops.gemm_epilogue, activation="gelu_tanh")
    result = fl.compare(partial(model, approximate=False), swapped, x, w, b, timing=False, memory=False)
    (out,) = [leaf for leaf in result.numerics.leaves if leaf.kind == "output"]
    assert 4.6e-4 < out.after.max_abs <= 4.8e-4
    assert out.before.max_abs < 1e-6

    def summed(fn):
        return lambda x: jnp.sum(fn(x, w, b))

    slopes = jax.grad(summed(swapped))(x) - jax.grad(summed(partial(model, approximate=False)))(x)
    assert 8.5e-4 < float(jnp.max(jnp.abs(slopes))) <= 8.7e-4
