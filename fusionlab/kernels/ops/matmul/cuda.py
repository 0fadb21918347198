"""`matmul` by XLA's product and one kernel of our own behind it, for bias and activation; the kernel is `gemm_epilogue`'s."""

from __future__ import annotations

from typing import Any

from ....device import Device
from ...op.arrays import Named
from ..gemm_epilogue import cuda as beside
from . import reference, support
from .axes import ProductAxes

Array = Any


def refuses(shapes: Named, device: Device, **attrs: Any) -> str | None:
    """Why this backend cannot run a call, or None."""
    found = support.kernel(shapes, device, **attrs)
    return found and found.sentence


def forward(a: Array, b: Array, bias: Array | None = None, **attrs: Any) -> list[Array]:
    """[out], and the activation's residual if asked for and if it has one."""
    h = reference.dot(a, b, **attrs)
    _, _, columns, _ = ProductAxes.of(a.shape, b.shape, attrs["dimensions"]).sizes
    matrix, vector = h.reshape(-1, columns), None if bias is None else bias.reshape(-1)
    return [array.reshape(h.shape) for array in beside.behind(matrix, vector, **attrs)]
