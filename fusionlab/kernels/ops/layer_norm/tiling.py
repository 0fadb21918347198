"""How threads are dealt out to rows in the kernels of `layer_norm.cu`: plain arithmetic, no GPU."""

from __future__ import annotations

from dataclasses import dataclass

from ..geometry import GRID_X, ITEM_BYTES, WARP, ceil_div, power_of_2, vector

DTYPES = ("float32", "bfloat16", "float16")
MAX_COLUMNS = 1 << 16
MAX_THREADS = 1024  # of a block (CUDA C++ Programming Guide, technical specifications)
REGISTERS = 1 << 16  # of a multiprocessor, and of a block at most
# Tuned on an H200, of 132 multiprocessors, at 32768 x 1024 and 8192 x 4096 in bfloat16.
MULTIPROCESSORS = 132
FORWARD_LANES = 256  # threads of a row before each takes more than two vectors
FORWARD_VECS = 8  # vectors of a thread before a row has more threads than that
HELD_WORDS = 32  # registers in which a thread keeps its part of a row, or of two
SMALL_BLOCK = 128  # threads of a block of several rows
RESIDENT_THREADS = 512  # of norm_backward, for each multiprocessor: 128 registers a thread
OWN_REGISTERS = 40  # of a thread of norm_backward beside what it holds
PARTITIONS = 4  # of a multiprocessor
SHORT_OF = 4096  # registers that a multiprocessor may be short of by that count, which is a rough one


@dataclass(frozen=True)
class RowTile:
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
        return min(self.blocks, ceil_div(rows, self.groups))


def forward_tile(columns: int, dtype: str) -> RowTile:
    """Of norm_forward: one row at a time, and no block for more than its rows."""
    vec = vector(columns, dtype)
    units = columns // vec
    lanes = _lanes(units, FORWARD_LANES, (2, 3))
    while ceil_div(units, lanes) > FORWARD_VECS and lanes < MAX_THREADS:
        lanes *= 2
    vecs = ceil_div(units, lanes)
    held = HELD_WORDS if lanes < MAX_THREADS else HELD_WORDS // 2
    return RowTile(vec, lanes, vecs, _groups(lanes), GRID_X, hold=vecs * _words(vec, dtype) <= held)


def backward_tile(columns: int, dtype: str, sums: int, ct_sum: bool, addends: int = 1) -> RowTile | None:
    """Of norm_backward with so many sums over rows, and a cotangent that is the sum of so many arrays; None where a thread cannot hold
    them."""
    vec = vector(columns, dtype)
    units = columns // vec
    arrays, each = (3, (2, 3)) if ct_sum else (2, (2,))
    most = _lanes(units, MAX_THREADS, each)
    while most > RESIDENT_THREADS // 4 and vec * ceil_div(units, most) < 8:
        most //= 2  # fewer threads where vectors are short
    for lanes in dict.fromkeys((most, min(most, RESIDENT_THREADS))):
        vecs, groups = ceil_div(units, lanes), _groups(lanes)
        held, block = vecs * _words(vec, dtype) * arrays, lanes * groups
        for ahead in (True, False):
            # What is narrower than a register takes more than one on its way.
            needed = OWN_REGISTERS + sums * vecs * vec + held * (1 + ahead) + (held if vec == 1 else 0)
            needed += _until_added(addends, vec, vecs, groups, dtype)
            resident = _resident(needed, block)
            if needed * block * resident <= REGISTERS + (SHORT_OF if vecs < 4 else 0):
                return RowTile(vec, lanes, vecs, groups, MULTIPROCESSORS * resident, ahead=ahead, resident=resident)
    if sums:
        return None
    lanes = min(most, RESIDENT_THREADS)
    return RowTile(vec, lanes, ceil_div(units, lanes), _groups(lanes), GRID_X, hold=False)


def _resident(registers: int, block: int) -> int:
    """Blocks of norm_backward that a multiprocessor has room for, with so many registers a thread."""
    resident = min(RESIDENT_THREADS, REGISTERS // registers) // block
    while resident > 1 and resident * block // WARP % PARTITIONS:
        resident -= 1  # registers are dealt out to as many warps in each partition
    return max(1, resident)


def _lanes(units: int, most: int, each: tuple[int, ...]) -> int:
    """Threads for a row of so many vectors, `each` of them a thread: the first of these that leaves fewest threads without one."""
    tried = [min(most, power_of_2(ceil_div(units, n))) for n in each]
    return min(tried, key=lambda lanes: lanes * ceil_div(units, lanes))


def _until_added(addends: int, vec: int, vecs: int, groups: int, dtype: str) -> int:
    """Registers of the cotangent's addends after the first: of more than two, those of two rows at a time."""
    if addends == 1:
        return 0
    rows = 2 if addends > 2 or vec == 1 else 1
    return vecs * _words(vec, dtype) * ((addends - 1) * rows + (groups > 1))


def _groups(lanes: int) -> int:
    """Rows of a block at a time."""
    return SMALL_BLOCK // lanes if lanes <= WARP else 1


def _words(vec: int, dtype: str) -> int:
    """Registers of a vector."""
    return max(1, vec * ITEM_BYTES[dtype] // 4)
