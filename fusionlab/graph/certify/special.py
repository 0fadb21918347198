"""Inputs that random numbers never cover: rows of zeros or of one number, masks that hide everything, the limits of the dtype.

An epsilon keeps a norm of zeros finite, but the gradient of a root of zero is NaN, whatever is added after it; and mathematically equal
spellings may differ in overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..dtypes import is_float
from .verdict import ProofOutcome, ResultPair, Results, agree

# The share of inputs that are near the dtype's edge, and that are infinite, draw by draw: few, or a sum of products is NaN anyway; many, or
# two never meet.
_EDGE = ((0.1, 0.0), (0.5, 0.1))
_HIDES = -1e30  # as a mask that is added: beside it a score is lost, and the logarithm of a sum of exponentials, too
_AGAIN = 3  # draws of each for a site of few elements


@dataclass(frozen=True)
class Special:
    """A change of drawn inputs, with its `description`.

    Attributes: `exact` (the resulting numbers are compared; else only whether they are numbers), `hides` (only masks are changed,
    so that rows may be fully masked), `alike` (results are compared only where both are numbers).
    """

    description: str
    of: Callable[[Sequence[Any]], list[Any]]
    exact: bool = False
    hides: bool = False
    alike: bool = False


def specials(avals: Sequence[Any], added: Collection[int] = ()) -> Iterator[Special]:
    """The special inputs of a program with arguments of these types; the last drawn array is the cotangent, and stays.

    `added` are the numbers of those that are added to the scores of a softmax.
    """
    floats = frozenset(i for i, a in enumerate(avals) if is_float(a.dtype))
    masks = frozenset(i for i, a in enumerate(avals) if a.dtype == np.bool_)

    def filled(where: frozenset[int], number: Callable[[int], float]) -> Callable[[Sequence[Any]], list[Any]]:
        return lambda args: [np.full_like(a, number(i)) if i in where else a for i, a in enumerate(args)]

    yield Special("inputs of zeros", filled(floats, lambda i: 0.0), exact=True)
    yield Special("inputs of zero variance", filled(floats, lambda i: 1.5 / (1 + i)))
    if added:
        yield Special("a score term that hides every key", filled(frozenset(added), lambda _: _HIDES), alike=True)
    if masks:
        yield Special("masks of all False", filled(masks, lambda i: False), exact=True, hides=True)
        yield Special("masks of all True", filled(masks, lambda i: True), exact=True, hides=True)


def compared(special: Special, names: Sequence[str], found: Results, tolerance: float) -> ProofOutcome:
    """Compares the results of two programs on special inputs.

    NaN and infinities of the program that are numbers in the replacement are `lost`, if only masks are changed. Any other difference
    means another function.
    """
    if special.alike:
        return _numbers_agree(special, names, found, tolerance)
    lost: list[str] = []
    for name, want, got in zip(names, *found.pair, strict=True):
        a, b = np.asarray(want, np.float64), np.asarray(got, np.float64)
        held, holds = np.isfinite(a), np.isfinite(b)
        code = "value" if name == "value" else "gradient"
        if (held & ~holds).any():
            return ProofOutcome(
                code,
                f"{name} would be {b[held & ~holds][0]} for {special.description}, where the program's is a number",
            )
        if (~held & holds).any():
            if not special.hides:
                sentence = f"{name} is {a[~held & holds][0]} for {special.description} and would become a number"
                return ProofOutcome(code, sentence)
            lost.append(name)
    verdict = _numbers_agree(special, names, found, tolerance) if special.exact else ProofOutcome(None)
    return replace(verdict, lost=tuple(lost))


def _numbers_agree(special: Special, names: Sequence[str], found: Results, tolerance: float) -> ProofOutcome:
    numbers = Results(_numbers(found.pair), lambda n: _numbers(found.nudged(n)))
    verdict = agree(tolerance, names, numbers)
    return verdict if verdict.ok else ProofOutcome(verdict.code, f"{verdict.detail} for {special.description}")


def _numbers(pair: ResultPair) -> ResultPair:
    """Two results with 0 where either is not a number."""
    both = [[np.isfinite(np.asarray(x, np.float64)) for x in side] for side in pair]
    held = [a & b for a, b in zip(*both, strict=True)]
    old, new = ([np.where(h, x, 0.0) for h, x in zip(held, side, strict=True)] for side in pair)
    return old, new


# -- the dtype's edge -----------------------------------------------------------------------------------------------------


def at_edge(args: Sequence[Any], avals: Sequence[Any], few: bool) -> Iterator[list[Any]]:
    """Drawn inputs of which some are near the largest number of their dtype, and some infinite; more often of a site of few elements."""
    for seed in range(len(_EDGE) * (_AGAIN if few else 1)):
        rng, (near, infinite) = np.random.default_rng(seed), _EDGE[seed % len(_EDGE)]
        given = (
            _moved(a, v.dtype, rng, near, infinite) if is_float(v.dtype) else a
            for a, v in zip(args, avals, strict=False)
        )
        yield [*given, *args[len(avals) :]]


def near_edge(args: Sequence[Any], avals: Sequence[Any]) -> Iterator[list[Any]]:
    """Drawn inputs with some or all entries of arrays of more than one axis near the largest finite number of their dtype: their squares
    overflow, and so may their products with ordinary numbers."""
    rng = np.random.default_rng(0)

    def large(a: Any, dtype: Any, share: float) -> Any:
        most = float(jnp.finfo(dtype).max)
        moved = np.where(rng.random(a.shape) < share, np.clip(a, -1.0, 1.0) * most, a)
        return moved.astype(dtype).astype(np.float64)

    for share in (1.0, 0.2, 0.2):
        typed = zip(args, avals, strict=False)
        given = (large(a, v.dtype, share) if is_float(v.dtype) and a.ndim > 1 else a for a, v in typed)
        yield [*given, *args[len(avals) :]]


def _moved(a: np.ndarray, dtype: Any, rng: np.random.Generator, near: float, infinite: float) -> np.ndarray:
    which, largest = rng.random(a.shape), float(jnp.finfo(dtype).max)
    found = np.where(which < near, np.sign(a) * largest * rng.uniform(0.5, 1.0, a.shape), a)
    found = np.where(which > 1 - infinite, np.sign(a) * np.inf, found)
    with np.errstate(over="ignore"):
        return found.astype(dtype).astype(np.float64)


def overflows(want: np.ndarray, got: np.ndarray) -> bool:
    """Whether numbers have become infinite or NaN, or infinities NaN."""
    return bool((np.isfinite(want) & ~np.isfinite(got)).any() or (np.isinf(want) & np.isnan(got)).any())
