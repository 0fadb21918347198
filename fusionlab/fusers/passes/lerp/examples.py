"""lerp by example: each known spelling, with w an array and with w a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....graph.matching.pattern import Example
from ...engine.grouping import Form


def _lerp(name: str, fn: Callable[..., Any], leaves: str, scalars: tuple[str, ...] = ()) -> Form:
    # Any of them may be broadcast along any axis.
    example = Example(
        name, fn, dict.fromkeys(leaves, "m"), scalars, optional={"m": frozenset(leaves)}, bare=True
    )  # fmt: skip
    return Form("lerp", name, example)


_BLENDS = {
    "x + w * (y - x)": lambda x, y, w: x + w * (y - x),
    "x - w * (x - y)": lambda x, y, w: x - w * (x - y),
    "x * (1 - w) + y * w": lambda x, y, w: x * (1 - w) + y * w,
    "x - w * x + w * y": lambda x, y, w: x - w * x + w * y,
    "x + w * y - w * x": lambda x, y, w: x + w * y - w * x,
}


# a - w * (a - b): the sign of a product and of a difference costs no rounding
AS_THE_OP_ROUNDS = frozenset({_BLENDS["x + w * (y - x)"], _BLENDS["x - w * (x - y)"]})
_OF_A_NUMBER = ("x + w * (y - x)", "x - w * (x - y)", "x + w * y - w * x")  # the others' factors are merged


LERP = (
    *(_lerp(name, fn, "xyw") for name, fn in _BLENDS.items()),
    *(_lerp(f"{name}, w a number", _BLENDS[name], "xy", ("w",)) for name in _OF_A_NUMBER),
    _lerp("x * (1 - w) + y * w, w a number", lambda x, y, v, w: x * v + y * w, "xy", ("1 - w", "w")),
)
