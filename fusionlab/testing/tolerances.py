"""The one table of tolerances, by dtype and reduction size.

A result of dtype d whose largest sum has n terms is compared with its float64 reference by
`|got - want| <= rtol * |want| + atol * max|want|`, the maximum over the array: after cancellation, errors are relative
to the terms, not to their sum. Sums accumulate in float32 at least, as XLA does for 16-bit operands.

Source: rounding of a sum of n terms grows about as sqrt(n) (Higham, Accuracy and Stability of Numerical Algorithms, 2nd
edition, section 4.2); a row leaves room for the dozen roundings of a layer around its largest sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import numpy as jnp

from fusionlab.errors import ArgumentError

from ..showing import Shown
from ..tracebacks import own_lines_hidden


@dataclass(frozen=True, repr=False)
class Tolerance(Shown):
    """What an array of a dtype may differ by.

    Attributes:
      dtype: its name; "tf32" for float32 whose products round their operands.
      reduction_size: holds for sums of up to so many terms.
      rtol: relative to each element.
      atol: relative to the array's largest magnitude.
      reason: why it is as large.
    """

    _says = "{0.dtype}: rtol {0.rtol:.3g}, atol {0.atol:.3g}; {0.reason}"

    dtype: str
    reduction_size: float
    rtol: float
    atol: float
    reason: str


TOLERANCES: tuple[Tolerance, ...] = (
    Tolerance("float64", 1024, 1e-12, 1e-12, "unit roundoff 1.1e-16, exp and erf accurate to a few ulp"),
    Tolerance("float64", math.inf, 1e-11, 1e-11, "sqrt(n) growth of long sums"),
    Tolerance("float32", 128, 4e-6, 4e-6, "unit roundoff 6.0e-8, short sums, a few ulp of exp, tanh, erf"),
    Tolerance("float32", 4096, 2e-5, 2e-5, "sqrt(n) growth: a matrix product of an ordinary layer"),
    Tolerance("float32", math.inf, 1e-4, 1e-4, "sums over a whole batch, as in weight gradients"),
    Tolerance(
        "tf32",
        math.inf,
        3e-3,
        2e-3,
        "float32 whose products round operands to 10 bits, unit roundoff 4.9e-4, as float16",
    ),
    Tolerance("bfloat16", 4096, 2e-2, 1e-2, "unit roundoff 3.9e-3; float32 accumulation hides the sum's length"),
    Tolerance("bfloat16", math.inf, 4e-2, 2e-2, "several bfloat16 roundings between long sums"),
    Tolerance("float16", 4096, 3e-3, 2e-3, "unit roundoff 4.9e-4; float32 accumulation hides the sum's length"),
    Tolerance("float16", math.inf, 1e-2, 5e-3, "several float16 roundings between long sums"),
    Tolerance("float8", math.inf, 0.25, 0.25, "unit roundoff 6.2e-2 (e4m3) or 0.125 (e5m2)"),
)


@own_lines_hidden
def tolerance(dtype: Any, reduction_size: int = 1, *, tf32: bool = False) -> Tolerance:
    """The row for a result of this dtype whose largest sum has `reduction_size` terms; complex as its parts.

    With `tf32`, float32 products may have run in TF32.

    Raises:
      ArgumentError: a dtype that is not floating (compare integers exactly), or a size below 1.
    """
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, np.inexact):
        raise ArgumentError(f"dtype: got {dtype}, needed a floating dtype; integers and bools are compared exactly")
    if reduction_size < 1:
        raise ArgumentError(f"reduction_size: got {reduction_size}, needed at least 1")
    name = _row_name(str(dtype), tf32)
    rows = [t for t in TOLERANCES if t.dtype == name and reduction_size <= t.reduction_size]
    if not rows:
        raise ArgumentError(
            f"dtype: got {dtype}, needed one of {', '.join(dict.fromkeys(t.dtype for t in TOLERANCES))}"
        )
    return rows[0]


def _row_name(dtype: str, tf32: bool) -> str:
    """The name of a dtype in the table."""
    if dtype.startswith("float8"):
        return "float8"
    # Each part of a complex number is a float of half its bits.
    name = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    return "tf32" if tf32 and name == "float32" else name
