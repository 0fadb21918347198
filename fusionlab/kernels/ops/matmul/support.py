"""What each way to run a product takes: pure functions of a call and a device, which touch no library and no GPU.

Limits: the cuBLAS documentation, cublasLtMatmul (table of supported types), cublasLtEpilogue_t and cublasLtMatrixLayoutAttribute_t.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from ....device import Device
from ...launch import cublaslt as lt
from ...launch.compile import refuses_device as refuses_compiled
from ...op.arrays import FLOATS, names_algorithm, precisions
from ..gemm_epilogue.cublaslt import compute_of
from ..gemm_epilogue.elementwise import KERNEL_ACTIVATIONS
from .axes import ProductAxes, Stored, free, stored

Array = Any

EPILOGUES = {"none": "", "relu": "RELU", "gelu_tanh": "GELU"}
HALVES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Reason:
    """Why something does not take a call: a code (`errors.ROUTE_REASONS`) and a sentence."""

    code: str
    sentence: str


def library(shapes: Mapping[str, Any], device: Device, **attrs: Any) -> Reason | None:
    """Why cuBLASLt cannot compute a call in one product, or None."""
    if unable := refuses_device(device):
        return unable
    if "nvmath" in device.missing:
        return Reason("device", lt.NOT_INSTALLED)
    if attrs.get("role", "call") != "call":
        return Reason("role", "of a backward the products stay XLA's")
    return (
        _types(shapes, **attrs) or _factors(shapes, **attrs) or _layout(shapes, **attrs) or _epilogue(shapes, **attrs)
    )


def refuses_device(device: Device) -> Reason | None:
    """Why nothing of ours runs on a device."""
    text = refuses_compiled(device)
    return Reason("device", text) if text else None


def _types(shapes: Mapping[str, Any], *, product: str, out: str, precision: Any, **_: Any) -> Reason | None:
    given = np.dtype(shapes["a"].dtype).name
    if given not in FLOATS:
        return Reason("dtype", f"operands of {given}: it multiplies {', '.join(FLOATS)}")
    if product != given and not (product == "float32" and given in HALVES):
        return Reason("dtype", f"{given} multiplied to {product}: it sums {given} in float32 or as it is")
    if out not in (product, given):
        return Reason("dtype", f"a result of {out} from operands of {given}: it writes {given} or {product}")
    if lax.Precision.HIGH in precisions(precision):
        return Reason(
            "precision", "precision HIGH (several products of lower precision) is no compute type of cuBLASLt"
        )
    if names_algorithm(precision):
        return Reason("precision", f"precision {precision} names an algorithm, which cuBLASLt does not take")
    return None


def _factors(shapes: Mapping[str, Any], *, alpha: float, beta: float, product: str, **_: Any) -> Reason | None:
    kind = np.float64 if product == "float64" else np.float32  # what it holds them in
    used = (alpha, beta) if "bias" in shapes else (alpha,)
    held = [float(np.asarray(factor).astype(kind)) for factor in used]
    if 0.0 in held:
        return Reason("scale", "what it multiplies by a factor of 0 it does not read: NaN and infinities would be lost")
    return None


def _layout(shapes: Mapping[str, Any], *, dimensions: Any, **_: Any) -> Reason | None:
    if any(0 in s.shape for s in shapes.values()):
        return Reason("axes", "an operand is empty")
    a, b = layouts(shapes, dimensions)
    for name, found in (("a", a), ("b", b)):
        if found is None:
            return Reason(
                "axes", f"{name} of shape {tuple(shapes[name].shape)} is not a batch of strided matrices in memory"
            )
    return None


def layouts(shapes: Mapping[str, Any], dimensions: Any) -> tuple[Stored | None, Stored | None]:
    """How the matrices of a and b stand in memory."""
    (lc, rc), (lb, rb) = dimensions
    pairs = sorted(zip(lc, rc, strict=True))  # in any order the sum is the same
    lc, rc = [i for i, _ in pairs], [i for _, i in pairs]
    sides = ((tuple(shapes["a"].shape), lc, lb), (tuple(shapes["b"].shape), rc, rb))
    a, b = (stored(shape, free(len(shape), c, batch), c, batch) for shape, c, batch in sides)
    return a, b


def _epilogue(shapes: Mapping[str, Any], *, activation: str, precision: Any, out: str, **_: Any) -> Reason | None:
    if activation not in EPILOGUES:
        return Reason("activation", f"cuBLASLt has no epilogue for {activation}, only for relu and gelu_tanh")
    if activation == "gelu_tanh":
        if out == "float64":
            return Reason("activation", "its GELU is good to some 3e-10 in float64 (measured), not to the last digit")
        given = np.dtype(shapes["a"].dtype).name
        if out == "float32" and (given != "float32" or compute_of(given, precision) == "f32"):
            return Reason("activation", "its GELU is good to some 3e-5 (measured), less than a float32 result keeps")
    return _bias(shapes, out)


def _bias(shapes: Mapping[str, Any], out: str) -> Reason | None:
    if "bias" not in shapes:
        return None
    dtype = np.dtype(shapes["bias"].dtype).name
    if dtype != out and not (dtype in HALVES and out == "float32"):
        return Reason("bias", f"a bias of {dtype} would be rounded to {out} before it is added")
    return None


def kernel(shapes: Mapping[str, Any], device: Device, **attrs: Any) -> Reason | None:
    """Why XLA's product with a kernel of our own behind it cannot compute a call, or None."""
    if unable := refuses_device(device):
        return unable
    if attrs.get("role", "call") != "call":
        return Reason("role", "of a backward the products and what stands before them stay XLA's")
    return _behind(shapes, **attrs)


def _behind(
    shapes: Mapping[str, Any],
    *,
    activation: str,
    product: str,
    out: str,
    alpha: float,
    beta: float,
    dimensions: Any,
    **_: Any,
) -> Reason | None:
    if activation == "none":
        return Reason("nothing", "without an activation there is nothing for a kernel beside the product to do")
    if activation not in KERNEL_ACTIVATIONS:
        return Reason(
            "activation", f"no kernel for the activation {activation}, only for {', '.join(KERNEL_ACTIVATIONS)}"
        )
    if out != product or out not in FLOATS:
        return Reason("dtype", f"a product of {product} with a result of {out}: its kernels read and write one dtype")
    if alpha != 1.0 or beta != 1.0:
        return Reason("scale", f"factors of {alpha:g} and {beta:g}: its kernels have none")
    if "bias" in shapes:
        along = ProductAxes.of(shapes["a"].shape, shapes["b"].shape, dimensions).bias(shapes["bias"].shape)
        if along != "columns":
            return Reason("bias", f"a bias along {along}: its kernels add one along the columns")
        dtype = np.dtype(shapes["bias"].dtype).name
        if dtype != out:
            return Reason("bias", f"a bias of {dtype} beside a result of {out}: its kernels take one dtype")
    return None
