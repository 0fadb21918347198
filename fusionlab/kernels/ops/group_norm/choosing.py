"""When the kernels of `group_norm` are chosen: where XLA's code was measured to take much longer than the memory traffic needs.

On an H100 XLA takes 1.4 to 2.3 times as long as they do forward, and 1.4 to 3.2 times forward and backward, at 16x64x64x320, 4x128x128x512
and 2x64x64x320 in bfloat16; they take 1.5 to 1.8 times what memory allows at the larger ones (`python -m benchmarks group_norms`; the
record is benchmarks/results/h100/group_norms_2026-11-27_jax0.11.2.json).
"""

from __future__ import annotations

import math

from ...choose.choices import CHOICES
from ...op.arrays import first_given
from ...op.implementation import Call, ChoiceKind

MEASURED = ("sm_90",)
LEAST = 1 << 20  # elements of x; fewer were not measured, and launches are most of their time
NOTHING_ON_A_CPU = "on a CPU the op is XLA's own code too"
FASTER = "XLA's code was measured to take longer at sizes like this (benchmarks group_norms)"


def why_xla(call: Call) -> tuple[ChoiceKind, str] | None:
    """Why XLA's code is taken although the kernels can run: they were not measured. None where they were."""
    if not CHOICES.measured_on(call.device, MEASURED):
        where = call.device.arch or "this architecture"
        why = f"measured on {', '.join(MEASURED)} only, not on {where} (fusionlab.tune measures; implementation='cuda' takes the kernels)"
        return ChoiceKind.UNMEASURED, why
    if (elements := math.prod(first_given(call.shapes, "x", "ct").shape)) < LEAST:
        return ChoiceKind.UNMEASURED, f"x has {elements} elements; below {LEAST} nothing was measured"
    return None
