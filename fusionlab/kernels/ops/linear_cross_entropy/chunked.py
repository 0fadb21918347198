""" "xla_chunked": a loop over chunks of rows, each of which makes all that its logits are needed for.

The arithmetic is that of rows.py. What is summed over rows, the gradients of w and bias, is added up in A; XLA adds to it in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ....graph.dtypes import arithmetic_dtype
from ...op.arrays import Named
from . import reference, rows
from .halves import factor, gradients, halves
from .settings import Settings

Array = Any

# Bytes of the logits of a chunk, in A, on a CPU and elsewhere. On a CPU longer chunks take more time as well as more memory.
MEMORY_ON_A_CPU, MEMORY = 1 << 26, 1 << 28
_ALIGNED = 8  # rows of a chunk are a multiple of
_SUMMED = ("w", "bias")


def chunks(shape: tuple[int, ...], size: int, form: Settings) -> tuple[int, int]:
    """(number of chunks, rows of each) of x with this shape and a vocabulary of `size`."""
    count = math.prod(shape[:-1])
    memory = MEMORY_ON_A_CPU if form.device is not None and form.device.platform == "cpu" else MEMORY
    most = form.chunk or max(memory // (size * arithmetic_dtype(form.logits_dtype).itemsize), 1)
    number = -(-count // most)
    if number <= 1:
        return 1, count
    each = -(-count // number)
    return number, each if form.chunk else -(-each // _ALIGNED) * _ALIGNED


def forward(
    x: Array,
    w: Array,
    labels: Array,
    bias: Array | None = None,
    weights: Array | None = None,
    *,
    residuals: bool,
    **attrs: Any,
) -> list[Array]:
    """As the reference gives it."""
    form = Settings.of(attrs)
    lift, scaled = reference.lifted(weights, form) if residuals and weights is not None else (1, None)
    known = halves(x, w, {} if scaled is None else {"loss": scaled}, form)

    def step(part: dict[str, Array]) -> dict[str, Array]:
        def pulled(of: rows.Logits, top: Array, mass: Array) -> dict[str, Array]:
            given = {"x": part["x"], "top": top, "mass": mass}
            return gradients(known, of, given, w, {"loss": part["weights"]}, tuple(form.gradients), form)

        found = rows.results(part["x"], w, part["labels"], bias, form, pulled if "weights" in part else None)
        return found | ({"x": reference.kept(found["x"], "x", form)} if "x" in found else {})

    given = {"x": x, "labels": labels} | ({} if scaled is None else {"weights": scaled})
    found = by_chunks(step, given, w, x.shape, form)
    return reference.finished(found, weights, {"x": lift, "bias": lift, "w": lift * factor(known)}, residuals, form)


def cotangent(saved: Named, ct: Any, wanted: tuple[str, ...], shardings: Named, **attrs: Any) -> list[Array]:
    """As the reference gives it; gradients that were made forward are only multiplied."""
    form = Settings.of(attrs)

    def of_rows(of_loss: Array | None, of_lse: Array | None, slots: tuple[str, ...]) -> dict[str, Array]:
        cotangents = {name: a for name, a in (("loss", of_loss), ("lse", of_lse)) if a is not None}
        known = halves(saved["x"], saved["w"], cotangents, form)

        def step(part: dict[str, Array]) -> dict[str, Array]:
            of = rows.logits(part["x"], saved["w"], part["labels"], saved.get("bias"), form)
            own = {name: part[name] for name in cotangents}
            return gradients(known, of, part, saved["w"], own, slots, form)

        given = {name: saved[name] for name in ("x", "labels", "top", "mass")} | cotangents
        found = by_chunks(step, given, saved["w"], saved["x"].shape, form)
        return found | ({"w": found["w"] * factor(known)} if "w" in found else {})

    return reference.pulled_back(saved, ct, wanted, form, of_rows)


def by_chunks(
    step: Callable[[dict[str, Array]], dict[str, Array]],
    given: Mapping[str, Array],
    w: Array,
    shape: tuple[int, ...],
    form: Settings,
) -> dict[str, Array]:
    """`step` of all rows: the gradients of w and bias added up, all else by row. `given` has entries for each row in front."""
    number, each = chunks(shape, w.shape[0 if form.transposed else 1], form)
    lead, count = shape[:-1], math.prod(shape[:-1])
    parts = {name: _cut(a, len(lead), number, each, 1 if name == "mass" else 0) for name, a in given.items()}
    kinds = jax.eval_shape(lambda given: step({name: a[0] for name, a in given.items()}), parts)
    zeros = {
        slot: jnp.zeros_like(w, shape=kinds[slot].shape, dtype=kinds[slot].dtype) for slot in _SUMMED if slot in kinds
    }

    def body(sums: dict[str, Array], part: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        found = step(part)
        sums = {name: total + found.pop(name) for name, total in sums.items()}
        return sums, found

    sums, found = lax.scan(body, zeros, parts)
    return sums | {name: _joined(a, lead, count) for name, a in found.items()}


def _cut(a: Array, lead: int, number: int, each: int, filling: int) -> Array:
    """An array with `lead` axes of rows in front as number x each x the rest; rows that are missing are made of `filling`."""
    rest = a.shape[lead:]
    flat = a.reshape(-1, *rest)
    if missing := number * each - flat.shape[0]:
        flat = jnp.pad(flat, [(0, missing), *((0, 0) for _ in rest)], constant_values=filling)
    return flat.reshape(number, each, *rest)


def _joined(a: Array, lead: tuple[int, ...], count: int) -> Array:
    """The chunks of an array with one entry for each row, with the axes of rows that the call has."""
    return a.reshape(-1, *a.shape[2:])[:count].reshape(*lead, *a.shape[2:])
