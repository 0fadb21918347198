"""`gated_matmul` on a GPU by one of FusionLab's own kernels (gated.cu): both products in one pass over x, the gate in registers.

It takes 16-bit operands of any sizes. The backward's products are XLA's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ....device import Device
from ...launch.ffi_call import launch
from ...op.arrays import names_algorithm
from ..gemm_epilogue.elementwise import KERNEL_ACTIVATIONS
from .plan import CODES, MOST_COLUMNS, SOURCE, forward_plan

Array = Any

OTHERS = "implementation='concatenated' takes it"


def refuses(shapes: Mapping[str, Any], device: Device, *, activation: str, precision: Any, **attrs: Any) -> str | None:
    """Why this kernel cannot run a call, or None."""
    dtype = np.dtype(shapes["x"].dtype).name
    if dtype not in CODES:
        return f"operands of {dtype}: its products are of 16-bit numbers ({', '.join(CODES)}); {OTHERS}"
    if activation not in KERNEL_ACTIVATIONS:
        return f"no kernel for the activation {activation}, only for {', '.join(KERNEL_ACTIVATIONS)}; {OTHERS}"
    if names_algorithm(precision):
        return f"precision {precision} names an algorithm; {OTHERS}"
    if any(0 in s.shape for s in shapes.values()):
        return "an operand is empty: there is nothing to compute"
    if max(shapes["w"].shape) > MOST_COLUMNS:
        return f"more than {MOST_COLUMNS} columns, the most that a grid has blocks for; {OTHERS}"
    return None


def refuses_device(device: Device) -> str | None:
    """Why the kernel cannot run on a device, or None."""
    return SOURCE.refuses(device)


def forward(
    x: Array, w: Array, v: Array, *, residuals: bool, activation: str, w_contract: int, **attrs: Any
) -> list[Array]:
    """[out], and x . w and x . v if asked for: one launch."""
    lead, inner, columns = x.shape[:-1], x.shape[-1], w.shape[1 - w_contract]
    rows = math.prod(lead)
    plan = forward_plan(rows, columns, inner, x.dtype.name, activation, transposed=bool(w_contract), saves=residuals)
    results = [jax.ShapeDtypeStruct((rows, columns), x.dtype)] * (3 if residuals else 1)
    return [a.reshape(*lead, columns) for a in launch(plan, [x.reshape(rows, inner), w, v], results)]
