"""The implementation of a call of `linear_cross_entropy`: on a GPU a rule from measurements on an H200 (`python -m benchmarks
linear_cross_entropy`), on a CPU chunks of rows wherever there would be more than one.
"""

from __future__ import annotations

import math

from ...choose.choices import CHOICES
from ...op.implementation import Call, ChoiceKind, ImplementationChoice
from . import chunked
from .settings import Settings

AGAIN = (
    "the backward pass computes the logits again, a product more than XLA's code, for the memory that they would take"
)
TIMED = ("softcap", "logits_dtype", "transposed", "masked", "also", "chunk", "precision")  # attributes
ONE = "its rows make one chunk"
AS_FAST_ON_A_CPU = "as many products as in XLA's code, and the logits of one chunk exist at a time"
MEASURED = ("sm_90",)
LEAST = 1 << 24  # logits: of one row XLA's code is faster, and of more of them nothing was measured up to here
FEW = f"of one row XLA's code was measured 1.7 times as fast, and of more nothing up to {LEAST} logits"
FASTER = "the gradient is made of logits that are read once, and never in float32: measured faster than XLA's code"


def rule(call: Call, by_kernel: bool) -> ImplementationChoice:
    """Chunks of rows, if there are several or on a GPU; `by_kernel`: whether the kernel can run the call."""
    form = Settings.of({**call.attrs, "device": call.device})
    if call.role == "tangent":
        return _xla("forward mode has the logits of all rows")
    if call.role == "cotangent" and not form.has_rows:
        return _xla("the gradients were made in the forward pass: they are only multiplied")
    shape, size = call.shapes["x"].shape, call.shapes["w"].shape[0 if form.transposed else 1]
    if call.device.platform == "cpu" and chunked.chunks(shape, size, form)[0] == 1:
        return _xla(ONE)
    if CHOICES.measured_on(call.device, MEASURED) and math.prod(shape[:-1]) * size < LEAST:
        return ImplementationChoice("xla", ChoiceKind.SLOWER, FEW)
    name = "cuda" if by_kernel and call.device.platform == "cuda" else "xla_chunked"
    return ImplementationChoice(name, *_kind(call, form))


def _kind(call: Call, form: Settings) -> tuple[ChoiceKind, str]:
    again = not form.is_scalar and bool(call.attrs.get("residuals"))
    if call.device.platform == "cpu":
        return (ChoiceKind.SLOWER, AGAIN) if again else (ChoiceKind.CHOSEN, AS_FAST_ON_A_CPU)
    if not CHOICES.measured_on(call.device, MEASURED):
        where = call.device.arch or call.device.platform
        why = f"it was not measured on {where} (fusionlab.tune measures; fl.ops.linear_cross_entropy takes it)"
        return ChoiceKind.UNMEASURED, why
    if again:
        return ChoiceKind.SLOWER, AGAIN
    return ChoiceKind.CHOSEN, FASTER


def _xla(why: str) -> ImplementationChoice:
    return ImplementationChoice("xla", ChoiceKind.SAME_CODE, why)
