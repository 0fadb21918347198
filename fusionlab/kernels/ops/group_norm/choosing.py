"""Where the kernels of `group_norm` are taken: where XLA's code was measured to take much longer than memory does.

On an H100 XLA takes 1.4 to 2.3 times as long as they do forward, and 1.4 to 3.2 times forward and backward, at 16x64x64x320, 4x128x128x512
and 2x64x64x320 in bfloat16; they take 1.5 to 1.8 times what memory allows at the larger ones (`python -m benchmarks group_norms`; the
record is benchmarks/results/h100/group_norms_2026-11-27_jax0.11.2.json).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ....device import Device
from ...op.implementation import Call, ChoiceKind, ImplementationChoice

MEASURED = ("sm_90",)
LEAST = 1 << 20  # elements of x; fewer were not measured, and launches are most of their time
NOTHING_ON_A_CPU = "on a CPU the op is XLA's own code too"
FASTER = "XLA's code was measured to take longer at sizes like this (benchmarks group_norms)"


def rule(call: Call, refusal: str | None) -> ImplementationChoice:
    """What runs on a GPU for a "call" or a "cotangent"; `refusal`: why the kernels cannot run it, or None."""
    if refusal:
        return ImplementationChoice("xla", ChoiceKind.DEVICE, refusal)
    why = _why_not_cuda(call.shapes, call.device)
    return (
        ImplementationChoice("xla", ChoiceKind.UNMEASURED, why)
        if why
        else ImplementationChoice("cuda", ChoiceKind.CHOSEN, FASTER)
    )


def _why_not_cuda(shapes: Mapping[str, Any], device: Device) -> str:
    """Why XLA's code is taken although the kernels can run: they were not measured. "" where they were."""
    if device.arch not in MEASURED:
        where = device.arch or "this architecture"
        return f"measured on {', '.join(MEASURED)} alone, not on {where} (implementation='cuda' takes the kernels)"
    whole = shapes["x"] if "x" in shapes else shapes["ct"]
    if (elements := math.prod(whole.shape)) < LEAST:
        return f"x has {elements} elements; below {LEAST} nothing was measured"
    return ""
