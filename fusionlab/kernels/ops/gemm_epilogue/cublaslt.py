"""`gemm_epilogue` by cuBLASLt's own epilogues: one call per product.

Forward, bias and activation are the epilogue of the product, and the auxiliary output is what the backward needs. Backward, the
derivative of the activation that made x is the epilogue of dx (DRELU, DGELU) and the bias gradient that of dw (BGRADA, BGRADB); the
derivative of the op's own activation has no product before it and takes FusionLab's kernel. Limits: the cuBLAS documentation,
cublasLtEpilogue_t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ....device import Device
from ...choose.choices import CHOICES
from ...launch import cublaslt as lt
from ...launch.architectures import refuses_older
from ...launch.compile import NOT_INSTALLED
from ...launch.ffi_call import launch
from ...launch.plans import plan_name
from ...op.arrays import Named, names_algorithm, precisions
from . import cuda, reference

Array = Any

EPILOGUES = {"none": "", "relu": "RELU", "gelu_tanh": "GELU"}
NO_EPILOGUE = "cuBLASLt has no epilogue for {}, only for relu and gelu_tanh"
MIN_CAPABILITY = 75


def refuses_device(device: Device) -> str | None:
    """Why this backend cannot run on a device, or None."""
    if unable := refuses_older(device, MIN_CAPABILITY, "the oldest that CUDA 13 supports"):
        return unable
    if device.missing:
        return lt.NOT_INSTALLED if "nvmath" in device.missing else NOT_INSTALLED
    return None


def refuses(shapes: Named, device: Device, *, role: str = "call", **attrs: Any) -> str | None:
    """Why this backend cannot run a call, or None."""
    return _refuses_attributes(role, **attrs) or _refuses_shapes(shapes, role, **attrs)


def _refuses_attributes(role: str, *, activation: str, precision: Any, **attrs: Any) -> str | None:
    # cuBLASLt's activations are RELU and GELU (cuBLAS documentation, cublasLtEpilogue_t); GELU is the tanh form.
    if role == "call" and activation not in EPILOGUES:
        return NO_EPILOGUE.format(activation)
    if role == "cotangent" and activation not in cuda.KERNEL_ACTIVATIONS:
        return f"neither an epilogue nor a kernel for the derivative of {activation}"
    if attrs.get("out") is not None:
        return "it writes its results in the dtype of its operands"
    # gelu_tanh saves the product itself, in the dtype of the result; relu's mask, which is bits, loses nothing by that.
    if attrs.get("wide") == "product" and (role != "call" or (attrs.get("residuals") and activation == "gelu_tanh")):
        return "the program keeps the product and its cotangent in float32; they would be rounded here"
    return refuses_precision(precision)


def refuses_precision(precision: Any) -> str | None:
    """Why cuBLASLt makes no product of this precision, or None."""
    if lax.Precision.HIGH in precisions(precision):
        return "precision HIGH (several products of lower precision) is not a compute type of cuBLASLt"
    if names_algorithm(precision):
        return f"precision {precision} names an algorithm, which cuBLASLt does not take"
    return None


def _refuses_shapes(shapes: Named, role: str, **attrs: Any) -> str | None:
    if any(0 in s.shape for s in shapes.values()):
        return "an operand is empty"
    if role == "call" and attrs["activation"] == "gelu_tanh" and (reason := _refuses_gelu(shapes, attrs)):
        return reason
    chained, saved = attrs.get("x_activation"), shapes.get("x_saved")
    if role == "cotangent" and chained and saved is not None:
        return _refuses_chain(chained, saved, attrs["x_contract"])
    return None


def _refuses_gelu(shapes: Named, attrs: Named) -> str | None:
    """Why gelu_tanh cannot be a call's epilogue, or None."""
    if "w" in shapes and (n := shapes["w"].shape[1 - attrs["w_contract"]]) % 8:
        return f"N = {n} is not a multiple of 8, which cuBLASLt needs for a saved pre-activation"
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
        return "x is contracted along its first axis; the derivative that made it is then not an epilogue of dx"
    if activation == "relu" and saved.dtype != np.uint8:
        return "the mask of the activation that made x is not packed into bits"
    if activation == "gelu_tanh" and saved.shape[-1] % 8:
        return f"K = {saved.shape[-1]} is not a multiple of 8, which cuBLASLt needs for a saved pre-activation"
    return None


def compute_of(dtype: str, precision: Any) -> str:
    """The dtype of multiplication and accumulation: as in XLA on a GPU, float32 operands are rounded to TF32 unless precision is
    HIGHEST."""
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
    x: Array, w: Array, bias: Array | None = None, x_saved: Array | None = None, *, residuals: bool, **attrs: Any
) -> list[Array]:
    """[act(x @ w + bias)], and the activation's residual if asked for and if it has one: one call."""
    activation, w_contract = attrs["activation"], attrs["w_contract"]
    flat, lead, leading = _as_matrix(x, attrs["x_contract"])
    rows, columns = math.prod(lead), w.shape[1 - w_contract]
    saves = residuals and activation != "none"
    found = _matmul(
        flat,
        w,
        (leading, bool(w_contract)),
        attrs,
        more=[] if bias is None else [bias],
        results=[saved_array(activation, rows, columns, x.dtype)] if saves else [],
        epilogue=epilogue_name(activation, saves, bias is not None),
        aux_pitch=aux_pitch(activation, saves, columns),
    )
    out = [a.reshape(*lead, a.shape[-1]) for a in found]
    if saves and activation == "relu" and not attrs["packed"]:
        out[1] = reference.unpacked(out[1], out[0].shape)
    return out


def cotangent(saved: Named, ct: Array, wanted: tuple[str, ...], shardings: Named, **attrs: Any) -> list[Array]:
    """The gradients wanted, one call a product."""
    grads, dh, activation = {}, ct, attrs["activation"]
    if activation != "none":
        residual = saved[cuda.ACTIVATIONS[activation].residual]
        dh, dbias = cuda.derive(residual, ct, activation, dbias="bias" in wanted)
        grads["bias"] = dbias
    lead, columns = dh.shape[:-1], dh.shape[-1]
    flat = dh.reshape(math.prod(lead), columns)
    if "x" in wanted:
        grads["x"] = _dx(flat, saved, lead, attrs)
    if "w" in wanted:
        sums = "bias" in wanted and grads.get("bias") is None
        grads["w"], *dbias = _dw(flat, saved["x"], sums, attrs)
        if sums:
            grads["bias"] = dbias[0]
    if "bias" in wanted and grads.get("bias") is None:
        grads["bias"] = jnp.sum(flat, axis=0)
    return [grads[slot] for slot in wanted]


def _dx(dh: Array, saved: Named, lead: tuple[int, ...], attrs: Named) -> Array:
    """dh @ w^T in the shape of x, with the derivative of the activation that made x as its epilogue."""
    w, of_x, x_activation = saved["w"], attrs["x_contract"], attrs["x_activation"]
    is_transposed = bool(attrs["w_contract"])
    if of_x == 0:  # x is (K, *M)
        (dx,) = _matmul(w, dh, (is_transposed, True), attrs)
        return reference.beyond(x_activation, saved, dx.reshape(-1, *lead))
    more, behind = [], {}
    middle = of_x != len(lead)
    if x_activation is not None and not middle:
        more = [saved["x_saved"].reshape(len(dh), -1)]
        pitch = more[0].shape[1] * (8 if x_activation == "relu" else 1)
        behind = {"epilogue": "D" + EPILOGUES[x_activation], "aux_pitch": pitch}
    (dx,) = _matmul(dh, w, (False, not is_transposed), attrs, more=more, **behind)
    dx = dx.reshape(*lead, -1)
    return reference.beyond(x_activation, saved, jnp.moveaxis(dx, -1, of_x)) if middle else dx


def _dw(dh: Array, x: Array, sums: bool, attrs: Named) -> list[Array]:
    """The gradient of w in its own shape and, if `sums`, the sum of dh over rows."""
    flat, _, leading = _as_matrix(x, attrs["x_contract"])
    results = [jax.ShapeDtypeStruct(dh.shape[1:], dh.dtype)] if sums else []
    if attrs["w_contract"]:  # w is (N, K): dh^T @ x
        epilogue = "BGRADB" if sums else "DEFAULT"
        return _matmul(dh, flat, (True, leading), attrs, results=results, epilogue=epilogue)
    epilogue = "BGRADA" if sums else "DEFAULT"
    return _matmul(flat, dh, (not leading, False), attrs, results=results, epilogue=epilogue)


def _as_matrix(x: Array, x_contract: int) -> tuple[Array, tuple[int, ...], bool]:
    """x with K first or last as a matrix, its other axes, and whether K is first; from the middle K is moved last."""
    if x_contract not in (0, x.ndim - 1):
        x = jnp.moveaxis(x, x_contract, -1)
    if x_contract == 0:
        return x.reshape(len(x), -1), x.shape[1:], True
    return x.reshape(-1, x.shape[-1]), x.shape[:-1], False


def _matmul(
    left: Array,
    right: Array,
    transposed: tuple[bool, bool],
    attrs: Named,
    *,
    more: Sequence[Array] = (),
    results: Sequence[jax.ShapeDtypeStruct] = (),
    **behind: Any,
) -> list[Array]:
    """A row-major product of two matrices, each maybe stored as its transpose, with its epilogue: [product, *results]."""
    rows, inner = left.shape[::-1] if transposed[0] else left.shape
    columns = right.shape[0 if transposed[1] else 1]
    device, dtype = attrs["device"], left.dtype.name
    plan = lt.row_major(
        rows,
        columns,
        inner,
        left_transposed=transposed[0],
        right_transposed=transposed[1],
        dtype=dtype,
        compute=compute_of(dtype, attrs["precision"]),
        workspace=lt.workspace_for(device.capability),
        **behind,
    )
    product = jax.ShapeDtypeStruct((rows, columns), left.dtype)
    return run(plan, device, [right, left, *more], [product, *results])


def run(
    plan: lt.MatmulPlan, device: Device, operands: Sequence[Array], results: Sequence[jax.ShapeDtypeStruct]
) -> list[Array]:
    """The results of a plan but its workspace, by the algorithm that was measured fastest for it, if one was."""
    if found := CHOICES.algorithm(device, plan_name(plan)):
        plan = plan.with_algorithm(*found)
    scratch = jax.ShapeDtypeStruct((plan.workspace,), np.uint8)
    return launch(plan, operands, [*results, scratch])[:-1]


def epilogue_name(activation: str, saves: bool, bias: bool) -> str:
    """cuBLASLt's name for the epilogue of a product, for example "RELU_AUX_BIAS"."""
    words = [EPILOGUES[activation], "AUX" if saves else "", "BIAS" if bias else ""]
    return "_".join(word for word in words if word) or "DEFAULT"


def aux_pitch(activation: str, saves: bool, columns: int) -> int:
    """The leading dimension of an epilogue's saved array, in bits for relu's mask; 0 if it saves nothing."""
    if not saves:
        return 0
    return 8 * reference.mask_pitch(columns) if activation == "relu" else columns


def saved_array(activation: str, rows: int, columns: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """The array that an epilogue saves for the backward: relu a packed mask, gelu_tanh the pre-activation."""
    if activation == "relu":
        return jax.ShapeDtypeStruct((rows, reference.mask_pitch(columns)), np.uint8)
    return jax.ShapeDtypeStruct((rows, columns), dtype)
