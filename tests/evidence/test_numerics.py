"""Errors are measured right: on known values, on NaN, on whole programs."""

from __future__ import annotations

import dataclasses
import re

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import numpy as jnp

from fusionlab.errors import ArgumentError
from fusionlab.evidence.comparison import measure
from fusionlab.evidence.errors import arrays
from fusionlab.evidence.errors.arrays import ULP_EDGES, compare_arrays, ulp_size
from fusionlab.evidence.errors.gradients import random_cotangents
from fusionlab.evidence.errors.numerics import Numerics, leaf_numerics, rounding_notes, tolerance_notes
from fusionlab.evidence.errors.reduction_sizes import ReductionSizes, reduction_size, sums_of
from fusionlab.graph.jax_compat import enable_x64
from fusionlab.testing.tolerances import TOLERANCES, tolerance


@given(st.floats(1e-30, 1e30), st.sampled_from([1, -1]))
def test_one_ulp_is_the_distance_to_the_next_number(x, sign):
    x = np.float32(sign * x)
    away = np.nextafter(x, np.float32(sign * np.inf))
    assert ulp_size(np.float64(x), np.float32) == abs(np.float64(away) - np.float64(x))


@pytest.mark.parametrize(
    ("dtype", "at", "spacing"),
    [
        (np.float32, 1.0, 2.0**-23),
        (np.float32, 1.999, 2.0**-23),
        (np.float32, 2.0, 2.0**-22),
        (np.float16, 1.0, 2.0**-10),
        (ml_dtypes.bfloat16, 1.0, 2.0**-7),
        (ml_dtypes.bfloat16, 100.0, 0.5),
        (np.float64, 1.0, 2.0**-52),
        (np.float32, 0.0, 2.0**-149),
        (np.float16, 0.0, 2.0**-24),
    ],
)
def test_ulp_sizes_of_known_values(dtype, at, spacing):
    assert ulp_size(np.array(at), dtype) == spacing


def test_an_error_is_measured_in_every_unit():
    want = np.array([[1.0, 2.0], [4.0, 0.0]])
    got = want + np.array([[0, 2.0**-21], [0, 0.5]])
    e = compare_arrays(got, want, np.float32, rtol=1e-3, atol=0.25)
    assert e.max_abs == 0.5
    assert e.max_rel == 2.0**-22
    assert e.rel_l2 == pytest.approx(0.5 / np.sqrt(21))
    assert e.ulp_max == 0.5 / 2.0**-149
    assert e.ulp_median == 1.0  # ulps: 0, 2, 0, 2**148
    assert e.over_tolerance == 1
    assert (e.worst_index, e.worst_value, e.worst_reference) == ((1, 1), 0.5, 0.0)


def test_elements_are_counted_by_their_distance_in_ulp():
    ulps = np.array([0, 0.25, 0.5, 1, 1.5, 3, 1024, 1025, 5000])
    found = compare_arrays(1 + ulps * 2.0**-52, np.ones(9), np.float64).ulp_histogram  # half an ulp has no number
    assert sum(found) == 9
    found = compare_arrays(1 + np.array([0, 1, 2, 3, 1024, 1025, np.nan]) * 2.0**-23, np.ones(7), np.float32)
    assert found.ulp_histogram == (1, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1)
    assert len(found.ulp_histogram) == len(ULP_EDGES) + 1
    assert compare_arrays(np.arange(3), np.arange(3), np.int32).ulp_histogram == ()
    assert compare_arrays(np.ones(0), np.ones(0), np.float32).ulp_histogram == (0,) * 11


def test_ulp_is_of_the_programs_own_dtype():
    want = np.array([1.0])
    assert compare_arrays(np.array([1 + 2.0**-8]), want, ml_dtypes.bfloat16).ulp_max == 0.5
    assert compare_arrays(np.array([1 + 2.0**-8]), want, np.float32).ulp_max == 2.0**15


def test_nans_and_infinities_must_be_the_same_ones():
    inf, nan = np.inf, np.nan
    same = compare_arrays(np.array([nan, inf, -inf, 1]), np.array([nan, inf, -inf, 1]), np.float32)
    assert (same.nonfinite_mismatch, same.over_tolerance, same.max_abs) == (0, 0, 0.0)
    e = compare_arrays(np.array([nan, inf, 3.0, 1.5]), np.array([0.0, -inf, inf, 1.0]), np.float32, rtol=1)
    assert (e.nonfinite_mismatch, e.over_tolerance, e.max_abs) == (3, 3, 0.5)
    assert e.worst_index == (0,)
    assert np.isnan(e.worst_value)


def test_integers_that_differ_beyond_what_float64_holds_are_not_the_same():
    want = np.arange(4) + (1 << 60)
    error = compare_arrays(want ^ 1, want, np.int64)
    assert (error.max_abs, error.over_tolerance) == (1.0, 4)
    (leaf,) = leaf_numerics("output", ["out"], [want], [want ^ 1], [want], ReductionSizes(1, coarsest="float32"))
    assert not leaf.ok


def test_integers_and_bools_are_compared_exactly():
    e = compare_arrays(np.array([1, 2, 300]), np.array([1, 5, 300]), np.int32, rtol=10, atol=10)
    assert (e.over_tolerance, e.max_abs, e.worst_index) == (1, 3.0, (1,))
    assert compare_arrays(np.array([True, False]), np.array([True, True]), np.bool_).over_tolerance == 1


def test_complex_empty_and_scalar_arrays_are_compared():
    assert compare_arrays(np.array([1 + 2j]), np.array([1 + 2.5j]), np.complex64).max_abs == 0.5
    assert compare_arrays(np.zeros((0, 3)), np.zeros((0, 3)), np.float32).max_abs == 0
    assert compare_arrays(np.float32(2), np.float64(1), np.float32).worst_index == ()
    with pytest.raises(ArgumentError, match="shapes"):
        compare_arrays(np.zeros(3), np.zeros(4), np.float32)


def test_the_largest_sum_of_a_program_is_found_inside_its_regions():
    def f(x, w):
        def step(c, _):
            return jax.checkpoint(lambda c: jnp.tanh(c @ w))(c), None

        return jax.lax.scan(step, x, None, 2)[0].sum(0)

    closed = jax.make_jaxpr(f)(jnp.ones((5, 48)), jnp.ones((48, 48)))
    assert reduction_size(closed) == 48
    assert reduction_size(jax.make_jaxpr(lambda x: x.sum())(jnp.ones((5, 7)))) == 35
    kernel = jax.make_jaxpr(lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME"))(
        jnp.ones((1, 3, 8, 8)), jnp.ones((4, 3, 5, 5))
    )
    assert reduction_size(kernel) == 75


def test_only_a_float32_product_that_asks_for_no_precision_may_run_in_tf32_and_only_on_a_gpu():
    def product(precision, dtype=jnp.float32):
        x = jnp.ones((4, 4), dtype)
        return jax.make_jaxpr(lambda x: jax.checkpoint(lambda x: jnp.dot(x, x, precision=precision))(x))(x)

    assert sums_of(product(None), "gpu") == ReductionSizes(4, tf32=True, coarsest="float32")
    assert sums_of(product(None), "cpu") == ReductionSizes(4, coarsest="float32")
    assert not sums_of(product("highest"), "gpu").tf32
    assert not sums_of(product(None, jnp.bfloat16), "gpu").tf32
    with jax.default_matmul_precision("float32"):
        assert not sums_of(product(None), "gpu").tf32
    assert tolerance("float32", 64, tf32=True).atol > tolerance("float32", 64).atol
    assert tolerance("float64", 64, tf32=True) == tolerance("float64", 64)


@pytest.mark.parametrize(
    ("dtypes", "coarsest"),
    [
        ((jnp.float32, jnp.float32), "float32"),
        ((jnp.float32, jnp.bfloat16), "bfloat16"),
        ((jnp.float16, jnp.bfloat16), "bfloat16"),
        ((jnp.int8, jnp.int8), ""),
    ],
)
def test_the_coarsest_dtype_that_is_multiplied_is_found_inside_regions(dtypes, coarsest):
    def f(x):
        for dtype in dtypes:
            x = jax.checkpoint(lambda x, dtype=dtype: (x.astype(dtype) @ x.astype(dtype)).astype(x.dtype))(x)
        return x

    assert sums_of(jax.make_jaxpr(f)(jnp.ones((4, 4))), "cpu").coarsest == coarsest


def test_a_float32_result_of_bfloat16_products_is_judged_by_the_tolerance_of_bfloat16():
    want, off = [np.linspace(1, 2, 8)], [np.float32(np.linspace(1, 2, 8) * 1.004)]
    exact = [np.float32(want[0])]
    (strict,) = leaf_numerics("output", ["out"], exact, off, want, ReductionSizes(64, coarsest="float32"))
    (wide,) = leaf_numerics("output", ["out"], exact, off, want, ReductionSizes(64, coarsest="bfloat16"))
    assert not strict.ok
    assert wide.ok
    assert (wide.dtype, wide.rtol) == ("float32", tolerance("bfloat16", 64).rtol)
    (note,) = tolerance_notes([wide], ReductionSizes(64, coarsest="bfloat16"))
    assert note == "float32 results are judged with the tolerance of bfloat16, in which the program multiplies"
    assert tolerance_notes([strict], ReductionSizes(64, coarsest="float32")) == ()
    (half,) = leaf_numerics(
        "output", ["out"], [x.astype(ml_dtypes.bfloat16) for x in exact], off, want, ReductionSizes(64)
    )
    assert tolerance_notes([half], ReductionSizes(64, coarsest="float32")) == ()


def test_a_gradient_that_is_zero_in_theory_says_so_instead_of_a_relative_error():
    want = [np.linspace(0, 1, 8), np.full(8, 1e-17)]
    got = [np.float32(want[0]), np.full(8, 1e-8, np.float32)]
    large, small = leaf_numerics("gradient", ["w", "b"], got, got, want, ReductionSizes(64))
    assert (large.zero_in_theory, small.zero_in_theory) == (False, True)
    assert small.after.rel_l2 > 1e8
    assert "zero in theory" in str(small)
    assert "rel L2" not in str(small)
    assert "rel L2" in str(large)


def test_an_output_of_which_the_original_has_no_digit_right_is_judged_by_the_originals_error():
    want = [np.linspace(0, 1, 8), np.full(8, 1e-37)]  # what Adam keeps of a gradient that is zero in theory
    noise = np.full(8, 1e-21, np.float32)
    sound, noisy = leaf_numerics(
        "output", ["w", "nu"], [np.float32(want[0]), noise], [want[0], noise], want, ReductionSizes(64)
    )
    assert (sound.zero_in_theory, noisy.zero_in_theory) == (False, True)
    assert noisy.ok
    assert noisy.shares == (0.5, 0.5)
    assert "zero in theory" in str(noisy)
    (note,) = rounding_notes([sound, noisy])
    assert note.startswith("1 output holds rounding alone")
    (worse,) = leaf_numerics("output", ["nu"], [noise], [5 * noise], want[1:], ReductionSizes(64))
    assert not worse.ok
    assert worse.shares[1] > 2
    assert [leaf.name for leaf in Numerics((noisy, sound), (), 64).ranked] == ["w", "nu"]


def test_an_error_that_spreads_over_what_is_rounding_alone_is_worse():
    want = np.zeros(100)
    spike = np.zeros(100, np.float32)
    spike[0] = 1.0
    (leaf,) = leaf_numerics("output", ["nu"], [spike], [np.ones(100, np.float32)], [want + 1e-6], ReductionSizes(64))
    assert leaf.is_rounding
    assert leaf.after.max_abs <= 2 * leaf.before.max_abs
    assert not leaf.ok  # ten times as far off over the whole array


def test_an_error_many_times_its_tolerance_is_said_in_times_and_whether_the_original_has_it_too():
    want = [np.linspace(0, 1, 8)]
    off = np.float32(want[0]) + np.float32(1e-2)
    same = Numerics(tuple(leaf_numerics("output", ["w"], [off], [off], want, ReductionSizes(64))), (), 64).sentence
    assert re.match(r"worst error ([\d,]+ times) its tolerance \(\1 before, no worse\): 1\.00e-02 in w,", same)
    right = [np.float32(want[0])]
    worse = Numerics(tuple(leaf_numerics("output", ["w"], right, [off], want, ReductionSizes(64))), (), 64).sentence
    assert re.match(r"worst error [\d,]+ times its tolerance \([\d.]+ % before\): ", worse)


def test_cotangents_are_fixed_random_and_of_the_outputs_dtype():
    avals = [jax.ShapeDtypeStruct((3, 4), d) for d in (jnp.bfloat16, jnp.int32, jnp.complex64)]
    first, second = random_cotangents(avals), random_cotangents(avals)
    assert first[0].dtype == jnp.bfloat16
    assert first[2].dtype == np.complex64
    np.testing.assert_array_equal(first[0], second[0])
    assert np.unique(first[0].astype(np.float32)).size > 8


def test_tolerances_grow_with_the_sum_and_shrink_with_the_dtype():
    assert tolerance(jnp.float32, 64).rtol < tolerance("float32", 4096).rtol < tolerance("float32", 10**6).rtol
    assert tolerance("float64", 768).rtol < tolerance("float32", 768).rtol < tolerance("float16", 768).rtol
    assert tolerance("float16", 768).rtol < tolerance(jnp.bfloat16, 768).rtol < tolerance("float8_e4m3fn").rtol
    assert tolerance("complex64", 64) == tolerance("float32", 64)
    assert all(row.reason for row in TOLERANCES)
    with pytest.raises(ArgumentError, match="exactly"):
        tolerance("int32")
    with pytest.raises(ArgumentError, match="at least 1"):
        tolerance("float32", 0)


@pytest.mark.parametrize(("dtype", "n"), [("float32", 100), ("float32", 4000), ("bfloat16", 4000), ("float16", 4000)])
def test_a_plain_matrix_product_is_within_its_tolerance_and_a_wrong_one_is_not(dtype, n):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((8, n), (n, 8)))
    want = np.asarray(x).astype(np.float64) @ np.asarray(w).astype(np.float64)
    row = tolerance(dtype, n)
    atol = row.atol * np.abs(want).max()
    got = np.asarray(x @ w)
    assert compare_arrays(got, want, got.dtype, row.rtol, atol).over_tolerance == 0
    wrong = np.asarray(x[:, n // 20 :] @ w[n // 20 :])
    assert compare_arrays(wrong, want, got.dtype, row.rtol, atol).over_tolerance > 0


def test_a_number_in_the_place_of_a_nan_is_counted_and_one_beside_it_that_is_off_is_still_worse():
    x = jnp.asarray([[-1.0, -4.0], [4.0, 9.0]])
    fill = lambda y: jnp.where(jnp.isnan(y), 0.0, y)  # noqa: E731
    quick = {"grad": False, "timing": False, "memory": False}
    found = measure(jnp.sqrt, lambda x: fill(jnp.sqrt(x)), x, **quick).numerics
    assert found.ok
    assert (found.leaves[0].filled, found.leaves[0].filled_rows) == (2, 1)
    assert "2 of 4 elements (1 whole rows) are NaN in the original" in found.notes[0]
    assert not measure(jnp.sqrt, lambda x: fill(jnp.sqrt(x)).at[1, 0].add(0.1), x, **quick).numerics.ok
    assert not measure(jnp.sqrt, lambda x: fill(jnp.sqrt(x)).at[1, 0].set(jnp.nan), x, **quick).numerics.ok


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_large_arrays_are_compared_on_the_device_with_the_same_result(dtype, monkeypatch):
    rng = np.random.default_rng(1)
    want = rng.standard_normal((7, 43)) * 10.0 ** rng.integers(-9, 9, (7, 43))
    got = (want * (1 + 1e-6 * rng.standard_normal(want.shape))).astype(dtype)
    got[0, :4], want[0, :6] = (np.nan, np.inf, -np.inf, 3), (np.nan, np.inf, np.inf, np.nan, 0, -0.0)
    found = []
    for block, to in ((2**17, np.asarray), (128, np.asarray), (64, jnp.asarray)):
        monkeypatch.setattr(arrays, "BLOCK", block)
        with enable_x64():
            pair = to(got), to(want)
        found.append(dataclasses.asdict(compare_arrays(*pair, dtype, rtol=1e-7, atol=1e-6)))
    whole, *others = found
    median = whole.pop("ulp_median")
    for blocks in others:
        assert blocks.pop("ulp_median") == pytest.approx(median, rel=0.5)  # of a sample
        for name, value in whole.items():
            assert blocks[name] == pytest.approx(value, rel=1e-13), name
    want[0], got[0] = 1, 1  # now the worst is a number, in the last block, of which most was in the one before
    got[6, 42] = 2 * want[6, 42] + 1e12
    assert compare_arrays(got, want, dtype).worst_index == (6, 42)


@pytest.mark.parametrize("to", [np.asarray, jnp.asarray])
def test_the_largest_finite_value(to):
    assert arrays.largest(to([1.0, -3.0, np.inf, np.nan])) == 3
    assert arrays.largest(to([np.nan])) == arrays.largest(to([])) == 0
