"""How the kernels of `layer_norm.cu` are compiled and launched for a call: plain arithmetic, no GPU."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ...launch.compile import CudaSource
from ...launch.kernel_plan import KernelPlan, Launch
from ..geometry import WARP, ceil_div, vector
from . import tiling
from .tiling import RowTile

SOURCE = CudaSource("layer_norm/layer_norm.cu", ("norm_forward", "norm_backward", "norm_columns", "norm_sum"))
_CODES = {"float32": 0, "bfloat16": 1, "float16": 2}
# Of out: the arrays that norm_backward adds up, as many as there are.
COTANGENTS = ("ct", "ct_1", "ct_2", "ct_3")
MOST_ADDENDS = len(COTANGENTS)
_GRADIENTS = ("x", "scale", "bias", "shift")  # in the order of the bits of FL_WANT
SUM_HEIGHT = 16  # threads that share a column of norm_sum
COLUMNS_HEIGHT = 8  # warps of a block of norm_columns
COLUMNS_BLOCKS = 6  # of them, for each multiprocessor


@dataclass(frozen=True)
class NormLaunch:
    """What all kernels of a call are told.

    Attributes:
      kind: "layer" or "rms".
      rows, columns: of x.
      dtype: numpy's name, of x, residual, out and sum.
      vectors: (slot, dtype) of those of scale, bias and shift that there are.
    """

    kind: str
    rows: int
    columns: int
    dtype: str
    vectors: tuple[tuple[str, str], ...]

    @property
    def statistics(self) -> tuple[str, ...]:
        return ("mean", "rstd") if self.kind == "layer" else ("rstd",)


def forward_plan(
    norm: NormLaunch, epsilon: float, residual: bool, gives_sum: bool, saves: bool, tile: RowTile | None = None
) -> KernelPlan:
    """Operands: x, residual, shift, scale, bias, those that there are. Results: out, sum, mean, rstd, those asked for."""
    given = dict(norm.vectors)
    tile = tile or tiling.forward_tile(norm.columns, norm.dtype)
    reads = ("x", *(("residual",) if residual else ()), *(s for s in ("shift", "scale", "bias") if s in given))
    gives = ("out", *(("sum",) if gives_sum else ()), *(norm.statistics if saves else ()))
    values = {
        **_common(0, norm, tile, reads),
        "RESIDUAL": int(residual),
        "SUM": int(gives_sum),
        "SAVES": int(saves),
    }
    params = (
        *_places("operand", ("x", "residual", "shift", "scale", "bias"), reads),
        *_places("result", ("out", "sum", "mean", "rstd"), gives),
        ("i64", norm.rows),
        ("i32", struct.unpack("=i", struct.pack("=f", epsilon))[0]),
    )
    launch = Launch("norm_forward", (tile.grid(norm.rows), 1, 1), (tile.lanes, tile.groups, 1), 0, params, early=True)
    return KernelPlan(SOURCE.path, _options(values), (launch,))


@dataclass(frozen=True)
class RowPass:
    """One pass over the rows that makes gradients.

    Attributes:
      plan: its operands are `reads`; its results the gradients of `grads`, then scratch.
      reads: `COTANGENTS`, "ct_sum", "x" (what was normalised, less the shift that is read), "shift", "scale", "mean", "rstd", "dx":
        those needed, in this order.
      grads: slots, in the order x, scale, bias, shift.
      scratch: shape of each array of partial sums, float32.
    """

    plan: KernelPlan
    reads: tuple[str, ...]
    grads: tuple[str, ...]
    scratch: tuple[tuple[int, int], ...]


def adds_up(norm: NormLaunch, wanted: tuple[str, ...], ct_sum: bool, addends: int) -> bool:
    """Whether one pass makes the gradients wanted of so many arrays whose sum the cotangent of out is."""
    sums = len(set(wanted) - {"x"})
    return addends == 1 or tiling.backward_tile(norm.columns, norm.dtype, sums, ct_sum, addends) is not None


def backward_passes(
    norm: NormLaunch, wanted: tuple[str, ...], ct_sum: bool, shifted: bool, addends: int = 1
) -> tuple[RowPass, ...]:
    """The gradients of those of x (and so of residual), scale, bias and shift that are wanted.

    Args:
      wanted: slots; not bias alone.
      ct_sum: whether the sum has a cotangent too.
      shifted: whether the shift is still to be added to what is read.
      addends: of how many arrays the cotangent of out is the sum; more than one only where `adds_up` says so.

    Returns:
      One pass; where a row is too wide for a thread to keep its sums over rows in registers, one for x and one for the sums.
    """
    grads = tuple(slot for slot in _GRADIENTS if slot in wanted)
    sums = tuple(slot for slot in grads if slot != "x")
    tile = tiling.backward_tile(norm.columns, norm.dtype, len(sums), ct_sum, addends)
    if tile is not None:
        return (rows_pass(norm, grads, ct_sum, shifted, tile, addends),)
    assert addends == 1
    tile = tiling.backward_tile(norm.columns, norm.dtype, 0, ct_sum)
    assert tile is not None
    whole = (rows_pass(norm, ("x",), ct_sum, shifted, tile),) if {"x", "shift"} & set(grads) else ()
    return (*whole, _columns_pass(norm, sums, shifted))


def rows_pass(
    norm: NormLaunch, grads: tuple[str, ...], ct_sum: bool, shifted: bool, tile: RowTile, addends: int = 1
) -> RowPass:
    """All of the gradients by norm_backward."""
    names = (*COTANGENTS, "ct_sum", "x", "shift", "scale", "mean", "rstd")
    there = {*COTANGENTS[:addends], "x", "rstd", *_if(ct_sum, "ct_sum"), *_if(shifted, "shift"), *norm.statistics}
    there |= set(_if("scale" in dict(norm.vectors) and bool({"x", "shift"} & set(grads)), "scale"))
    reads = tuple(n for n in names if n in there)
    blocks = tile.grid(norm.rows)
    values = {
        **_common(1, norm, tile, reads),
        "CT_SUM": int(ct_sum),
        "CTS": addends,
        "AHEAD": int(tile.ahead),
        "BLOCKS": tile.resident,
    }
    return _pass(
        norm, "norm_backward", names, reads, grads, values, (blocks, 1, 1), (tile.lanes, tile.groups, 1), blocks
    )


def _columns_pass(norm: NormLaunch, grads: tuple[str, ...], shifted: bool) -> RowPass:
    """Gradients that are sums over rows, by norm_columns."""
    names = ("ct", "x", "shift", "mean", "rstd", "dx")
    of_scale = {"x", *norm.statistics, *_if(shifted, "shift")}
    there = set(_if("scale" in grads or "bias" in grads, "ct")) | set(_if("shift" in grads, "dx"))
    there |= of_scale if "scale" in grads else set()
    reads = tuple(n for n in names if n in there)
    vec = vector(norm.columns, norm.dtype)
    across = ceil_div(norm.columns // vec, WARP)
    parts = min(ceil_div(norm.rows, COLUMNS_HEIGHT), ceil_div(tiling.MULTIPROCESSORS * COLUMNS_BLOCKS, across))
    tile = RowTile(vec, WARP, 1, 1, 1)
    values = {**_common(2, norm, tile, reads), "CT_SUM": 0, "CTS": 1, "HEIGHT": COLUMNS_HEIGHT}
    block = (WARP, COLUMNS_HEIGHT, 1)
    return _pass(norm, "norm_columns", names, reads, grads, values, (across, parts, 1), block, parts)


def _pass(
    norm: NormLaunch,
    entry: str,
    names: tuple[str, ...],
    reads: tuple[str, ...],
    grads: tuple[str, ...],
    values: dict[str, object],
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    parts: int,
) -> RowPass:
    """A kernel that leaves `parts` partial sums, and their sum."""
    sums = tuple(slot for slot in grads if slot != "x")
    results = (*grads, *(f"parts_{slot}" for slot in sums))
    partials = ("parts_scale", "parts_bias", "parts_shift")
    params = (
        *_places("operand", names, reads),
        *_places("result", partials if entry == "norm_columns" else ("x", *partials), results),
        ("i64", norm.rows),
    )
    launches = [Launch(entry, grid, block, 0, params, early=True)]
    if sums:
        each = tuple(n for slot in ("scale", "bias", "shift") for n in (f"parts_{slot}", slot))
        across = ceil_div(norm.columns, WARP), len(sums), 1
        added = (*_places("result", each, results), ("i32", parts))
        launches.append(Launch("norm_sum", across, (WARP, SUM_HEIGHT, 1), 0, added, early=True))
    options = {
        **values,
        "WANT": sum(1 << _GRADIENTS.index(slot) for slot in grads),
        "SUM_HEIGHT": SUM_HEIGHT,
    }
    plan = KernelPlan(SOURCE.path, _options(options), tuple(launches))
    return RowPass(plan, reads, grads, ((parts, norm.columns),) * len(sums))


def _if(there: bool, name: str) -> tuple[str, ...]:
    return (name,) if there else ()


def _common(kind: int, norm: NormLaunch, tile: RowTile, reads: tuple[str, ...]) -> dict[str, object]:
    given = dict(norm.vectors)
    return {
        "KIND": kind,
        "T": _CODES[norm.dtype],
        **{slot.upper(): _CODES[given[slot]] if slot in given else -1 for slot in ("scale", "bias", "shift")},
        "READS_SCALE": int("scale" in reads),
        "ADDS_SHIFT": int("shift" in reads),
        "RMS": int(norm.kind == "rms"),
        "N": norm.columns,
        "VEC": tile.vec,
        "LANES": tile.lanes,
        "VECS": tile.vecs,
        "GROUPS": tile.groups,
        "HOLD": int(tile.hold),
    }


def _places(kind: str, every: tuple[str, ...], there: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    return tuple((kind, there.index(n)) if n in there else ("null", 0) for n in every)


def _options(values: dict[str, object]) -> tuple[str, ...]:
    return tuple(f"-DFL_{name}={value}" for name, value in values.items())
