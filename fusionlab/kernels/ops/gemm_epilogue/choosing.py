"""Which implementation a call of `gemm_epilogue` takes: what was measured for it, or a rule per architecture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ....device import Device
from ...choose.choices import CHOICES, Choice, case_text
from . import cublaslt, cuda

PACKABLE = ("relu", "relu_where")  # activations whose residual is a plain mask
SIZES = ("rows", "columns", "inner")
ON_CPU = "on a CPU the product dominates and XLA already fuses bias and activation"


# Why one cannot run a call: what was measured near a call may not run for it.
IMPLEMENTED = {"xla": lambda *a, **k: None, "cublaslt": cublaslt.refuses, "cuda": cuda.refuses}


def case(role: str, shapes: Mapping[str, Any], attrs: Mapping[str, Any]) -> str:
    """The call as text: all that its speed hangs on. `shapes` by operand name; `attrs` those of the primitive."""
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
    content |= dict(zip(("rows", "columns", "inner"), sizes, strict=True))
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


def measured(role: str, shapes: Mapping[str, Any], device: Device, attrs: Mapping[str, Any]) -> Choice | None:
    """What was measured for the call on that architecture, or for one near it, if anything was."""
    if device.platform != "cuda" or not device.arch:
        return None
    text = case(role, shapes, attrs)
    return CHOICES.lookup(device.arch, text) or CHOICES.nearest(device.arch, text, SIZES)


def preferred(role: str, shapes: Mapping[str, Any], device: Device, attrs: Mapping[str, Any]) -> tuple[str, str]:
    """The implementation to take when none is named, and the reason."""
    if device.platform == "cpu":
        return "xla", ON_CPU
    if role == "tangent":
        return "xla", "forward mode has no implementation of its own"
    if device.platform != "cuda":
        return "xla", "the only implementation there is here"
    found = measured(role, shapes, device, attrs)
    if found is not None:
        refuses = IMPLEMENTED.get(found.implementation, _unknown)
        if refusal := refuses(shapes, device, role=role, **attrs):
            return (
                "xla",
                f"{found.implementation!r} was fastest but cannot run this call: {refusal}",
            )
        return found.implementation, found.reason
    where = device.arch or "this architecture"
    hint = CHOICES.unshared or "fusionlab.tune measures"
    return "xla", f"no such call was measured for {where}; {hint}"


def _unknown(*shapes: Any, **attrs: Any) -> str:
    return "this version of FusionLab has no such implementation"


def packs(shapes: Mapping[str, Any], device: Device, attrs: Mapping[str, Any]) -> bool:
    """Whether the mask of a relu is kept in bits: where an implementation other than XLA's is named, or where that was measured best."""
    if device.platform != "cuda" or attrs["activation"] not in PACKABLE:
        return False
    if jax.device_count() > 1:  # a row of bits is padded, so that columns of it cannot be split among devices
        return False
    if attrs["implementation"] is not None:
        return attrs["implementation"] != "xla"
    found = measured("call", shapes, device, {**attrs, "residuals": True, "packed": True})
    return found is not None and bool(found.settings.get("packed"))
