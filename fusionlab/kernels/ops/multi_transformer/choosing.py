"""When the kernels of `multi_transformer` are chosen: a rule from measurements on an H200 (`python -m benchmarks decoding`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from ....device import Device
from ...choose.choices import CHOICES
from .decode import backend as cuda
from .decode.persistent.plan import BLOCKS

MEASURED = ("sm_90",)
TUNE = "fusionlab.tune measures; implementation='cuda' takes them"
# Tokens' features between which the kernels were measured faster than jax.jit, for 1, 4 and 16 texts: for one text by any of the kernels,
# for several by the one that needs a multiprocessor for each of its blocks. Other widths were not measured.
WIDTHS = 1024, 4096
FASTER = "a few texts of one token each: measured faster than XLA's code for such layers"


def why_not_cuda(shapes: Mapping[str, Any], device: Device, *, residuals: bool = False, **attrs: Any) -> str | None:
    """Why the pieces are preferred for a call; None where the kernels are."""
    if not CHOICES.measured_on(device, MEASURED):
        where = device.arch or "this architecture"
        return f"the kernels were measured on {', '.join(MEASURED)} only, not on {where} ({TUNE})"
    if residuals:
        return "they run only forward"
    rows, tokens, width = shapes["x"].shape
    if tokens != 1:
        return f"{tokens} tokens per text, the kernels are for one"
    least, most = WIDTHS
    if not least <= width <= most:
        return f"tokens of {width} features; the kernels were measured for {least} to {most}"
    if rows > 1 and (reason := _why_not_several(width, device, attrs)):
        return f"{rows} texts: the kernel for several {reason}"
    # To XLA the kernels are one custom call, and the op names no axes along which it could be split (`Op.labels`).
    if not device.simulated and jax.device_count() > 1:
        return "with several devices each would compute the whole layer"
    return cuda.refuses(shapes, device, **attrs)


def _why_not_several(width: int, device: Device, attrs: Mapping[str, Any]) -> str:
    """Why the kernel for several texts is not taken, said of it; "" where it is."""
    if (device.units or 0) < BLOCKS:
        return f"needs {BLOCKS} multiprocessors, there are {device.units or 'none known'}"
    if not attrs["pre_norm"]:
        return "needs the norms before the products"
    if attrs["heads"] * attrs["head_size"] > width:
        return "was measured only with heads that together have no more features than a token"
    return ""
