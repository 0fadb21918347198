"""`gemm_epilogue` on a GPU by XLA's product and one of FusionLab's own kernels.

Forward, the kernel adds the bias, applies the activation and writes what the backward needs, in one pass over the product. Backward,
one pass multiplies by the derivative and sums the bias gradient (in two stages, always in the same order). The products stay XLA's.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ....device import Device
from ...launch.ffi_call import launch
from ...op.arrays import Named
from ..geometry import accumulator
from . import reference
from .activations import ACTIVATIONS
from .elementwise import KERNEL_ACTIVATIONS, backward_plan, forward_plan

Array = Any


def refuses(shapes: Named, device: Device, **attrs: Any) -> str | None:
    """Why this backend cannot run a call, or None."""
    return refuses_activation(attrs["activation"]) or _refuses_wide(**attrs)


def refuses_activation(activation: str) -> str | None:
    """Why no kernel follows a product with this activation, or None."""
    if activation == "none":
        return "without an activation there is nothing left for a kernel after the product"
    if activation not in KERNEL_ACTIVATIONS:
        return f"no kernel for the activation {activation}, only for {', '.join(KERNEL_ACTIVATIONS)}"
    return None


def _refuses_wide(
    *, activation: str, role: str = "call", wide: str | None = None, out: str | None = None, **attrs: Any
) -> str | None:
    """Where a program goes on in float32: the kernel computes so, behind a product that is rounded."""
    if out is not None:
        return "its kernel writes results in the dtype of the operands"
    if wide == "product":
        return "its product is rounded before the kernel adds to it, and the program's is not"
    if wide is None or role != "call":
        return None
    if (
        ACTIVATIONS[activation].residual == "preactivation"
        and "bias" in attrs.get("present", ())
        and attrs.get("residuals")
    ):
        return "the sum with the bias, which it keeps, is rounded before its activation, and the program's is not"
    return None


def saves_of(activation: str, packed: bool) -> str:
    """The kernels' name for the residual of an activation."""
    kind = ACTIVATIONS[activation].residual
    return kind if kind != "mask" else "bits" if packed else "bytes"


def forward(x: Array, w: Array, bias: Array | None = None, x_saved: Array | None = None, **attrs: Any) -> list[Array]:
    """[act(x @ w + bias)], and the activation's residual if asked for and if it has one."""
    return behind(reference.product(x, w, attrs["x_contract"], attrs["w_contract"], attrs["precision"]), bias, **attrs)


def behind(
    h: Array, bias: Array | None, *, activation: str, residuals: bool, packed: bool = False, **_: Any
) -> list[Array]:
    """The epilogue of a product: [act(h + bias)], and the residual if asked for; h is (*M, N), bias N."""
    saves = saves_of(activation, packed) if residuals else "none"
    keeps_h = saves == "preactivation"
    if keeps_h and bias is not None:
        h, bias = h + bias, None  # XLA's product adds it; the sum is what is kept
    out, *saved = activate(h, bias, activation, "none" if keeps_h else saves)
    return [out, h] if keeps_h else [out, *saved]


def activate(h: Array, bias: Array | None, activation: str, saves: str) -> list[Array]:
    """[act(h + bias)] and, for `saves` "bits" or "bytes", that residual; h is (*M, N), bias N."""
    shape, columns = h.shape, h.shape[-1]
    rows = math.prod(shape[:-1])
    plan = forward_plan(rows, columns, h.dtype.name, activation, bias=bias is not None, saves=saves)
    results = [jax.ShapeDtypeStruct((rows, columns), h.dtype)]
    if saves != "none":
        results.append(_saved_shape(activation, saves, rows, columns))
    flat = h.reshape(rows, columns)
    # Written over h where nothing else reads it; XLA copies it first where something does.
    outs = launch(plan, [flat] if bias is None else [flat, bias], results, aliases={0: 0})
    return [a.reshape(*shape[:-1], a.shape[-1]) for a in outs]


def cotangent(saved: Named, ct: Array, wanted: tuple[str, ...], shardings: Named, **attrs: Any) -> list[Array]:
    """The gradients wanted: dh and dbias by the kernel, dx and dw by XLA's products."""
    activation = attrs["activation"]
    dh, dbias = derive(saved[ACTIVATIONS[activation].residual], ct, activation, dbias="bias" in wanted)
    return reference.gradients(saved, dh, wanted, shardings, dbias, **attrs)


def derive(residual: Array, ct: Array, activation: str, *, dbias: bool) -> tuple[Array, Array | None]:
    """act'(h) * ct in ct's shape (*M, N) and dtype and, if asked for, its sum over rows (N, accumulated in float32; float64 for
    float64)."""
    shape, columns = ct.shape, ct.shape[-1]
    rows = math.prod(shape[:-1])
    saves = saves_of(activation, residual.dtype == jnp.uint8)
    plan, partial_shape = backward_plan(rows, columns, ct.dtype.name, activation, dbias=dbias, saves=saves)
    results = [jax.ShapeDtypeStruct((rows, columns), ct.dtype)]
    if dbias:
        partial = jax.ShapeDtypeStruct(partial_shape, accumulator(ct.dtype.name))
        results += [jax.ShapeDtypeStruct((columns,), ct.dtype), partial]
    flat = residual.reshape(rows, residual.shape[-1])
    dh, *sums = launch(plan, [ct.reshape(rows, columns), flat], results)
    return dh.reshape(shape), sums[0] if dbias else None


def _saved_shape(activation: str, saves: str, rows: int, columns: int) -> jax.ShapeDtypeStruct:
    if saves == "bits":
        return jax.ShapeDtypeStruct((rows, reference.mask_pitch(columns)), np.uint8)
    return jax.ShapeDtypeStruct((rows, columns), np.int8 if activation == "relu_tie" else np.bool_)
