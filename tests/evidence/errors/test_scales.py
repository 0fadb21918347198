"""A factor on a whole array is found where no single element shows it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.evidence.errors.arrays import compare_arrays
from fusionlab.evidence.errors.numerics import leaf_numerics
from fusionlab.evidence.errors.reduction_sizes import ReductionSizes


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
