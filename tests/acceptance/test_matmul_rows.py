"""Rows 52 to 57: matrix products and their routes, the library's calls run by numpy on a CPU (`tests/kernels/emulated_blas.py`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex_core

import fusionlab as fl
from fusionlab import ops
from fusionlab.kernels.ops.matmul import support
from tests.acceptance.reference import VALUE
from tests.kernels.emulated_blas import products_on_the_cpu

ON, OFF = (fl.Strategy(matmul_schedule={"library": on}) for on in (True, False))


def arrays(*shapes, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.uniform(-1, 1, s), dtype) for s in shapes)


def routed(fn, *args, passes=ON, device="sm_90"):
    """(findings, result, the library's calls) of the program with its routes applied."""
    found = fl.find(fn, *args, passes=passes, device=device)
    program = jax.jit(jex_core.jaxpr_as_fun(found.rewritten()))
    with products_on_the_cpu(support) as plans:
        out = program(*args)
    return found, out[0] if len(out) == 1 else out, plans


def close(got, want, rtol):
    want = np.asarray(want, np.float64)
    np.testing.assert_allclose(
        np.asarray(got, np.float64), want, rtol=0, atol=rtol * max(1.0, float(np.abs(want).max()))
    )


def test_row_52_the_option_changes_the_route_and_the_tag_is_visible():
    a, b = jnp.ones((2, 3), jnp.float16), jnp.ones((3, 4), jnp.float16)

    def fn(a, b):
        return jnp.matmul(a, b, preferred_element_type=jnp.float32)

    for passes, tag in ((ON, "evaluate"), (OFF, "xla")):
        found, out, plans = routed(fn, a, b, passes=passes)
        assert [row.tag for row in found.routes()] == [tag]
        assert tag in str(found.routes())
        assert (out == 3).all()
        assert [plan.result_dtype for plan in plans] == ["float32"] * (tag == "evaluate")  # not rounded to half before


M, N, K = 32, 64, 128
EIGHT = {
    "transposed operand": (lambda a, b, v: jnp.einsum("mk,nk->mn", a, b.T), 1),
    "a sum of products": (lambda a, b, v: jnp.einsum("mk,kn->mn", a, b), 1),
    "alpha": (lambda a, b, v: 0.3 * (a @ b), 1),
    "beta": (lambda a, b, v: a @ b + 0.7 * v, 1),
    "alpha and beta": (lambda a, b, v: 0.3 * (a @ b) + 0.7 * v, 1),
    "alpha of the sum": (lambda a, b, v: 0.3 * (a @ b + v), 1),
    "linear": (lambda a, b, v: jax.lax.dot_general(a, b.T, (((1,), (1,)), ((), ()))), 1),
    "linear with bias": (lambda a, b, v: jax.lax.dot_general(a, b.T, (((1,), (1,)), ((), ()))) + v, 1),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", EIGHT)
def test_row_53_one_call_each(name):
    fn, calls = EIGHT[name]
    args = arrays((M, K), (K, N), (N,))
    found, out, plans = routed(fn, *args)
    assert len(plans) == calls
    assert found.routes().counts()["evaluate"] == 1
    with jax.enable_x64(True):
        close(out, fn(*(a.astype("float64") for a in args)), 1e-6)


@pytest.mark.whole
@pytest.mark.parametrize("n", [24, 32])
def test_row_54_a_row_bias_is_told_from_a_column_bias(n):
    a, b, rows, columns = arrays((32, 16), (16, n), (32,), (n,))
    for fn, bias in ((lambda a, b, v: a @ b + v[:, None], rows), (lambda a, b, v: a @ b + v, columns)):
        found, out, plans = routed(fn, a, b, bias)
        assert len(plans) == len(found.candidates) == 1
        close(out, fn(a, b, bias), 1e-6)


LEFT = {"k": (32,), "mk": (64, 32), "1k": (1, 32), "bmk": (4, 64, 32), "b1mk": (4, 1, 64, 32)}
RIGHT = {"k": (32,), "kn": (32, 16), "k1": (32, 1), "bkn": (4, 32, 16)}


def of_one_term(shape):
    return tuple(1 if n == 32 else n for n in shape)


@pytest.mark.parametrize("right", RIGHT)
@pytest.mark.parametrize("left", LEFT)
def test_row_55_products_of_every_shape(left, right):
    shapes = LEFT[left], RIGHT[right]
    for pair in (shapes, tuple(map(of_one_term, shapes))):
        a, b = arrays(*pair)
        found, out, plans = routed(jnp.matmul, a, b)
        (row,) = found.routes()
        # [k] x [b,k,n] is one product of which b's columns (b, n) stand apart in memory, unless there is one batch or one term.
        apart = right == "bkn" and left != "bmk" and pair == shapes
        assert (len(plans), row.answers[0].code) == ((0, "axes") if apart else (1, ""))
        with jax.enable_x64(True):
            close(out, jnp.matmul(a.astype("float64"), b.astype("float64")), 1e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weight", [(16, 32), (1, 32)])
def test_row_55_linear_of_every_shape(weight, bias):
    def linear(x, w, v):
        out = jnp.einsum("...k,nk->...n", x, w)
        return out + v if bias else out

    for shape in LEFT.values():
        x, w, v = arrays(shape, weight, weight[:1])
        found, out, plans = routed(linear, x, w, v)
        assert len(plans) == len(found.candidates) == 1
        with jax.enable_x64(True):
            close(out, linear(*(one.astype("float64") for one in (x, w, v))), 1e-6)


def test_row_55_one_fused_function_at_several_shapes():
    fused = fl.fuse(lambda a, b: 2.0 * (a @ b), passes=ON)
    for m in (3, 8, 64):
        a, b = arrays((m, 32), (32, 16))
        close(fused(a, b), 2.0 * np.asarray(a) @ np.asarray(b), 1e-6)
        assert fused.findings(a, b).routes()[0].shape == f"{m}x32x16"


EPILOGUES = {
    "bias": ("none", True, False),
    "relu": ("relu", False, False),
    "bias, relu": ("relu", True, False),
    "relu, aux": ("relu", False, True),
    "bias, relu, aux": ("relu", True, True),
    "gelu": ("gelu_tanh", False, False),
    "gelu, aux": ("gelu_tanh", False, True),
    "bias, gelu": ("gelu_tanh", True, False),
    "bias, gelu, aux": ("gelu_tanh", True, True),
}
PRECISIONS = {  # operands, product and result -> tolerance
    ("float16", "float16"): 1e-3,
    ("bfloat16", "bfloat16"): 1e-2,
    ("float16", "float32"): 1e-4,
    ("bfloat16", "float32"): 1e-4,
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", EPILOGUES)
def test_row_56_the_matrix_of_epilogues(name, precision):
    activation, biased, aux = EPILOGUES[name]
    given, made = precision
    a, b, v = arrays((504, 248), (248, 136), (136,), dtype=given)
    a = a / 8
    attrs = {"activation": activation, "product": made, "return_residual": aux}
    with products_on_the_cpu(support) as plans:
        able = not (activation == "gelu_tanh" and made == "float32")  # its GELU keeps less than float32
        attrs["implementation"] = "cublaslt" if able else "xla"
        out = jax.jit(lambda *args: ops.matmul(*args, **attrs))(a, b, *([v] if biased else []))
    assert len(plans) == able
    h = np.asarray(a, np.float64) @ np.asarray(b, np.float64) + (np.asarray(v, np.float64) if biased else 0)
    want = h if activation == "none" else VALUE[activation](h)
    tolerance = PRECISIONS[precision]
    close(out[0] if aux else out, want, tolerance)
    if aux and activation == "relu":
        sure = np.abs(h) > 0.01
        assert (np.asarray(out[1]) == (h > 0))[sure].all()
    elif aux:
        close(out[1], h, tolerance)


def test_row_57_what_cannot_be_one_kernel_is_split_and_the_split_is_shown():
    def prologue(x, w):
        return jnp.sin(x) @ w

    x, w = arrays((24, 16), (16, 8))
    found, out, plans = routed(prologue, x, w)
    assert len(plans) == 1
    (row,) = found.routes()
    assert "sin before it" in row.split
    close(out, prologue(x, w), 1e-6)

    def narrowed(x, w):  # an operand in float32 beside one of 16 bits
        return x.astype(jnp.bfloat16) @ w

    found, out, plans = routed(narrowed, x, w.astype(jnp.bfloat16))
    assert [plan.dtype for plan in plans] == ["bfloat16"]
    (row,) = found.routes()
    assert "convert_element_type before it" in row.split
    close(out, narrowed(x, w.astype(jnp.bfloat16)), 1e-2)
