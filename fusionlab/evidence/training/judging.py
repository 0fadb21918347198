"""What is inside the band: differences of the fused version's run from the original's, against those of the original from itself.

The original is run again several times, each time with other roundings of its sums. Rosinski and Williamson ("The accumulation of rounding
errors and port validation for global atmospheric models", SIAM J. Sci. Comput. 18, 1997) judge a port by this: its difference from the
original must not grow beyond that of a run of the original which was changed in its last bits. Baker et al. ("A new ensemble-based
consistency test for the Community Earth System Model", Geosci. Model Dev. 8, 2015) do so with an ensemble of such runs.

Steps are judged in blocks, each twice as long as the one before: 1, 2-3, 4-7, 8-15, ... A difference is outside where its mean square in a
block is above `FACTOR`^2 times a quantile of the F distribution times that of the runs of the original. The quantile makes a false alarm
anywhere as rare as one comparison in a hundred, if the differences of `n` entries in `k` runs are normal with at most `ENTRIES` degrees of
freedom each: differences that training has amplified are no longer independent of each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jax import numpy as jnp

from .blocks import blocks_of
from .curve import LOSS, TOTAL, StepRange
from .lanes import Series
from .result import Leaf

FACTOR = 3.0  # a fused program also rounds where the original does not: other intermediate values, not only other orders of sums
ENTRIES = 32  # degrees of freedom of a larger array
FALSE_ALARMS = 0.01  # of a comparison


def limit(entries: int, runs: int, comparisons: int) -> float:
    """How many times the root mean square of `runs` differences of the original from itself a difference may be."""
    from scipy import special

    n = min(max(entries, 1), ENTRIES)
    quantile = special.fdtri(n, max(runs, 1) * n, 1 - FALSE_ALARMS / max(comparisons, 1))
    return FACTOR * float(np.sqrt(quantile))


@dataclass(frozen=True)
class Measured:
    """What is judged: one number of each step, or an array of the state.

    Attributes:
      name: as a table has it.
      entries: how many numbers it consists of.
      eps: the unit roundoff of its dtype, twice: the distance from 1 to the next number.
      squares: of a run, the sum of the squares of its differences in each block; scale: of the original, the sum of its squares.
      relative: whether differences are divided by the scale.
    """

    name: str
    entries: int
    eps: float
    squares: Callable[[Series], Sequence[float]]
    scale: Sequence[float]
    relative: bool = True


def measured(leaves: Sequence[Leaf], original: Series, loss_eps: float) -> list[Measured]:
    """The loss, all floats of the state together, and each of these arrays (the measured ones)."""

    def of_array(i: int) -> Callable[[Series], Sequence[float]]:
        return lambda series: [block[i] for block in series.blocks]

    def of_all(series: Series) -> Sequence[float]:
        return [float(block.sum()) for block in series.blocks]

    sizes = [math.prod(leaf.shape) for leaf in leaves]
    eps = [float(jnp.finfo(leaf.dtype).eps) for leaf in leaves]
    found = [
        Measured(LOSS, 1, loss_eps, lambda s: in_blocks(s.loss_differences), in_blocks(original.losses), relative=False)
    ]
    if leaves:
        found.append(Measured(TOTAL, sum(sizes), max(eps), of_all, of_all(original)))
    each = zip(leaves, sizes, eps, range(len(leaves)), strict=True)
    return found + [Measured(leaf.name, n, e, of_array(i), of_array(i)(original)) for leaf, n, e, i in each]


def in_blocks(values: Sequence[float]) -> list[float]:
    """The sum of the squares of a value of each step in each block."""
    squares = np.square(np.asarray(values, np.float64))
    return [float(squares[first - 1 : last].sum()) for first, last in blocks_of(len(values))]


def judged(of: Sequence[Measured], fused: Series, runs: Sequence[Series]) -> Iterator[StepRange]:
    """Each of them in each block in which a run of the original is there to be compared with.

    The loss may give half of the false alarms, the arrays together the other half.
    """
    blocks = blocks_of(len(fused.losses))
    for one in of:
        mine, theirs = one.squares(fused), [one.squares(run) for run in runs]
        for b, (first, last) in enumerate(blocks):
            have = [squares[b] for run, squares in zip(runs, theirs, strict=True) if len(run.losses) >= last]
            if not have:
                continue
            factor = limit(one.entries, len(have), 2 * len(blocks) * (1 if one.name == LOSS else len(of) - 1))
            yield _stretch(one, (first, last), mine[b], sum(have) / len(have), one.scale[b], factor)


def _stretch(one: Measured, block: tuple[int, int], mine: float, band: float, scale: float, factor: float) -> StepRange:
    count = block[1] - block[0] + 1
    # Two entries of it in their last place are no difference: the other runs may happen to have none.
    least = 4 * one.eps**2 * scale / one.entries
    unit = (scale if one.relative and scale else 1.0) if one.relative else count
    fused, other, most = (math.sqrt(x / unit) for x in (mine, band, band + least))
    return StepRange(one.name, *block, fused, other, factor * most)
