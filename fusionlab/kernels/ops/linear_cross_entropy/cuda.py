""" "cuda": the chunks of chunked.py, with FusionLab's own kernel for what lies between their products (softmax_part.py)."""

from __future__ import annotations

from typing import Any

from ....device import Device
from ...launch.compile import refuses_device as refuses_cuda
from ...op.arrays import Named
from . import chunked
from .own import softmax_part
from .own.part_plan import SOURCE
from .settings import Settings

Array = Any


def refuses(shapes: Named, device: Device, *, role: str, **attrs: Any) -> str | None:
    """Why the kernel cannot run a call, or None."""
    form = Settings.of({**attrs, "device": device})
    if "w" not in shapes:  # a backward pass that only multiplies
        return None
    return softmax_part.refuses(form, form.logits_dtype, shapes["w"].shape[0 if form.transposed else 1])


def refuses_device(device: Device) -> str | None:
    """Why the kernel cannot run there, or None."""
    return refuses_cuda(device) or SOURCE.refuses(device)


def forward(*operands: Array, **attrs: Any) -> list[Array]:
    """As the reference gives it."""
    return chunked.forward(*operands, by_kernel=True, **attrs)


def cotangent(saved: Named, ct: Any, wanted: tuple[str, ...], shardings: Named, **attrs: Any) -> list[Array]:
    """As the reference gives it."""
    return chunked.cotangent(saved, ct, wanted, shardings, by_kernel=True, **attrs)
