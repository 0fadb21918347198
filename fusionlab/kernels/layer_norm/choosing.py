"""Where the kernels of `layer_norm` are taken: a rule of what was measured on an H200 (`python -m benchmarks norms`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...device import Device
from . import cuda, tiling

MEASURED = ("sm_90",)
LEAST = 1 << 20  # elements of x below which both take the same time, as launches are most of it
WIDEST = 1 << 14  # columns beyond which XLA's code is faster forward as well
FASTER = "one pass over memory: measured faster than XLA's code at sizes like this"


def why_not_cuda(role: str, shapes: Mapping[str, Any], device: Device, *, residuals: bool = False, **attrs: Any) -> str:
    """Why XLA's code is preferred for a "call" or a "cotangent" of these shapes; "" where the kernels are."""
    if device.arch not in MEASURED:
        where = device.arch or "this architecture"
        return f"the kernels were measured on {', '.join(MEASURED)} alone, not on {where} (implementation='cuda' takes them)"
    if reason := cuda.refuses(shapes, device, role=role, **attrs):
        return reason
    whole = next(a for name in ("x", "sum", "ct", "ct_sum") if (a := shapes.get(name)) is not None)
    elements, columns, dtype = math.prod(whole.shape), whole.shape[-1], whole.dtype.name
    if elements < LEAST:
        return f"x has {elements} elements; below {LEAST} XLA's code was measured to take as long"
    if role == "cotangent" and tiling.backward_tile(columns, dtype, 3, ct_sum=False) is None:
        return f"rows of {columns} entries take the kernels two passes backward, and XLA's code was measured faster"
    if columns > WIDEST:
        return f"for rows of {columns} entries XLA's code was measured faster"
    if role == "call" and not residuals and tiling.vector(columns, dtype) * tiling.ITEM_BYTES[dtype] < 4:
        return f"rows of {columns} entries are read one by one, and forward alone XLA's code was measured faster"
    return ""
