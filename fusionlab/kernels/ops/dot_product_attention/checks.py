"""Checks of a call of `dot_product_attention`: ranks, sizes, dtypes and numbers, each with an error that names the argument."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ....errors import ArgumentError
from ....graph.dtypes import arithmetic_dtype
from ...op.arrays import FLOATS
from .layouts import AttentionSizes


def refused(reason: str) -> ArgumentError:
    return ArgumentError(f"dot_product_attention: {reason}")


def check_shapes(query: Any, key: Any, value: Any, layout: str) -> None:
    for slot, a in (("query", query), ("key", key), ("value", value)):
        _check_rank(slot, a, layout)
    q, k, v = (tuple(a.shape) for a in (query, key, value))
    length, heads = (-3, -2) if layout == "BTNH" else (-2, -3)
    for slot, shape in (("key", k), ("value", v)):
        if shape[:-3] != q[:-3]:
            raise refused(
                f"{slot} {shape} has batch axes {shape[:-3]}, query {q} has {q[:-3]}; needed the same: broadcast them"
            )
    _check_heads(q, k, v, heads)
    if k[-1] != q[-1]:
        raise refused(f"key {k} has {k[-1]} features, query {q} has {q[-1]}; needed the same H")
    if v[length] != k[length]:
        raise refused(f"value {v} has length {v[length]}, key {k} has {k[length]}; needed the same S")
    if k[length] < 1 or q[-1] < 1:
        raise refused(f"key has shape {k}; needed at least one key and one feature")


def heads_sharing(query: Any, key: Any, layout: str) -> int:
    """How many query heads read one head of key and value."""
    q, k = (AttentionSizes.of(a.shape, layout).heads for a in (query, key))
    return q // k if k else 1


def scores_shape(query: Any, key: Any, layout: str) -> tuple[int, ...]:
    q = AttentionSizes.of(query.shape, layout)
    return (*q.batch, q.heads, q.length, AttentionSizes.of(key.shape, layout).length)


def seen_pairs(t: int, s: int, is_causal: bool, window: tuple[int, int] | None) -> float:
    """The part of all T x S pairs that a causal mask or a window leaves, both aligned at the top left; 1 without either."""
    if window is None and not is_causal:
        return 1.0
    left, right = window if window is not None else (t, 0)
    rows = np.arange(t)
    seen = np.minimum(rows + right, s - 1) - np.maximum(rows - left, 0) + 1
    return float(np.maximum(seen, 0).sum()) / max(1, t * s)


def _check_rank(slot: str, a: Any, layout: str) -> None:
    if a is None:
        raise refused(f"{slot} is missing, needed an array")
    if len(a.shape) < 3:
        raise refused(
            f"{slot} has shape {tuple(a.shape)}, rank {len(a.shape)}; needed rank 3 or "
            f"more: *batch, {'length, heads' if layout == 'BTNH' else 'heads, length'}, features"
        )


def _check_heads(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], heads: int) -> None:
    """Of the shapes of query, key and value, their heads being at this axis."""
    if v[heads] != k[heads]:
        raise refused(f"value {v} has {v[heads]} heads at axis {heads}, key {k} has {k[heads]}; needed the same")
    if k[heads] != q[heads] and (k[heads] == 0 or q[heads] % k[heads]):
        raise refused(
            f"key {k} has {k[heads]} heads at axis {heads}, query {q} has {q[heads]}; needed "
            f"as many, or a number that divides them: each key head is then read by as many neighbouring query heads"
        )


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether it broadcasts to another shape, which is not made larger by that."""
    aligned = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(n in (1, m) for n, m in aligned)


def check_broadcast(slot: str, operand: Any, scores: tuple[int, ...], dtype: Any) -> None:
    """A mask is bool, factors float or bool, a bias or a sink float; a float no wider than the scores; the shape broadcasts to them, that
    of a sink to their rows."""
    shape, own, wide = tuple(operand.shape), np.dtype(operand.dtype), np.dtype(arithmetic_dtype(dtype))
    floats = f"one of {', '.join(FLOATS)}"
    taken, needed = {
        "mask": (("bool",), "bool"),
        "factors": (("bool", *FLOATS), f"bool or {floats}"),
    }.get(slot, (FLOATS, floats))
    if own.name not in taken:
        raise refused(f"{slot} has dtype {own.name}, needed {needed}")
    if own != np.bool_ and own.itemsize > wide.itemsize:
        raise refused(
            f"{slot} has dtype {own.name}, wider than the {wide.name} that the scores of "
            f"{np.dtype(dtype).name} operands are computed in; cast {slot} or the operands with .astype"
        )
    rows = slot == "sink"
    to = (*scores[:-1], 1) if rows else scores
    if not _broadcasts(shape, to):
        raise refused(
            f"{slot} has shape {shape}, which does not broadcast to the {'rows of ' if rows else ''}scores {to}; "
            f"needed {'one for each head, or ' if rows else ''}*batch, heads, query length, {1 if rows else 'key length'}, aligned right, "
            f"each of them or 1"
        )


def for_each_head(sink: Any) -> Any:
    """A sink, or its shape with a dtype; with the axes of rows and keys added if it has only an axis of heads."""
    if len(sink.shape) != 1:
        return sink
    if isinstance(sink, jax.Array):
        return jnp.expand_dims(sink, (1, 2))
    return jax.ShapeDtypeStruct((*sink.shape, 1, 1), sink.dtype)


def checked_dropout_shape(
    given: Mapping[str, Any], full: Mapping[str, Any], scores: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The shape in which a dropout_key's factors are drawn, with the scores' rank; None without a key."""
    keep, drawn = full["keep"], full["dropout_shape"]
    if "dropout_key" not in given:
        if drawn is not None:
            raise refused(f"dropout_shape is {drawn}, and there is no dropout_key; needed both")
        return None
    _check_key(given["dropout_key"])
    if "factors" in given:
        raise refused("got factors and a dropout_key, which makes factors; needed one of them")
    if not 0.0 < _number("keep", keep, "a number above 0 and up to 1") <= 1.0:
        raise refused(f"keep is {keep}, needed a number above 0 and up to 1")
    if drawn is None:
        return scores
    try:
        shape = tuple(operator.index(n) for n in drawn)
    except TypeError as e:
        raise refused(f"dropout_shape is {drawn!r}, needed a tuple of sizes, or None") from e
    if not _broadcasts(shape, scores):
        raise refused(
            f"dropout_shape is {shape}, which does not broadcast to the scores {scores}; needed *batch, heads, "
            f"query length, key length, aligned right, each of them or 1"
        )
    return (1,) * (len(scores) - len(shape)) + shape


def _check_key(key: Any) -> None:
    if tuple(key.shape) != (2,) or np.dtype(key.dtype) != np.uint32:
        raise refused(
            f"dropout_key has shape {tuple(key.shape)} and dtype {np.dtype(key.dtype).name}, needed the data of a "
            f"threefry2x32 key, uint32 of shape (2,): jax.random.key_data(key)"
        )


def checked_window(window: Any, is_causal: bool, t: int, s: int) -> tuple[bool, tuple[int, int] | None]:
    """(is_causal, window) as the implementations take them: a window that ends at the row is causal, one that hides nothing more than
    `is_causal` does is dropped, and it reaches no further than there are rows and keys.
    """
    if window is None:
        return is_causal, None
    left, right = _sides(window)
    is_causal = is_causal or right == 0
    left, right = min(left, max(t - 1, 0)), 0 if is_causal else min(right, s - 1)
    hides = left < t - 1 or (not is_causal and right < s - 1)
    return is_causal, (left, right) if hides else None


def _sides(window: Any) -> tuple[int, int]:
    """How many keys a window has before the row and after it."""
    try:
        left, right = (operator.index(n) for n in (window if isinstance(window, tuple | list) else (window, window)))
    except (TypeError, ValueError) as e:
        raise refused(
            f"window is {window!r}, needed a number of keys on either side, a pair (left, right), or None"
        ) from e
    if min(left, right) < 0:
        raise refused(f"window is {window!r}, needed numbers of keys from 0 on")
    return left, right


def check_numbers(full: dict[str, Any], features: int) -> None:
    """Puts the numbers among the attributes in canonical form: floats, or None for no softcap."""
    scale = full["scale"]
    full["scale"] = 1.0 / math.sqrt(features) if scale is None else _number("scale", scale, "a finite number")
    full["keep"] = _number("keep", full["keep"], "a number above 0 and up to 1")
    full["factors_scale"] = _number("factors_scale", full["factors_scale"], "a finite number")
    if full["softcap"] is not None:
        full["softcap"] = _number("softcap", full["softcap"], "a finite number greater than 0, or None")
        if full["softcap"] <= 0:
            raise refused(f"softcap is {full['softcap']}, needed a number greater than 0")
    full["mask_value"] = _number("mask_value", full["mask_value"], "a finite number or -inf", (-math.inf,))


def _number(name: str, value: Any, needed: str, allowed: tuple[float, ...] = ()) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as e:  # a traced value, or no number at all
        raise refused(f"{name} is {value!r}, needed a number known when tracing") from e
    if not math.isfinite(number) and number not in allowed:
        raise refused(f"{name} is {number}, needed {needed}")
    return number
