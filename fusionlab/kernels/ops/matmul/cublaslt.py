"""`matmul` by cuBLASLt: one call for the product and all that stands behind it.

A bias along the columns is the epilogue's. One along the rows, or with a factor of its own, is the matrix C of beta C: it is written out
in the shape of the result first, which costs writing and reading that once. The backward's products are XLA's.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ....device import Device
from ...choose.choices import CHOICES
from ...launch import cublaslt as lt
from ...launch.ffi_call import launch
from ...launch.plans import plan_name
from ..gemm_epilogue import reference as unbatched
from ..gemm_epilogue.cublaslt import aux_pitch, compute_of, epilogue_name, saved_array
from . import reference, support
from .axes import ProductAxes, Stored

Array = Any


def refuses(shapes: Mapping[str, Any], device: Device, **attrs: Any) -> str | None:
    """Why this backend cannot run a call, or None."""
    found = support.library(shapes, device, **attrs)
    return found and found.sentence


def forward(
    a: Array,
    b: Array,
    bias: Array | None = None,
    *,
    residuals: bool,
    dimensions: Any,
    activation: str,
    out: str,
    device: Device,
    **attrs: Any,
) -> list[Array]:
    """[out], and the activation's residual if asked for and if it has one: one call.

    Where its epilogue cannot write what is kept for the backward, the call makes h, and what follows is jnp code.
    """
    sizes = ProductAxes.of(a.shape, b.shape, dimensions)
    call = functools.partial(_called, a, b, bias, sizes, device, dimensions=dimensions, **attrs)
    if not residuals or activation == "none":
        return call(activation, out, False)
    if _keeps(sizes, activation, out, attrs["product"]):
        return call(activation, out, True)
    (h,) = call("none", attrs["product"], False)
    return reference.epilogue(h, None, True, alpha=1.0, beta=1.0, activation=activation, out=out)


def _keeps(sizes: ProductAxes, activation: str, out: str, product: str) -> bool:
    """Whether an epilogue writes what the backward reads: of one matrix, in the dtype of h, and for GELU of columns in eights."""
    batch, _rows, columns, _inner = sizes.sizes
    return batch == 1 and out == product and (activation == "relu" or columns % 8 == 0)


def _is_in_epilogue(bias: Array | None, beta: float, sizes: ProductAxes) -> bool:
    """Whether cuBLASLt adds the bias itself: one entry for each column of the result, and no factor."""
    return bias is not None and beta == 1.0 and sizes.bias(bias.shape) in ("columns", "nothing")


def _called(
    a: Array,
    b: Array,
    bias: Array | None,
    sizes: ProductAxes,
    device: Device,
    activation: str,
    out: str,
    saves: bool,
    **attrs: Any,
) -> list[Array]:
    in_epilogue = _is_in_epilogue(bias, attrs["beta"], sizes)
    plan = product_plan({"a": a, "b": b}, sizes, device, out=out, **attrs)
    _, rows, columns, _ = sizes.sizes
    pitch = aux_pitch(activation, saves, columns)
    beta = float(attrs["beta"]) if bias is not None and not in_epilogue else 0.0
    plan = replace(plan, epilogue=epilogue_name(activation, saves, in_epilogue), aux_pitch=pitch, beta=beta)
    if found := CHOICES.algorithm(device.arch, plan_name(plan)):
        plan = plan.with_algorithm(*found)
    more = [] if bias is None else [_bias(bias, sizes, out, in_epilogue)]
    results = [jax.ShapeDtypeStruct(sizes.result, np.dtype(out))]
    if saves:
        results.append(saved_array(activation, rows, columns, np.dtype(out)))
    scratch = jax.ShapeDtypeStruct((plan.workspace,), np.uint8)
    outs = launch(plan, [b, a, *more], [*results, scratch])[:-1]
    if saves and activation == "relu":
        outs[1] = unbatched.unpacked(outs[1], (rows, columns))
    return [outs[0], *(saved.reshape(sizes.result) for saved in outs[1:])]


def _bias(bias: Array, sizes: ProductAxes, out: str, in_epilogue: bool) -> Array:
    _, _, columns, _ = sizes.sizes
    if in_epilogue:
        return jnp.broadcast_to(bias.reshape(-1), (columns,)).astype(out)
    return jnp.broadcast_to(bias, sizes.result).astype(out)


def product_plan(
    operands: Mapping[str, Any],
    sizes: ProductAxes,
    device: Device,
    *,
    dimensions: Any,
    out: str,
    precision: Any,
    alpha: float,
    **_: Any,
) -> lt.MatmulPlan:
    """The plan of a call without its epilogue; `operands` have shapes and dtypes."""
    a, b = support.layouts(operands, dimensions)
    if a is None or b is None:
        raise AssertionError("a call that was refused")
    batch, rows, columns, inner = sizes.sizes
    dtype = np.dtype(operands["a"].dtype).name
    return lt.row_major(
        rows,
        columns,
        inner,
        left_transposed=a.transposed,
        right_transposed=not b.transposed,  # stored as columns x inner unless "transposed"
        dtype=dtype,
        compute=compute_of(dtype, precision),
        workspace=lt.workspace_for(device.capability),
        out="" if out == dtype else out,
        alpha=float(alpha),
        batch=batch,
        leading=(_leading(b, columns, inner), _leading(a, rows, inner)),
        strides=(b.stride, a.stride) if batch > 1 else (0, 0),
    )


def _leading(operand: Stored, outer: int, inner: int) -> int:
    """As a plan has it: 0 where rows stand behind one another."""
    return 0 if operand.leading == (outer if operand.transposed else inner) else operand.leading
