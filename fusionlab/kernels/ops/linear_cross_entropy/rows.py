"""The arithmetic of some rows of `linear_cross_entropy`: of all of them in the reference, of a chunk in "xla_chunked".

Letters: x is *R E; w is E V, or V E where it is transposed; labels and all that is kept of a row are *R; logits h are *R V. All but the
products is computed in A, float32, or float64 for logits in float64.

    h = softcap * tanh(scale * (x @ w + bias) / softcap), and fill from entry `classes` on
    lse = top + log(mass), top = max(h), mass = sum(exp(h - top))
    loss = lse - (1 - s) * h[label] - s / V * sum(h) + z * lse^2
    dh = p * (1 + 2 z lse) * dloss + p * dlse - (s / V + (1 - s) * [label]) * dloss, with p = exp(h - top) / mass

The loss is computed of h - top, where the large addends cancel before they are rounded. Of a label outside of [0, V) nothing is picked, so
that h[label] is 0; or, of one that is "drop"ped, lse counts s times, as where a product with `one_hot` has the sum of both.

Where each device holds a part of the vocabulary or of the rows (`Settings.across`), the sums run over the devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ....graph.dtypes import arithmetic_dtype
from ...op.arrays import Named, explicit_sharding, for_product
from .settings import Settings

Array = Any
BY_ROW = ("top", "mass", "loss", "lse")  # what is known of a row whatever is asked


class Logits(NamedTuple):
    """Logits of some rows.

    Attributes:
      h: *R V, in A.
      tanh: of the softcap, *R V, in A; None without one.
      label: whether an entry is the label's, bool *R V.
      counts: whether an entry is one of the classes and not filled, bool V; None where all are.
      inside: whether a label is in [0, V), bool *R; None where all count as such.
      size: V, over all devices.
    """

    h: Array
    tanh: Array | None
    label: Array
    counts: Array | None
    inside: Array | None
    size: int


def _sides(form: Settings) -> tuple[int, int]:
    """The axes of w along E and along V."""
    return (1, 0) if form.transposed else (0, 1)


def logits(x: Array, w: Array, labels: Array, bias: Array | None, form: Settings) -> Logits:
    """The product in the dtype of the logits, and all else in A."""
    return of_product(product(x, w, form), labels, bias, form)


def product(x: Array, w: Array, form: Settings) -> Array:
    """x @ w in the dtype of the logits."""
    return _product(x, w, ((x.ndim - 1,), _sides(form)[:1]), form, form.logits_dtype)


def of_product(h: Array, labels: Array, bias: Array | None, form: Settings) -> Logits:
    """The logits of the product, *R V."""
    h = h.astype(arithmetic_dtype(h.dtype))
    if bias is not None:
        h = h + bias.astype(h.dtype)
    h = h if form.scale == 1 else form.scale * h
    tanh = None
    if form.softcap is not None:
        tanh = jnp.tanh(h / form.softcap)
        h = form.softcap * tanh
    counts = None if form.classes is None else _entries(h.shape[-1:], jnp.int32, form) < form.classes
    h = h if counts is None else jnp.where(counts, h, form.fill)
    label, inside, size = _labelled(h, labels, form)
    return Logits(h, tanh, label, counts, inside, size)


def _entries(shape: tuple[int, ...], dtype: Any, form: Settings) -> Array:
    """The numbers of the entries of the last axis, among those of all devices."""
    entries = lax.broadcasted_iota(dtype, shape, len(shape) - 1)
    axes = form.mesh_axes("v")
    return entries + lax.axis_index(axes).astype(dtype) * shape[-1] if axes else entries


def _through_logits(dh: Array, of: Logits, form: Settings) -> Array:
    """The derivative of the logits by the product, times a tangent or a cotangent."""
    dh = dh if of.tanh is None else dh * (1 - jnp.square(of.tanh))
    dh = dh if form.scale == 1 else form.scale * dh
    return dh if of.counts is None else jnp.where(of.counts, dh, 0)


def _product(a: Array, b: Array, over: Any, form: Settings, dtype: Any, like: Array | None = None) -> Array:
    """The sum over these axes of each, in `dtype`; sharded as `like` is, where that is part of its type."""
    sharding = None if like is None else explicit_sharding(like)
    a, b = for_product(a, b, dtype, form.device)
    how = {"precision": form.precision, "preferred_element_type": dtype, "out_sharding": sharding}
    return lax.dot_general(a, b, (over, ((), ())), **how)


def _labelled(h: Array, labels: Array, form: Settings) -> tuple[Array, Array | None, int]:
    """Which entry is that of the label, which labels are in range, and V."""
    axes, part = form.mesh_axes("v"), h.shape[-1]
    size = part * (lax.axis_size(axes) if axes else 1)
    # Of 64 bits a label may be far out of range; no narrower one is, unless it has no sign, and then it wraps to a number below zero.
    labels = labels.astype(jnp.int64 if labels.dtype.itemsize == 8 else jnp.int32)
    inside = (labels >= 0) & (labels < size)
    if form.out_of_range in ("clip", "promise_in_bounds"):
        labels = jnp.clip(labels, 0, size - 1)
    if form.out_of_range == "clip":
        inside = None
    return _entries(h.shape, labels.dtype, form) == labels[..., None], inside, size


def statistics(of: Logits, form: Settings) -> tuple[Array, Array]:
    """(top, mass) of each row; top is 0 where no logit is finite or the largest is infinite, as `logsumexp` has it."""
    axes = form.mesh_axes("v")
    top = jnp.max(lax.stop_gradient(of.h), axis=-1)
    top = lax.pmax(top, axes) if axes else top
    top = lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    mass = jnp.sum(jnp.exp(of.h - top[..., None]), axis=-1)
    return top, lax.psum(mass, axes) if axes else mass


def losses(of: Logits, top: Array, mass: Array, form: Settings) -> dict[str, Array]:
    """lse and loss of each row."""
    s, axes, log_mass = form.label_smoothing, form.mesh_axes("v"), jnp.log(mass)
    below, lse = of.h - top[..., None], top + log_mass
    picked = jnp.sum(jnp.where(of.label, below, 0), axis=-1)
    total = jnp.sum(below, axis=-1) if s else jnp.zeros_like(picked)
    if axes:
        picked, total = lax.psum((picked, total), axes)
    loss = log_mass - (1 - s) * _picked(picked, of, top, form)
    if form.out_of_range == "drop" and of.inside is not None:
        loss = jnp.where(of.inside, loss, s * log_mass)
    loss = loss - (s / of.size) * total if s else loss
    loss = loss + form.z_loss * jnp.square(lse) if form.z_loss else loss
    return {"loss": loss, "lse": lse}


def _picked(picked: Array, of: Logits, top: Array, form: Settings) -> Array:
    """The label's logit less top, of one in range; by `out_of_range`, of any other."""
    if of.inside is None or form.out_of_range in ("drop", "promise_in_bounds"):
        return picked
    return jnp.where(of.inside, picked, -top if form.out_of_range == "zero" else jnp.nan)


def results(
    x: Array,
    w: Array,
    labels: Array,
    bias: Array | None,
    form: Settings,
    pulled: Callable[..., dict[str, Array]] | None,
) -> dict[str, Array]:
    """All that is known of some rows, by name; and what `pulled` makes of their logits and statistics: gradients, by slot."""
    of = logits(x, w, labels, bias, form)
    top, mass = statistics(of, form)
    found = {"top": top, "mass": mass, **losses(of, top, mass, form)}
    if "argmax" in form.also:
        found["argmax"] = best(of, form)
    return found if pulled is None else found | pulled(of, top, mass)


def best(of: Logits, form: Settings) -> Array:
    """The number of the largest logit of each row, int32: the first of equal ones, or of NaN, as `jnp.argmax` has it."""
    axes = form.mesh_axes("v")
    found = jnp.argmax(of.h, axis=-1).astype(jnp.int32)
    if not axes:
        return found
    largest = jnp.take_along_axis(of.h, found[..., None], axis=-1)[..., 0]
    # A NaN is the largest of all.
    largest = jnp.where(jnp.isnan(largest), jnp.inf, largest), jnp.isnan(largest)
    found = found + (lax.axis_index(axes) * of.h.shape[-1]).astype(jnp.int32)
    nan, most = lax.pmax(largest[1].astype(jnp.int32), axes), lax.pmax(largest[0], axes)
    first = jnp.where(nan == 1, largest[1], largest[0] == most)
    return lax.pmin(jnp.where(first, found, jnp.iinfo(jnp.int32).max), axes)


def through(of: Logits, top: Array, mass: Array, of_loss: Array | None, of_lse: Array | None, form: Settings) -> Array:
    """The cotangent of x @ w + bias, in A, of those of the loss and the lse of each row, one of which may be None."""
    p = jnp.exp(of.h - top[..., None]) / mass[..., None]
    if of_loss is None:
        dh = p * (jnp.zeros_like(top) if of_lse is None else of_lse)[..., None]
    else:
        of_p = counts(of, top, mass, form) * of_loss
        of_p = of_p if of_lse is None else of_p + of_lse
        dh = p * of_p[..., None] - of_loss[..., None] * _targets(of, form)
    return _through_logits(dh, of, form)


def _targets(of: Logits, form: Settings) -> Array:
    """How much of each logit the loss takes off."""
    s = form.label_smoothing
    label = of.label
    if form.out_of_range == "promise_in_bounds" and of.inside is not None:
        label = label & of.inside[..., None]
    return jnp.where(label, jnp.asarray(1 - s, of.h.dtype), 0) + s / of.size


def counts(of: Logits, top: Array, mass: Array, form: Settings) -> Array:
    """The derivative of the loss of each row by its lse."""
    found = 1 + 2 * form.z_loss * (top + jnp.log(mass)) if form.z_loss else jnp.ones_like(top)
    if form.out_of_range == "drop" and of.inside is not None:
        found = jnp.where(of.inside, found, found - (1 - form.label_smoothing))
    return found


def moved(saved: Named, tangents: Named, of: Logits, form: Settings) -> Array:
    """The tangent of the logits, in A, of those of x, w and bias that there are."""
    axes, parts = ((saved["x"].ndim - 1,), _sides(form)[:1]), []
    if "x" in tangents:
        parts.append(_product(tangents["x"], saved["w"], axes, form, form.logits_dtype))
    if "w" in tangents:
        parts.append(_product(saved["x"], tangents["w"], axes, form, form.logits_dtype))
    parts = [a.astype(of.h.dtype) for a in parts]
    if "bias" in tangents:
        parts.append(jnp.broadcast_to(tangents["bias"].astype(of.h.dtype), of.h.shape))
    dh = functools.reduce(jnp.add, parts)
    return _through_logits(dh, of, form)


def gradients(dh: Array, x: Array, w: Array, wanted: tuple[str, ...], form: Settings) -> dict[str, Array]:
    """Those wanted of x, w and bias, in A, of the cotangent of x @ w + bias; that of x is of a device's part of the vocabulary."""
    found = products(dh.astype(form.logits_dtype), x, w, wanted, form)
    return found | ({"bias": jnp.sum(dh, axis=tuple(range(dh.ndim - 1)))} if "bias" in wanted else {})


def products(
    dh: Array, x: Array, w: Array, wanted: tuple[str, ...], form: Settings, rounded: bool = False
) -> dict[str, Array]:
    """Those of x and w, in A or `rounded` as they are, of a cotangent in the dtype in which it is multiplied."""
    axes, wide, found = tuple(range(dh.ndim - 1)), arithmetic_dtype(dh.dtype), {}
    if "x" in wanted:
        over = ((dh.ndim - 1,), _sides(form)[1:])
        found["x"] = _product(dh, w, over, form, x.dtype if rounded else wide, x)
    if "w" in wanted:
        sides = (dh, x) if form.transposed else (x, dh)
        found["w"] = _product(*sides, (axes, axes), form, w.dtype if rounded else wide, w)
    return found
