"""Where the kernels of `layer_norm` are taken: a rule of what was measured on an H200 (`python -m benchmarks norms` measures it again; only
its two largest cases are on record so far, in that of `python -m benchmarks multi_transformer`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...op.arrays import first_given
from ...op.implementation import Call, ChoiceKind
from ..geometry import ITEM_BYTES, vector
from . import cuda

MEASURED = ("sm_90",)
LEAST = 1 << 20  # elements of x below which both take the same time, as launches are most of it
# Columns beyond which XLA's code is faster, or nothing was measured.
WIDEST = {"call": 1 << 14, "cotangent": 1 << 13}
AS_FAST_ON_A_CPU = "on a CPU XLA's own code was measured as fast (benchmarks norms_cpu)"
FASTER = "one pass over memory: measured faster than XLA's code at sizes like this"


def kernels(call: Call) -> tuple[ChoiceKind, str]:
    """Whether they are taken for a "call" or a "cotangent" that they can run, and why."""
    if call.device.arch not in MEASURED:
        where = call.device.arch or "this architecture"
        why = f"the kernels were measured on {', '.join(MEASURED)} alone, not on {where} (implementation='cuda' takes them)"
        return ChoiceKind.UNMEASURED, why
    why = _why_slower(call.role, call.shapes, call.attrs.get("residuals", False))
    return (ChoiceKind.SLOWER, why) if why else (ChoiceKind.CHOSEN, FASTER)


def _why_slower(role: str, shapes: Mapping[str, Any], residuals: bool) -> str:
    """Why XLA's code was measured to be as fast as the kernels; "" where they are faster."""
    whole = first_given(shapes, *cuda.WHOLE)
    elements, columns, dtype = math.prod(whole.shape), whole.shape[-1], whole.dtype.name
    if elements < LEAST:
        return f"x has {elements} elements; below {LEAST} XLA's code was measured to take as long"
    if columns > WIDEST[role]:
        way = "forward" if role == "call" else "backward"
        return f"for rows of more than {WIDEST[role]} entries ({columns}) XLA's code was measured faster {way}"
    if role == "call" and not residuals and vector(columns, dtype) * ITEM_BYTES[dtype] < 4:
        return f"rows of {columns} entries are read one by one, and forward alone XLA's code was measured faster"
    return ""
