"""Dropout made of a key: the factors are `jax.random.bernoulli(key, keep, dropout_shape)`, to the bit, wherever they are made.

The generator is jax.random's default, threefry2x32 with `jax_threefry_partitionable=True`, where an entry's bits depend on the key and
the entry's number alone: so a kernel makes those of its block, forward and again backward, and nothing of the scores' shape is kept.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

Array = Any


def drawn(key: Array, keep: float, shape: tuple[int, ...]) -> Array:
    """bool, True with probability `keep`, of a threefry2x32 key.

    A float32 draws 32 bits for each entry, whatever a Python float would draw.
    """
    with jax.threefry_partitionable(True):
        return jax.random.bernoulli(key, np.float32(keep), shape)


def kept(dropout_key: Array, keep: float, shape: tuple[int, ...]) -> Array:
    """The same of the data of such a key, uint32[2]."""
    return drawn(jax.random.wrap_key_data(dropout_key, impl="threefry2x32"), keep, shape)
