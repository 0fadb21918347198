"""How the kernel of `softmax_part.cu` is laid over rows, compiled and launched: plain arithmetic, no GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ....launch.architectures import ARCHITECTURES, COPIES, RESERVED, TENSOR_CORES, Architecture, target_of
from ....launch.compile import CudaSource
from ....launch.kernel_plan import KernelPlan, Launch
from ...geometry import ITEM_BYTES, VECTOR_BYTES, WARP, ceil_div, power_of_2
from ...passes import CODES, float_param, options, places
from ..settings import OUT_OF_RANGE, Settings

# The instructions are those that warp.cuh has.
SOURCE = CudaSource("linear_cross_entropy/own/softmax_part.cu", ("softmax_part",), (TENSOR_CORES, COPIES))
DTYPES = ("float32", "bfloat16", "float16")  # of the logits and of their cotangent
MAX_COLUMNS = 1 << 30  # a column's number has 32 bits
RESULTS: tuple[str, ...] = ("cotangent", "top", "mass", "loss", "lse", "argmax")
MULTIPROCESSORS = 132  # where a device's own number is not known
STATIC = 1 << 9  # bytes of shared memory that a block has for its reductions, at most
RESIDENT_THREADS = 1024  # of a multiprocessor: 64 registers each
HELD = 2  # vectors of a thread in registers, at most: more of them spill others
MOST_AGAIN = 4  # of a row's vectors, one in so many is read a second time before blocks get larger


def results_of(form: Settings, out: str | None) -> tuple[str, ...]:
    """Of `RESULTS` those of a call with this dtype of the cotangent, None where it is not wanted."""
    without = {"cotangent": out is None, "argmax": "argmax" not in form.also}
    return tuple(name for name in RESULTS if not without.get(name))


@dataclass(frozen=True)
class PartTile:
    """How the kernel is laid over rows.

    Attributes:
      threads: of a block, which has one row at a time.
      resident: blocks that a multiprocessor has room for.
      units: vectors of a thread in a row.
      held, staged: how many of them are kept in registers, and in shared memory.
    """

    threads: int
    resident: int
    units: int
    held: int
    staged: int

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory of a block."""
        return self.staged * self.threads * VECTOR_BYTES

    @property
    def again(self) -> int:
        """Vectors of a thread that have no room, and are read a second time."""
        return self.units - self.held - self.staged


def limits_of(arch: str) -> Architecture:
    """Those of an architecture; where it is not known, those of the one with the least shared memory that runs the kernel."""
    if arch and (target := target_of(arch)) is not None:
        return ARCHITECTURES[target]
    return min((ARCHITECTURES[a] for a in SOURCE.archs), key=lambda one: (one.shared, one.warps))


def part_tile(columns: int, dtype: str, twice: bool, limits: Architecture) -> PartTile:
    """Two blocks to a multiprocessor, so that one waits while the other computes, or one where too much of a row would be read again.

    Args:
      columns: of the logits, and `dtype` theirs.
      twice: whether the kernel goes over a row a second time; else it keeps nothing of it.
    """
    vectors = columns * ITEM_BYTES[dtype] // VECTOR_BYTES
    threads = max(WARP, min(power_of_2(ceil_div(vectors, 4)), RESIDENT_THREADS // 2))
    if not twice:
        resident = min(limits.blocks, RESIDENT_THREADS // threads)
        return PartTile(threads, resident, ceil_div(vectors, threads), 0, 0)
    tile = tile_of(columns, dtype, threads, RESIDENT_THREADS // threads, limits)
    if tile.again * MOST_AGAIN > tile.units:
        return tile_of(columns, dtype, RESIDENT_THREADS, 1, limits)
    return tile


def tile_of(columns: int, dtype: str, threads: int, resident: int, limits: Architecture, held: int = HELD) -> PartTile:
    """Of blocks of so many threads, at most so many to a multiprocessor, that keep as much of a row as there is room for, in registers
    no more than `held` vectors of each thread."""
    resident = min(resident, limits.blocks, limits.warps * WARP // threads)
    room = min(limits.shared, limits.shared_of_all // resident - RESERVED) - STATIC
    units = ceil_div(columns * ITEM_BYTES[dtype] // VECTOR_BYTES, threads)
    staged = min(units, room // (threads * VECTOR_BYTES))
    return PartTile(threads, resident, units, min(units - staged, held), staged)


def part_plan(
    rows: int,
    columns: int,
    dtype: str,
    out: str | None,
    form: Settings,
    tile: PartTile | None = None,
    size: int | None = None,
    bias: str | None = None,
) -> KernelPlan:
    """Operands: logits, labels (int32), with `out` the cotangents of the losses, and with `bias` that. Results: those of `results_of`.

    Args:
      rows, columns: of the logits, none of them 0, and `dtype` theirs.
      out: the dtype of the cotangent; None where it is not wanted.
      form: of the call; the room is that of its device.
      tile: None chooses one.
      size: the vocabulary, the first entries of a row; None: all columns.
      bias: the dtype of a bias of `columns` entries that is still to be added; None: without one.
    """
    size = columns if size is None else size
    device, smooth = form.device, bool(form.label_smoothing)
    limits = limits_of(device.arch if device else "")
    tile = tile or part_tile(columns, dtype, out is not None or smooth, limits)
    values = {
        "T": CODES[dtype],
        "OUT": -1 if out is None else CODES[out],
        "BIAS": -1 if bias is None else CODES[bias],
        "N": columns,
        "SIZE": size,
        "CLASSES": size if form.classes is None else form.classes,
        "VEC": VECTOR_BYTES // ITEM_BYTES[dtype],
        "THREADS": tile.threads,
        "UNITS": tile.units,
        "HELD": tile.held,
        "STAGED": tile.staged,
        "BLOCKS": tile.resident,
        "SCALED": int(form.scale != 1),
        "CAPPED": int(form.softcap is not None),
        "SMOOTH": int(smooth),
        "BEST": int("argmax" in form.also),
        "OUTSIDE": OUT_OF_RANGE.index(form.out_of_range),
    }
    reads = ("logits", "labels", *([] if out is None else ["of_loss"]), *([] if bias is None else ["bias"]))
    s, cap = form.label_smoothing, 1.0 if form.softcap is None else form.softcap
    params = (
        *places("operand", ("logits", "labels", "of_loss", "bias"), reads),
        *places("result", RESULTS, results_of(form, out)),
        ("i64", rows),
        *map(float_param, (form.scale, s, 1 - s, s / size, form.z_loss, *map(_of_float32, (form.fill, cap, 1 / cap)))),
    )
    units = (device.units if device else None) or MULTIPROCESSORS
    grid = (min(rows, tile.resident * units), 1, 1)
    launch = Launch("softmax_part", grid, (tile.threads, 1, 1), tile.shared, params, early=True)
    return KernelPlan(SOURCE.path, options(values), (launch,))


def _of_float32(number: float) -> float:
    """Infinite where it is out of range, as in an array."""
    with np.errstate(over="ignore"):
        return float(np.float32(number))
