"""The implementation of a call of `linear_cross_entropy`: chunks, wherever there would be more than one."""

from __future__ import annotations

from ...op.implementation import Call, ChoiceKind, ImplementationChoice
from . import chunked
from .settings import Settings

AGAIN = (
    "the backward pass computes the logits again, a product more than XLA's code, for the memory that they would take"
)
TIMED = ("softcap", "logits_dtype", "transposed", "masked", "also", "chunk", "precision")  # attributes
ONE = "its rows make one chunk"
AS_FAST_ON_A_CPU = "as many products as in XLA's code, and the logits of one chunk exist at a time"


def rule(call: Call) -> ImplementationChoice:
    """Chunks of rows, if there are several; of a site on a GPU, where nothing was measured, XLA's code."""
    form = Settings.of({**call.attrs, "device": call.device})
    if call.role == "tangent":
        return _xla("forward mode has the logits of all rows")
    if call.role == "cotangent" and not form.has_rows:
        return _xla("the gradients were made in the forward pass: they are only multiplied")
    size = call.shapes["w"].shape[0 if form.transposed else 1]
    if call.device.platform == "cpu" and chunked.chunks(call.shapes["x"].shape, size, form)[0] == 1:
        return _xla(ONE)
    if call.device.platform != "cpu":
        where = call.device.arch or call.device.platform
        why = f"chunks of rows were not measured on {where} (fusionlab.tune measures; fl.ops.linear_cross_entropy takes them)"
        return ImplementationChoice("xla_chunked", ChoiceKind.UNMEASURED, why)
    if not form.is_scalar and call.attrs.get("residuals"):
        return ImplementationChoice("xla_chunked", ChoiceKind.SLOWER, AGAIN)
    return ImplementationChoice("xla_chunked", ChoiceKind.CHOSEN, AS_FAST_ON_A_CPU)


def _xla(why: str) -> ImplementationChoice:
    return ImplementationChoice("xla", ChoiceKind.SAME_CODE, why)
