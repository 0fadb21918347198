"""Whether two programs computed the same numbers from the same inputs: relative to the largest, and apart from the rounding noise of a
sum that cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..dtypes import is_float

# Largest relative error allowed. Casts are the identity here, so all that remains is how literals were rounded: two units
# in the last place of the dtype they were written in, amplified by a handful of operations.
TOLERANCE = {"float64": 1e-9, "float32": 4e-6, "float16": 1e-2, "bfloat16": 4e-2}
# What float64 leaves of a sum that cancels: at most so much of the largest number that both programs make; and another number, of at
# least an eighth of its size, when the inputs are moved a little. One of several moves shows it: few elements may stay by chance.
NOISE = 1e-13
_SPREAD, _INPUT_MOVES = 8, 4

ResultPair = tuple[Sequence[Any], Sequence[Any]]  # results of the old program, and of the new one


@dataclass(frozen=True)
class ProofOutcome:
    """The outcome of a certification.

    Attributes:
      code: None if the proof succeeded, else a rejection code; `detail` is the reason.
      lost: the results (the value, gradients) that are NaN in the program where a mask hides everything, and numbers in the replacement.
      edge: whether numbers near the dtype's limits become infinities in the replacement, or infinities NaN.
      regained: whether a gradient that is NaN or infinite in the program, for finite numbers near the dtype's limits, is a number in the
        replacement.
    """

    code: str | None
    detail: str = ""
    lost: tuple[str, ...] = ()
    edge: bool = False
    regained: bool = False

    @property
    def ok(self) -> bool:
        return self.code is None


@dataclass(frozen=True)
class Results:
    """The results of two programs on the same inputs: `pair`; `nudged(n)` are their results on slightly moved inputs, in one way per n;
    `given` the inputs, with their reduced sizes.
    """

    pair: ResultPair
    nudged: Callable[[int], ResultPair]
    given: Any = None


def tolerance_of(values: Sequence[Any]) -> float:
    """The relative error allowed for operands and results of these dtypes."""
    return max(TOLERANCE.get(np.dtype(v.dtype).name, 1e-9) for v in values if is_float(v.dtype))


def agree(tolerance: float, names: Sequence[str], found: Results) -> ProofOutcome:
    """Whether each of the named results agrees."""
    want, got = found.pair
    noise = NOISE * max((_largest(a, finite=True) for a in (*want, *got)), default=0.0)
    for number, (name, a, b) in enumerate(zip(names, want, got, strict=True)):
        error = relative_error(a, b)
        if error <= tolerance or (max(_largest(a), _largest(b)) <= noise and _is_noise(number, found)):
            continue
        code = "value" if name == "value" else "gradient"
        if math.isinf(error):
            return ProofOutcome(code, f"{name} has NaN or infinity at other entries")
        return ProofOutcome(code, f"{name} differs by {error:.2g} relative (allowed {tolerance:.0e})")
    return ProofOutcome(None)


def _is_noise(number: int, found: Results) -> bool:
    """Whether two tiny results differ only by rounding noise, as cancelling gradients do (e.g. of a value added to every key of a query).
    A result that is meant to be small hardly moves with its inputs.
    """
    want, got = _at(found.pair, number)
    if want.shape != got.shape:
        return False
    difference = np.max(np.abs(want - got), initial=0.0)
    for move in range(_INPUT_MOVES):
        moved = _at(found.nudged(move), number)
        spread = sum(np.max(np.abs(a - b), initial=0.0) for a, b in zip((want, got), moved, strict=True))
        if difference <= _SPREAD * spread:
            return True
    return False


def _at(pair: ResultPair, number: int) -> tuple[np.ndarray, np.ndarray]:
    old, new = (np.asarray(side[number], np.float64) for side in pair)
    return old, new


def relative_error(want: np.ndarray, got: np.ndarray) -> float:
    """Largest absolute difference over the largest absolute value; inf where NaN or infinities do not coincide."""
    want, got = np.asarray(want, np.float64), np.asarray(got, np.float64)
    if want.shape != got.shape:
        return math.inf
    finite = np.isfinite(want)
    same_special = np.array_equal(np.where(finite, 0.0, want), np.where(np.isfinite(got), 0.0, got), equal_nan=True)
    if not same_special or not np.array_equal(finite, np.isfinite(got)):
        return math.inf
    if not finite.any():
        return 0.0
    difference = float(np.max(np.abs(want[finite] - got[finite])))
    return difference / max(float(np.max(np.abs(want[finite]))), 1e-30) if difference else 0.0


def _largest(a: Any, finite: bool = False) -> float:
    """The largest absolute value, of the `finite` ones or of all; NaN counts as infinite."""
    array = np.abs(np.asarray(a, np.float64))
    if finite:
        return float(array.max(initial=0.0, where=np.isfinite(array)))
    largest = float(array.max(initial=0.0))
    return largest if math.isfinite(largest) else math.inf
