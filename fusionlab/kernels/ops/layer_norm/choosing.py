"""When the kernels of `layer_norm` are chosen: a rule from measurements on an H200 (`python -m benchmarks norms` measures it again;
only its two largest cases are on record so far, in that of `python -m benchmarks multi_transformer`).
"""

from __future__ import annotations

import math
from typing import Any

from ...choose.choices import CHOICES
from ...op.arrays import first_given
from ...op.implementation import Call, ChoiceKind
from ..geometry import ITEM_BYTES, vector
from . import cuda

MEASURED = ("sm_90",)
TUNE = "fusionlab.tune measures; implementation='cuda' takes them"
LEAST = 1 << 20  # elements of x below which both take the same time, as launches are most of it
# Columns beyond which XLA's code is faster, or nothing was measured.
WIDEST = {"call": 1 << 14, "cotangent": 1 << 13}
AS_FAST_ON_A_CPU = "on a CPU XLA's own code was measured as fast (benchmarks norms_cpu)"
FASTER = "one pass over memory: measured faster than XLA's code at sizes like this"


def why_xla(call: Call) -> tuple[ChoiceKind, str] | None:
    """Why XLA's code is taken although the kernels can run; None where they were measured faster."""
    if not CHOICES.measured_on(call.device, MEASURED):
        where = call.device.arch or "this architecture"
        why = f"the kernels were measured on {', '.join(MEASURED)} only, not on {where} ({TUNE})"
        return ChoiceKind.UNMEASURED, why
    why = _why_slower(call.role, first_given(call.shapes, *cuda.WHOLE), call.attrs.get("residuals", False))
    return (ChoiceKind.SLOWER, why) if why else None


def _why_slower(role: str, whole: Any, residuals: bool) -> str:
    """Why XLA's code was measured to be as fast as the kernels; "" where they are faster."""
    elements, columns, dtype = math.prod(whole.shape), whole.shape[-1], whole.dtype.name
    if elements < LEAST:
        return f"x has {elements} elements; below {LEAST} XLA's code was measured to take as long"
    if columns > WIDEST[role]:
        way = "forward" if role == "call" else "backward"
        return f"for rows of more than {WIDEST[role]} entries ({columns}) XLA's code was measured faster {way}"
    if role == "call" and not residuals and vector(columns, dtype) * ITEM_BYTES[dtype] < 4:
        return f"rows of {columns} entries are read one by one, and forward alone XLA's code was measured faster"
    return ""
