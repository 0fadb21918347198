"""How far rounding alone moves the results of a program: the original again, on arguments moved by one rounding.

A result may be zero in theory (the gradient of a key's bias), or badly conditioned in a few elements (Adam's update m / (sqrt(v) + eps)
where the gradient cancels). Its error is then relative to the terms that cancelled, which the result no longer shows, so a tolerance
relative to its own magnitude means nothing; what those terms leave is measured instead. A stable algorithm gives the exact result of
arguments that differ by rounding (Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 1.5), so no version has to
be nearer than the original is on such arguments. Moving every argument also changes nearly every rounding inside: each run draws the
program's own roundings anew, as Monte Carlo arithmetic does (Parker, UCLA CSD-970002, 1997).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from fusionlab.graph.dtypes import is_float
from fusionlab.graph.jax_compat import on_default_device
from fusionlab.showing import Shown

from .arrays import BLOCK, Error
from .reduction_sizes import ReductionSizes, mantissa_bits

RUNS = 8  # at most
# Errors of a version that are only rounding exceed this times the largest of the original in nine runs once in some 30,000 results, where
# one normally distributed element decides.
GROWTH = 4.0
# Times the original's largest error, and its elements over tolerance, after so many runs: more of them will not reach it. An error of a few
# elements may be a jump that few runs make, as of the sign of a gradient that cancels.
_HOPELESS, _ENOUGH = 100.0, 2


@dataclass(frozen=True, repr=False)
class Noise(Shown):
    """The largest errors of the original against the float64 reference, on arguments moved by one rounding.

    Attributes:
      runs: how many there were.
      max_abs, rel_l2, over_tolerance: the largest of each over the runs, as in `Error`.
    """

    _says = "max abs {0.max_abs:.2e}, relative L2 {0.rel_l2:.2e}, over tolerance {0.over_tolerance} in {0.runs} runs"

    runs: int
    max_abs: float
    rel_l2: float
    over_tolerance: int

    def explains(self, error: Error, before: Error) -> bool:
        """Whether an error is at most `GROWTH` times the original's: the largest, over the array, and in the number of elements."""
        return self._excess(error, before) <= 1

    def is_hopeless(self, error: Error, before: Error) -> bool:
        """Whether more runs will hardly explain an error."""
        many = error.over_tolerance > _HOPELESS * max(self.over_tolerance, before.over_tolerance, 1)
        return self.runs >= _ENOUGH and many and self._excess(error, before) > _HOPELESS / GROWTH

    def _excess(self, error: Error, before: Error) -> float:
        pairs = (
            (error.max_abs, max(self.max_abs, before.max_abs)),
            (error.rel_l2, max(self.rel_l2, before.rel_l2)),
            (error.over_tolerance, max(self.over_tolerance, before.over_tolerance, 1)),
        )
        return max(e / (GROWTH * own) if own else float("inf") if e else 0.0 for e, own in pairs)


def with_run(noise: Noise | None, error: Error) -> Noise:
    """The noise after one more run."""
    if noise is None:
        return Noise(1, error.max_abs, error.rel_l2, error.over_tolerance)
    return Noise(
        noise.runs + 1,
        max(noise.max_abs, error.max_abs),
        max(noise.rel_l2, error.rel_l2),
        max(noise.over_tolerance, error.over_tolerance),
    )


def moved(tree: Any, run: int, sums: ReductionSizes, rounded: str = "") -> Any:
    """Arguments with every float element moved by one rounding, up or down at random; others, and zeros, as they are.

    A rounding is a step to a neighbouring number of the array's dtype, or half a step of the dtype in which the program multiplies, if
    that is coarser: its products round their operands to it anyway. An array in a dtype with fewer bits than `rounded`, the coarsest
    that the program rounds to, stays as it is: a program that computes in float32 makes no error as large as a step of bfloat16.
    """
    coarse = _roundoff(sums)
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(
        [x if _is_narrower(x, rounded) else _moved(x, 64 * run + i, coarse) for i, x in enumerate(leaves)]
    )


def _is_narrower(x: Any, rounded: str) -> bool:
    dtype = getattr(x, "dtype", None)
    return bool(rounded) and is_float(dtype) and mantissa_bits(dtype) < mantissa_bits(rounded)


def _roundoff(sums: ReductionSizes) -> float:
    if sums.tf32 and sums.coarsest == "float32":
        return 2.0**-11
    return float(jnp.finfo(sums.coarsest).eps) / 2 if sums.coarsest else 0.0


def _moved(x: Any, salt: int, coarse: float) -> Any:
    if not (hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)) or not x.size:
        return x
    by = max(float(jnp.finfo(x.dtype).eps), coarse)
    if x.size > BLOCK or not on_default_device(x):
        return _shifted_on_device(x, salt & 0xFFFFFFFF, by)
    # On the host nothing is compiled; on the device each shape is another program.
    return jax.device_put(_shifted(np, np.asarray(x), salt & 0xFFFFFFFF, by), x.sharding)


@functools.partial(jax.jit, static_argnames="by")
def _shifted_on_device(x: Any, salt: Any, by: float) -> Any:
    return _shifted(jnp, x, salt, by)


def _shifted(of: Any, x: Any, salt: Any, by: float) -> Any:
    """Each element times 1 + by or 1 - by, as `of`, NumPy or `jax.numpy`, computes it: the same on both."""
    # A hash of the position (the last step of MurmurHash3): as random as is needed, and compiled in no time for each shape.
    h = of.arange(x.size, dtype="uint32").reshape(x.shape) * of.uint32(0x9E3779B1)
    h = h + of.asarray([salt], dtype="uint32") * of.uint32(0x85EBCA6B)
    h = (h ^ (h >> 16)) * of.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * of.uint32(0xC2B2AE35)
    wide = x.astype("float32") if x.dtype.itemsize < 4 else x
    return of.where((h ^ (h >> 16)) >> 31 == 0, wide * (1 + by), wide * (1 - by)).reshape(x.shape).astype(x.dtype)


def measure_noise(
    run: Callable[[int], Sequence[Any]],
    error_of: Callable[[int, Any], Error],
    judged: Mapping[int, tuple[Error, Error]],
) -> dict[int, Noise]:
    """The noise of some results, of as many runs as it takes to explain each error or to give it up.

    Args:
      run: the number of a run, from 1 -> the original's results on arguments moved for it.
      error_of: (number of a result, its value) -> its error.
      judged: number of a result -> (the error of the version, the error of the original).
    """
    noise: dict[int, Noise] = {}
    for k in range(1, RUNS + 1):
        results = run(k)
        noise = {i: with_run(noise.get(i), error_of(i, results[i])) for i in judged}
        if all(n.explains(*judged[i]) or n.is_hopeless(*judged[i]) for i, n in noise.items()):
            break
    return noise
