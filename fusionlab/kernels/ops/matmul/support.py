"""The products that each route can run: pure functions of a call and a device, which touch no library and no GPU.

Limits: the cuBLAS documentation, cublasLtMatmul (table of supported types), cublasLtEpilogue_t and cublasLtMatrixLayoutAttribute_t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ....device import Device
from ....showing import Shown
from ...launch import cublaslt as lt
from ...launch.compile import refuses_device as refuses_compiled
from ...op.arrays import FLOATS, Named
from ..gemm_epilogue.cublaslt import EPILOGUES, NO_EPILOGUE, compute_of, refuses_precision
from ..gemm_epilogue.cuda import refuses_activation
from .axes import ProductAxes, Stored, free, stored

Array = Any

HALVES = ("bfloat16", "float16")


@dataclass(frozen=True, repr=False)
class Reason(Shown):
    """Why something does not take a call: a code (`errors.ROUTE_REASONS`) and a sentence."""

    _says = "{0.code}: {0.sentence}"

    code: str
    sentence: str


def library(shapes: Named, device: Device, **attrs: Any) -> Reason | None:
    """Why cuBLASLt cannot compute a call in one product, or None."""
    if unable := refuses_device(device):
        return unable
    if "nvmath" in device.missing:
        return Reason("device", lt.NOT_INSTALLED)
    if attrs.get("role", "call") != "call":
        return Reason("role", "the products of a backward stay XLA's")
    return (
        _types(shapes, **attrs) or _factors(shapes, **attrs) or _layout(shapes, **attrs) or _epilogue(shapes, **attrs)
    )


def refuses_device(device: Device) -> Reason | None:
    """Why no kernel of FusionLab's runs on a device."""
    return _reason("device", refuses_compiled(device))


def _reason(code: str, sentence: str | None) -> Reason | None:
    return None if sentence is None else Reason(code, sentence)


def _types(shapes: Named, *, product: str, out: str, precision: Any, **_: Any) -> Reason | None:
    given = np.dtype(shapes["a"].dtype).name
    if given not in FLOATS:
        return Reason("dtype", f"operands of {given}: it multiplies {', '.join(FLOATS)}")
    if product != given and not (product == "float32" and given in HALVES):
        return Reason("dtype", f"{given} multiplied to {product}: it sums {given} in float32 or as it is")
    if out not in (product, given):
        return Reason("dtype", f"a result of {out} from operands of {given}: it writes {given} or {product}")
    return _reason("precision", refuses_precision(precision))


def _factors(shapes: Named, *, alpha: float, beta: float, product: str, **_: Any) -> Reason | None:
    kind = np.float64 if product == "float64" else np.float32  # what it holds them in
    used = (alpha, beta) if "bias" in shapes else (alpha,)
    held = [float(np.asarray(factor).astype(kind)) for factor in used]
    if 0.0 in held:
        return Reason("scale", "it does not read an operand whose factor is 0: NaN and infinities would be lost")
    return None


def _layout(shapes: Named, *, dimensions: Any, **_: Any) -> Reason | None:
    if any(0 in s.shape for s in shapes.values()):
        return Reason("axes", "an operand is empty")
    a, b = layouts(shapes, dimensions)
    for name, found in (("a", a), ("b", b)):
        if found is None:
            return Reason(
                "axes", f"{name} of shape {tuple(shapes[name].shape)} is not a batch of strided matrices in memory"
            )
    return None


def layouts(shapes: Named, dimensions: Any) -> tuple[Stored | None, Stored | None]:
    """The layouts of the matrices of a and b in memory."""
    (lc, rc), (lb, rb) = dimensions
    pairs = sorted(zip(lc, rc, strict=True))  # in any order the sum is the same
    lc, rc = [i for i, _ in pairs], [i for _, i in pairs]
    sides = ((tuple(shapes["a"].shape), lc, lb), (tuple(shapes["b"].shape), rc, rb))
    a, b = (stored(shape, free(len(shape), c, batch), c, batch) for shape, c, batch in sides)
    return a, b


def _epilogue(shapes: Named, *, activation: str, precision: Any, out: str, **_: Any) -> Reason | None:
    if activation not in EPILOGUES:
        return Reason("activation", NO_EPILOGUE.format(activation))
    if activation == "gelu_tanh":
        if out == "float64":
            return Reason("activation", "its GELU is good to some 3e-10 in float64 (measured), not to the last digit")
        given = np.dtype(shapes["a"].dtype).name
        if out == "float32" and (given != "float32" or compute_of(given, precision) == "f32"):
            return Reason("activation", "its GELU is good to some 3e-5 (measured), less than a float32 result keeps")
    return _bias(shapes, out)


def _bias(shapes: Named, out: str) -> Reason | None:
    if "bias" not in shapes:
        return None
    dtype = np.dtype(shapes["bias"].dtype).name
    if dtype != out and not (dtype in HALVES and out == "float32"):
        return Reason("bias", f"a bias of {dtype} would be rounded to {out} before it is added")
    return None


def kernel(shapes: Named, device: Device, **attrs: Any) -> Reason | None:
    """Why XLA's product followed by one of FusionLab's own kernels cannot compute a call, or None."""
    if unable := refuses_device(device):
        return unable
    if attrs.get("role", "call") != "call":
        return Reason("role", "the products of a backward, and what comes before them, stay XLA's")
    return _behind(shapes, **attrs)


def _behind(shapes: Named, *, activation: str, product: str, out: str, **attrs: Any) -> Reason | None:
    if unable := refuses_activation(activation):
        return Reason("nothing" if activation == "none" else "activation", unable)
    if out != product or out not in FLOATS:
        return Reason("dtype", f"a product of {product} with a result of {out}: its kernels read and write one dtype")
    if (factors := (attrs["alpha"], attrs["beta"])) != (1.0, 1.0):
        return Reason("scale", "factors of {:g} and {:g}: its kernels have none".format(*factors))
    if "bias" in shapes:
        along = ProductAxes.of(shapes["a"].shape, shapes["b"].shape, attrs["dimensions"]).bias(shapes["bias"].shape)
        if along != "columns":
            return Reason("bias", f"a bias along {along}: its kernels add one along the columns")
        dtype = np.dtype(shapes["bias"].dtype).name
        if dtype != out:
            return Reason("bias", f"a bias of {dtype} with a result of {out}: its kernels take one dtype")
    return None
