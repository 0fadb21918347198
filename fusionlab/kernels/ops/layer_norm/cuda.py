"""`layer_norm` on a GPU by kernels of our own: one pass forward, and one backward with every gradient."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ....device import Device
from ...launch.ffi_call import launch
from ...op.arrays import first_given, refuses_dtypes
from ..geometry import GRID_X
from . import reference
from .plan import COTANGENTS, NormLaunch, RowPass, adds_up, backward_passes, forward_plan
from .tiling import DTYPES, MAX_COLUMNS

Array = Any

_VECTORS = ("scale", "bias", "shift")
WHOLE = ("x", "sum", "ct", "ct_sum")  # operands of the shape of x


def refuses(shapes: Mapping[str, Any], device: Device, *, axis: int, role: str = "call", **attrs: Any) -> str | None:
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
    kind: str,
    epsilon: float,
    gives_sum: bool,
    **attrs: Any,
) -> list[Array]:
    """[out], the sum if the call gives it or if it is saved, and mean (LayerNorm alone) and rstd if residuals are asked for."""
    vectors = {n: v for n, v in (("shift", shift), ("scale", scale), ("bias", bias)) if v is not None}
    if not x.size:
        given = {"x": x, "scale": scale, "bias": bias, "shift": shift, "residual": residual}
        numbers = {"kind": kind, "epsilon": epsilon, "gives_sum": gives_sum}
        return reference.forward(**given, residuals=residuals, **numbers, **attrs)  # pyright: ignore[reportArgumentType]
    norm = _norm(x, kind, {n: v.dtype.name for n, v in vectors.items()})
    sums = gives_sum or (residuals and residual is not None)
    plan = forward_plan(norm, epsilon, residual is not None, sums, residuals)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    results = [like, *([like] if sums else ())]
    if residuals:
        results += [jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32)] * len(norm.statistics)
    return launch(plan, [x, *([] if residual is None else [residual]), *vectors.values()], results)


def cotangent(
    saved: Mapping[str, Array],
    ct: Any,
    wanted: tuple[str, ...],
    shardings: Mapping[str, Any],
    *,
    kind: str,
    dtypes: tuple[str, ...],
    present: tuple[str, ...],
    **attrs: Any,
) -> list[Array]:
    """The gradients of the slots wanted, each of its operand's dtype. Sums are in float32, always in the same order, rounded once.

    The gradients of x and residual are one array. Without a cotangent of out, or with bias alone wanted, there is no norm to go through,
    and it is XLA's code. The cotangent of out may be a tuple of arrays, whose sum it is.
    """
    cts = dict(ct) if isinstance(ct, Mapping) else {"out": ct}
    terms = _terms(cts)
    if not terms or not terms[0].size or set(wanted) == {"bias"}:
        given = {"kind": kind, "dtypes": dtypes, "present": present, **attrs}
        whole = {**cts, "out": functools.reduce(jax.lax.add, terms)} if terms else cts
        return reference.cotangent(saved, whole, wanted, shardings, **given)
    as_given: dict[str, str] = dict(zip(present, dtypes, strict=True))
    norm = _norm(terms[0], kind, as_given)
    slots = tuple(dict.fromkeys(map(_gradient_slot, wanted)))
    if not adds_up(norm, slots, "sum" in cts, len(terms)):
        terms = (functools.reduce(jax.lax.add, terms),)
    operands = _backward_operands(norm, saved, cts, terms)
    passes = backward_passes(norm, slots, "sum" in cts, "shift" in operands, len(terms))
    gradients = _run(passes, operands, as_given)
    return [gradients[_gradient_slot(slot)] for slot in wanted]


def _terms(cts: Mapping[str, Any]) -> tuple[Array, ...]:
    """The arrays whose sum the cotangent of out is; none where there is none."""
    if "out" not in cts:
        return ()
    return cts["out"] if isinstance(cts["out"], tuple) else (cts["out"],)


def _gradient_slot(slot: str) -> str:
    """The slot whose gradient is this one's too."""
    return "x" if slot == "residual" else slot


def _backward_operands(
    norm: NormLaunch, saved: Mapping[str, Array], cts: Mapping[str, Any], terms: tuple[Array, ...]
) -> dict[str, Array]:
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


def _run(passes: Sequence[RowPass], operands: Mapping[str, Array], dtypes: Mapping[str, str]) -> dict[str, Array]:
    """The gradients that passes make, one after another: a later one may read the gradient of x."""
    found, x = dict(operands), operands["x"]
    gradients: dict[str, Array] = {}
    for row_pass in passes:
        types = [
            jax.ShapeDtypeStruct(x.shape if s == "x" else x.shape[-1:], dtypes.get(s, x.dtype)) for s in row_pass.grads
        ]
        types += [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in row_pass.scratch]
        results = launch(row_pass.plan, [found[name] for name in row_pass.reads], types)
        gradients |= zip(row_pass.grads, results, strict=False)
        found |= {"dx": gradients["x"]} if "x" in gradients else {}
    return gradients


def _norm(x: Array, kind: str, dtypes: Mapping[str, str]) -> NormLaunch:
    *rows, columns = x.shape
    vectors = tuple(sorted((slot, dtype) for slot, dtype in dtypes.items() if slot in _VECTORS))
    return NormLaunch(kind, math.prod(rows), columns, x.dtype.name, vectors)
