"""`gemm_epilogue` by cuBLASLt's own epilogues: one call a product.

Forward, bias and activation are the epilogue of the product, and the auxiliary output is what the backward needs. Backward, the
derivative of the activation that made x is the epilogue of dx (DRELU, DGELU) and the bias gradient that of dw (BGRADA, BGRADB); the
derivative of the op's own activation has no product before it and takes our own kernel. Limits: the cuBLAS documentation,
cublasLtEpilogue_t.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ....device import Device
from ...choose.choices import CHOICES
from ...launch import cublaslt as lt
from ...launch.compile import NOT_INSTALLED
from ...launch.ffi_call import launch
from ...launch.plans import plan_name
from ...op.arrays import precisions
from . import cuda, reference

Array = Any

EPILOGUES = {"none": "", "relu": "RELU", "gelu_tanh": "GELU"}
MIN_CAPABILITY = 75


def refuses_device(device: Device) -> str | None:
    """Why this backend cannot run on a device, or None."""
    if device.platform != "cuda":
        return f"it needs a CUDA device, this is {device}"
    if device.arch and device.capability < MIN_CAPABILITY:
        return f"{device.arch} is older than sm_{MIN_CAPABILITY}, the oldest that CUDA 13 supports"
    if device.missing:
        return lt.NOT_INSTALLED if "nvmath" in device.missing else NOT_INSTALLED
    return None


def refuses(shapes: Mapping[str, Any], device: Device, *, role: str = "call", **attrs: Any) -> str | None:
    """Why this backend cannot run a call, or None."""
    return _refuses_attributes(role, **attrs) or _refuses_shapes(shapes, role, **attrs)


def _refuses_attributes(role: str, *, activation: str, precision: Any, **attrs: Any) -> str | None:
    # cuBLASLt's activations are RELU and GELU (cuBLAS documentation, cublasLtEpilogue_t); GELU is the tanh form.
    if role == "call" and activation not in EPILOGUES:
        return f"cuBLASLt has no epilogue for {activation}, only for relu and gelu_tanh"
    if role == "cotangent" and activation != "none" and activation not in cuda.KERNEL_ACTIVATIONS:
        return f"neither an epilogue nor a kernel for the derivative of {activation}"
    if attrs.get("out") is not None:
        return "it writes its results in the dtype of its operands"
    # gelu_tanh saves the product itself, in the dtype of the result; relu's mask, which is bits, loses nothing by that.
    if attrs.get("wide") == "product" and (role != "call" or (attrs.get("residuals") and activation == "gelu_tanh")):
        return "the program keeps the product, and what goes back through it, in float32; it would be rounded here"
    return _refuses_precision(precision)


def _refuses_precision(precision: Any) -> str | None:
    if lax.Precision.HIGH in precisions(precision):
        return "precision HIGH (several products of lower precision) is no compute type of cuBLASLt"
    if any(not isinstance(p, lax.Precision) for p in precisions(precision)):
        return f"precision {precision} names an algorithm, which cuBLASLt does not take"
    return None


def _refuses_shapes(shapes: Mapping[str, Any], role: str, **attrs: Any) -> str | None:
    if any(0 in s.shape for s in shapes.values()):
        return "an operand is empty"
    if role == "call" and attrs["activation"] == "gelu_tanh" and (reason := _refuses_gelu(shapes, attrs)):
        return reason
    chained = attrs.get("x_activation")
    saved = shapes.get("x_saved")
    if role == "cotangent" and chained and saved is not None:
        return _refuses_chain(chained, saved, attrs["x_contract"])
    return None


def _refuses_gelu(shapes: Mapping[str, Any], attrs: Mapping[str, Any]) -> str | None:
    """Why gelu_tanh cannot be a call's epilogue, or None."""
    if "w" in shapes and (n := shapes["w"].shape[1 - attrs["w_contract"]]) % 8:
        return f"N = {n} is no multiple of 8, which cuBLASLt needs of a saved pre-activation"
    if not shapes:
        return None
    dtype = np.dtype(next(iter(shapes.values())).dtype).name
    if dtype == "float64":
        return "its GELU is good to some 3e-10 in float64 (measured), not to the last digit"
    if dtype == "float32" and compute_of(dtype, attrs["precision"]) == "f32":
        return "its GELU is good to some 3e-5 in float32 (measured), less than precision HIGHEST asks for"
    return None


def _refuses_chain(activation: str, saved: Any, x_contract: int) -> str | None:
    if activation not in EPILOGUES:
        return f"cuBLASLt has no epilogue for the derivative of {activation}"
    if x_contract != len(saved.shape) - 1:
        return "x is contracted along its first axis; the derivative that made it is no epilogue of dx then"
    if activation == "relu" and saved.dtype != np.uint8:
        return "the mask of the activation that made x is not packed into bits"
    if activation == "gelu_tanh" and saved.shape[-1] % 8:
        return f"K = {saved.shape[-1]} is no multiple of 8, which cuBLASLt needs of a saved pre-activation"
    return None


def compute_of(dtype: str, precision: Any) -> str:
    """What is multiplied and accumulated in: as XLA does on a GPU, float32 operands are rounded to TF32 unless precision is HIGHEST."""
    if dtype == "float64":
        return "f64"
    exact = bool(precisions(precision)) and all(p == lax.Precision.HIGHEST for p in precisions(precision))
    return "tf32" if dtype == "float32" and not exact else "f32"


def product_arithmetic(dtype: str, precision: Any, device: Device) -> str:
    """The same in words, for a product of any of the implementations on a device: a CPU rounds nothing to TF32."""
    compute = compute_of(dtype, precision)
    if compute == "tf32" and device.platform == "cuda":
        return "float32 rounded to TF32, summed in float32; precision HIGHEST would round nothing"
    return "float64, summed in float64" if compute == "f64" else f"{dtype}, summed in float32"


def forward(
    x: Array,
    w: Array,
    bias: Array | None = None,
    x_saved: Array | None = None,
    *,
    residuals: bool,
    activation: str,
    x_contract: int,
    w_contract: int,
    packed: bool,
    **attrs: Any,
) -> list[Array]:
    """[act(x @ w + bias)], and the activation's residual if asked for and if it has one: one call."""
    x, leading = _matrix_sides(x, x_contract)
    lead = x.shape[1:] if leading else x.shape[:-1]
    rows, columns, inner = math.prod(lead), w.shape[1 - w_contract], w.shape[w_contract]
    saves = residuals and activation != "none"
    out = _matmul(
        x.reshape((inner, rows) if leading else (rows, inner)),
        w,
        [] if bias is None else [bias],
        (rows, columns, inner),
        [saved_array(activation, rows, columns, x.dtype)] if saves else [],
        left_transposed=leading,
        right_transposed=bool(w_contract),
        epilogue=epilogue_name(activation, saves, bias is not None),
        aux_pitch=aux_pitch(activation, saves, columns),
        **attrs,
    )
    out = [a.reshape(*lead, a.shape[-1]) for a in out]
    if saves and activation == "relu" and not packed:
        out[1] = reference.unpacked(out[1], out[0].shape)
    return out


def cotangent(
    saved: Mapping[str, Array],
    ct: Array,
    wanted: tuple[str, ...],
    shardings: Mapping[str, Any],
    *,
    activation: str,
    x_contract: int,
    w_contract: int,
    x_activation: str | None,
    **attrs: Any,
) -> list[Array]:
    """The gradients wanted, one call a product."""
    grads, dh = {}, ct
    if activation != "none":
        residual = saved[cuda.ACTIVATIONS[activation].residual]
        dh, dbias = cuda.derive(residual, ct, activation, dbias="bias" in wanted)
        grads["bias"] = dbias
    rows, columns = math.prod(dh.shape[:-1]), dh.shape[-1]
    flat = dh.reshape(rows, columns)
    if "x" in wanted:
        lead = dh.shape[:-1]
        grads["x"] = _dx(flat, saved, lead, x_contract, w_contract, x_activation, attrs)
    if "w" in wanted:
        sums = "bias" in wanted and grads.get("bias") is None
        grads["w"], *dbias = _dw(flat, saved["x"], x_contract, w_contract, sums, attrs)
        if sums:
            grads["bias"] = dbias[0]
    if "bias" in wanted and grads.get("bias") is None:
        grads["bias"] = jnp.sum(flat, axis=0)
    return [grads[slot] for slot in wanted]


def _dx(
    dh: Array,
    saved: Mapping[str, Array],
    lead: tuple[int, ...],
    x_contract: int,
    w_contract: int,
    x_activation: str | None,
    attrs: Mapping[str, Any],
) -> Array:
    """dh @ w^T in the shape of x, with the derivative of the activation that made x as its epilogue."""
    w = saved["w"]
    (rows, columns), inner = dh.shape, w.shape[w_contract]
    if x_contract == 0:  # x is (K, *M)
        (dx,) = _matmul(
            w,
            dh,
            [],
            (inner, rows, columns),
            [],
            left_transposed=bool(w_contract),
            right_transposed=True,
            epilogue="DEFAULT",
            **attrs,
        )
        return reference.beyond(x_activation, saved, dx.reshape(inner, *lead))
    aux, pitch, epilogue = [], 0, "DEFAULT"
    middle = x_contract != len(lead)
    if x_activation is not None and not middle:
        kept = saved["x_saved"].reshape(rows, -1)
        pitch = kept.shape[1] * (8 if x_activation == "relu" else 1)
        aux, epilogue = [kept], "D" + EPILOGUES[x_activation]
    (dx,) = _matmul(
        dh,
        w,
        aux,
        (rows, inner, columns),
        [],
        right_transposed=not w_contract,
        epilogue=epilogue,
        aux_pitch=pitch,
        **attrs,
    )
    dx = dx.reshape(*lead, inner)
    return reference.beyond(x_activation, saved, jnp.moveaxis(dx, -1, x_contract)) if middle else dx


def _dw(dh: Array, x: Array, x_contract: int, w_contract: int, sums: bool, attrs: Mapping[str, Any]) -> list[Array]:
    """The gradient of w in its own shape and, if `sums`, the sum of dh over rows."""
    rows, columns = dh.shape
    inner = x.shape[x_contract]
    x, leading = _matrix_sides(x, x_contract)
    flat = x.reshape((inner, rows) if leading else (rows, inner))
    results = [jax.ShapeDtypeStruct((columns,), dh.dtype)] if sums else []
    if w_contract:  # w is (N, K): dh^T @ x
        epilogue = "BGRADB" if sums else "DEFAULT"
        shape, sides = (columns, inner, rows), {"left_transposed": True, "right_transposed": leading}
        return _matmul(dh, flat, [], shape, results, epilogue=epilogue, **sides, **attrs)
    epilogue = "BGRADA" if sums else "DEFAULT"
    return _matmul(
        flat, dh, [], (inner, columns, rows), results, left_transposed=not leading, epilogue=epilogue, **attrs
    )


def _matrix_sides(x: Array, x_contract: int) -> tuple[Array, bool]:
    """x with K first or last, so that it is a matrix, and whether it is first; from the middle K is moved last."""
    if x_contract in (0, x.ndim - 1):
        return x, x_contract == 0
    return jnp.moveaxis(x, x_contract, -1), False


def _matmul(
    left: Array,
    right: Array,
    more: list[Array],
    shape: tuple[int, int, int],
    results: list[jax.ShapeDtypeStruct],
    *,
    precision: Any,
    device: Device,
    left_transposed: bool = False,
    right_transposed: bool = False,
    epilogue: str,
    aux_pitch: int = 0,
    **_: Any,
) -> list[Array]:
    """A row-major product (rows, columns, inner) with its epilogue: [product, *results]."""
    rows, columns, inner = shape
    workspace = lt.workspace_for(device.capability)
    plan = lt.row_major(
        rows,
        columns,
        inner,
        left_transposed=left_transposed,
        right_transposed=right_transposed,
        dtype=left.dtype.name,
        compute=compute_of(left.dtype.name, precision),
        epilogue=epilogue,
        aux_pitch=aux_pitch,
        workspace=workspace,
    )
    if found := CHOICES.algorithm(device.arch, plan_name(plan)):
        plan = plan.with_algorithm(*found)
    product = jax.ShapeDtypeStruct((rows, columns), left.dtype)
    scratch = jax.ShapeDtypeStruct((workspace,), np.uint8)
    return launch(plan, [right, left, *more], [product, *results, scratch])[:-1]


def epilogue_name(activation: str, saves: bool, bias: bool) -> str:
    """cuBLASLt's name for what follows a product: "RELU_AUX_BIAS", say."""
    words = [EPILOGUES[activation], "AUX" if saves else "", "BIAS" if bias else ""]
    return "_".join(word for word in words if word) or "DEFAULT"


def aux_pitch(activation: str, saves: bool, columns: int) -> int:
    """The leading dimension of what an epilogue saves, of relu's mask in bits; 0 where it saves nothing."""
    if not saves:
        return 0
    return 8 * reference.mask_pitch(columns) if activation == "relu" else columns


def saved_array(activation: str, rows: int, columns: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """What an epilogue saves for the backward: relu a packed mask, gelu_tanh the pre-activation."""
    if activation == "relu":
        return jax.ShapeDtypeStruct((rows, reference.mask_pitch(columns)), np.uint8)
    return jax.ShapeDtypeStruct((rows, columns), dtype)
