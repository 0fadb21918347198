"""Where the kernels of `layer_norm` are taken: a rule of what was measured (`python -m benchmarks norms`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...device import Device
from . import cuda

MEASURED = ("sm_90",)
LEAST = 1 << 20  # elements of x below which launches are most of the time
FASTER = (
    "one pass over memory each way: measured faster than XLA's code from a million elements on, at all widths tried"
)


def why_not_cuda(shapes: Mapping[str, Any], device: Device, **attrs: Any) -> str:
    """Why XLA's code is preferred; "" where the kernels are."""
    if device.arch not in MEASURED:
        where = device.arch or "this architecture"
        return f"the kernels were measured on {', '.join(MEASURED)} alone, not on {where} (implementation='cuda' takes them)"
    if reason := cuda.refuses(shapes, device, **attrs):
        return reason
    whole = next(a for name in ("x", "sum", "ct", "ct_sum") if (a := shapes.get(name)) is not None)
    elements = math.prod(whole.shape)
    return f"x has {elements} elements; below {LEAST} the kernels gain nothing" if elements < LEAST else ""
