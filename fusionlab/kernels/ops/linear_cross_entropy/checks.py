"""The checks of a call of `linear_cross_entropy`, and its attributes in canonical form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ....errors import ArgumentError
from ....graph.dtypes import arithmetic_dtype, is_float, narrows
from ...op.arrays import canonical_precision, check_dtypes, check_given, check_name, check_vectors, whole_number
from .settings import ALSO, OUT_OF_RANGE

_OP = "linear_cross_entropy"


def checked(given: Mapping[str, Any], full: dict[str, Any]) -> dict[str, Any]:
    """The attributes in canonical form.

    Raises:
      ArgumentError, UnknownNameError: as `linear_cross_entropy`.
    """
    check_given(_OP, given, ("x", "w", "labels"))
    for name in ("transposed", "masked"):
        if not isinstance(full[name], bool):
            raise ArgumentError(f"{_OP}: {name} is {full[name]!r}, needed True or False")
    _check_shapes(given, full["transposed"])
    check_dtypes(_OP, {slot: given[slot] for slot in ("x", "w")})
    check_name(f"{_OP} out_of_range", full["out_of_range"], OUT_OF_RANGE)
    full["logits_dtype"] = _logits_dtype(given, full["logits_dtype"])
    _check_others(given, arithmetic_dtype(full["logits_dtype"]))
    full["label_smoothing"] = _number("label_smoothing", full["label_smoothing"])
    full["z_loss"] = _number("z_loss", full["z_loss"])
    if full["softcap"] is not None:
        full["softcap"] = _number("softcap", full["softcap"], above=0)
    full["scale"] = _number("scale", full["scale"])
    full["fill"] = full["fill"] if full["fill"] == -math.inf else _number("fill", full["fill"])
    _check_classes(full, given["w"].shape[0 if full["transposed"] else 1])
    if full["chunk"] is not None:
        full["chunk"] = whole_number(_OP, "chunk", full["chunk"], "a number of rows, or None")
        if full["chunk"] < 1:
            raise ArgumentError(f"{_OP}: chunk is {full['chunk']}, needed 1 or more rows, or None")
    full["also"] = _also(full["also"], "weights" in given)
    full["precision"] = canonical_precision(full["precision"])
    full["dtypes"] = tuple(np.dtype(a.dtype).name for a in given.values())
    return full


def _check_shapes(given: Mapping[str, Any], transposed: bool) -> None:
    x, w = (tuple(given[slot].shape) for slot in ("x", "w"))
    size = _vocabulary(x, w, transposed)
    for slot in ("labels", "weights"):
        if slot in given and (found := tuple(given[slot].shape)) != x[:-1]:
            raise ArgumentError(f"{_OP}: {slot} has shape {found}, needed {x[:-1]}: one for each row of x {x}")
    check_vectors(_OP, given, ("bias",), size, f"each of the vocabulary of w {w}")


def _check_classes(full: dict[str, Any], size: int) -> None:
    if full["classes"] is None:
        return
    full["classes"] = whole_number(_OP, "classes", full["classes"], "a number of classes, or None")
    if not 1 <= full["classes"] <= size:
        raise ArgumentError(f"{_OP}: classes is {full['classes']}, needed 1 to {size}, the vocabulary of w, or None")
    if full["classes"] == size:
        full["classes"] = None


def _vocabulary(x: tuple[int, ...], w: tuple[int, ...], transposed: bool) -> int:
    """The size of the vocabulary, by the shapes of x and w."""
    if not x:
        raise ArgumentError(f"{_OP}: x is a scalar, needed rank 1 or more: rows, and E features as the last axis")
    if len(w) != 2:
        raise ArgumentError(f"{_OP}: w has shape {w}, needed rank 2: {'V x E' if transposed else 'E x V'}")
    features, size = w[::-1] if transposed else w
    if features != x[-1]:
        other = "E x V without" if transposed else "V x E with"
        raise ArgumentError(
            f"{_OP}: x {x} has {x[-1]} features, but w {w} has {features}; needed the same E: w is {other} transposed=True"
        )
    if size < 1:
        raise ArgumentError(f"{_OP}: w has shape {w}, no vocabulary; needed at least one entry")
    return size


def _logits_dtype(given: Mapping[str, Any], asked: Any) -> str:
    own = np.dtype(given["x"].dtype)
    wide = np.dtype(arithmetic_dtype(own))
    try:
        found = wide if asked is None else np.dtype(asked)
    except TypeError as e:
        raise ArgumentError(f"{_OP}: logits_dtype is {asked!r}, needed a dtype or None") from e
    if found not in (own, wide):
        raise ArgumentError(f"{_OP}: logits_dtype is {found}, needed that of x, {own}, or {wide}")
    return found.name


def _check_others(given: Mapping[str, Any], wide: Any) -> None:
    if np.dtype(given["labels"].dtype).kind not in "iu":
        raise ArgumentError(f"{_OP}: labels has dtype {given['labels'].dtype}, needed integers")
    for slot in ("bias", "weights"):
        if slot in given and (not is_float(given[slot].dtype) or narrows(wide, given[slot].dtype)):
            raise ArgumentError(
                f"{_OP}: {slot} has dtype {given[slot].dtype}, needed a float no wider than {np.dtype(wide)}: cast it with .astype"
            )


def _number(name: str, value: Any, above: float = -math.inf) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError) as e:
        raise ArgumentError(
            f"{_OP}: {name} is {value!r}, needed a number that is known when the program is traced"
        ) from e
    if not math.isfinite(found) or found <= above:
        needed = "a finite number" if above == -math.inf else f"a finite number above {above:g}"
        raise ArgumentError(f"{_OP}: {name} is {value!r}, needed {needed}")
    return found


def _also(asked: Any, is_weighted: bool) -> tuple[str, ...]:
    if isinstance(asked, str) or not isinstance(asked, tuple | list):
        raise ArgumentError(f"{_OP}: also is {asked!r}, needed a tuple of names, out of {', '.join(ALSO)}")
    for name in asked:
        check_name(f"{_OP} result", name, ALSO)
    if len(set(asked)) < len(asked):
        raise ArgumentError(f"{_OP}: also is {asked!r}, needed each name once")
    if "loss" in asked and not is_weighted:
        raise ArgumentError(
            f"{_OP}: also names 'loss', which is the result without weights; needed weights, or no 'loss'"
        )
    return tuple(asked)
