"""How far one array is from its reference."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from fusionlab.errors import ArgumentError
from fusionlab.graph.jax_compat import enable_x64, on_default_device
from fusionlab.graph.settings import jax_defaults
from fusionlab.showing import Shown
from fusionlab.tracebacks import own_lines_hidden

BLOCK = 2**17  # elements: larger arrays are compared on the device
_SAMPLED = 2**12  # elements of each block, for the median
ULP_EDGES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0, 256.0, 1024.0)


@dataclass(frozen=True, repr=False)
class Error(Shown):
    """The distance of an array from its reference; non-finite elements are counted, not measured.

    Attributes:
      max_abs, max_rel: largest |got - want|, and of |got - want| / |want| where want is not 0.
      rel_l2: norm of the difference over the norm of the reference.
      ulp_max, ulp_median: |got - want| in units in the last place of the array's own dtype at `want`; fractions happen. The median of
        more than 131,072 elements is that of 4,096 of each block of them, evenly spaced.
      ulp_histogram: finite elements by their distance in ulp: the counts between consecutive `ULP_EDGES`, then the count beyond the
        last; () in older records and for integers.
      share: the largest |got - want| / (atol + rtol * |want|) of finite elements: above 1 it is over tolerance; infinite where nothing is
        tolerated, as of integers that differ; None in older records.
      scale: <got, want> / <want, want> of finite elements: 1.01 of an array that is 1 % too large, which no element may show, as
        rounding errors that point either way cancel in it; None in older records, for integers, and where the reference is 0.
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
    scale: float | None = None


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
    got, want = (x if np.size(x) > BLOCK and on_default_device(x) else np.asarray(x) for x in (got, want))
    if got.shape != want.shape:
        raise ArgumentError(f"arrays: got shapes {got.shape} and {want.shape}, needed the same shape")
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, np.floating) and got.size > BLOCK:
        return _compare_in_blocks(got, want, dtype, rtol, atol)
    got, want = np.asarray(got), np.asarray(want)
    if jnp.issubdtype(dtype, np.complexfloating):
        got, want = (np.stack([x.real, x.imag], -1) for x in (got, want))
        dtype = np.finfo(dtype).dtype
    if not jnp.issubdtype(dtype, np.floating):
        return _compare_exactly(got, want)
    return _compare_floats(got, want, dtype, rtol, atol)


def largest(x: Any) -> float:
    """The largest |x| among finite elements, 0 without any."""
    if x.size > BLOCK and jnp.issubdtype(x.dtype, np.floating):
        size = _block_size(x)
        with jax_defaults(), enable_x64(True):
            return float(max(jax.device_get([_top_of(_cut(x, i, size)) for i in _firsts(x.size, size)])))
    size = np.abs(np.asarray(x))
    top = size.max(initial=0)
    return float(top if np.isfinite(top) else size.max(initial=0, where=np.isfinite(size)))


@jax.jit
def _top_of(x: Any) -> Any:
    return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0))


def _compare_floats(got: np.ndarray, want: np.ndarray, dtype: Any, rtol: float, atol: float) -> Error:
    got, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(got) & np.isfinite(want)
    mismatch = ~finite & ~((got == want) | (np.isnan(got) & np.isnan(want)))
    difference = np.zeros(got.shape)
    difference[finite] = np.abs(got[finite] - want[finite])
    size = np.where(finite, np.abs(want), 0.0)
    with np.errstate(over="ignore"):  # in units of the smallest number, a difference from zero may be infinite
        ulp = difference / ulp_size(size, dtype)
    relative = np.divide(difference, size, out=np.zeros(got.shape), where=size > 0)
    index = _worst_index(np.where(mismatch, np.inf, difference))
    norm, total = _norm(difference), _norm(size)
    product = float(np.sum(np.where(finite, got, 0) * np.where(finite, want, 0)))
    tolerated = atol + rtol * size
    return Error(
        max_abs=_top(difference),
        max_rel=_top(relative),
        rel_l2=norm / total if total else (float("inf") if norm else 0.0),
        ulp_max=_top(ulp),
        ulp_median=float(np.median(ulp[finite])) if finite.any() else 0.0,
        over_tolerance=int(((difference > tolerated) | mismatch).sum()),
        share=_top(_quotients(difference, tolerated)),
        nonfinite_mismatch=int(mismatch.sum()),
        scale=_scale(product, float(total) ** 2),
        worst_index=index,
        worst_value=float(got[index]) if got.size else 0.0,
        worst_reference=float(want[index]) if got.size else 0.0,
        ulp_histogram=_histogram(ulp[finite]),
    )


def _compare_in_blocks(got: Any, want: Any, dtype: Any, rtol: float, atol: float) -> Error:
    """As `_compare_floats`, on the device and in blocks of few sizes, so that little is compiled; the median is that of a sample."""
    n, size = got.size, _block_size(got)
    info = jnp.finfo(dtype)
    limits = np.asarray([2.0**info.minexp, 2.0**info.nmant]), np.asarray([rtol, atol])
    firsts = _firsts(n, size)
    with jax_defaults(), enable_x64(True):
        blocks = [_block(_cut(got, i, size), _cut(want, i, size), size * k - i, *limits) for k, i in enumerate(firsts)]
        found = [_Found(*each) for each in jax.device_get(blocks)]
    sums, counts = (np.sum([getattr(f, part) for f in found], axis=0) for part in ("sums", "counts"))
    tops = np.max([f.tops for f in found], axis=0)
    worst = max(range(len(found)), key=lambda k: (found[k].worst[0], -k))
    ulps = np.concatenate([f.ulps for f in found])
    at = firsts[worst] + int(found[worst].index)
    norm, total = map(math.sqrt, sums[:2])
    return Error(
        **dict(zip(("max_abs", "max_rel", "ulp_max", "share"), map(float, tops), strict=True)),
        rel_l2=norm / total if total else (math.inf if norm else 0.0),
        ulp_median=float(np.nanmedian(ulps)) if np.isfinite(ulps).any() else 0.0,
        over_tolerance=int(counts[0]),
        nonfinite_mismatch=int(counts[1]),
        scale=_scale(float(sums[2]), float(sums[1])),
        worst_index=tuple(int(i) for i in np.unravel_index(at, got.shape)),
        worst_value=float(found[worst].worst[1]),
        worst_reference=float(found[worst].worst[2]),
        ulp_histogram=tuple(int(c) for c in counts[2:]),
    )


class _Found(NamedTuple):
    """Of a block: largest values, sums of squares and products, counts, the worst (difference, value, reference), its place, some ulps."""

    tops: Any
    sums: Any
    counts: Any
    worst: Any
    index: Any
    ulps: Any


@jax.jit
def _block(got: Any, want: Any, skipped: Any, units: Any, limits: Any) -> tuple[Any, ...]:
    """`_Found` of a block in float64, without its first `skipped` elements.

    `units` are the smallest normal number of the dtype whose ulp counts, and how many ulp there are in a power of two.
    """
    counted = jnp.arange(got.size) >= skipped
    finite = counted & jnp.isfinite(got) & jnp.isfinite(want)
    mismatch = counted & ~finite & ~((got == want) | (jnp.isnan(got) & jnp.isnan(want)))
    difference = jnp.where(finite, jnp.abs(got - want), 0)
    size = jnp.where(finite, jnp.abs(want), 0)
    # The exponent's bits alone are the power of two below `size`: much faster than frexp and ldexp.
    power = (size.view(np.uint64) & np.uint64(0x7FF << 52)).view(np.float64)
    ulp = difference / jnp.maximum(power, units[0]) * units[1]
    tolerated = limits[1] + limits[0] * size
    share = jnp.where(tolerated > 0, difference / tolerated, jnp.where(difference > 0, jnp.inf, 0))
    relative = jnp.where(size > 0, difference / size, 0)
    over = counted & ((difference > tolerated) | mismatch)
    ranked = jnp.where(mismatch, jnp.inf, difference)
    index = jnp.argmax(jnp.where(counted, ranked, -1))
    within = jnp.stack([finite.sum(), *((finite & (ulp > edge)).sum() for edge in ULP_EDGES), 0])
    every = max(1, got.size // _SAMPLED)
    return (
        jnp.stack([x.max() for x in (difference, relative, ulp, share)]),
        jnp.stack([x.sum() for x in (difference**2, size**2, jnp.where(finite, got * want, 0))]),
        jnp.concatenate([jnp.stack([over.sum(), mismatch.sum()]), within[:-1] - within[1:]]),
        jnp.stack([x[index] for x in (ranked, got, want)]),
        index,
        jnp.where(finite, ulp, jnp.nan)[::every],
    )


def _block_size(x: Any) -> int:
    """Elements of a block: on a CPU no more than its caches hold."""
    return BLOCK if x.size < 16 * BLOCK or jax.default_backend() == "cpu" else 16 * BLOCK


def _firsts(n: int, size: int) -> list[int]:
    """Where blocks begin; the last one holds the last elements, some of which are in the one before as well."""
    return [min(start, n - size) for start in range(0, n, size)]


def _cut(x: Any, first: int, size: int) -> Any:
    """A block of an array in float64 on the device."""
    return _slice(x, first, size) if isinstance(x, jax.Array) else _wide(x.reshape(-1)[first : first + size])


@functools.partial(jax.jit, static_argnums=2)
def _slice(x: Any, first: Any, size: int) -> Any:
    return jax.lax.dynamic_slice(x.reshape(-1), (first,), (size,)).astype(np.float64)


@jax.jit
def _wide(x: Any) -> Any:
    return x.astype(np.float64)


def _scale(product: float, square: float) -> float | None:
    found = product / square if square > 0 else math.nan
    return found if math.isfinite(found) else None


def _norm(x: np.ndarray) -> float:
    """Of all elements; `np.linalg.norm` starts threads of BLAS, for which small arrays wait."""
    return math.sqrt(float(np.sum(np.square(x))))


def _quotients(difference: np.ndarray, tolerated: np.ndarray) -> np.ndarray:
    """Elementwise; where nothing is tolerated, 0 of no difference and infinity of any."""
    beyond = np.where(difference > 0, np.inf, 0.0)
    return np.divide(difference, tolerated, out=beyond, where=tolerated > 0)


def _histogram(ulp: np.ndarray) -> tuple[int, ...]:
    within = np.searchsorted(ULP_EDGES, ulp.ravel(), side="left")
    return tuple(int(n) for n in np.bincount(within, minlength=len(ULP_EDGES) + 1))


def _compare_exactly(got: np.ndarray, want: np.ndarray) -> Error:
    differs = got != want
    # At least 1: float64 holds no integer beyond 2^53 exactly.
    difference = np.maximum(np.abs(got.astype(np.float64) - want.astype(np.float64)), 1) * differs
    index = _worst_index(difference)
    norm, total = _norm(difference), _norm(want.astype(np.float64))
    return Error(
        max_abs=_top(difference),
        max_rel=_top(np.divide(difference, np.abs(want), out=np.zeros(got.shape), where=want != 0)),
        rel_l2=norm / total if total else (float("inf") if norm else 0.0),
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
