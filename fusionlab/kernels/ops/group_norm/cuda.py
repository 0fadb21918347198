"""`group_norm` on a GPU by FusionLab's own kernels: x is read twice forward, x and the cotangent twice backward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ....device import Device
from ...launch.ffi_call import launch
from ...op.arrays import Named, first_given, refuses_dtypes
from ..layer_norm.tiling import DTYPES
from ..passes import KernelPass
from . import reference
from .plan import Images, backward_pass, forward_pass
from .tiling import MAX_BATCH, MAX_CHANNELS

Array = Any


def refuses(shapes: Named, device: Device, *, batch_axes: int, **attrs: Any) -> str | None:
    """Why this backend cannot run a call, or None. `shapes` maps the operands' names to shapes with dtypes."""
    whole = first_given(shapes, "x", "ct")
    if whole is None:  # a tangent that reads neither, which is the reference's
        return None
    if reason := refuses_dtypes(shapes, DTYPES):
        return reason
    if (channels := whole.shape[-1]) > MAX_CHANNELS:
        return f"x has {channels} channels, the kernels take {MAX_CHANNELS} at most"
    if (batch := math.prod(whole.shape[:batch_axes])) > MAX_BATCH:
        return f"there are {batch} images, the kernels take {MAX_BATCH} at most"
    return None


def forward(
    x: Array, scale: Array | None = None, bias: Array | None = None, *, residuals: bool, **attrs: Any
) -> list[Array]:
    """[out], and mean and rstd if residuals are asked for."""
    given = {n: a for n, a in (("x", x), ("scale", scale), ("bias", bias)) if a is not None}
    if not x.size:
        return reference.forward(**given, residuals=residuals, **attrs)
    one = forward_pass(_images(x, {n: a.dtype.name for n, a in given.items()}, attrs), attrs["epsilon"], residuals)
    statistic = jax.ShapeDtypeStruct((*x.shape[: attrs["batch_axes"]], attrs["groups"]), jnp.float32)
    return list(
        _run(one, given, {"out": jax.ShapeDtypeStruct(x.shape, x.dtype), "mean": statistic, "rstd": statistic}).values()
    )


def cotangent(saved: Named, ct: Array, wanted: tuple[str, ...], shardings: Named, **attrs: Any) -> list[Array]:
    """The gradients of the slots wanted, each of its operand's dtype. Sums are in float32, always in the same order, rounded once.

    With bias alone wanted of a norm without an activation there is no norm to go through, and it is XLA's code.
    """
    if not ct.size or "x" not in saved:
        return reference.cotangent(saved, ct, wanted, shardings, **attrs)
    as_given: dict[str, str] = dict(zip(attrs["present"], attrs["dtypes"], strict=True))
    types = {n: jax.ShapeDtypeStruct(ct.shape if n == "x" else ct.shape[-1:], as_given[n]) for n in wanted}
    grads = _run(backward_pass(_images(ct, as_given, attrs), wanted), {**saved, "ct": ct}, types)
    return [grads[slot] for slot in wanted]


def _images(x: Array, dtypes: Mapping[str, str], attrs: Named) -> Images:
    """`dtypes` are those of the operands."""
    (*rows, channels), batch_axes = x.shape, attrs["batch_axes"]
    batch, positions = math.prod(rows[:batch_axes]), math.prod(rows[batch_axes:])
    vectors = tuple(sorted((slot, dtype) for slot, dtype in dtypes.items() if slot != "x"))
    return Images(batch, positions, channels, attrs["groups"], x.dtype.name, attrs["activation"], vectors)


def _run(one: KernelPass, known: Named, types: Named) -> dict[str, Array]:
    """What a pass gives, without its scratch."""
    return dict(zip(one.gives, launch(one.plan, [known[n] for n in one.reads], one.results(types)), strict=False))
