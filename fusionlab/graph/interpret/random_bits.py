"""Random bits of JAX's default generator (threefry2x32) in numpy, for which JAX would compile a program for every shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..settings import on_one_device

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def threefry2x32(key: Any, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two words from a key of two words and two counters (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)."""
    a, b = (np.uint32(k) for k in key)
    keys = (a, b, a ^ b ^ _PARITY)
    with np.errstate(over="ignore"):
        x, y = first + a, second + b
        for n in range(5):
            for turn in _ROTATIONS[n % 2]:
                x = x + y
                y = (y << np.uint32(turn) | y >> np.uint32(32 - turn)) ^ x
            x, y = x + keys[(n + 1) % 3], y + keys[(n + 2) % 3] + np.uint32(n + 1)
    return x, y


def bits_by_entry(key: Any, width: int, shape: Sequence[int]) -> np.ndarray:
    """Random bits in which each entry depends only on the key and its number (`jax_threefry_partitionable`)."""
    numbers = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
    high, low = threefry2x32(key, (numbers >> np.uint64(32)).astype(np.uint32), numbers.astype(np.uint32))
    if width == 64:
        return high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
    return (high ^ low).astype(f"uint{width}")


@dataclass(frozen=True, eq=False)
class Keys:
    """An array of keys of JAX's default generator, as its words: `uint32[..., 2]`. `dtype` is JAX's for keys."""

    words: np.ndarray
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.words.shape[:-1]

    @property
    def ndim(self) -> int:
        return len(self.shape)


def words_of(x: Any) -> np.ndarray:
    """The words of an array of keys, ours or JAX's."""
    if isinstance(x, Keys):
        return x.words
    return on_one_device(lambda: np.asarray(jax.random.key_data(x)))


def as_jax(x: Any) -> Any:
    """Keys as a JAX array; anything else unchanged."""
    if not isinstance(x, Keys):
        return x
    return on_one_device(lambda: jax.random.wrap_key_data(jnp.asarray(x.words), impl="threefry2x32"))
