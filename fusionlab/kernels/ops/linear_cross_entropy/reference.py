"""The meaning of `linear_cross_entropy` in plain jnp, with the logits of all rows at once: rows.py has the arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ....graph.dtypes import arithmetic_dtype
from ...op.arrays import Named
from . import rows
from .settings import GRADIENTS, Settings

Array = Any


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
    """The loss of each row, or their weighted sum; the further results; and what is saved if residuals are asked for."""
    form = Settings.of(attrs)
    factor, scaled = lifted(weights, form) if residuals and weights is not None else (1, None)

    def pulled(of: rows.Logits, top: Array, mass: Array) -> dict[str, Array]:
        return rows.gradients(rows.through(of, top, mass, scaled, None, form), x, w, tuple(form.gradients), form)

    found = rows.results(x, w, labels, bias, form, None if scaled is None else pulled)
    return finished(found, weights, dict.fromkeys(GRADIENTS, factor), residuals, form)


def finished(
    found: dict[str, Array], weights: Array | None, factors: Mapping[str, Any], residuals: bool, form: Settings
) -> list[Array]:
    """The results and residuals of a call, of all that is known of its rows; the gradients among it are multiplied by their factors."""
    if weights is None:
        found["out"] = found["loss"]
    else:
        axes = form.mesh_axes("m")
        found["out"] = weighted(weights, found["loss"], form)
        found |= {slot: found[slot] * factors[slot] for slot in form.gradients if slot in found}
        found |= _over_devices(found, axes, form)
        made = {slot: found[slot] for slot in form.gradients if slot in found}
        found |= {GRADIENTS[slot]: a.astype(form.dtype_of(slot)) if form.rounded else a for slot, a in made.items()}
    return [found[name] for name in (*form.results, *(form.residuals if residuals else ()))]


def _together(gradients: Sequence[Array], here: bool) -> Sequence[Array]:
    """The gradients, all made before one is used, if that is to be said `here`: where they are multiplied, and with several devices before
    they are summed, since XLA scatters only what it sums directly before it is split.

    On a GPU the gradient of w, which nothing waits for, would be made last, and keep the cotangents of all logits until then.
    """
    return lax.optimization_barrier(gradients) if here else gradients


def _over_devices(found: Mapping[str, Array], axes: Any, form: Settings) -> dict[str, Array]:
    """The sums over rows, over the devices that have some of them; and the gradient of x, over those with parts of the vocabulary."""
    of_x = form.mesh_axes("v")
    summed = lax.psum({name: found[name] for name in ("out", "bias") if name in found}, axes) if axes else {}
    over = {slot: by for slot, by in (("x", of_x), ("w", axes)) if slot in found}
    if not any(over.values()):
        return summed
    parts = _together([_sent(found[slot], by, form) for slot, by in over.items()], form.on_a_gpu)
    return summed | {
        slot: lax.psum(part, by).astype(found[slot].dtype) if by else part
        for part, (slot, by) in zip(parts, over.items(), strict=True)
    }


def _sent(gradient: Array, axes: Any, form: Settings) -> Array:
    """A product in the dtype in which the program's own are summed over devices; in float16 the small numbers of a mean would vanish."""
    return gradient.astype(form.logits_dtype) if axes and form.logits_dtype == "bfloat16" else gradient


def weighted(weights: Array, loss: Array, form: Settings) -> Array:
    """The sum of weights * loss; if they mask, a row of weight 0 counts nothing whatever its loss is, NaN included."""
    weights = weights.astype(loss.dtype)
    return jnp.sum(weights * (jnp.where((weights == 0) & ~jnp.isfinite(loss), 0, loss) if form.masked else loss))


def lifted(weights: Array, form: Settings) -> tuple[Any, Array]:
    """(factor, weights / factor): in float16 the gradients of a mean over many rows would vanish."""
    weights = weights.astype(arithmetic_dtype(form.logits_dtype))
    if form.dtype_of("x") != "float16":
        return 1, weights
    factor = jnp.max(jnp.abs(weights), initial=0)
    if axes := form.mesh_axes("m"):
        factor = lax.pmax(factor, axes)
    factor = lax.stop_gradient(jnp.where(jnp.isfinite(factor) & (factor > 0), factor, 1))
    return factor, weights / factor


def tangent(saved: Named, tangents: Named, shape: tuple[int, ...], shardings: Named, **attrs: Any) -> Any:
    """Of each result that has one, a dict where there are several; of the weighted sum by the gradients that were made forward."""
    form, found = Settings.of(attrs), {}
    wide = arithmetic_dtype(form.logits_dtype)
    if form.has_rows:
        found = _of_rows(saved, tangents, form)
    if form.is_scalar:
        pairs = [(saved[name], tangents[slot]) for slot, name in form.gradients.items() if slot in tangents]
        pairs += [(saved["loss"], tangents["weights"])] if "weights" in tangents else []
        found["out"] = functools.reduce(jnp.add, (jnp.sum(a.astype(wide) * t.astype(wide)) for a, t in pairs))
    else:
        found["out"] = found["loss"]
    return found if len(form.results) > 1 else found["out"]


def _of_rows(saved: Named, tangents: Named, form: Settings) -> dict[str, Array]:
    """The tangents of loss and lse by row."""
    if not {"x", "w", "bias"} & set(tangents):
        return dict.fromkeys(("loss", "lse"), jnp.zeros_like(saved["loss"]))
    of, top, mass = recomputed(saved, form)
    s, dh = form.label_smoothing, rows.moved(saved, tangents, of, form)
    p = jnp.exp(of.h - top[..., None]) / mass[..., None]
    lse = jnp.sum(p * dh, axis=-1)
    loss = rows.counts(of, top, mass, form) * lse - (1 - s) * jnp.sum(jnp.where(of.label, dh, 0), axis=-1)
    loss = loss - s / of.size * jnp.sum(dh, axis=-1) if s else loss
    return {"loss": loss, "lse": lse}


def recomputed(saved: Named, form: Settings) -> tuple[rows.Logits, Array, Array]:
    """The logits again, and the statistics that were saved."""
    return rows.logits(saved["x"], saved["w"], saved["labels"], saved.get("bias"), form), saved["top"], saved["mass"]


def cotangent(saved: Named, ct: Any, wanted: tuple[str, ...], shardings: Named, **attrs: Any) -> list[Array]:
    """The gradients wanted, in order: the ones that were made forward, times the cotangent of the sum; of that of a row made now."""
    form = Settings.of(attrs)

    def by_rows(of_loss: Array | None, of_lse: Array | None, slots: tuple[str, ...]) -> dict[str, Array]:
        dh = rows.through(*recomputed(saved, form), of_loss, of_lse, form)
        return rows.gradients(dh, saved["x"], saved["w"], slots, form)

    return pulled_back(saved, ct, wanted, form, by_rows)


def pulled_back(
    saved: Named, ct: Any, wanted: tuple[str, ...], form: Settings, by_rows: Callable[..., dict[str, Array]]
) -> list[Array]:
    """The gradients wanted, in order. `by_rows`: (cotangents of loss and lse by row, or None, slots) -> their gradients in A."""
    cts = dict(ct) if isinstance(ct, Mapping) else {"out": ct}
    found = _of_sum(saved, cts.pop("out"), wanted, form) if form.is_scalar and "out" in cts else {}
    here = _are_made_here(cts, form)
    of_loss = _added(cts.get("loss"), cts.get("out"))
    slots = tuple(slot for slot in wanted if slot != "weights")
    if slots and (of_loss is not None or "lse" in cts):
        for slot, gradient in by_rows(of_loss, cts.get("lse"), slots).items():
            found[slot] = _added(found.get(slot), gradient)
    if "weights" in wanted and "weights" not in found:
        found["weights"] = jnp.zeros_like(saved["loss"])
    gradients = [found[slot].astype(form.dtype_of(slot)) for slot in wanted]
    return list(_together(gradients, here))


def _are_made_here(by_row: Mapping[str, Array], form: Settings) -> bool:
    """Whether, on a GPU, the backward pass keeps gradients together: the forward pass did where it summed those of several devices."""
    return form.on_a_gpu and (bool(by_row) or jax.device_count() == 1)


def _of_sum(saved: Named, ct: Array, wanted: tuple[str, ...], form: Settings) -> dict[str, Array]:
    """The gradients of the weighted sum: those that were made forward, times its cotangent."""
    names, wide = {**form.gradients, "weights": "loss"}, arithmetic_dtype(form.logits_dtype)
    return {slot: _once(ct * saved[names[slot]].astype(wide), slot, form) for slot in wanted}


def _added(first: Any, second: Any) -> Any:
    """The sum of two arrays of which either may be None."""
    return second if first is None else first if second is None else first + second


def _once(gradient: Array, slot: str, form: Settings) -> Array:
    """A gradient that every device has whole, where those of the devices are going to be summed: on one of them, and 0 on the others."""
    axes = form.mesh_axes("v" if slot == "x" else "m") if form.has_rows and slot != "weights" else ()
    return jnp.where(lax.axis_index(axes) == 0, gradient, 0) if axes else gradient
