"""The meaning of `lerp` in plain jnp, its tangent and its cotangent.

x, y and w have one rank; along each axis each has the result's size or 1, and is broadcast there.

    out = x + w * (y - x)
    dx = (1 - w) * ct,  dy = w * ct,  dw = (y - x) * ct, each summed over the axes along which its operand is broadcast

Arithmetic and sums are float32 for float32, bfloat16 and float16, float64 for float64, and rounded once, to the operands' dtype.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ...op.arrays import Named, summed_to, wide

Array = Any


def forward(x: Array, y: Array, w: Array, *, residuals: bool, **_: Any) -> list[Array]:
    """[out]; nothing is saved except the operands."""
    start = wide(x)
    return [(start + wide(w) * (wide(y) - start)).astype(x.dtype)]


def tangent(saved: Named, tangents: Named, shape: tuple[int, ...], shardings: Named, **_: Any) -> Array:
    """(1 - w) * dx + w * dy + (y - x) * dw, of those that move."""
    factors = _factors(saved, tuple(tangents))
    parts = [factors[slot] * wide(moved) for slot, moved in tangents.items()]
    total = jnp.broadcast_to(sum(parts[1:], parts[0]), shape)
    return total.astype(next(iter(tangents.values())).dtype)


def cotangent(saved: Named, ct: Array, wanted: tuple[str, ...], shardings: Named, **attrs: Any) -> list[Array]:
    """The gradients wanted, in order; `broadcast` has (slot, shape, dtype) of every operand."""
    factors, shapes = _factors(saved, wanted), operand_shapes(attrs["broadcast"], ct.shape)
    moved = {slot: factors[slot] * wide(ct) for slot in wanted}
    return [summed_to(moved[slot], shapes[slot], shardings.get(slot)).astype(ct.dtype) for slot in wanted]


def operand_shapes(
    broadcast: tuple[tuple[str, tuple[int, ...], str], ...], result: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    """The shape of each operand of a part of a call, whose result has the shape `result`: where a device has a part of an axis of the
    result, it has that part of the operands that are not broadcast along it.
    """
    return {slot: tuple(1 if n == 1 else m for n, m in zip(shape, result, strict=True)) for slot, shape, _ in broadcast}


def _factors(saved: Named, slots: tuple[str, ...]) -> dict[str, Array]:
    """What each operand's tangent is multiplied by."""
    makes = {
        "x": lambda: 1.0 - wide(saved["w"]),
        "y": lambda: wide(saved["w"]),
        "w": lambda: wide(saved["y"]) - wide(saved["x"]),
    }
    return {slot: makes[slot]() for slot in slots}
