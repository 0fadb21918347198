"""Products with the cotangent of float32 logits, of operands in bfloat16, by the units for 16 bits: of float16.

XLA would widen the operand for a product with float32, which a GPU multiplies at half the rate. Rounded to bfloat16 the cotangent makes the
errors of the gradients up to 1.13 times as large (numpy, 512 x 256 x 4096), rounded to float16 1.003 times: it has three more bits. What it
lacks is range: the cotangent is divided by the size of each row, by which the other operand or the result is multiplied, and the operands
by a power of two, which keeps their bits but of numbers below 2^-14 of the largest.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp

from ....graph.dtypes import arithmetic_dtype
from ...op.arrays import Named, is_default
from . import rows
from .settings import Settings

Array = Any


class Halves(NamedTuple):
    """What is known before the first chunk.

    Attributes:
      w: in float16, divided by `of_w`.
      of_w, of_x, of_rows: scalars: the sizes of w, of x, and of the largest cotangent of a row.
    """

    w: Array
    of_w: Array
    of_x: Array
    of_rows: Array


def halves(x: Array, w: Array, cotangents: Named, form: Settings) -> Halves | None:
    """Of a call on a GPU with such dtypes, given the cotangents of loss and lse by row; None of any other."""
    on_gpu = form.device is not None and form.device.platform == "cuda"
    takes = (
        x.dtype == jnp.bfloat16 and form.logits_dtype == "float32" and is_default(form.precision) and form.is_bounded
    )
    if not (cotangents and on_gpu and takes and x.size):
        return None
    of_w, of_x = (_size(a.astype(jnp.float32)) for a in (w, x))
    return Halves((w / of_w.astype(w.dtype)).astype(jnp.float16), of_w, of_x, _size(_by_row(cotangents)))


def _size(a: Array) -> Array:
    """The power of two at or below the largest magnitude; 1 where that is 0 or no number."""
    most = jnp.max(jnp.abs(a))
    return jnp.where(jnp.isfinite(most) & (most > 0), jnp.exp2(jnp.floor(jnp.log2(most))), 1)


def _by_row(cotangents: Named) -> Array:
    return functools.reduce(jnp.add, map(jnp.abs, cotangents.values()))


def multiplied(
    known: Halves | None, of: rows.Logits, part: Named, cotangents: Named, form: Settings
) -> tuple[Array, Array | None]:
    """(the cotangent of the logits in the dtype in which it is multiplied, the sizes of its rows by which it was divided)."""
    given, sizes = divided(known, cotangents)
    dh = rows.through(of, part["top"], part["mass"], *_of_both(given), form)
    return dh.astype(dtype_of(known, form)), sizes


def dtype_of(known: Halves | None, form: Settings) -> Any:
    """The dtype in which the cotangent of the logits is multiplied."""
    return form.logits_dtype if known is None else jnp.float16


def divided(known: Halves | None, cotangents: Named) -> tuple[Named, Array | None]:
    """(the cotangents of loss and lse by row, as that of the logits is made of them, the sizes by which they were divided)."""
    if known is None:
        return cotangents, None
    sizes = _by_row(cotangents)
    # Of a row without one that of the others, or x would be beyond float16 where theirs is small.
    sizes = jnp.where(jnp.isfinite(sizes) & (sizes > 0), sizes, known.of_rows)
    return {name: a / sizes for name, a in cotangents.items()}, sizes


def products(
    known: Halves | None,
    dh: Array,
    sizes: Array | None,
    x: Array,
    w: Array,
    wanted: tuple[str, ...],
    form: Settings,
    rounded: bool = False,
) -> dict[str, Array]:
    """The gradients of x and w among those wanted, of what `multiplied` gives, in A, or `rounded` where nothing multiplies them; that of w
    is to be multiplied by `factor`."""
    if known is None or sizes is None:
        return rows.products(dh, x, w, wanted, form, rounded)
    x = (x * (sizes / known.of_rows / known.of_x)[..., None]).astype(jnp.float16)
    found = rows.products(dh, x, known.w, wanted, form)
    return found | ({"x": found["x"] * (sizes * known.of_w)[..., None]} if "x" in found else {})


def summed(dh: Array, sizes: Array | None) -> Array:
    """The gradient of the bias, in A, of what `multiplied` gives."""
    dh = dh.astype(arithmetic_dtype(dh.dtype))
    return jnp.sum(dh if sizes is None else dh * sizes[..., None], axis=tuple(range(dh.ndim - 1)))


def of_bias(of: rows.Logits, part: Named, cotangents: Named, form: Settings) -> dict[str, Array]:
    """The gradient of the bias of a chunk's logits, in A."""
    dh = rows.through(of, part["top"], part["mass"], *_of_both(cotangents), form)
    return {"bias": jnp.sum(dh, axis=tuple(range(dh.ndim - 1)))}


def _of_both(cotangents: Named) -> tuple[Array | None, Array | None]:
    return cotangents.get("loss"), cotangents.get("lse")


def factor(known: Halves | None) -> Any:
    """What the sum of the gradients of w is to be multiplied by."""
    return 1 if known is None else known.of_rows * known.of_x
