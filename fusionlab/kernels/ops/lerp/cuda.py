"""`lerp` on a GPU by FusionLab's own kernels: one pass forward, and one backward over the cotangent, whatever is broadcast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ....device import Device
from ...launch.ffi_call import launch
from ...op.arrays import FLOATS, Named, refuses_dtypes
from ..geometry import accumulator
from ..passes import KernelPass
from .axes import MAX_RANK, result_shape
from .plan import backward_passes, forward_plan
from .reference import operand_shapes

Array = Any


def refuses(shapes: Named, device: Device, **attrs: Any) -> str | None:
    """Why this backend cannot run a call, or None. `shapes` may have entries for x, y and w with a shape and a dtype."""
    for slot, shape in shapes.items():
        if len(shape.shape) > MAX_RANK:
            return f"{slot} has rank {len(shape.shape)}, the kernels take {MAX_RANK} at most"
    if reason := refuses_dtypes(shapes, FLOATS):
        return reason
    if len(dtypes := {jnp.dtype(shape.dtype).name for shape in shapes.values()}) > 1:
        return f"the kernels take one dtype, not {' and '.join(sorted(dtypes))}"
    return None


def forward(x: Array, y: Array, w: Array, *, residuals: bool, **_: Any) -> list[Array]:
    """[x + w (y - x)] of arrays of one rank and one dtype that broadcast against each other."""
    shapes = {"x": x.shape, "y": y.shape, "w": w.shape}
    out = jax.ShapeDtypeStruct(result_shape(shapes), x.dtype)
    return launch(forward_plan(shapes, x.dtype.name), [x, y, w], [out])


def cotangent(saved: Named, ct: Array, wanted: tuple[str, ...], shardings: Named, **attrs: Any) -> list[Array]:
    """The gradients of the slots wanted, each of its operand's shape; `broadcast` has the shapes of all three.

    Sums are accumulated in float32 (float64 for float64), always in the same order, and rounded once.
    """
    shapes = operand_shapes(attrs["broadcast"], ct.shape)
    if not ct.size:
        return [jnp.zeros(shapes[slot], ct.dtype) for slot in wanted]
    found = run_passes(backward_passes(shapes, wanted, ct.dtype.name), saved, ct, shapes)
    return [found[slot] for slot in wanted]


def run_passes(
    passes: Iterable[KernelPass], saved: Named, ct: Array, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Array]:
    """The results of the passes, by slot; `shapes` are those of x, y and w."""
    sums: dict[str, Array] = {}
    known = {**saved, "ct": ct}
    types = {slot: jax.ShapeDtypeStruct(shape, ct.dtype) for slot, shape in shapes.items()}
    for one in passes:
        results = one.results(types, accumulator(ct.dtype.name))
        sums |= zip(one.gives, launch(one.plan, [known[name] for name in one.reads], results), strict=False)
    return sums
