"""The verdict of a timing: a ratio of medians, how sure it is, and what may be said of it."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np

from .contention import Contention

VERDICT_SAMPLES = 40  # a median of fewer is too uncertain on a shared machine
WIDEST = 0.06  # of an interval, relative to its lower end: twice the least effect
MIN_EFFECT = 0.03  # below this, two compilations of one function differ as much
# With fewer samples a verdict needs an effect that no doubt is left of: an interval this far from 1, and every pair of samples on its side
# of 1, of at least so many pairs (the sign test: 2 in 2**6 is 3 %). And no interval that reaches further from 1 is "no difference".
FAR, LEAST_SAMPLES = 0.10, 6
BLOCKS = 8
BUSY = 2.0  # times the least effect, the width of an interval and what is far, on a busy machine


class Verdict(enum.StrEnum):
    """The verdict of a timing on "after" against "before"."""

    FASTER = "faster"
    SLOWER = "slower"
    NO_DIFFERENCE = "no difference"
    SAME_CODE = "same code"
    UNDECIDED = "undecided: the times vary too much"
    BUSY = "undecided: the machine is busy"
    INCONCLUSIVE = f"inconclusive: fewer than {VERDICT_SAMPLES} samples"
    NOT_TIMED = "not timed"


def ratio_interval(
    before: Sequence[float],
    after: Sequence[float],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    busy: bool = False,
) -> tuple[float, float]:
    """Percentile bootstrap interval of median(before) / median(after).

    Samples with the same index were taken next to each other, so they are drawn together: what slowed the machine then
    slowed both. The draws are seeded, so the same samples always give the same interval. On a busy machine what slows it lasts for
    several samples: an eighth of them, taken in a row, is then drawn at once.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13; blocks: Künsch, Annals of Statistics 17 (1989).
    """
    n = min(len(before), len(after))
    block = max(1, n // BLOCKS) if busy else 1
    starts = np.random.default_rng(0).integers(0, n, (resamples, -(-n // block)))
    index = ((starts[:, :, None] + np.arange(block)) % n).reshape(resamples, -1)[:, :n]
    ratios = np.median(np.asarray(before)[:n][index], axis=1) / np.median(np.asarray(after)[:n][index], axis=1)
    low, high = np.percentile(ratios, (50 * (1 - confidence), 50 * (1 + confidence)))
    return float(low), float(high)


def judge(
    ratio: float,
    interval: tuple[float, float],
    samples: int,
    agreeing: bool = False,
    contention: Contention | None = None,
) -> Verdict:
    """The verdict on a ratio of medians, its interval, and the number of samples of each function.

    "No difference" means that no difference is as large as `FAR`: an interval that reaches further leaves it undecided.

    Args:
      agreeing: every two samples taken next to each other differ in the same direction. With fewer samples than a verdict
        takes, that and an interval far from 1 are one, too.
      contention: what else ran. On a busy machine a verdict needs `BUSY` times the least effect and an interval that is narrow or far
        from 1, and "no difference" an interval closer to 1; where this process waited longer than it ran, only an interval far from 1
        and samples that all agree are a verdict.
    """
    busy = contention is not None and contention.is_busy
    away = BUSY * FAR if busy else FAR
    sure = agreeing and (interval[0] > 1 + away or interval[1] < 1 / (1 + away))
    if samples < VERDICT_SAMPLES and not (sure and samples >= LEAST_SAMPLES):
        return Verdict.INCONCLUSIVE
    if contention is not None and contention.is_too_much and not sure:
        return Verdict.BUSY
    return _supported(ratio, interval, busy) or (Verdict.BUSY if busy else Verdict.UNDECIDED)


def _supported(ratio: float, interval: tuple[float, float], busy: bool) -> Verdict | None:
    """The verdict that enough samples support, if any."""
    low, high = interval
    if low <= 1 <= high or abs(ratio - 1) < MIN_EFFECT:
        near = BUSY * MIN_EFFECT if busy else FAR
        return Verdict.NO_DIFFERENCE if 1 / (1 + near) <= low and high <= 1 + near else None
    if busy and not (abs(ratio - 1) >= BUSY * MIN_EFFECT and _is_clear(low, high)):
        return None
    return Verdict.FASTER if ratio > 1 else Verdict.SLOWER


def _is_clear(low: float, high: float) -> bool:
    """Whether an interval from a busy machine is narrow or far from 1."""
    return high <= (1 + BUSY * WIDEST) * low or is_far((low, high))


def is_far(interval: tuple[float, float]) -> bool:
    """Whether an interval is so far from 1 that it is a verdict at any width, on a busy machine, too."""
    low, high = interval
    return low > 1 + BUSY * FAR or high < 1 / (1 + BUSY * FAR)
