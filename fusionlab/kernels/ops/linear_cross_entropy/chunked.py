""" "xla_chunked" and "cuda": a loop over chunks of rows, each of which makes all that its logits are needed for.

The arithmetic is that of rows.py; "cuda" has a kernel for what lies between the products, softmax_part.py. On a GPU the cotangents of all
logits are kept, in 16 bits, as long as they take no more than `WHOLE`, and multiplied once after the loop; otherwise, and on a CPU, each
chunk multiplies its own, and what is summed over rows, the gradients of w and bias, is added up in A, which XLA does in place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ....graph.dtypes import arithmetic_dtype
from ...op.arrays import Named
from . import reference, rows
from .halves import Halves, divided, dtype_of, factor, halves, multiplied, of_bias, products, summed
from .own.softmax_part import softmax_part, unwritten
from .settings import Settings

Array = Any

# Bytes of the logits of a chunk: on a CPU in A, where longer chunks take more time as well as more memory; elsewhere in their own dtype.
MEMORY_ON_A_CPU, MEMORY = 1 << 26, 1 << 27
MORE = 2  # as many on a GPU where no cotangent is made: nothing is kept of the logits but some numbers of each row
WHOLE = 1 << 32  # bytes of the cotangents of all logits; adding up the gradient of w, chunk by chunk, takes longer
_ALIGNED = 8  # rows of a chunk are a multiple of
# Entries of a row: where they are no multiple of the first, 16 bytes of 16-bit numbers, a GPU's products take several times as long, and w
# gets entries of 0 up to a multiple of the second, the rows of a tile of a product.
_VECTOR, _TILE = 8, 64
_SUMMED = ("w", "bias")


class Kept(Enum):
    """What of the logits of all rows is kept until the loop is over."""

    NOTHING = "there is no cotangent"
    IN_PLACE = (
        "their cotangents, which take as much as the logits, whose memory they get: chunks of some rows would save none"
    )
    BESIDE = "their cotangents, which take less"
    SUMS = "the sums of what each chunk multiplies its own by"


# Rows of a chunk on a GPU: the product of fewer is slower, and each chunk reads and writes the sums: at a vocabulary of 128256 chunks of
# 2048 rows took 7 % less time than those of 1024 (record linear_cross_entropy_2026-11-30 of an H200).
LEAST = dict.fromkeys(Kept, 1024) | {Kept.SUMS: 2048}


def chunks(shape: tuple[int, ...], size: int, form: Settings, kept: Kept = Kept.BESIDE) -> tuple[int, int]:
    """(number of chunks, rows of each) of x with this shape and a vocabulary of `size`."""
    count = math.prod(shape[:-1])
    number = _number(count, size, form, kept)
    if number <= 1:
        return 1, count
    each = -(-count // number)
    return number, each if form.chunk else -(-each // _ALIGNED) * _ALIGNED


def _number(count: int, size: int, form: Settings, kept: Kept) -> int:
    if kept is Kept.IN_PLACE and not form.chunk:
        return 1
    if form.on_a_gpu and not form.chunk:  # the nearest: a row more than fits is no reason for another chunk
        return round(count / (_most_rows(size, form, kept) * (MORE if kept is Kept.NOTHING else 1)))
    return -(-count // (form.chunk or _most_rows(size, form, kept)))


def _most_rows(size: int, form: Settings, kept: Kept) -> int:
    if form.on_a_gpu:
        return max(MEMORY // (size * jnp.dtype(form.logits_dtype).itemsize), LEAST[kept])
    return max(MEMORY_ON_A_CPU // (size * arithmetic_dtype(form.logits_dtype).itemsize), 1)


def forward(
    x: Array,
    w: Array,
    labels: Array,
    bias: Array | None = None,
    weights: Array | None = None,
    *,
    residuals: bool,
    by_kernel: bool = False,
    **attrs: Any,
) -> list[Array]:
    """As the reference gives it; what lies between the products `by_kernel` or as jnp code."""
    form = Settings.of(attrs)
    lift, scaled = reference.lifted(weights, form) if residuals and weights is not None else (1, None)
    w, size = _padded(w, form, by_kernel)
    known = halves(x, w, {} if scaled is None else {"loss": scaled}, form)
    pull = _Pull(known, w, size, bias, tuple(form.gradients), x.shape, form)

    def step(part: dict[str, Array]) -> dict[str, Array]:
        if by_kernel:
            return pull.by_kernel(part, part.get("weights"))

        def pulled(of: rows.Logits, top: Array, mass: Array) -> dict[str, Array]:
            return pull(of, {"x": part["x"], "top": top, "mass": mass}, {"loss": part["weights"]})

        return rows.results(part["x"], w, part["labels"], bias, form, pulled if "weights" in part else None)

    given = {"x": x, "labels": labels} | ({} if scaled is None else {"weights": scaled})
    found = by_chunks(step, given, w, x.shape, form, None if scaled is None else pull, by_kernel)
    return reference.finished(found, weights, {"x": lift, "bias": lift, "w": lift * factor(known)}, residuals, form)


def cotangent(
    saved: Named, ct: Any, wanted: tuple[str, ...], shardings: Named, by_kernel: bool = False, **attrs: Any
) -> list[Array]:
    """As the reference gives it; gradients that were made forward are only multiplied."""
    form = Settings.of(attrs)

    def of_rows(of_loss: Array | None, of_lse: Array | None, slots: tuple[str, ...]) -> dict[str, Array]:
        cotangents = {name: a for name, a in (("loss", of_loss), ("lse", of_lse)) if a is not None}
        runs = by_kernel and set(cotangents) == {"loss"}
        w, size = _padded(saved["w"], form, runs)
        known = halves(saved["x"], w, cotangents, form)
        pull = _Pull(known, w, size, saved.get("bias"), slots, saved["x"].shape, replace(form, also=()))

        def step(part: dict[str, Array]) -> dict[str, Array]:
            if runs:
                found = pull.by_kernel(part, part["loss"])
                return {name: a for name, a in found.items() if name not in rows.BY_ROW}
            of = rows.logits(part["x"], w, part["labels"], saved.get("bias"), form)
            return pull(of, part, {name: part[name] for name in cotangents})

        given = {name: saved[name] for name in ("x", "labels", "top", "mass")} | cotangents
        found = by_chunks(step, given, w, saved["x"].shape, form, pull, runs)
        return found | ({"w": found["w"] * factor(known)} if "w" in found else {})

    return reference.pulled_back(saved, ct, wanted, form, of_rows)


class _Pull:
    """The gradients, by slot, of a chunk's logits; or what they are made of after the loop, under names of its own.

    Attributes:
      w, size: as `_padded` gives them.
      bias: as it is given; None without one.
      kept: what they are made of after the loop, if they are.
    """

    def __init__(
        self,
        known: Halves | None,
        w: Array,
        size: int,
        bias: Array | None,
        wanted: tuple[str, ...],
        shape: tuple[int, ...],
        form: Settings,
    ):
        self.known, self.w, self.size, self.bias, self.wanted, self.form = known, w, size, bias, wanted, form
        logits, cotangent = jnp.dtype(form.logits_dtype), jnp.dtype(dtype_of(known, form))
        whole = math.prod(shape[:-1]) * w.shape[0 if form.transposed else 1] * cotangent.itemsize
        self.kept = Kept.SUMS
        if wanted and form.on_a_gpu and whole <= WHOLE:
            self.kept = Kept.IN_PLACE if cotangent == logits else Kept.BESIDE

    def __call__(self, of: rows.Logits, part: dict[str, Array], cotangents: dict[str, Array]) -> dict[str, Array]:
        # The gradient of a bias is that of cotangents that are not rounded yet, and takes the place of the one that `made` gives.
        found = of_bias(of, part, cotangents, self.form) if "bias" in self.wanted else {}
        return self.made(*multiplied(self.known, of, part, cotangents, self.form), part["x"]) | found

    def made(self, dh: Array, sizes: Array | None, x: Array) -> dict[str, Array]:
        """Of the cotangent of a chunk's logits, as `multiplied` gives it: the gradients of x and w, or what they are made of."""
        if self.kept is Kept.SUMS:
            return self._multiplied(dh, sizes, x)
        return {_DH: dh} | ({} if sizes is None else {_SIZES: sizes})

    def by_kernel(self, part: dict[str, Array], of_loss: Array | None) -> dict[str, Array]:
        """All that is known of a chunk's rows, and with the cotangent of the loss of each row what `__call__` gives."""
        h, bias = rows.product(part["x"], self.w, self.form), self.bias
        if bias is not None:
            bias = jnp.pad(bias, (0, h.shape[-1] - self.size))
            # What makes a product in 16 bits adds it on the way to memory, and rounds the sum: not where logits that are not rounded,
            # computed again for a derivative by row, would meet the statistics of rounded ones.
            if h.dtype.itemsize < 4 and not self.form.has_rows:
                h, bias = h + bias.astype(h.dtype), None
        run = functools.partial(softmax_part, h, part["labels"], form=self.form, size=self.size, bias=bias)
        if of_loss is None:
            return run(None)
        given, sizes = divided(self.known, {"loss": of_loss})
        found = run(given["loss"], wanted=dtype_of(self.known, self.form))
        return found | self.made(found.pop("dh"), sizes, part["x"])

    def products(self, found: dict[str, Array], x: Array) -> dict[str, Array]:
        """With the gradients in place of what they are made of; all by row, as x is."""
        if _DH not in found:
            return found
        return self._multiplied(found.pop(_DH), found.pop(_SIZES, None), x, self.form.rounded) | found

    def _multiplied(self, dh: Array, sizes: Array | None, x: Array, rounded: bool = False) -> dict[str, Array]:
        found = products(self.known, dh, sizes, x, self.w, self.wanted, self.form, rounded)
        return found | ({"bias": summed(dh, sizes)[: self.size]} if "bias" in self.wanted else {})

    def cut(self, found: dict[str, Array]) -> dict[str, Array]:
        """With the gradient of w without the entries that `_padded` added."""
        axis = 0 if self.form.transposed else 1
        if "w" not in found or found["w"].shape[axis] == self.size:
            return found
        return found | {"w": lax.slice_in_dim(found["w"], 0, self.size, axis=axis)}


def _padded(w: Array, form: Settings, by_kernel: bool) -> tuple[Array, int]:
    """(w with as many entries of the vocabulary as a product is fast with, how many of them are its own): more `by_kernel` alone."""
    axis = 0 if form.transposed else 1
    size = w.shape[axis]
    missing = -size % _TILE if by_kernel and size > _TILE and size % _VECTOR else 0
    if not missing:
        return w, size
    return jnp.pad(w, [(0, missing if i == axis else 0) for i in range(2)]), size


_DH, _SIZES = "cotangent", "sizes"


def by_chunks(
    step: Callable[[dict[str, Array]], dict[str, Array]],
    given: Mapping[str, Array],
    w: Array,
    shape: tuple[int, ...],
    form: Settings,
    pull: _Pull | None,
    by_kernel: bool,
) -> dict[str, Array]:
    """`step` of all rows: the gradients of w and bias added up, all else by row; those that `pull` makes after the loop of all rows, with
    the ones that were missing in the last chunk. `given` has entries for each row in front.
    """
    kept = Kept.NOTHING if pull is None else pull.kept
    number, each = chunks(shape, w.shape[0 if form.transposed else 1], form, kept)
    lead, count = shape[:-1], math.prod(shape[:-1])
    parts = {name: _cut(a, len(lead), number, each, 1 if name == "mass" else 0) for name, a in given.items()}
    sums, found = _looped(step, parts, w, by_kernel) if number > 1 else _once(step, parts)
    found = sums | {name: _flat(a) for name, a in found.items()}
    found = found if pull is None else pull.cut(pull.products(found, _flat(parts["x"])))
    return {name: a if name in _SUMMED else a[:count].reshape(*lead, *a.shape[1:]) for name, a in found.items()}


def _looped(
    step: Callable[..., Any], parts: dict[str, Array], w: Array, by_kernel: bool
) -> tuple[dict[str, Array], dict[str, Array]]:
    kinds = jax.eval_shape(lambda given: step({name: a[0] for name, a in given.items()}), parts)
    number = len(next(iter(parts.values())))
    zeros = {
        slot: jnp.zeros_like(w, shape=kinds[slot].shape, dtype=kinds[slot].dtype) for slot in _SUMMED if slot in kinds
    }
    # XLA fills what a scan stacks with zeros first, which takes as long as the cotangents take to be written.
    stack = {}
    if by_kernel and _DH in kinds:
        stack[_DH] = unwritten((number, *kinds[_DH].shape), kinds[_DH].dtype, [*parts.values(), w])

    def body(carried: tuple[Any, ...], part: dict[str, Array]) -> tuple[tuple[Any, ...], dict[str, Array]]:
        at, sums, stack = carried
        found = step(part)
        sums = {name: total + found.pop(name) for name, total in sums.items()}
        stack = {name: lax.dynamic_update_index_in_dim(a, found.pop(name), at, 0) for name, a in stack.items()}
        return (at + 1, sums, stack), found

    (_, sums, stack), found = lax.scan(body, (0, zeros, stack), parts)
    return sums, found | stack


def _once(step: Callable[..., Any], parts: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    found = step({name: a[0] for name, a in parts.items()})
    return {slot: found.pop(slot) for slot in _SUMMED if slot in found}, {name: a[None] for name, a in found.items()}


def _flat(a: Array) -> Array:
    return a.reshape(-1, *a.shape[2:])


def _cut(a: Array, lead: int, number: int, each: int, filling: int) -> Array:
    """An array with `lead` axes of rows in front as number x each x the rest; rows that are missing are made of `filling`."""
    rest = a.shape[lead:]
    flat = a.reshape(-1, *rest)
    if missing := number * each - flat.shape[0]:
        flat = jnp.pad(flat, [(0, missing), *((0, 0) for _ in rest)], constant_values=filling)
    return flat.reshape(number, each, *rest)
