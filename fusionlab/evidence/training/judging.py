"""What is inside the band: differences of the fused version's run from the original's, against those of the original from itself.

The original is run again several times, each time with other roundings of its sums. Rosinski and Williamson ("The accumulation of rounding
errors and port validation for global atmospheric models", SIAM J. Sci. Comput. 18, 1997) judge a port by this: its difference from the
original must not grow beyond that of a run of the original which was changed in its last bits. Baker et al. ("A new ensemble-based
consistency test for the Community Earth System Model", Geosci. Model Dev. 8, 2015) do so with an ensemble of such runs.

Steps are judged in blocks, each twice as long as the one before: 1, 2-3, 4-7, 8-15, ... A difference is outside where its mean square in a
block is above all of these:

- `FACTOR`^2 times a quantile of the F distribution times that of the runs of the original. The quantile makes a false alarm anywhere as
  rare as one comparison in a hundred, if the differences of `n` entries in `k` runs are normal with at most `ENTRIES` degrees of freedom
  each: differences that training has amplified are no longer independent of each other.
- The same, as many times larger as that limit is too small for the runs of the original themselves: each is judged by the others.
  Differences that are not normal (the first update of Adam is the sign of a gradient, and a sign differs or does not) make it larger, among
  arrays of about the same size.
- Four times that of the original from itself in float32. A version that is no farther from exact training than the original is at most
  twice as far from the original.

From the block on in which a limit means nothing any more (of the loss more than half of the largest loss so far, of the state more than its
norm), nothing is judged: the original's own runs have parted. So it is from the block on in which the original's loss, or a limit, is not
finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
ALIKE = 8  # times as many entries: arrays of about the same size
FEWEST_RUNS = 3  # that judge each other
OF_FLOAT32 = 2.0  # times the original's distance from itself in float32
OF_LOSS = 0.5  # of the largest loss so far: a limit above it says nothing


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


@dataclass(frozen=True)
class Judged:
    """What was found.

    Attributes:
      stretches: of each thing that is judged, in each block.
      parted: the first step from which on nothing is judged, counted from 1; 0: all are.
    """

    stretches: tuple[StepRange, ...]
    parted: int = 0


def judged(of: Sequence[Measured], fused: Series, runs: Sequence[Series], wide: Series | None = None) -> Judged:
    """Each of them in each block in which a run of the original is there to be compared with.

    The loss may give half of the false alarms, the arrays together the other half.

    Args:
      of: the loss first.
      fused, runs: of the fused version, and of the original with other roundings.
      wide: of the original in float32.
    """
    squares = [_Squares(one, fused, runs, wide) for one in of]
    found: list[StepRange] = []
    for b, block in enumerate(blocks_of(len(fused.losses))):
        here = [each.block(b, block) for each in squares]
        if not here or not here[0].runs:
            continue
        comparisons = 2 * len(blocks_of(len(fused.losses)))
        ranges = [each.judged(here, comparisons * (1 if each.of.name == LOSS else len(of) - 1)) for each in here]
        if not math.isfinite(here[0].scale) or _says_nothing(ranges, fused, block):
            return Judged(_in_order(of, found), block[0])
        found += ranges
    return Judged(_in_order(of, found))


def _in_order(of: Sequence[Measured], found: Sequence[StepRange]) -> tuple[StepRange, ...]:
    places = {one.name: i for i, one in enumerate(of)}
    return tuple(sorted(found, key=lambda s: (places[s.of], s.first)))


def _says_nothing(ranges: Sequence[StepRange], fused: Series, block: tuple[int, int]) -> bool:
    original = np.subtract(fused.losses, fused.loss_differences)[: block[1]]
    largest = np.nanmax(np.abs(original), initial=0.0, where=np.isfinite(original))
    of_loss, *others = ranges
    if not all(math.isfinite(s.limit) for s in ranges):
        return True
    return (largest > 0 and of_loss.limit > OF_LOSS * largest) or any(s.of == TOTAL and s.limit > 1 for s in others)


class _Squares:
    """The sums of squares of one thing, of all runs."""

    def __init__(self, of: Measured, fused: Series, runs: Sequence[Series], wide: Series | None) -> None:
        self.of, self.fused = of, of.squares(fused)
        self.runs = [(len(run.losses), of.squares(run)) for run in runs]
        self.wide = of.squares(wide) if wide is not None else []

    def block(self, b: int, steps: tuple[int, int]) -> _Block:
        runs = [squares[b] for length, squares in self.runs if length >= steps[1]]
        return _Block(
            self.of, steps, self.fused[b], runs, self.wide[b] if b < len(self.wide) else 0.0, self.of.scale[b]
        )


@dataclass(frozen=True)
class _Block:
    """The sums of squares of one thing in one block: of the fused version, of each run of the original, of it in float32, and its scale."""

    of: Measured
    steps: tuple[int, int]
    fused: float
    runs: Sequence[float]
    wide: float
    scale: float

    @property
    def least(self) -> float:
        """Two entries of it in their last place are no difference: the other runs may happen to have none."""
        return 4 * self.of.eps**2 * self.scale / max(self.of.entries, 1)

    def judged(self, all_of_them: Sequence[_Block], comparisons: int) -> StepRange:
        factor = limit(self.of.entries, len(self.runs), comparisons)
        if self.of.name not in (LOSS, TOTAL):
            alike = [b for b in all_of_them if b.of.name not in (LOSS, TOTAL) and _are_alike(self.of, b.of)]
            factor *= max(1.0, 2 * max(b.worst_run(comparisons) for b in alike))
        unit = (self.scale if self.of.relative and self.scale else 1.0) if self.of.relative else self.count
        band = sum(self.runs) / len(self.runs)
        fused, runs, most, wide = (math.sqrt(x / unit) for x in (self.fused, band, band + self.least, self.wide))
        return StepRange(self.of.name, *self.steps, fused, runs, max(factor * most, OF_FLOAT32 * wide), wide)

    @property
    def count(self) -> int:
        return self.steps[1] - self.steps[0] + 1

    def worst_run(self, comparisons: int) -> float:
        """How far the run of the original that is farthest is, over what the others would allow it."""
        if len(self.runs) < FEWEST_RUNS:
            return 0.0
        farthest = max(self.runs)
        others = (sum(self.runs) - farthest) / (len(self.runs) - 1) + self.least
        most = limit(self.of.entries, len(self.runs) - 1, comparisons) * math.sqrt(others)
        return math.sqrt(farthest) / most if most else 0.0


def _are_alike(one: Measured, other: Measured) -> bool:
    return one.entries <= ALIKE * other.entries and other.entries <= ALIKE * one.entries
