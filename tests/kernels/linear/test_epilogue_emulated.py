"""The elementwise CUDA kernels, compiled as C++ and run thread by thread, against activations.py and float64."""

import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fusionlab.kernels.ops.gemm_epilogue.activations import ACTIVATIONS
from fusionlab.kernels.ops.gemm_epilogue.elementwise import (
    KERNEL_ACTIVATIONS,
    accumulator,
    backward_plan,
    forward_plan,
    saves_for_backward,
)
from fusionlab.kernels.ops.gemm_epilogue.reference import mask_pitch

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float64": np.float64}
GUARD = 64  # bytes before and after each result that nothing may write
WITH_DERIVATIVE = [a for a in KERNEL_ACTIVATIONS if a != "none"]


class Guarded:
    """Arrays with a guard on either side."""

    def __init__(self):
        self._all = []

    def empty(self, shape, dtype):
        size = math.prod(shape) * np.dtype(dtype).itemsize
        whole = np.full(size + 2 * GUARD + 16, 0xA5, np.uint8)
        start = GUARD + -(whole.ctypes.data + GUARD) % 16
        self._all.append((whole, start, start + size))
        return whole[start : start + size].view(dtype).reshape(shape)

    def copy(self, array):
        mine = self.empty(array.shape, array.dtype)
        mine[...] = array
        return mine

    def check(self):
        for whole, start, end in self._all:
            assert (whole[:start] == 0xA5).all()
            assert (whole[end:] == 0xA5).all()


def exact(activation, h):
    """The activation and its derivative in float64, of finite h."""
    h = np.asarray(h, np.float64)
    with np.errstate(all="ignore"):
        if activation in ("relu", "relu_tie", "relu_where"):
            return np.maximum(h, 0), np.where(h == 0, 0.5 * (activation == "relu_tie"), h > 0)
        if activation == "gelu_erf":
            phi = 0.5 * np.vectorize(math.erfc, otypes=[float])(-h * math.sqrt(0.5))
            return h * phi, phi + h * np.exp(-h * h / 2) / math.sqrt(2 * math.pi)
        w = 2 * math.sqrt(2 / math.pi) * (h + 0.044715 * h**3) if activation == "gelu_tanh" else h
        dw = 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * h**2) if activation == "gelu_tanh" else 1.0
        w = 2 * h if activation == "tanh" else w
        e = np.exp(-np.abs(w))
        s, slope = np.where(w > 0, 1, e) / (1 + e), e / (1 + e) ** 2
        if activation == "sigmoid":
            return s, slope
        if activation == "tanh":
            return np.tanh(h), 4 * slope
        return h * s, s + h * np.where(slope == 0, 0, slope * dw)


def ulp(value, dtype):
    """The distance of neighbours of `dtype` around |value|."""
    info = ml_dtypes.finfo(DTYPES[dtype])
    exponent = np.floor(np.log2(np.maximum(np.abs(value), float(info.smallest_normal))))
    return 2.0 ** (exponent - info.nmant)


def every_value(dtype):
    return np.arange(65536, dtype=np.uint16).view(DTYPES[dtype]).reshape(256, 256)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"], ids=str)
@pytest.mark.parametrize("activation", WITH_DERIVATIVE, ids=str)
def test_every_16_bit_input_forward(emulator, activation, dtype):
    h = every_value(dtype)
    out = np.empty_like(h)
    emulator.run(forward_plan(256, 256, dtype, activation, bias=False, saves="none"), [h], [out])
    wide = h.astype(np.float32)
    meant = np.asarray(ACTIVATIONS[activation].fn(jnp.asarray(wide)))
    np.testing.assert_array_equal(np.isnan(out), np.isnan(meant))
    finite = np.isfinite(wide)
    np.testing.assert_array_equal(out[~finite].astype(np.float32), meant[~finite])
    if activation.startswith("relu"):
        np.testing.assert_array_equal(np.signbit(out)[finite], np.signbit(meant)[finite])  # -0 becomes 0
    value = exact(activation, wide[finite])[0]
    error = np.abs(out[finite].astype(np.float64) - value)
    # Half of it is the rounding of the result. At 1e-36 float's own range ends: 1 + exp(-h) is infinite.
    assert np.max((error - 1e-36) / ulp(value, dtype)) < 0.51


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"], ids=str)
@pytest.mark.parametrize("activation", WITH_DERIVATIVE, ids=str)
def test_every_16_bit_input_backward(emulator, activation, dtype):
    h = every_value(dtype)
    saves = saves_for_backward(activation)[-1]
    saved = h if saves == "preactivation" else np.asarray(ACTIVATIONS[activation].save(jnp.asarray(h)))
    ct, dh = np.ones_like(h), np.empty_like(h)
    spec, _ = backward_plan(256, 256, dtype, activation, dbias=False, saves=saves)
    emulator.run(spec, [ct, saved], [dh])
    wide = h.astype(np.float32)
    act = ACTIVATIONS[activation]
    meant = np.asarray(act.scale(act.save(jnp.asarray(wide)), jnp.ones(wide.shape)))
    # Between these, 3 h^2 overflows in jnp's derivative of the tanh-GELU and h^2 does not.
    told = ~((np.abs(wide) > 1e19) & (np.abs(wide) < 2e19))
    np.testing.assert_array_equal(np.isnan(dh)[told], np.isnan(meant)[told])
    finite = np.isfinite(wide) & ~np.isnan(dh)
    np.testing.assert_array_equal(dh[~np.isfinite(wide)].astype(np.float32), meant[~np.isfinite(wide)])
    value = exact(activation, wide[finite])[1]
    error = np.abs(dh[finite].astype(np.float64) - value)
    # A sum of two terms near the derivative's zero keeps its absolute error: 1e-6 of terms about 0.2.
    assert np.max((error - 1e-6 * (activation in ("gelu_tanh", "gelu_erf", "silu")) - 1e-37) / ulp(value, dtype)) < 0.51


SPECIAL = [
    -np.inf,
    -1e4,
    -100,
    -20,
    -5,
    -1,
    -0.75,
    -1e-6,
    -0.0,
    0.0,
    1e-6,
    0.06,
    0.07,
    1,
    5,
    20,
    100,
    1e4,
    np.inf,
    np.nan,
]


@pytest.mark.parametrize("dtype", ["float32", "float64"], ids=str)
@pytest.mark.parametrize("activation", KERNEL_ACTIVATIONS, ids=str)
def test_wide_values_and_special_ones(emulator, activation, dtype):
    """Values and derivatives at ties, infinities and NaN are jnp's; elsewhere within a few ulp of float64."""
    columns = len(SPECIAL)
    h = np.stack([np.asarray(SPECIAL), np.linspace(-9, 9, columns)]).astype(DTYPES[dtype])
    out = np.empty_like(h)
    emulator.run(forward_plan(2, columns, dtype, activation, bias=False, saves="none"), [h], [out])
    act = ACTIVATIONS[activation]
    narrow = jnp.asarray(h, jnp.float32)
    tolerance = {"rtol": 1e-5, "atol": 1e-5}  # jnp's 1 + tanh cancels in the negative tail
    np.testing.assert_allclose(out, act.fn(narrow), **tolerance)
    if activation == "none":
        return
    finite = np.isfinite(h)
    # In the tails exp multiplies the error of its argument.
    few = 6 if activation in ("relu", "relu_tie", "relu_where") else 200
    value, derivative = exact(activation, h[finite])
    assert np.all(np.abs(out[finite] - value) <= few * ulp(value, dtype) + 1e-36)
    saves = saves_for_backward(activation)[-1]
    dh = np.empty_like(h)
    emulator.run(backward_plan(2, columns, dtype, activation, dbias=False, saves=saves)[0], [np.ones_like(h), h], [dh])
    np.testing.assert_allclose(dh, act.scale(act.save(narrow), jnp.ones(h.shape)), **tolerance)
    assert np.all(np.abs(dh[finite] - derivative) <= few * ulp(np.maximum(np.abs(derivative), 0.1), dtype))


SHAPES = [(1, 8), (3, 1), (5, 130), (37, 24), (9, 520), (70, 264), (127, 40), (263, 3)]
VARIANTS = [
    ("bfloat16", "relu", "bits"),
    ("float16", "relu_where", "bits"),
    ("float32", "relu", "bits"),
    ("float64", "relu", "bits"),
    ("bfloat16", "relu_tie", "bytes"),
    ("float32", "relu_tie", "bytes"),
    ("float64", "relu_where", "bytes"),
    ("bfloat16", "gelu_erf", "preactivation"),
    ("float16", "silu", "preactivation"),
    ("float32", "gelu_tanh", "preactivation"),
    ("float64", "tanh", "preactivation"),
    ("bfloat16", "none", "none"),
    ("float32", "none", "none"),
]


def example(shape, dtype, seed=0):
    """Multiples of a quarter, zero among them: sums of them are exact."""
    rng = np.random.default_rng(seed)
    return (rng.integers(-8, 9, shape) / 4).astype(DTYPES[dtype])


def saved_like(saves, h, activation):
    """What forward saves of h, in numpy."""
    if saves == "bits":
        rows, columns = h.shape
        padded = np.zeros((rows, 8 * mask_pitch(columns)), bool)
        padded[:, :columns] = h > 0
        return np.packbits(padded, axis=1, bitorder="little")
    if saves == "bytes":
        if activation != "relu_tie":
            return (h > 0).astype(np.int8)
        return np.where(h > 0, 2, h == 0).astype(np.int8)
    return h


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_forward_writes_everything_once_and_nothing_else(emulator, variant, shape):
    dtype, activation, saves = variant
    guarded = Guarded()
    h, bias = guarded.copy(example(shape, dtype)), guarded.copy(example(shape[1:], dtype, 1))
    sum_ = (h.astype(np.float64) + bias.astype(np.float64)).astype(DTYPES[dtype])
    wanted = saved_like(saves, sum_, activation)
    out = guarded.empty(shape, DTYPES[dtype])
    results = [out] if saves == "none" else [out, guarded.empty(wanted.shape, wanted.dtype)]
    spec = forward_plan(*shape, dtype, activation, bias=True, saves=saves)
    emulator.run(spec, [h, bias], results)
    guarded.check()
    value = sum_.astype(np.float64) if activation == "none" else exact(activation, sum_)[0]
    np.testing.assert_allclose(out.astype(np.float64), value, rtol=8e-3 if dtype == "bfloat16" else 2e-3)
    for result in results[1:]:
        np.testing.assert_array_equal(result, wanted)
    kept = h.copy()
    emulator.run(spec, [h, bias], [h, *results[1:]])
    np.testing.assert_array_equal(h, out)
    if saves == "preactivation":
        emulator.run(spec, [kept, bias], [results[0], kept])
        np.testing.assert_array_equal(kept, wanted)
        np.testing.assert_array_equal(results[0], out)


@pytest.mark.parametrize("shape", [*SHAPES, (0, 16), (0, 3)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_backward_and_the_sum_over_rows(emulator, variant, shape):
    dtype, activation, saves = variant
    guarded = Guarded()
    h, ct = example(shape, dtype), guarded.copy(example(shape, dtype, 1))
    spec, scratch = backward_plan(*shape, dtype, activation, dbias=True, saves=saves)
    saved = guarded.copy(saved_like(saves, h, activation))
    dbias, partial = guarded.empty(shape[1:], DTYPES[dtype]), guarded.empty(scratch, np.dtype(accumulator(dtype)))
    slope = np.ones(shape) if activation == "none" else exact(activation, h)[1]
    wide = slope * ct.astype(np.float64)
    if activation == "none":
        emulator.run(spec, [ct], [dbias, partial])
    else:
        dh = guarded.empty(shape, DTYPES[dtype])
        emulator.run(spec, [ct, saved], [dh, dbias, partial])
        np.testing.assert_allclose(dh.astype(np.float64), wide, rtol=8e-3 if dtype == "bfloat16" else 2e-3, atol=1e-6)
        emulator.run(spec, [ct, saved], [ct, dbias, partial])
        np.testing.assert_array_equal(ct, dh)
    guarded.check()
    total = wide.sum(0)
    error = np.abs(dbias.astype(np.float64) - total)
    # Of float32 sums of f32 terms, rounded once: not of terms that were rounded to 16 bits before.
    assert np.all(error <= 0.51 * ulp(total, dtype) + 1e-5 * np.abs(wide).sum(0))


def test_the_derivative_of_a_relu_chooses_and_that_of_its_tie_form_multiplies(emulator):
    """0 where h <= 0 although ct is infinite; relu_tie, as activations.py, gives NaN there."""
    h = np.array([[-1, 0, 1, 2, -1, 0, 1, 2]], np.float32)
    ct = np.full((1, 8), np.inf, np.float32)
    for activation, saves, zero in (
        ("relu", "bits", 0),
        ("relu", "preactivation", 0),
        ("relu_tie", "bytes", np.nan),
        ("relu", "bytes", 0),
    ):
        dh = np.empty_like(h)
        spec, _ = backward_plan(1, 8, "float32", activation, dbias=False, saves=saves)
        emulator.run(spec, [ct, saved_like(saves, h, activation)], [dh])
        act = ACTIVATIONS[activation]
        np.testing.assert_array_equal(dh, act.scale(act.save(jnp.asarray(h)), jnp.asarray(ct)))
        np.testing.assert_array_equal(dh[0, 0], zero)
