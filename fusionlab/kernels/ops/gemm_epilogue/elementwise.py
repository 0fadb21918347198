"""How the elementwise kernels of `epilogue.cu` are compiled and launched for a call: plain arithmetic, no GPU.

All are bound by memory, so the geometry has two aims: every access of a warp is of whole 16-byte words side by side, and enough blocks
to keep every multiprocessor busy to the end.
"""

from __future__ import annotations

from ....errors import ArgumentError
from ...launch.compile import CudaSource
from ...launch.kernel_plan import KernelPlan, Launch
from ...op.arrays import check_name
from ..geometry import GRID_Y, ITEM_BYTES, VECTOR_BYTES, accumulator, ceil_div, power_of_2, round_up
from ..passes import CODES, integers, options, places
from .reference import mask_pitch

SOURCE = CudaSource("gemm_epilogue/epilogue.cu", ("epilogue_forward", "epilogue_backward", "epilogue_sum"))
# In the order of FL_ACT.
KERNEL_ACTIVATIONS = tuple("none relu relu_tie relu_where gelu_tanh gelu_erf silu sigmoid tanh".split())
SAVES = ("none", "bits", "bytes", "preactivation")  # in the order of FL_SAVES
_THREADS = 256
_SUM_WIDTH = 16  # threads of a block along a row where rows are summed: 256 bytes side by side
_ROWS_IN_FLIGHT = 4  # kRows
_SUM_BLOCK = (32, 32, 1)  # kSumColumns, kSumRows


def saves_for_backward(activation: str) -> tuple[str, ...]:
    """The arrays that the backward kernel of an activation may read, the smallest first; ("none",) for the activation "none"."""
    if activation == "none":
        return ("none",)
    if activation in ("relu", "relu_where"):
        return ("bits", "bytes", "preactivation")
    return ("bytes", "preactivation") if activation == "relu_tie" else ("preactivation",)


def forward_plan(rows: int, columns: int, dtype: str, activation: str, *, bias: bool, saves: str) -> KernelPlan:
    """out = act(h + bias), and what backward reads.

    Args:
      rows, columns: of h and out; either may be 0.
      dtype: numpy's name, of h, bias (columns) and out.
      activation: one of `KERNEL_ACTIVATIONS`.
      bias: whether there is one.
      saves: "none", or one of `saves_for_backward(activation)`.

    Returns:
      A plan with operands h[, bias] and results out[, saved]; saved is uint8 rows x mask_pitch(columns) for "bits" (h > 0, lowest bit
      first, padding 0), a byte each for "bytes" (relu_tie: twice the derivative; else h > 0), as h for "preactivation". out may be h,
      and so may a saved pre-activation.

    Raises:
      ArgumentError, UnknownNameError: what is asked for does not exist.
    """
    _check(rows, columns, dtype, activation)
    _check_saves(saves, activation, ("none", *saves_for_backward(activation)))
    vec = _vector(columns, dtype)
    # The threads of a padded row of bits write its padding too. Of fewer than 8 columns each, they pass bits to their neighbours in the
    # warp, which must therefore lie in one row.
    covered, least = (8 * mask_pitch(columns), 32 if vec < 8 else 1) if saves == "bits" else (columns, 1)
    width = _width(covered, vec, least, _THREADS)
    height = _THREADS // width
    # One tile of rows a block: thousands of blocks for anything large, and 4 rows share the bias that a thread holds.
    grid = (ceil_div(covered, vec * width), min(ceil_div(rows, height * _ROWS_IN_FLIGHT), GRID_Y), 1)
    params = (
        *places("operand", ("h", "bias"), ("h", "bias") if bias else ("h",)),
        *places("result", ("out", "saved"), ("out",) if saves == "none" else ("out", "saved")),
        *integers(rows, columns, mask_pitch(columns)),
    )
    launch = Launch("epilogue_forward", grid, (width, height, 1), 0, params, early=True)
    told = _options(dtype, activation, vec, bias=bias, saves=saves, dbias=False)
    return KernelPlan(SOURCE.path, told, (launch,) if rows and columns else ())


def backward_plan(
    rows: int, columns: int, dtype: str, activation: str, *, dbias: bool, saves: str, sms: int = 132
) -> tuple[KernelPlan, tuple[int, int] | None]:
    """dh = act'(saved) * ct, and the sum of dh over rows.

    Args:
      rows, columns: of ct and dh; either may be 0.
      dtype: numpy's name, of ct, dh and dbias (columns).
      activation: one of `KERNEL_ACTIVATIONS`.
      dbias: whether the sum is wanted; the same bits every time. "none" without it has nothing to do.
      saves: one of `saves_for_backward(activation)`: what ct is followed by.
      sms: multiprocessors of the device: an H200 has 132.

    Returns:
      The plan, with operands ct[, saved] and results dh[, dbias, partial]; for "none", where dh is ct, results dbias, partial. And
      the shape of partial, scratch of `accumulator(dtype)`; None without dbias. dh may be ct.

    Raises:
      ArgumentError, UnknownNameError: what is asked for does not exist.
    """
    _check(rows, columns, dtype, activation)
    _check_saves(saves, activation, saves_for_backward(activation))
    if saves == "none" and not dbias:
        raise ArgumentError(
            "backward_plan: activation 'none' without dbias; needed dbias=True: dh is ct, without a kernel"
        )
    vec = _vector(columns, dtype)
    # With a sum, a block is half a warp wide, so that it has 16 rows or more at once and few partial sums are left.
    width = _width(columns, vec, 1, _SUM_WIDTH if dbias else _THREADS)
    height = _THREADS // width
    across = ceil_div(columns, vec * width)
    tile = height * _ROWS_IN_FLIGHT
    per_block = tile if not dbias else _rows_per_block(rows, across, tile, _traffic_rows(dtype, saves), sms)
    # Blocks stand along y, where a grid has `GRID_Y` at most.
    per_block = max(per_block, round_up(ceil_div(rows, GRID_Y), tile))
    blocks = max(1, ceil_div(rows, per_block))
    # Without an activation dh is ct: nothing is read beside it, and only the sum is written.
    reads, makes = (("ct",), ()) if saves == "none" else (("ct", "saved"), ("dh",))
    makes += ("dbias", "partial") if dbias else ()
    params = (
        *places("operand", ("ct", "saved"), reads),
        *places("result", ("dh", "partial"), makes),
        *integers(rows, columns, mask_pitch(columns), per_block),
    )
    launches = [Launch("epilogue_backward", (across, blocks, 1), (width, height, 1), 0, params, early=True)]
    # A second kernel adds the partial sums, in order: the bits are the same every time, which atomics do not promise.
    if dbias:
        summed = (*places("result", ("partial", "dbias"), makes), *integers(blocks, columns))
        grid = (ceil_div(columns, _SUM_BLOCK[0]), 1, 1)
        launches.append(Launch("epilogue_sum", grid, _SUM_BLOCK, 0, summed, early=True))
    # CUDA refuses a grid of no blocks; a sum over no rows is still written: 0.
    there_is_work = columns * (rows + dbias)
    told = _options(dtype, activation, vec, bias=False, saves=saves, dbias=dbias)
    return KernelPlan(SOURCE.path, told, tuple(launches) if there_is_work else ()), (blocks, columns) if dbias else None


def _rows_per_block(rows: int, across: int, tile: int, traffic: int, sms: int) -> int:
    """Rows of a block that leaves a row of partial sums, a multiple of `tile`.

    As many as keep the partial sums below 1 % of the traffic; more of them where there would still be 32 blocks for each
    multiprocessor (about ten waves, so that the last, partial one costs little), fewer where there would not be 6 (two waves).
    """
    most, least = rows * across // (6 * sms), rows * across // (32 * sms)
    return round_up(max(tile, min(max(traffic, least), most)), tile)


def _traffic_rows(dtype: str, saves: str) -> int:
    """Rows of which reading ct and what was saved and writing dh is 100 times the writing and reading of their partial sum."""
    size = ITEM_BYTES[dtype]
    moved = {"none": size, "bits": 2 * size + 0.125, "bytes": 2 * size + 1, "preactivation": 3 * size}[saves]
    return int(100 * 2 * ITEM_BYTES[accumulator(dtype)] / moved) + 1


def _options(dtype: str, activation: str, vec: int, *, bias: bool, saves: str, dbias: bool) -> tuple[str, ...]:
    act = KERNEL_ACTIVATIONS.index(activation)
    flags = {"BIAS": int(bias), "SAVES": SAVES.index(saves), "DBIAS": int(dbias)}
    return options({"T": CODES[dtype], "ACT": act, "VEC": vec, **flags})


def _vector(columns: int, dtype: str) -> int:
    """Columns of a thread: 16 bytes of them, or 1 where rows would not start on 16 bytes."""
    whole = VECTOR_BYTES // ITEM_BYTES[dtype]
    return 1 if columns % whole else whole


def _width(columns: int, vec: int, least: int, most: int) -> int:
    """Threads of a block along a row: the power of 2 that covers it, between bounds."""
    return min(most, max(least, power_of_2(ceil_div(columns, vec))))


def _check(rows: int, columns: int, dtype: str, activation: str) -> None:
    if rows < 0 or columns < 0:
        raise ArgumentError(f"rows, columns: got {rows} and {columns}, needed sizes of 0 or more")
    check_name("dtype", dtype, CODES)
    check_name("activation", activation, KERNEL_ACTIVATIONS)


def _check_saves(saves: str, activation: str, valid: tuple[str, ...]) -> None:
    if saves not in valid:
        raise ArgumentError(f"saves: got {saves!r} for activation {activation!r}, needed one of {', '.join(valid)}")
