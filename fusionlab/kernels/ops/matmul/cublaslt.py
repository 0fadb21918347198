"""`matmul` by cuBLASLt: one call for the product and its epilogue.

A bias along the columns is the epilogue's. One along the rows, or with a factor of its own, is the matrix C of beta C: it is written out
in the shape of the result first, which costs writing and reading that once. The backward's products are XLA's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ....device import Device
from ...launch import cublaslt as lt
from ...op.arrays import Named
from ..gemm_epilogue import reference as unbatched
from ..gemm_epilogue.cublaslt import aux_pitch, compute_of, epilogue_name, run, saved_array
from . import reference, support
from .axes import ProductAxes, Stored

Array = Any


def refuses(shapes: Named, device: Device, **attrs: Any) -> str | None:
    """Why this backend cannot run a call, or None."""
    found = support.library(shapes, device, **attrs)
    return found and found.sentence


def forward(a: Array, b: Array, bias: Array | None = None, *, residuals: bool, **attrs: Any) -> list[Array]:
    """[out], and the activation's residual if asked for and if it has one: one call.

    Where its epilogue cannot write what is kept for the backward, the call makes h, and what follows is jnp code.
    """
    activation, out, product = attrs["activation"], attrs["out"], attrs["product"]
    sizes = ProductAxes.of(a.shape, b.shape, attrs["dimensions"])
    saves = residuals and activation != "none"
    if not saves or _keeps(sizes, activation, out, product):
        return _called(a, b, bias, sizes, saves, **attrs)
    (h,) = _called(a, b, bias, sizes, False, **attrs | {"activation": "none", "out": product})
    return reference.epilogue(h, None, True, alpha=1.0, beta=1.0, activation=activation, out=out)


def _keeps(sizes: ProductAxes, activation: str, out: str, product: str) -> bool:
    """Whether an epilogue writes what the backward reads: of one matrix, in the dtype of h, and for GELU of columns in eights."""
    batch, _rows, columns, _inner = sizes.sizes
    return batch == 1 and out == product and (activation == "relu" or columns % 8 == 0)


def _is_in_epilogue(bias: Array | None, beta: float, sizes: ProductAxes) -> bool:
    """Whether cuBLASLt adds the bias itself: one entry for each column of the result, and no factor."""
    return bias is not None and beta == 1.0 and sizes.bias(bias.shape) in ("columns", "nothing")


def _called(a: Array, b: Array, bias: Array | None, sizes: ProductAxes, saves: bool, **attrs: Any) -> list[Array]:
    activation, out, device = attrs["activation"], attrs["out"], attrs["device"]
    in_epilogue = _is_in_epilogue(bias, attrs["beta"], sizes)
    plan = product_plan({"a": a, "b": b}, sizes, **attrs)
    _, rows, columns, _ = sizes.sizes
    pitch = aux_pitch(activation, saves, columns)
    beta = float(attrs["beta"]) if bias is not None and not in_epilogue else 0.0
    plan = replace(plan, epilogue=epilogue_name(activation, saves, in_epilogue), aux_pitch=pitch, beta=beta)
    more = [] if bias is None else [_bias(bias, sizes, out, in_epilogue)]
    results = [jax.ShapeDtypeStruct(sizes.result, np.dtype(out))]
    if saves:
        results.append(saved_array(activation, rows, columns, np.dtype(out)))
    outs = run(plan, device, [b, a, *more], results)
    if saves and activation == "relu":
        outs[1] = unbatched.unpacked(outs[1], (rows, columns))
    return [outs[0], *(saved.reshape(sizes.result) for saved in outs[1:])]


def _bias(bias: Array, sizes: ProductAxes, out: str, in_epilogue: bool) -> Array:
    _, _, columns, _ = sizes.sizes
    if in_epilogue:
        return jnp.broadcast_to(bias.reshape(-1), (columns,)).astype(out)
    return jnp.broadcast_to(bias, sizes.result).astype(out)


def product_plan(operands: Named, sizes: ProductAxes, *, device: Device, out: str, **attrs: Any) -> lt.MatmulPlan:
    """The plan of a call without its epilogue; `operands` have shapes and dtypes."""
    a, b = support.layouts(operands, attrs["dimensions"])
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
        compute=compute_of(dtype, attrs["precision"]),
        workspace=lt.workspace_for(device.capability),
        out="" if out == dtype else out,
        alpha=float(attrs["alpha"]),
        batch=batch,
        leading=(_leading(b, columns, inner), _leading(a, rows, inner)),
        strides=(b.stride, a.stride) if batch > 1 else (0, 0),
    )


def _leading(operand: Stored, outer: int, inner: int) -> int:
    """As a plan has it: 0 where rows stand behind one another."""
    return 0 if operand.leading == (outer if operand.transposed else inner) else operand.leading
