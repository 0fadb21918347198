"""How the kernels of `layer_norm.cu` are compiled and launched for a call: plain arithmetic, no GPU."""

from __future__ import annotations

from dataclasses import dataclass

from ...launch.compile import CudaSource
from ...launch.kernel_plan import KernelPlan, Launch
from ..geometry import WARP, ceil_div, vector
from ..passes import CODES, SUM_HEIGHT, KernelPass, float_param, options, places, sum_of_parts, those
from . import tiling
from .tiling import RowTile

SOURCE = CudaSource("layer_norm/layer_norm.cu", ("norm_forward", "norm_backward", "norm_columns", "norm_sum"))
# Of out: the arrays that norm_backward adds up, as many as there are.
COTANGENTS = ("ct", "ct_1", "ct_2", "ct_3")
MOST_ADDENDS = len(COTANGENTS)
_SUMS = ("scale", "bias", "shift")  # gradients that are sums over rows
_GRADIENTS = ("x", *_SUMS)  # in the order of the bits of FL_WANT
COLUMNS_HEIGHT = 8  # warps of a block of norm_columns
COLUMNS_BLOCKS = 6  # of them, for each multiprocessor


@dataclass(frozen=True)
class NormLaunch:
    """The parameters that all kernels of a call share.

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
    tile = tile or tiling.forward_tile(norm.columns, norm.dtype)
    reads = ("x", *["residual"] * residual, *those(dict(norm.vectors), "shift", "scale", "bias"))
    gives = ("out", *["sum"] * gives_sum, *(norm.statistics if saves else ()))
    values = {
        **_common(0, norm, tile, reads),
        "RESIDUAL": int(residual),
        "SUM": int(gives_sum),
        "SAVES": int(saves),
    }
    params = (
        *places("operand", ("x", "residual", "shift", "scale", "bias"), reads),
        *places("result", ("out", "sum", "mean", "rstd"), gives),
        ("i64", norm.rows),
        float_param(epsilon),
    )
    launch = Launch("norm_forward", (tile.grid(norm.rows), 1, 1), (tile.lanes, tile.groups, 1), 0, params, early=True)
    return KernelPlan(SOURCE.path, options(values), (launch,))


def adds_up(norm: NormLaunch, wanted: tuple[str, ...], ct_sum: bool, addends: int) -> bool:
    """Whether one pass makes the gradients wanted of so many arrays whose sum the cotangent of out is."""
    sums = len(set(wanted) - {"x"})
    return addends == 1 or tiling.backward_tile(norm.columns, norm.dtype, sums, ct_sum, addends) is not None


def backward_passes(
    norm: NormLaunch, wanted: tuple[str, ...], ct_sum: bool, shifted: bool, addends: int = 1
) -> tuple[KernelPass, ...]:
    """The gradients of those of x (and so of residual), scale, bias and shift that are wanted.

    Args:
      wanted: slots; not bias alone.
      ct_sum: whether the sum has a cotangent too.
      shifted: whether the shift is still to be added to what is read.
      addends: of how many arrays the cotangent of out is the sum; more than one only if `adds_up` allows it.

    Returns:
      One pass, which reads `COTANGENTS`, "ct_sum", "x" (what was normalised, less the shift that is read), "shift", "scale", "mean",
      "rstd": those needed, in this order. Where a row is too wide for a thread to keep its sums over rows in registers, one for x and
      one for the sums, which may read "dx", what the other gives.
    """
    grads = those(wanted, *_GRADIENTS)
    sums = those(grads, *_SUMS)
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
) -> KernelPass:
    """All of the gradients by norm_backward."""
    names = (*COTANGENTS, "ct_sum", "x", "shift", "scale", "mean", "rstd")
    there = {*COTANGENTS[:addends], "x", *["ct_sum"] * ct_sum, *["shift"] * shifted, *norm.statistics}
    if {"x", "shift"} & set(grads):
        there |= set(those(dict(norm.vectors), "scale"))
    reads = those(there, *names)
    blocks = tile.grid(norm.rows)
    values = {
        **_common(1, norm, tile, reads),
        "CT_SUM": int(ct_sum),
        "CTS": addends,
        "AHEAD": int(tile.ahead),
        "BLOCKS": tile.resident,
    }
    operands = places("operand", names, reads)
    shape = (blocks, 1, 1), (tile.lanes, tile.groups, 1)
    return _pass(norm, "norm_backward", operands, reads, grads, values, shape, blocks)


def _columns_pass(norm: NormLaunch, grads: tuple[str, ...], shifted: bool) -> KernelPass:
    """Gradients that are sums over rows, by norm_columns."""
    names = ("ct", "x", "shift", "mean", "rstd", "dx")
    of_slots = {"scale": {"ct", "x", *norm.statistics, *["shift"] * shifted}, "bias": {"ct"}, "shift": {"dx"}}
    reads = those(set().union(*(of_slots[slot] for slot in grads)), *names)
    vec = vector(norm.columns, norm.dtype)
    across = ceil_div(norm.columns // vec, WARP)
    parts = min(ceil_div(norm.rows, COLUMNS_HEIGHT), ceil_div(tiling.MULTIPROCESSORS * COLUMNS_BLOCKS, across))
    tile = RowTile(vec, WARP, 1, 1, 1)
    values = {**_common(2, norm, tile, reads), "CT_SUM": 0, "CTS": 1, "HEIGHT": COLUMNS_HEIGHT}
    operands = places("operand", names, reads)
    shape = (across, parts, 1), (WARP, COLUMNS_HEIGHT, 1)
    return _pass(norm, "norm_columns", operands, reads, grads, values, shape, parts)


def _pass(
    norm: NormLaunch,
    entry: str,
    operands: tuple[tuple[str, int], ...],
    reads: tuple[str, ...],
    grads: tuple[str, ...],
    values: dict[str, object],
    shape: tuple[tuple[int, int, int], tuple[int, int, int]],
    parts: int,
) -> KernelPass:
    """A kernel of this grid and block that leaves `parts` partial sums, and their sum."""
    sums = those(grads, *_SUMS)
    results = (*grads, *(f"parts_{slot}" for slot in sums))
    written = places("result", (*["x"] * (entry == "norm_backward"), *(f"parts_{slot}" for slot in _SUMS)), results)
    launch = Launch(entry, *shape, 0, (*operands, *written, ("i64", norm.rows)), early=True)
    launches = launch, *sum_of_parts("norm_sum", norm.columns, _SUMS, results, parts)
    wants = sum(1 << _GRADIENTS.index(slot) for slot in grads)
    told = options({**values, "WANT": wants, "SUM_HEIGHT": SUM_HEIGHT})
    return KernelPass(KernelPlan(SOURCE.path, told, launches), reads, grads, ((parts, norm.columns),) * len(sums))


def _common(kind: int, norm: NormLaunch, tile: RowTile, reads: tuple[str, ...]) -> dict[str, object]:
    given = dict(norm.vectors)
    return {
        "KIND": kind,
        "T": CODES[norm.dtype],
        **{slot.upper(): CODES.get(given.get(slot, ""), -1) for slot in _SUMS},
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
