"""`group_norm` on a GPU by kernels of our own: x is read twice forward, x and the cotangent twice backward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ....device import Device
from ...launch.ffi_call import launch
from ...op.arrays import first_given, refuses_dtypes
from ..layer_norm.tiling import DTYPES
from . import reference
from .plan import GroupPass, Images, backward_pass, forward_pass
from .tiling import MAX_BATCH, MAX_CHANNELS

Array = Any


def refuses(
    shapes: Mapping[str, Any], device: Device, *, batch_axes: int, role: str = "call", **attrs: Any
) -> str | None:
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
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    residuals: bool,
    groups: int,
    epsilon: float,
    activation: str,
    batch_axes: int,
    **attrs: Any,
) -> list[Array]:
    """[out], and mean and rstd if residuals are asked for."""
    given = {n: a for n, a in (("x", x), ("scale", scale), ("bias", bias)) if a is not None}
    if not x.size:
        numbers = {"groups": groups, "epsilon": epsilon, "activation": activation, "batch_axes": batch_axes}
        return reference.forward(**given, residuals=residuals, **numbers, **attrs)
    vectors = {n: a.dtype.name for n, a in given.items() if n != "x"}
    group_pass = forward_pass(_images(x, groups, activation, batch_axes, vectors), epsilon, residuals)
    statistic = jax.ShapeDtypeStruct((*x.shape[:batch_axes], groups), jnp.float32)
    return _run(
        group_pass, given, {"out": jax.ShapeDtypeStruct(x.shape, x.dtype), "mean": statistic, "rstd": statistic}
    )


def cotangent(
    saved: Mapping[str, Array],
    ct: Array,
    wanted: tuple[str, ...],
    shardings: Mapping[str, Any],
    *,
    groups: int,
    activation: str,
    batch_axes: int,
    dtypes: tuple[str, ...],
    present: tuple[str, ...],
    **attrs: Any,
) -> list[Array]:
    """The gradients of the slots wanted, each of its operand's dtype. Sums are in float32, always in the same order, rounded once.

    With bias alone wanted of a norm without an activation there is no norm to go through, and it is XLA's code.
    """
    if not ct.size or "x" not in saved:
        numbers = {"groups": groups, "activation": activation, "batch_axes": batch_axes}
        given = {"dtypes": dtypes, "present": present, **numbers, **attrs}
        return reference.cotangent(saved, ct, wanted, shardings, **given)
    as_given: dict[str, str] = dict(zip(present, dtypes, strict=True))
    vectors = {n: dtype for n, dtype in as_given.items() if n != "x"}
    group_pass = backward_pass(_images(ct, groups, activation, batch_axes, vectors), wanted)
    types = {n: jax.ShapeDtypeStruct(ct.shape if n == "x" else ct.shape[-1:], as_given[n]) for n in wanted}
    grads = dict(zip(group_pass.gives, _run(group_pass, {**saved, "ct": ct}, types), strict=True))
    return [grads[slot] for slot in wanted]


def _images(x: Array, groups: int, activation: str, batch_axes: int, vectors: Mapping[str, str]) -> Images:
    *rows, channels = x.shape
    batch, positions = math.prod(rows[:batch_axes]), math.prod(rows[batch_axes:])
    given = tuple(sorted(vectors.items()))
    return Images(batch, positions, channels, groups, x.dtype.name, activation, given)


def _run(group_pass: GroupPass, known: Mapping[str, Array], types: Mapping[str, Any]) -> list[Array]:
    """What a pass gives, without its scratch."""
    results = [
        *(types[n] for n in group_pass.gives),
        *(jax.ShapeDtypeStruct(s, jnp.float32) for s in group_pass.scratch),
    ]
    return launch(group_pass.plan, [known[n] for n in group_pass.reads], results)[: len(group_pass.gives)]
