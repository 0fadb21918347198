"""`layer_norm` on a GPU by FusionLab's own kernels: one pass forward, and one backward with every gradient."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ....device import Device
from ...launch.ffi_call import launch
from ...op.arrays import Named, first_given, refuses_dtypes
from ..geometry import GRID_X
from ..passes import KernelPass
from . import reference
from .plan import COTANGENTS, NormLaunch, adds_up, backward_passes, forward_plan
from .tiling import DTYPES, MAX_COLUMNS

Array = Any

_VECTORS = ("scale", "bias", "shift")
WHOLE = ("x", "sum", "ct", "ct_sum")  # operands of the shape of x


def refuses(shapes: Named, device: Device, *, axis: int, **attrs: Any) -> str | None:
    """Why this backend cannot run a call, or None. `shapes` maps the operands' names to shapes with dtypes."""
    whole = first_given(shapes, *WHOLE)
    if whole is None:  # a tangent that reads none of them, which is the reference's
        return None
    if axis != len(whole.shape) - 1:
        return f"it normalises over axis {axis} of rank {len(whole.shape)}, the kernels over the last one"
    if reason := refuses_dtypes(shapes, DTYPES):
        return reason
    *rows, columns = whole.shape
    if columns > MAX_COLUMNS:
        return f"rows have {columns} entries, the kernels take {MAX_COLUMNS} at most"
    if math.prod(rows) > GRID_X:
        return f"there are {math.prod(rows)} rows, the kernels take {GRID_X} at most"
    return None


def forward(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    shift: Array | None = None,
    residual: Array | None = None,
    *,
    residuals: bool,
    **attrs: Any,
) -> list[Array]:
    """[out], the sum if the call gives it or if it is saved, and mean (LayerNorm alone) and rstd if residuals are asked for."""
    if not x.size:
        return reference.forward(x, scale, bias, shift, residual, residuals=residuals, **attrs)
    vectors = {n: v for n, v in (("shift", shift), ("scale", scale), ("bias", bias)) if v is not None}
    norm = _norm(x, attrs["kind"], {n: v.dtype.name for n, v in vectors.items()})
    sums = attrs["gives_sum"] or (residuals and residual is not None)
    plan = forward_plan(norm, attrs["epsilon"], residual is not None, sums, residuals)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype)] * (2 if sums else 1)
    if residuals:
        results += [jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32)] * len(norm.statistics)
    return launch(plan, [x, *([] if residual is None else [residual]), *vectors.values()], results)


def cotangent(saved: Named, ct: Any, wanted: tuple[str, ...], shardings: Named, **attrs: Any) -> list[Array]:
    """The gradients of the slots wanted, each of its operand's dtype. Sums are in float32, always in the same order, rounded once.

    The gradients of x and residual are one array. Without a cotangent of out, or if only the bias gradient is wanted, no norm is
    involved, and XLA's code runs. The cotangent of out may be a tuple of arrays to be summed.
    """
    cts = dict(ct) if isinstance(ct, Mapping) else {"out": ct}
    terms = _terms(cts)
    if not terms or not terms[0].size or set(wanted) == {"bias"}:
        whole = {**cts, "out": functools.reduce(jax.lax.add, terms)} if terms else cts
        return reference.cotangent(saved, whole, wanted, shardings, **attrs)
    as_given: dict[str, str] = dict(zip(attrs["present"], attrs["dtypes"], strict=True))
    norm = _norm(terms[0], attrs["kind"], as_given)
    slots = tuple(dict.fromkeys(map(_gradient_slot, wanted)))
    if not adds_up(norm, slots, "sum" in cts, len(terms)):
        terms = (functools.reduce(jax.lax.add, terms),)
    operands = _backward_operands(norm, saved, cts, terms)
    passes = backward_passes(norm, slots, "sum" in cts, "shift" in operands, len(terms))
    gradients = _run(passes, operands, as_given)
    return [gradients[_gradient_slot(slot)] for slot in wanted]


def _terms(cts: Named) -> tuple[Array, ...]:
    """The addends of the cotangent of out; empty if there is no cotangent."""
    if "out" not in cts:
        return ()
    return cts["out"] if isinstance(cts["out"], tuple) else (cts["out"],)


def _gradient_slot(slot: str) -> str:
    """The slot whose gradient is this one's too."""
    return "x" if slot == "residual" else slot


def _backward_operands(norm: NormLaunch, saved: Named, cts: Named, terms: tuple[Array, ...]) -> dict[str, Array]:
    """What the passes read, by their names for it; a sum that was saved has the shift in it."""
    found: dict[str, Array] = {
        **dict(zip(COTANGENTS, terms, strict=False)),
        "x": saved["sum"] if "sum" in saved else saved["x"],
        **{n: saved[n] for n in ("scale", *norm.statistics) if n in saved},
    }
    if "shift" in saved and "sum" not in saved:
        found["shift"] = saved["shift"]
    if "sum" in cts:
        found["ct_sum"] = cts["sum"]
    return found


def _run(passes: Sequence[KernelPass], operands: Named, dtypes: Mapping[str, str]) -> dict[str, Array]:
    """The gradients that passes make, one after another: a later one may read the gradient of x."""
    found, x = dict(operands), operands["x"]
    gradients: dict[str, Array] = {}
    for row_pass in passes:
        shapes = {slot: x.shape if slot == "x" else x.shape[-1:] for slot in row_pass.gives}
        types = {slot: jax.ShapeDtypeStruct(s, dtypes.get(slot, x.dtype)) for slot, s in shapes.items()}
        results = launch(row_pass.plan, [found[name] for name in row_pass.reads], row_pass.results(types))
        gradients |= zip(row_pass.gives, results, strict=False)
        found |= {"dx": gradients["x"]} if "x" in gradients else {}
    return gradients


def _norm(x: Array, kind: str, dtypes: Mapping[str, str]) -> NormLaunch:
    *rows, columns = x.shape
    vectors = tuple(sorted((slot, dtype) for slot, dtype in dtypes.items() if slot in _VECTORS))
    return NormLaunch(kind, math.prod(rows), columns, x.dtype.name, vectors)
