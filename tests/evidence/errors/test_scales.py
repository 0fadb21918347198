"""A factor on a whole array is found where no single element shows it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.evidence.errors.arrays import compare_arrays
from fusionlab.evidence.errors.numerics import explained_by_rounding, leaf_numerics
from fusionlab.evidence.errors.reduction_sizes import ReductionSizes, coarsest_of
from fusionlab.evidence.errors.rounding import moved


def rounded(want, seed, factor=1.0):
    """The array with errors as a chain of bfloat16 products has them, 0.6 % of each element."""
    noise = np.random.default_rng(seed).normal(size=want.shape)
    return jnp.asarray(factor * want * (1 + 0.006 * noise), jnp.float32)


@pytest.mark.parametrize("factor", [1.01, 0.99])
def test_a_factor_that_no_element_shows_is_worse(factor):
    want = np.random.default_rng(0).normal(size=(64, 64))
    sums = ReductionSizes(1024, coarsest="bfloat16")
    (leaf,) = leaf_numerics("gradient", ["w"], [rounded(want, 1)], [rounded(want, 2, factor)], [want], sums)
    assert leaf.after.over_tolerance == 0
    assert leaf.is_rescaled
    assert not leaf.ok
    assert f"{leaf.after.scale:.4g} times the reference as a whole: WORSE" in str(leaf)
    assert leaf.after.scale == pytest.approx(factor, abs=1e-3)


@pytest.mark.parametrize("own", [0.998, 1.002, 0.98])
def test_a_factor_of_the_original_as_well_cancels(own):
    want = np.random.default_rng(0).normal(size=(64, 64))
    sums = ReductionSizes(1024, coarsest="bfloat16")

    def found(before, after):
        arrays = [rounded(want, 1, before)], [rounded(want, 2, after)]
        return leaf_numerics("gradient", ["w"], *arrays, [want], sums)[0].is_rescaled

    assert not found(own, own)
    assert found(own, own * (1.01 if own > 1 else 0.99))  # away from the reference
    assert not found(own, 1)


def test_a_factor_beside_less_rounding_shows_against_the_reference():
    """GPT-2 in bfloat16: the original's gradients are 1.002 times the reference, those with the fused loss 1.0002 times."""
    want = np.random.default_rng(0).normal(size=(256, 256))
    arrays = [rounded(want, 1, 1.003)], [rounded(want, 2, 1.01)]
    (leaf,) = leaf_numerics("gradient", ["w"], *arrays, [want], ReductionSizes(1024, coarsest="bfloat16"))
    assert leaf.after.scale / leaf.before.scale - 1 < leaf.scale_limit
    assert leaf.is_rescaled


def test_rounding_is_no_factor():
    sums = ReductionSizes(1024, coarsest="bfloat16")
    for size in (1, 64, 256, 4096):
        for seed in range(20):
            want = np.random.default_rng(seed).normal(size=size)
            arrays = [rounded(want, 2 * seed + 1)], [rounded(want, 2 * seed + 2)]
            (leaf,) = leaf_numerics("gradient", ["w"], *arrays, [want], sums)
            assert not leaf.is_rescaled or abs(leaf.after.scale - 1) > 0.0078


def test_what_has_no_scale():
    zeros, ones = np.zeros(3), np.ones(3)
    assert compare_arrays(ones, zeros, "float32").scale is None
    assert compare_arrays(ones * np.nan, ones, "float32").scale is None
    assert compare_arrays(np.ones(3, int), np.ones(3, int), int).scale is None
    assert compare_arrays(ones * 2, ones, "float32").scale == pytest.approx(2)


def test_a_jump_that_the_original_makes_as_well_is_no_factor():
    """One sign of 1,024: the update of Adam where a gradient cancels."""
    want = np.sign(np.random.default_rng(0).normal(size=1024))
    got = jnp.asarray(np.where(np.arange(1024) == 3, -want, want), jnp.float32)
    arrays = [jnp.asarray(want, jnp.float32)], [got], [want], ReductionSizes(1024)
    (leaf,) = leaf_numerics("output", ["update"], *arrays)
    assert leaf.is_rescaled
    runs = [arrays[0], arrays[0], arrays[0], arrays[1]]
    (found,) = explained_by_rounding([leaf], [want], lambda k: runs[min(k, 4) - 1])
    assert found.noise.runs == 4  # an error of one element is no reason to give up before
    assert (found.is_rescaled, found.ok) == (False, True)
    # Which is no excuse for a factor, nor for an error of many elements.
    (leaf,) = leaf_numerics("output", ["update"], arrays[0], [got * 1.01], *arrays[2:])
    (found,) = explained_by_rounding([leaf], [want], lambda k: runs[min(k, 4) - 1])
    assert (found.noise.runs, found.ok) == (2, False)


@pytest.mark.dear
def test_arguments_move_by_no_more_than_the_program_rounds():
    x = {d: jnp.ones(64, d) for d in ("bfloat16", "float8_e4m3fn", "float32")}

    def moving(fn):
        after = moved(x, 1, ReductionSizes(1), coarsest_of(jax.make_jaxpr(fn)(x)))
        return {d for d in x if bool((after[d] != x[d]).any())}

    assert moving(lambda x: x["bfloat16"].astype(jnp.float32) * x["float32"]) == {"float32"}
    assert moving(lambda x: x["bfloat16"] * 2) == {"bfloat16", "float32"}
    assert moving(lambda x: x["float8_e4m3fn"] * 2) == set(x)
