"""`layer_norm` forward by a kernel in Pallas (Mosaic GPU): each program, one warpgroup, normalises a row that it holds in registers.

It needs neither CuPy nor a compiler other than JAX's own. The backward is the reference's.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ....device import Device
from ....graph.jax_compat import pallas_load
from ...launch.ffi_call import varying_as
from ...op.arrays import first_given, refuses_dtypes
from ...op.implementation import Call, ChoiceKind, ImplementationChoice
from .choosing import LEAST

Array = Any

ARCH = "sm_90"  # where it was tried; Mosaic GPU is for Hopper and what came after
DTYPES = ("float32", "bfloat16", "float16")
MAX_COLUMNS = 1 << 13  # a row is held in the registers of 128 threads
_THREADS = 128  # of a warpgroup
_VECTOR = 8  # entries that a thread reads at once, at most


def refuses(
    shapes: Mapping[str, Any], device: Device, *, axis: int, gives_sum: bool = False, **attrs: Any
) -> str | None:
    """Why the kernel cannot run a call, or None."""
    x = first_given(shapes, "x")
    columns = x.shape[axis]
    if axis != len(x.shape) - 1:
        return f"it normalises over axis {axis} of rank {len(x.shape)}, the kernel over the last one"
    if {"shift", "residual"} & set(shapes) or gives_sum:
        return "it adds up a shift or a residual first, which the kernel does not"
    if reason := refuses_dtypes(shapes, DTYPES):
        return reason
    if columns % _THREADS or columns > MAX_COLUMNS:
        return f"rows have {columns} entries, the kernel takes multiples of {_THREADS} up to {MAX_COLUMNS}"
    return "x is empty: there is nothing to compute" if 0 in x.shape else None


def refuses_device(device: Device) -> str | None:
    """Why the kernel cannot run on a device, or None."""
    if device.platform != "cuda":
        return f"needs a CUDA device, this is {device}"
    return None if device.arch == ARCH else f"{device.arch or device} is not {ARCH}, where alone the kernel was tried"


def missing() -> str | None:
    """The missing requirement of the kernel, or None."""
    here = importlib.util.find_spec("jax.experimental.pallas.mosaic_gpu")
    return None if here else "this JAX has no Pallas for Mosaic GPU: install jax>=0.10"


def why_taken(call: Call, found: ImplementationChoice) -> str:
    """Why this kernel runs a call instead of the implementation chosen so far; "" if it does not."""
    x = call.shapes["x"]
    if found.kind is ChoiceKind.DEVICE and math.prod(x.shape) >= LEAST:
        return f"measured faster than XLA's code (benchmarks norms --each); the CUDA kernel cannot run: {found.reason}"
    whole = call.attrs["kind"] == "rms" or x.shape[-1] % (_THREADS * _VECTOR) == 0
    if found.kind is ChoiceKind.CHOSEN and whole and x.dtype.itemsize == 2:
        return "in 16 bits measured faster than the CUDA kernel (benchmarks norms --each)"
    return ""


def forward(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    residuals: bool,
    kind: str,
    epsilon: float,
    **attrs: Any,
) -> list[Array]:
    """[out], and mean (LayerNorm alone) and rstd, in float32, if residuals are asked for."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    columns, centred = x.shape[-1], kind == "layer"
    rows = math.prod(x.shape[:-1])
    vectors = [v for v in (scale, bias) if v is not None]
    at_once = math.gcd(_VECTOR, columns // _THREADS)
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=at_once)

    def load(ref: Any) -> Array:
        return pallas_load(ref, layout).astype(jnp.float32)

    def kernel(x_ref: Any, *refs: Any) -> None:
        vector_refs, out_ref, kept = refs[: len(vectors)], refs[len(vectors)], refs[len(vectors) + 1 :]
        row = jax.lax.axis_index("row")
        moved = load(x_ref.at[row])
        mean = jnp.sum(moved) / columns
        if centred:
            moved = moved - mean
        rstd = jax.lax.rsqrt(jnp.sum(moved * moved) / columns + epsilon)
        result, given = moved * rstd, list(map(load, vector_refs))
        if scale is not None:
            result = result * given[0]
        if bias is not None:
            result = result + given[-1]
        out_ref[row] = result.astype(out_ref.dtype)
        for ref, statistic in zip(kept, (mean, rstd) if centred else (rstd,), strict=False):
            ref[row] = statistic

    whole = jax.ShapeDtypeStruct((rows, columns), x.dtype)
    statistics = [jax.ShapeDtypeStruct((rows,), jnp.float32)] * ((1 + centred) * residuals)
    operands = x.reshape(rows, columns), *vectors
    types = [varying_as(operands, a) for a in (whole, *statistics)]
    out, *kept = plgpu.kernel(kernel, out_type=types, grid=(rows,), grid_names=("row",))(*operands)
    return [out.reshape(x.shape), *(a.reshape(x.shape[:-1]) for a in kept)]
