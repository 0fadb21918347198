"""The implementation of a call of `linear_cross_entropy`: on a GPU a rule from measurements on an H200 (`python -m benchmarks
linear_cross_entropy`), on a CPU chunks of rows wherever there would be more than one.
"""

from __future__ import annotations

import math

import numpy as np

from ...choose.choices import CHOICES
from ...op.implementation import Call, ChoiceKind, ImplementationChoice
from . import chunked
from .settings import Settings

AGAIN = (
    "the backward pass computes the logits again, a product more than XLA's code, for the memory that they would take"
)
TIMED = ("softcap", "logits_dtype", "transposed", "masked", "also", "chunk", "precision")  # attributes
TAKE = "fusionlab.tune measures; fl.ops.linear_cross_entropy takes it"
ONE = "all its rows fit in one chunk, so chunks would save no memory"
AS_FAST_ON_A_CPU = "as many products as in XLA's code, and the logits of one chunk exist at a time"
MEASURED = ("sm_90",)
LEAST = 1 << 24  # logits: of one row XLA's code is faster, and of more of them nothing was measured up to here
FEW = f"with one row XLA's code was measured 1.7 times as fast; with more rows nothing was measured below {LEAST:,} logits"
FASTER = "the gradient is made of logits that are read once, and never in float32: measured faster than XLA's code"


def rule(call: Call, by_kernel: bool) -> ImplementationChoice:
    """Chunks of rows, if there are several or on a GPU; `by_kernel`: whether the kernel can run the call."""
    form = Settings.of({**call.attrs, "device": call.device})
    if why := _left_to_xla(call, form):
        return ImplementationChoice("xla", ChoiceKind.SAME_CODE, why)
    if CHOICES.measured_on(call.device, MEASURED) and _logits(call, form) < LEAST:
        return ImplementationChoice("xla", ChoiceKind.SLOWER, FEW)
    if call.device.platform == "cpu":
        return ImplementationChoice("xla_chunked", *_judged(call, form, AS_FAST_ON_A_CPU))
    by_kernel = by_kernel and call.device.platform == "cuda"
    name = "cuda" if by_kernel else "xla_chunked"
    if why := _unmeasured(call, by_kernel):
        return ImplementationChoice(name, ChoiceKind.UNMEASURED, why)
    return ImplementationChoice(name, *_judged(call, form, FASTER))


def _left_to_xla(call: Call, form: Settings) -> str:
    """Why a call is computed as XLA computes it in any case; "" where it has chunks."""
    if call.role == "tangent":
        return "forward mode has the logits of all rows"
    if call.role == "cotangent" and not form.has_rows:
        return "the gradients were made in the forward pass: they are only multiplied"
    size = call.shapes["w"].shape[0 if form.transposed else 1]
    if call.device.platform == "cpu" and chunked.chunks(call.shapes["x"].shape, size, form)[0] == 1:
        return ONE
    return ""


def _logits(call: Call, form: Settings) -> int:
    return math.prod(call.shapes["x"].shape[:-1]) * call.shapes["w"].shape[0 if form.transposed else 1]


def _unmeasured(call: Call, by_kernel: bool) -> str:
    """What of a call on a GPU no record covers; "" where one does."""
    if not CHOICES.measured_on(call.device, MEASURED):
        return f"it was not measured on {call.device.arch or call.device.platform} ({TAKE})"
    if not by_kernel:
        return f"without the kernel, which does not run this call, it was not measured ({TAKE})"
    dtype = np.dtype(call.shapes["x"].dtype).name
    return "" if dtype == "bfloat16" else f"it was not measured for x in {dtype} ({TAKE})"


def _judged(call: Call, form: Settings, why: str) -> tuple[ChoiceKind, str]:
    again = not form.is_scalar and bool(call.attrs.get("residuals"))
    return (ChoiceKind.SLOWER, AGAIN) if again else (ChoiceKind.CHOSEN, why)
