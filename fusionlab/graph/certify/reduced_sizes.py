"""The sizes to which a program's axes are reduced for certification: tried until they are consistent and quick to evaluate."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..interpret.limits import KEPT_SIZES, CannotEvaluate, CutError, PositionsError, SizesDifferError, TooLargeError
from .inputs import Reduction

_MOST_PRODUCT_SIZES = 16  # sizes that are products of others
_REAL_SIZE_LIMIT = 1 << 16  # elements; a region this small may be evaluated as it stands
# Entries of an array, and terms that it is made of: within seconds, and on any machine.
SOON = 1 << 25, 1 << 30
AT_ALL = 1 << 27, 1 << 34


def elements(avals: Sequence[Any]) -> int:
    """The number of elements of all arrays together."""
    return sum(math.prod(a.shape) for a in avals)


def at_sizes(attempt: Callable[[Reduction], Any], avals: Sequence[Any], kept: frozenset[int] = frozenset()) -> Any:
    """`attempt` at reduced sizes, or at the real ones if that fails. Axes of the sizes `kept` are not reduced.

    An axis that only the program itself splits (features into heads) keeps the lengths of its parts. If that is slow, for example because
    there are as many tokens as features, reduced parts are tried too.
    """
    split: set[int] = set()
    known = {n: n for n in kept}
    try:
        with contextlib.suppress(TooLargeError):
            return _at_products(attempt, Reduction(known, most=SOON), split)
        if not kept:
            with contextlib.suppress(CannotEvaluate):
                return _at_parts(attempt, split, avals)
        return _at_products(attempt, Reduction(known, most=AT_ALL), set())
    except CannotEvaluate:
        if elements(avals) > _REAL_SIZE_LIMIT:
            raise
        return attempt(Reduction(most=AT_ALL, real=True))


def _at_parts(attempt: Callable[[Reduction], Any], split: set[int], avals: Sequence[Any]) -> Any:
    """`attempt` with reduced parts `split` too, except those along which the program uses positions."""
    known = {int(s) for a in avals for s in a.shape}
    whole: set[int] = set()
    for _ in range(_MOST_PRODUCT_SIZES):
        parts = sorted(split - known - whole)
        if not parts:
            break
        gathered = len(split)
        # Different ones to different sizes, none of them one that stands for itself.
        reduced = {n: KEPT_SIZES + 1 + i for i, n in enumerate(parts)}
        try:
            return _at_products(attempt, Reduction(reduced, frozenset(reduced), SOON), split)
        except PositionsError as error:
            whole.add(error.size)
        except TooLargeError:
            if len(split) == gathered:
                raise
    raise CannotEvaluate("axes of parts that have to be whole")


def _at_products(attempt: Callable[[Reduction], Any], reduction: Reduction, split: set[int]) -> Any:
    """`attempt` at reduced sizes, some of which turn out to be products of others and are reduced to the product. `split`
    collects the unreduced parts of axes that the program splits.
    """
    tried: set[tuple[int, int]] = set()
    while True:
        try:
            return attempt(reduction)
        except SizesDifferError as error:
            split.update(error.split)
            now = (error.real, error.other)  # of a product of products again, once those are known
            if now in tried or len(tried) >= _MOST_PRODUCT_SIZES:
                raise
            tried.add(now)
            reduction = replace(reduction, known={**reduction.known, error.real: error.other})
        except CutError as error:
            if error.real in reduction.cut:
                raise
            reduction = replace(reduction, cut={**reduction.cut, error.real: error.ends})
