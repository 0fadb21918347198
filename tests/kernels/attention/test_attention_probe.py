"""What a mask passed as data is found to be, by jnp and by the kernel (as C++)."""

from __future__ import annotations

import numpy as np
import pytest

from fusionlab.errors import ArgumentError
from fusionlab.kernels.ops.dot_product_attention.cudnn.probe import lengths_of, probe_plan

KEYS = (1, 5, 255, 256, 1000)


def masks(keys):
    rng = np.random.default_rng(keys)
    one_off = np.arange(keys) < keys // 2
    return np.stack(
        [
            np.zeros(keys, bool),
            np.ones(keys, bool),
            np.arange(keys) < rng.integers(1, keys + 1),
            np.arange(keys) >= keys // 2,
            np.where(np.arange(keys) == keys // 4, False, one_off),
            np.where(np.arange(keys) == keys - 1, True, one_off),
            rng.random(keys) < 0.5,
        ]
    )


def expected(mask):
    lengths = mask.sum(-1)
    return lengths, (mask == (np.arange(mask.shape[-1]) < lengths[..., None])).all(-1)


@pytest.mark.parametrize("keys", KEYS)
def test_lengths_and_prefixes_in_jnp(keys):
    mask = masks(keys)
    for shaped in (mask, mask.reshape(7, 1, 1, keys)):
        for got, want in zip(lengths_of(shaped), expected(shaped), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("keys", KEYS)
def test_the_kernel_finds_the_same(keys, emulator):
    mask = masks(keys)
    found = np.full((7, 2), -7, np.int32)
    emulator.run(probe_plan(7, keys), [mask], [found])
    lengths, prefix = expected(mask)
    np.testing.assert_array_equal(found, np.stack([lengths, prefix], -1))


def test_a_mask_of_numbers_is_refused():
    with pytest.raises(ArgumentError, match="mask: got dtype float32, needed bool"):
        lengths_of(np.ones((2, 3), np.float32))
