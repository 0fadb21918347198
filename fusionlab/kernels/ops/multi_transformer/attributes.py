"""Checks of the attributes of a call of `multi_transformer`: names and numbers, each with an error that names the attribute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ....errors import ArgumentError
from ...op.arrays import check_name, whole_number
from ..gemm_epilogue.activations import ACTIVATIONS
from ..layer_norm.op import KINDS

LAYOUTS = ("separate", "concatenated", "interleaved", "packed")
CACHES = ("append", "write", "prefill")
CACHE_LAYOUTS = ("BSHD", "BHSD")
LAYER_PARTS = ("attention", "feed_forward")
TURNED = ("q", "k", "v", "qkv", "out", "up", "gate", "down")  # slots whose weights may be [out, in]


def refused(reason: str) -> ArgumentError:
    return ArgumentError(f"multi_transformer: {reason}")


def _check_choices(full: Mapping[str, Any]) -> None:
    named = {"qkv": LAYOUTS, "norm": KINDS, "activation": ACTIVATIONS, "cache_layout": CACHE_LAYOUTS}
    named |= {name: valid for name, valid in (("cache", CACHES), ("part", LAYER_PARTS)) if full[name] is not None}
    for name, valid in named.items():
        check_name(f"multi_transformer {name}", full[name], valid)


def _turned(slots: Any) -> tuple[str, ...]:
    """The slots whose weights are [out, in], always in the same order."""
    if not isinstance(slots, tuple | list) or not set(slots) <= set(TURNED):
        raise refused(f"turned is {slots!r}, needed a tuple of {', '.join(TURNED)}: weights that are [out, in]")
    return tuple(slot for slot in TURNED if slot in slots)


def checked_attributes(full: dict[str, Any]) -> dict[str, Any]:
    """The attributes in canonical form, except those that depend on the operands.

    Raises:
      ArgumentError: names the attribute, its value and the allowed ones.
      UnknownNameError: there is no layout, norm, activation, cache or part of that name.
    """
    _check_choices(full)
    _check_part(full)
    for name in ("pre_norm", "gated", "is_causal", "gives_keys"):
        if not isinstance(full[name], bool):
            raise refused(f"{name} is {full[name]!r}, needed True or False")
    full["turned"] = _turned(full["turned"])
    full["layers"] = _count("layers", full["layers"])
    for name in ("heads", "kv_heads"):
        full[name] = None if full[name] is None else _count(name, full[name])
    if full["rotary"] not in (None, 1, 2) or isinstance(full["rotary"], bool):
        raise refused(f"rotary is {full['rotary']!r}, needed None, 1 or 2: how many position tables turn a head")
    return full | {"epsilons": _epsilons(full["epsilons"]), "mask_value": _mask_value(full["mask_value"])}


def _check_part(full: Mapping[str, Any]) -> None:
    part = full["part"]
    if part is None:
        return
    if full["layers"] != 1:
        raise refused(
            f"part is {part!r} of {full['layers']!r} layers, needed one: the sum between two parts belongs to neither"
        )
    if part == "feed_forward":
        for name, none in (("cache", None), ("gives_keys", False), ("rotary", None)):
            if full[name] != none:
                raise refused(
                    f"part is 'feed_forward', and {name} is {full[name]!r}; needed {none!r}: it belongs to the attention"
                )


def _count(name: str, value: Any) -> int:
    number = whole_number("multi_transformer", name, value, "a whole number from 1 on")
    if number < 1:
        raise refused(f"{name} is {number}, needed a whole number from 1 on")
    return number


def _number(name: str, value: Any, needed: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as e:  # a traced value, or no number at all
        raise refused(f"{name} is {value!r}, needed {needed}, known when tracing") from e


def _epsilons(epsilons: Any) -> tuple[float | None, float | None]:
    if not isinstance(epsilons, tuple | list) or len(epsilons) != 2:
        raise refused(f"epsilons is {epsilons!r}, needed a pair: of the attention's norm and of the feed-forward's")
    found = tuple(None if e is None else _number("epsilon", e, "a number, 0 or more") for e in epsilons)
    for e in found:
        if e is not None and not (math.isfinite(e) and e >= 0):
            raise refused(f"epsilon is {e}, needed a finite number, 0 or more, or None for no norm")
    return found[0], found[1]


def _mask_value(value: Any) -> float:
    number = _number("mask_value", value, "a finite number or -inf")
    if not math.isfinite(number) and number != -math.inf:
        raise refused(f"mask_value is {number}, needed a finite number or -inf")
    return number


def scale_of(scale: Any, size: int) -> float:
    """The factor of the scores: as given, or 1/sqrt(size) for heads of this size.

    Raises:
      ArgumentError: it is not a finite number known when tracing.
    """
    if scale is None:
        return 1.0 / math.sqrt(size)
    number = _number("scale", scale, "a finite number")
    if not math.isfinite(number):
        raise refused(f"scale is {number}, needed a finite number")
    return number
