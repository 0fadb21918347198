"""How the kernel of `gated.cu` is compiled and launched for a call: plain arithmetic, no GPU."""

from __future__ import annotations

from ...launch.architectures import COPIES, TENSOR_CORES
from ...launch.compile import CudaSource
from ...launch.kernel_plan import KernelPlan, Launch
from ..gemm_epilogue.elementwise import KERNEL_ACTIVATIONS
from ..geometry import ceil_div
from ..passes import integers, options

SOURCE = CudaSource("gated_matmul/gated.cu", ("gated_forward",), (TENSOR_CORES, COPIES), 64 << 10)
CODES = {"bfloat16": 1, "float16": 2}  # FL_T
MOST_COLUMNS = 65535 * 64  # a grid's blocks along y, CUDA's limit, of kColumns each
_WARP_ROWS, _COLUMNS, _INNER, _WORD = 32, 64, 64, 8  # as of gated.cu
_BYTES = 2


def forward_plan(
    rows: int, columns: int, inner: int, dtype: str, activation: str, *, transposed: bool, saves: bool
) -> KernelPlan:
    """out = act(x w) * (x v), of x (rows x inner), w and v (inner x columns; columns x inner where `transposed`).

    Args:
      rows, columns, inner: sizes, none of them 0.
      dtype: a key of `CODES`, of all operands and results.
      activation: one of `KERNEL_ACTIVATIONS`.
      transposed: how w and v lie in memory.
      saves: x w and x v are results too.

    Returns:
      A plan with operands x, w, v and results out[, x w, x v], each rows x columns.
    """
    warps = 2 if rows <= 2 * _WARP_ROWS else 4  # along the rows: a block of 64 or of 128 rows
    tile = warps * _WARP_ROWS
    aligned = {"X": inner, "W": inner if transposed else columns, "OUT": columns}
    values = {
        "T": CODES[dtype],
        "ACT": KERNEL_ACTIVATIONS.index(activation),
        "WARPS": warps,
        "NK": int(transposed),
        **{f"VEC_{name}": int(size % _WORD == 0) for name, size in aligned.items()},
        "SAVES": int(saves),
    }
    shared = 2 * _BYTES * (tile * _INNER + 2 * _COLUMNS * _INNER)  # two stages of x, w and v
    kept = (("result", 1), ("result", 2)) if saves else (("null", 0), ("null", 0))
    params = (*(("operand", i) for i in range(3)), ("result", 0), *kept, *integers(rows, columns, inner))
    grid = (ceil_div(rows, tile), ceil_div(columns, _COLUMNS), 1)
    launch = Launch("gated_forward", grid, (64 * warps, 1, 1), shared, params, early=True)
    return KernelPlan(SOURCE.path, options(values), (launch,))
