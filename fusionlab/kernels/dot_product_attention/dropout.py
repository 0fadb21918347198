"""Dropout made of a key: the factors are `jax.random.bernoulli(key, keep, shape of the scores)`, to the bit, wherever they are made.

The generator is jax.random's default, threefry2x32 with `jax_threefry_partitionable=True`, under which an entry's bits hang on the key and
the entry's number alone: so a kernel makes those of its block, forward and again backward, and nothing of the scores' shape is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

Array = Any


def kept(dropout_key: Array, keep: float, shape: tuple[int, ...]) -> Array:
    """bool, True with probability `keep`; `dropout_key` is the data of a threefry2x32 key, uint32[2]."""
    with jax.threefry_partitionable(True):
        key = jax.random.wrap_key_data(dropout_key, impl="threefry2x32")
        return jax.random.bernoulli(key, keep, shape)


def forward_of(plain: Callable[..., list[Array]]) -> Callable[..., list[Array]]:
    """A BTNH forward that also takes `dropout_key` and `keep`, of one that takes factors."""

    @functools.wraps(plain)
    def forward(
        query: Array,
        key: Array,
        value: Array,
        *rest: Any,
        dropout_key: Array | None = None,
        keep: float = 1.0,
        **more: Any,
    ) -> list[Array]:
        if dropout_key is not None:
            *batch, t, n, _ = query.shape
            more["factors"] = kept(dropout_key, keep, (*batch, n, t, key.shape[-3]))
        return plain(query, key, value, *rest, **more)

    return forward


def of_saved(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The same of a tangent or a cotangent, whose first argument is what was saved, by name."""

    @functools.wraps(plain)
    def linear(saved: Mapping[str, Array], *rest: Any, keep: float = 1.0, **more: Any) -> Any:
        if "dropout_key" in saved:
            saved = {**saved, "factors": kept(saved["dropout_key"], keep, _scores_shape(saved))}
        return plain(saved, *rest, **more)

    return linear


def _scores_shape(saved: Mapping[str, Array]) -> tuple[int, ...]:
    if "probabilities" in saved:
        return saved["probabilities"].shape
    *batch, t, n, _ = saved["query"].shape
    return (*batch, n, t, saved["key"].shape[-3])
