"""How far one array is from its reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import numpy as jnp

from fusionlab.errors import ArgumentError
from fusionlab.showing import Shown
from fusionlab.tracebacks import own_lines_hidden

ULP_EDGES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0, 256.0, 1024.0)


@dataclass(frozen=True, repr=False)
class Error(Shown):
    """The distance of an array from its reference; non-finite elements are counted, not measured.

    Attributes:
      max_abs, max_rel: largest |got - want|, and of |got - want| / |want| where want is not 0.
      rel_l2: norm of the difference over the norm of the reference.
      ulp_max, ulp_median: |got - want| in units in the last place of the array's own dtype at `want`; fractions happen.
      ulp_histogram: finite elements by their distance in ulp: the counts between consecutive `ULP_EDGES`, then the count beyond the
        last; () in older records and for integers.
      share: the largest |got - want| / (atol + rtol * |want|) of finite elements: above 1 it is over tolerance; infinite where nothing is
        tolerated, as of integers that differ; None in older records.
      over_tolerance: elements over tolerance or of a non-finite mismatch; for integers and bools, elements that differ.
      nonfinite_mismatch: elements where one is NaN or infinite and the other not, or of another kind or sign.
      worst_index, worst_value, worst_reference: where |got - want| is largest (a mismatch first), and both values.
    """

    _says = "max abs {0.max_abs:.2e}, relative L2 {0.rel_l2:.2e}, over tolerance {0.over_tolerance}"

    max_abs: float
    max_rel: float
    rel_l2: float
    ulp_max: float
    ulp_median: float
    over_tolerance: int
    nonfinite_mismatch: int
    worst_index: tuple[int, ...]
    worst_value: float
    worst_reference: float
    ulp_histogram: tuple[int, ...] = ()
    share: float | None = None


def ulp_size(reference: np.ndarray, dtype: Any) -> np.ndarray:
    """The distance between neighbouring numbers of `dtype` at |reference| (float64 in, float64 out).

    The spacing below the smallest normal number is that of the smallest normal: hardware may flush what lies under it.
    """
    info = jnp.finfo(dtype)
    _, exponent = np.frexp(np.abs(reference))
    exponent = np.where(reference == 0, int(info.minexp), exponent - 1)
    return np.ldexp(1.0, np.maximum(exponent, int(info.minexp)) - int(info.nmant))


@own_lines_hidden
def compare_arrays(got: Any, want: Any, dtype: Any, rtol: float = 0.0, atol: float = 0.0) -> Error:
    """Measures `got` against `want`, with ulp of `dtype`; integers and bools are compared exactly.

    Args:
      got, want: arrays of one shape, numpy or jax; complex ones are compared as pairs of floats.
      dtype: the dtype whose ulp counts: the program's own.
      rtol, atol: over tolerance is |got - want| > atol + rtol * |want|.

    Raises:
      ArgumentError: the shapes differ.
    """
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape:
        raise ArgumentError(f"arrays: got shapes {got.shape} and {want.shape}, needed the same shape")
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, np.complexfloating):
        got, want = (np.stack([x.real, x.imag], -1) for x in (got, want))
        dtype = np.finfo(dtype).dtype
    if not jnp.issubdtype(dtype, np.floating):
        return _compare_exactly(got, want)
    return _compare_floats(got.astype(np.float64), want.astype(np.float64), dtype, rtol, atol)


def _compare_floats(got: np.ndarray, want: np.ndarray, dtype: Any, rtol: float, atol: float) -> Error:
    finite = np.isfinite(got) & np.isfinite(want)
    mismatch = ~finite & ~((got == want) | (np.isnan(got) & np.isnan(want)))
    difference = np.zeros(got.shape)
    difference[finite] = np.abs(got[finite] - want[finite])
    size = np.where(finite, np.abs(want), 0.0)
    ulp = difference / ulp_size(size, dtype)
    relative = np.divide(difference, size, out=np.zeros(got.shape), where=size > 0)
    index = _worst_index(np.where(mismatch, np.inf, difference))
    norm, total = np.linalg.norm(difference), np.linalg.norm(size)
    tolerated = atol + rtol * size
    return Error(
        max_abs=_top(difference),
        max_rel=_top(relative),
        rel_l2=float(norm / total) if total else (float("inf") if norm else 0.0),
        ulp_max=_top(ulp),
        ulp_median=float(np.median(ulp[finite])) if finite.any() else 0.0,
        over_tolerance=int(((difference > tolerated) | mismatch).sum()),
        share=_top(_quotients(difference, tolerated)),
        nonfinite_mismatch=int(mismatch.sum()),
        worst_index=index,
        worst_value=float(got[index]) if got.size else 0.0,
        worst_reference=float(want[index]) if got.size else 0.0,
        ulp_histogram=_histogram(ulp[finite]),
    )


def _quotients(difference: np.ndarray, tolerated: np.ndarray) -> np.ndarray:
    """Elementwise; where nothing is tolerated, 0 of no difference and infinity of any."""
    beyond = np.where(difference > 0, np.inf, 0.0)
    return np.divide(difference, tolerated, out=beyond, where=tolerated > 0)


def _histogram(ulp: np.ndarray) -> tuple[int, ...]:
    within = np.searchsorted(ULP_EDGES, ulp.ravel(), side="left")
    return tuple(int(n) for n in np.bincount(within, minlength=len(ULP_EDGES) + 1))


def _compare_exactly(got: np.ndarray, want: np.ndarray) -> Error:
    differs = got != want
    difference = np.abs(got.astype(np.float64) - want.astype(np.float64)) * differs
    index = _worst_index(difference)
    norm, total = np.linalg.norm(difference), np.linalg.norm(want.astype(np.float64))
    return Error(
        max_abs=_top(difference),
        max_rel=_top(np.divide(difference, np.abs(want), out=np.zeros(got.shape), where=want != 0)),
        rel_l2=float(norm / total) if total else (float("inf") if norm else 0.0),
        ulp_max=0.0,
        ulp_median=0.0,
        over_tolerance=int(differs.sum()),
        share=math.inf if differs.any() else 0.0,
        nonfinite_mismatch=0,
        worst_index=index,
        worst_value=float(got[index]) if got.size else 0.0,
        worst_reference=float(want[index]) if got.size else 0.0,
    )


def _top(x: np.ndarray) -> float:
    return float(x.max()) if x.size else 0.0


def _worst_index(x: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(x)), x.shape)) if x.size else ()
