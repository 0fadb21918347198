"""Common arithmetic of kernel plans: bytes, vectors, CUDA's limits of a grid. No GPU needed."""

from __future__ import annotations

import math

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
VECTOR_BYTES = 16  # the widest load
WARP = 32
# Blocks of a grid along x and along y (CUDA C++ Programming Guide, technical specifications).
GRID_X = 2**31 - 1
GRID_Y = 65535


def accumulator(dtype: str) -> str:
    """The dtype of arithmetic and of partial sums: float32, for float64 itself."""
    return "float64" if dtype == "float64" else "float32"


def ceil_div(total: int, size: int) -> int:
    return -(-total // size)


def round_up(value: int, step: int) -> int:
    return ceil_div(value, step) * step


def power_of_2(value: int) -> int:
    """The least that is not below `value`."""
    return 1 << (max(1, value) - 1).bit_length()


def vector(columns: int, dtype: str) -> int:
    """Neighbours that a thread takes: a power of 2, up to 16 bytes, of which rows hold a whole number and so start on one."""
    return math.gcd(columns, VECTOR_BYTES // ITEM_BYTES[dtype])
