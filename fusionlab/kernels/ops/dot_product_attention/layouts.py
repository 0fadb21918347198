"""Where length and heads stand in query, key, value and the result: "BTNH" (*B, length, heads, features) or "BNTH".

The statistics, and all that has the shape of the scores, are *B N T (S) in both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ....errors import unknown_name
from .reference import residual_names

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


def check_layout(layout: Any) -> None:
    """Raises UnknownNameError unless it is one of `LAYOUTS`."""
    if layout not in LAYOUTS:
        raise unknown_name("layout", layout, LAYOUTS)


def forward_of(btnh: Callable[..., list[Array]]) -> Callable[..., list[Array]]:
    """A forward that takes any layout, of one that is written for BTNH."""

    @functools.wraps(btnh)
    def forward(query: Array, key: Array, value: Array, *rest: Any, layout: str = "BTNH", **more: Any) -> list[Array]:
        if layout == "BTNH":
            return btnh(query, key, value, *rest, **more)
        found = btnh(*map(_swapped, (query, key, value)), *rest, **more)
        names = ("out", *residual_names(more["saves"], more.get("softcap"), more.get("sink") is not None))
        return list(_each_swapped(dict(zip(names, found, strict=False))).values())

    return forward


def tangent_of(btnh: Callable[..., Array]) -> Callable[..., Array]:
    """The same of a tangent."""

    @functools.wraps(btnh)
    def tangent(
        saved: Mapping[str, Array],
        tangents: Mapping[str, Array],
        shape: tuple[int, ...],
        shardings: Mapping[str, Any],
        *,
        layout: str = "BTNH",
        **attrs: Any,
    ) -> Array:
        if layout == "BTNH":
            return btnh(saved, tangents, shape, shardings, **attrs)
        *batch, n, t, h = shape
        return _swapped(btnh(_each_swapped(saved), _each_swapped(tangents), (*batch, t, n, h), shardings, **attrs))

    return tangent


def cotangent_of(btnh: Callable[..., list[Array]]) -> Callable[..., list[Array]]:
    """The same of a cotangent."""

    @functools.wraps(btnh)
    def cotangent(
        saved: Mapping[str, Array],
        ct: Array,
        wanted: tuple[str, ...],
        shardings: Mapping[str, Any],
        *,
        layout: str = "BTNH",
        **attrs: Any,
    ) -> list[Array]:
        if layout == "BTNH":
            return btnh(saved, ct, wanted, shardings, **attrs)
        placed = {n: _swapped_sharding(s) if n in _LAID_OUT else s for n, s in shardings.items()}
        found = btnh(_each_swapped(saved), _swapped(ct), wanted, placed, **attrs)
        return list(_each_swapped(dict(zip(wanted, found, strict=True))).values())

    return cotangent


def _swapped(a: Array) -> Array:
    return jnp.swapaxes(a, -2, -3)


def _swapped_sharding(sharding: Any) -> Any:
    *batch, first, second, last = sharding.spec  # of a type: one entry for each axis
    return sharding.update(spec=PartitionSpec(*batch, second, first, last))


def _each_swapped(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name: _swapped(a) if name in _LAID_OUT else a for name, a in arrays.items()}
