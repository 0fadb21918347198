"""The implementation of a call of `gemm_epilogue`: the measured one, or a rule per architecture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...choose.choices import CHOICES, case_text
from ...op.implementation import Call, ChoiceKind, Implementation, ImplementationChoice
from . import cublaslt

PACKABLE = ("relu", "relu_where")  # activations whose residual is a plain mask
SIZES = ("rows", "columns", "inner")
ON_CPU = "on a CPU the product dominates and XLA already fuses bias and activation"


def case(role: str, shapes: Mapping[str, Any], attrs: Mapping[str, Any]) -> str:
    """The call as text: all that its speed depends on. `shapes` by operand name; `attrs` those of the primitive."""
    content: dict[str, Any] = {
        "activation": attrs["activation"],
        "bias": "bias" in attrs["present"],
        "x": _side(attrs),
        "w": "NK" if attrs["w_contract"] else "KN",
    }
    if role == "call":
        x, w = shapes["x"], shapes["w"]
        sizes = _rows(x.shape, attrs["x_contract"]), w.shape[1 - attrs["w_contract"]], w.shape[attrs["w_contract"]]
        content |= {"residuals": bool(attrs.get("residuals"))}
        like = x
    else:
        like = shapes["ct"]
        sizes = math.prod(like.shape[:-1]), like.shape[-1], _inner(shapes, attrs)
        wanted = [slot for slot, live in zip(attrs["present"], attrs["live"], strict=True) if live]
        # Whether dx and dw are wanted is left out: their products are the same whatever makes dh and its sum.
        content |= {"bias": "bias" in wanted, "x_activation": attrs["x_activation"]}
    content |= dict(zip(SIZES, sizes, strict=True))
    dtype = np.dtype(like.dtype).name
    packed = bool(attrs["packed"]) and content.get("residuals", True)  # without residuals there is nothing to pack
    content |= {"dtype": dtype, "compute": cublaslt.compute_of(dtype, attrs["precision"]), "packed": packed}
    return case_text("gemm_epilogue", role, **content)


def _side(attrs: Mapping[str, Any]) -> str:
    return "KM" if attrs["x_contract"] == 0 else "MK"


def _rows(shape: tuple[int, ...], contracted: int) -> int:
    return math.prod(s for i, s in enumerate(shape) if i != contracted)


def _inner(shapes: Mapping[str, Any], attrs: Mapping[str, Any]) -> int:
    """K, where an operand of a backward call has it; one that makes the bias gradient alone has none."""
    if "w" in shapes:
        return shapes["w"].shape[attrs["w_contract"]]
    return shapes["x"].shape[attrs["x_contract"]] if "x" in shapes else 0


def _can_run(call: Call, implementations: Mapping[str, Implementation]) -> bool:
    """Whether anything but XLA's code can run it, on an architecture that is known."""
    others = [impl for name, impl in implementations.items() if name != "xla"]
    refusals = [impl.refuses(call.shapes, call.device, role=call.role, **call.attrs) for impl in others]
    return bool(call.device.arch) and None in refusals


def rule(call: Call, unable: str, implementations: Mapping[str, Implementation]) -> ImplementationChoice:
    """The choice if no implementation that can run was measured: XLA's code."""
    untried = False
    if call.device.platform == "cpu":
        why = ON_CPU
    elif call.role == "tangent":
        why = "forward mode has no implementation of its own"
    elif call.device.platform != "cuda":
        why = "the only implementation there is here"
    else:
        hint = CHOICES.unshared or "fusionlab.tune measures"
        untried = not unable and _can_run(call, implementations)
        why = unable or f"no such call was measured for {call.device.arch or 'this architecture'}; {hint}"
    return ImplementationChoice("xla", ChoiceKind.SAME_CODE, why, untried)
