"""`matmul` by XLA's product and one kernel of our own behind it, for bias and activation; the kernel is `gemm_epilogue`'s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....device import Device
from ..gemm_epilogue import cuda as beside
from . import reference, support
from .axes import ProductAxes

Array = Any


def refuses(shapes: Mapping[str, Any], device: Device, **attrs: Any) -> str | None:
    """Why this backend cannot run a call, or None."""
    found = support.kernel(shapes, device, **attrs)
    return found and found.sentence


def forward(
    a: Array, b: Array, bias: Array | None = None, *, residuals: bool, activation: str, **attrs: Any
) -> list[Array]:
    """[out], and the activation's residual if asked for and if it has one."""
    h = reference.dot(a, b, **attrs)
    shape, (_, _, columns, _) = h.shape, ProductAxes.of(a.shape, b.shape, attrs["dimensions"]).sizes
    h = h.reshape(-1, columns)
    vector = None if bias is None else bias.reshape(-1)
    saves = beside.saves_of(activation, packed=False) if residuals else "none"
    keeps_h = saves == "preactivation"
    if keeps_h and vector is not None:
        h, vector = h + vector, None  # XLA's product adds it; the sum is what is kept
    out, *saved = beside.activate(h, vector, activation, "none" if keeps_h else saves)
    saved = [h] if keeps_h else saved
    return [array.reshape(shape) for array in (out, *saved)]
