"""How threads are dealt out to rows in the kernels of `layer_norm.cu`: plain arithmetic, no GPU."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ...errors import ArgumentError

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
VECTOR_BYTES = 16  # the widest load
WARP = 32
MAX_COLUMNS = 1 << 16
MAX_THREADS = 1024  # of a block (CUDA C++ Programming Guide, technical specifications)
REGISTERS = 1 << 16  # of a multiprocessor, and of a block at most
GRID_X = 2**31 - 1  # CUDA's limit


@dataclass(frozen=True)
class Tile:
    """How one kernel is laid over rows.

    Attributes:
      vec: neighbours that a thread takes at once.
      lanes: threads of a row, a power of 2.
      vecs: vectors of a thread in a row.
      groups: rows of a block at a time; 1 where a row has more than a warp.
      blocks: of the grid, at most.
      hold: whether a thread keeps its part of a row in registers.
      ahead: whether it loads the next row before it works on this one.
      resident: blocks that a multiprocessor is to have room for.
    """

    vec: int
    lanes: int
    vecs: int
    groups: int
    blocks: int
    hold: bool = True
    ahead: bool = False
    resident: int = 1

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.lanes * self.groups

    def grid(self, rows: int) -> int:
        return min(self.blocks, parts_of(rows, self.groups))


def parts_of(total: int, size: int) -> int:
    return -(-total // size)


def power_of_2(number: int) -> int:
    """The smallest power of 2 that is no less."""
    return 1 << max(number - 1, 0).bit_length()


def vector(columns: int, dtype: str) -> int:
    """Neighbours of one load, aligned in every row."""
    return math.gcd(columns, VECTOR_BYTES // ITEM_BYTES[dtype])
