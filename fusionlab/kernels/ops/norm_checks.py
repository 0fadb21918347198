"""The norms' checks of their operands and numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import ArgumentError
from ...graph.dtypes import arithmetic_dtype
from ..op.arrays import check_dtypes


def check_norm_dtypes(op: str, shapes: Mapping[str, Any]) -> None:
    """Each is one of FLOATS, a residual is of the dtype of x, and none is wider than the arithmetic.

    Raises:
      ArgumentError: names the operand, its dtype and the allowed ones.
    """
    for slot, v in shapes.items():
        check_dtypes(op, {slot: v})
    if "residual" in shapes:
        check_dtypes(op, {slot: shapes[slot] for slot in ("x", "residual")})
    wide = np.dtype(arithmetic_dtype(shapes["x"].dtype))
    for slot, v in shapes.items():
        if np.dtype(v.dtype).itemsize > wide.itemsize:
            raise ArgumentError(
                f"{op}: {slot} has dtype {np.dtype(v.dtype).name}, wider than the {wide.name} that x of dtype "
                f"{np.dtype(shapes['x'].dtype).name} is normalised in; cast {slot} or x with .astype"
            )


def checked_epsilon(op: str, epsilon: Any) -> float:
    """As a float. Raises ArgumentError unless it is a finite number, 0 or more, known when tracing."""
    try:
        number = float(epsilon)
    except (TypeError, ValueError) as e:  # a traced value, or no number at all
        raise ArgumentError(f"{op}: epsilon is {epsilon!r}, needed a number known when tracing") from e
    if not (math.isfinite(number) and number >= 0):
        raise ArgumentError(f"{op}: epsilon is {number}, needed a finite number, 0 or more")
    return number
