"""`layer_norm` forward by a kernel in Pallas, which Triton compiles: each program normalises whole rows in registers.

It needs neither CuPy nor a compiler beside JAX's own. The backward is the reference's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ....device import Device
from ...op.arrays import first_given, refuses_dtypes
from ...op.implementation import Call, ChoiceKind, ImplementationChoice
from .choosing import LEAST, MEASURED

Array = Any

DTYPES = ("float32", "bfloat16", "float16")
MAX_COLUMNS = 1 << 14  # a row is held in the registers of one block of threads
NARROW = 1 << 10  # columns up to which an RMSNorm in 16 bits takes 0.81 to 0.93 of the CUDA kernel's time
_BLOCK = 1 << 13  # entries that a program holds
_OLDEST = 80  # compute capability of the oldest GPUs that Triton is used for here


def refuses(
    shapes: Mapping[str, Any], device: Device, *, axis: int, gives_sum: bool = False, **attrs: Any
) -> str | None:
    """Why the kernel cannot run a call, or None."""
    x = first_given(shapes, "x")
    if axis != len(x.shape) - 1:
        return f"it normalises over axis {axis} of rank {len(x.shape)}, the kernel over the last one"
    if {"shift", "residual"} & set(shapes) or gives_sum:
        return "it adds up a shift or a residual first, which the kernel does not"
    if reason := refuses_dtypes(shapes, DTYPES):
        return reason
    if x.shape[-1] > MAX_COLUMNS:
        return f"rows have {x.shape[-1]} entries, the kernel takes {MAX_COLUMNS} at most"
    return "x is empty: there is nothing to compute" if 0 in x.shape else None


def refuses_device(device: Device) -> str | None:
    """Why the kernel cannot run on a device, or None."""
    if device.platform != "cuda":
        return f"needs a CUDA device, this is {device}"
    if device.arch and device.capability < _OLDEST:
        return f"{device.arch} is older than sm_{_OLDEST}"
    return None


def why_taken(call: Call, found: ImplementationChoice) -> str:
    """Why the kernel runs a call that it can run, in place of what was found for it; "" where that runs."""
    x = call.shapes["x"]
    if found.kind is ChoiceKind.DEVICE and call.device.arch in MEASURED and math.prod(x.shape) >= LEAST:
        return f"measured faster than XLA's code (benchmarks norms --each); the CUDA kernel cannot run: {found.reason}"
    narrow = call.attrs["kind"] == "rms" and x.dtype.itemsize == 2 and x.shape[-1] <= NARROW
    if found.kind is ChoiceKind.CHOSEN and narrow:
        return f"for rows of up to {NARROW} entries measured faster than the CUDA kernel (benchmarks norms --each)"
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
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    columns = x.shape[-1]
    rows = math.prod(x.shape[:-1])
    width = pl.next_power_of_2(columns)
    height = math.gcd(rows, max(1, _BLOCK // width))  # a power of 2 that divides the rows
    vectors = [v for v in (scale, bias) if v is not None]
    centred = kind == "layer"

    def kernel(*refs: Any) -> None:
        x_ref, *vector_refs, out_ref = refs[: 2 + len(vectors)]
        mine = pl.ds(pl.program_id(0) * height, height)
        inside = jnp.arange(width) < columns
        block = (mine, pl.ds(0, width))
        mask = jnp.broadcast_to(inside[None, :], (height, width))
        values = triton.load(x_ref.at[block], mask=mask, other=0.0).astype(jnp.float32)
        mean = jnp.sum(values, axis=1) / columns if centred else jnp.zeros(height, jnp.float32)
        moved = jnp.where(mask, values - mean[:, None], 0.0)
        rstd = jax.lax.rsqrt(jnp.sum(moved * moved, axis=1) / columns + epsilon)
        result = moved * rstd[:, None]
        loaded = iter(
            [triton.load(v.at[pl.ds(0, width)], mask=inside, other=0.0).astype(jnp.float32) for v in vector_refs]
        )
        result = result * next(loaded)[None, :] if scale is not None else result
        result = result + next(loaded)[None, :] if bias is not None else result
        triton.store(out_ref.at[block], result.astype(out_ref.dtype), mask=mask)
        kept = (mean, rstd) if centred else (rstd,)
        for ref, statistic in zip(refs[2 + len(vectors) :], kept, strict=False):
            triton.store(ref.at[mine], statistic)

    statistics = [jax.ShapeDtypeStruct((rows,), jnp.float32)] * ((1 + centred) * residuals)
    call = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((rows, columns), x.dtype), *statistics],
        grid=(rows // height,),
        compiler_params=triton.CompilerParams(num_warps=max(1, min(16, height * width // 512))),
        name=f"{kind}_norm",
    )
    out, *kept = call(x.reshape(rows, columns), *vectors)
    return [out.reshape(x.shape), *(a.reshape(x.shape[:-1]) for a in kept)]
