"""The positions of length and heads in query, key, value and the result: "BTNH" (*B, length, heads, features) or "BNTH".

The statistics, and all that has the shape of the scores, are *B N T (S) in both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ...op.implementation import Implementation
from . import reference
from .dropout import kept
from .settings import Settings

Array = Any

LAYOUTS = ("BTNH", "BNTH")
_LAID_OUT = ("query", "key", "value", "out", "rounded_off")


class AttentionSizes(NamedTuple):
    """Of a query, key or value: `batch` axes, `length`, `heads`, `features`."""

    batch: tuple[int, ...]
    length: int
    heads: int
    features: int

    @classmethod
    def of(cls, shape: Sequence[int], layout: str) -> AttentionSizes:
        *batch, first, second, features = shape
        length, heads = (first, second) if layout == "BTNH" else (second, first)
        return cls(tuple(batch), length, heads, features)

    def shape(self, layout: str) -> tuple[int, ...]:
        middle = (self.length, self.heads) if layout == "BTNH" else (self.heads, self.length)
        return (*self.batch, *middle, self.features)


def lengths(shapes: Mapping[str, Any], layout: str) -> tuple[int, int]:
    """Of queries and keys, 0 where a backward does not read them."""
    t, s = (AttentionSizes.of(shapes[n].shape, layout).length if n in shapes else 0 for n in ("query", "key"))
    return t, s


def implementation(
    name: str,
    summary: str,
    forward: Callable[[Mapping[str, Array], Settings], list[Array]],
    cotangent: Callable[..., list[Array]],
    opaque: bool = False,
    **more: Any,
) -> Implementation:
    """One way to run the op, by `forward(given, settings)` and `cotangent(saved, ct, wanted, shardings, settings)`; the rest as
    `Implementation` has it. Unless it is opaque, these are written for BTNH and for factors in place of a dropout key."""
    called, transposed = _forward_of(forward, not opaque), _cotangent_of(cotangent, not opaque)
    return Implementation(name, summary, called, _tangent, transposed, opaque=opaque, **more)


def _forward_of(forward: Callable[..., list[Array]], in_btnh: bool) -> Callable[..., list[Array]]:
    def called(*, present: tuple[str, ...], **attrs: Any) -> list[Array]:
        given, form = {slot: attrs[slot] for slot in present}, Settings.of({**attrs, "present": present})
        if not in_btnh:
            return forward(given, form)
        found = forward(_with_factors(_placed(given, form), form), form)
        names = ("out", *form.saved_names)
        return list(_placed(dict(zip(names, found, strict=False)), form).values())

    return called


def _cotangent_of(cotangent: Callable[..., list[Array]], in_btnh: bool) -> Callable[..., list[Array]]:
    def called(
        saved: Mapping[str, Array], ct: Array, wanted: tuple[str, ...], shardings: Mapping[str, Any], **attrs: Any
    ) -> list[Array]:
        form = Settings.of(attrs)
        if not in_btnh:
            return cotangent(saved, ct, wanted, shardings, form)
        if form.layout == "BNTH":
            shardings = {n: _swapped_sharding(s) if n in _LAID_OUT else s for n, s in shardings.items()}
        saved, out = _placed(saved, form), _placed({"out": ct}, form)
        found = cotangent(_with_factors(saved, form), out["out"], wanted, shardings, form)
        return list(_placed(dict(zip(wanted, found, strict=True)), form).values())

    return called


def _tangent(
    saved: Mapping[str, Array],
    tangents: Mapping[str, Array],
    shape: tuple[int, ...],
    shardings: Mapping[str, Any],
    **attrs: Any,
) -> Array:
    """That of the reference, which all implementations have."""
    form = Settings.of(attrs)
    saved, tangents = (_placed(arrays, form) for arrays in (saved, tangents))
    return _placed({"out": reference.tangent(_with_factors(saved, form), tangents, form)}, form)["out"]


def _with_factors(given: Mapping[str, Array], form: Settings) -> Mapping[str, Array]:
    """What is given, with the factors that its dropout key draws."""
    if "dropout_key" not in given or form.dropout_shape is None:
        return given
    return {**given, "factors": kept(given["dropout_key"], form.keep, form.dropout_shape)}


def _placed(arrays: Mapping[str, Array], form: Settings) -> dict[str, Array]:
    """Those of a call in its layout as in BTNH, or the other way."""
    swapped = _LAID_OUT if form.layout == "BNTH" else ()
    return {name: jnp.swapaxes(a, -2, -3) if name in swapped else a for name, a in arrays.items()}


def _swapped_sharding(sharding: Any) -> Any:
    *batch, first, second, last = sharding.spec  # of a type: one entry for each axis
    return sharding.update(spec=PartitionSpec(*batch, second, first, last))
