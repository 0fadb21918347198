"""How the kernels of `layer_norm.cu` are compiled and launched for a call: plain arithmetic, no GPU."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ..compile import Source
from ..kernel_plan import KernelPlan, Launch
from . import tiling
from .tiling import Tile, parts_of

SOURCE = Source("layer_norm/layer_norm.cu", ("norm_forward", "norm_backward", "norm_columns", "norm_sum"))
_CODES = {"float32": 0, "bfloat16": 1, "float16": 2}
_GRADIENTS = ("x", "scale", "bias", "shift")  # the bits of FL_WANT
SUM_HEIGHT = 16  # threads that share a column of norm_sum
COLUMNS_HEIGHT = 8  # warps of a block of norm_columns


@dataclass(frozen=True)
class Norm:
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
    norm: Norm, epsilon: float, residual: bool, gives_sum: bool, saves: bool, tile: Tile | None = None
) -> KernelPlan:
    """Operands: x, residual, shift, scale, bias, those that there are. Results: out, sum, mean, rstd, those asked for."""
    given = dict(norm.vectors)
    tile = tile or tiling.forward_tile(norm.columns, norm.dtype)
    reads = ("x", *(("residual",) if residual else ()), *(s for s in ("shift", "scale", "bias") if s in given))
    gives = ("out", *(("sum",) if gives_sum else ()), *(norm.statistics if saves else ()))
    values = {
        **_common(0, norm, tile, "shift" in given),
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
class Backward:
    """The launches that make gradients.

    Attributes:
      plan: its operands are `reads`; its results the gradients of `grads`, then scratch.
      reads: "ct", "ct_sum", "x" (what was normalised, less the shift), "shift", "scale", "mean", "rstd": those needed, in this order.
      grads: slots, in the order x, scale, bias, shift.
      scratch: shape of each array of partial sums, float32.
    """

    plan: KernelPlan
    reads: tuple[str, ...]
    grads: tuple[str, ...]
    scratch: tuple[tuple[int, int], ...]


def backward(norm: Norm, wanted: tuple[str, ...], ct_sum: bool, shifted: bool, tile: Tile | None = None) -> Backward:
    """The gradients of x (and so of residual), scale, bias and shift that are wanted."""
    given = dict(norm.vectors)
    grads = tuple(slot for slot in _GRADIENTS if slot in wanted)
    sums = tuple(slot for slot in grads if slot != "x")
    tile = tile or tiling.backward_tile(norm.columns, norm.dtype, len(sums), ct_sum)
    reads = tuple(
        n
        for n in ("ct", "ct_sum", "x", "shift", "scale", *norm.statistics)
        if (n != "ct_sum" or ct_sum) and (n != "shift" or shifted) and (n != "scale" or n in given)
    )
    made = tile.grid(norm.rows)
    scratch = ((made, norm.columns),) * len(sums)
    results = {slot: i for i, slot in enumerate(grads)} | {f"parts_{s}": len(grads) + i for i, s in enumerate(sums)}
    common = {
        **_common(1, norm, tile, "shift" in reads),
        "CT_SUM": int(ct_sum),
        "WANT": sum(1 << _GRADIENTS.index(slot) for slot in grads),
        "AHEAD": int(tile.ahead),
        "BLOCKS": tile.resident,
        "SUM_HEIGHT": SUM_HEIGHT,
    }
    params = (
        *_places("operand", ("ct", "ct_sum", "x", "shift", "scale", "mean", "rstd"), reads),
        *(("result", results[n]) if n in results else ("null", 0) for n in ("x", "parts_scale", "parts_bias", "parts_shift")),
        ("i64", norm.rows),
    )
    launches = [Launch("norm_backward", (made, 1, 1), (tile.lanes, tile.groups, 1), 0, params, early=True)]
    if sums:
        launches.append(_sum(results, sums, norm.columns, made))
    return Backward(KernelPlan(SOURCE.path, _options(common), tuple(launches)), reads, grads, scratch)


def _sum(results: dict[str, int], sums: tuple[str, ...], columns: int, parts: int) -> Launch:
    params: list[tuple[str, int]] = []
    for slot in ("scale", "bias", "shift"):
        params += [("result", results[n]) if n in results else ("null", 0) for n in (f"parts_{slot}", slot)]
    grid = (parts_of(columns, tiling.WARP), len(sums), 1)
    return Launch("norm_sum", grid, (tiling.WARP, SUM_HEIGHT, 1), 0, (*params, ("i32", parts)), early=True)


def _common(kind: int, norm: Norm, tile: Tile, adds_shift: bool) -> dict[str, object]:
    given = dict(norm.vectors)
    return {
        "KIND": kind,
        "T": _CODES[norm.dtype],
        **{slot.upper(): _CODES[given[slot]] if slot in given else -1 for slot in ("scale", "bias", "shift")},
        "ADDS_SHIFT": int(adds_shift),
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
