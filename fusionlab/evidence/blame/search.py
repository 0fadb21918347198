"""Looks for the smallest program that still shows a fault: equations are left out by delta debugging, loops and calls are entered.

Delta debugging: Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, IEEE Transactions on Software Engineering
28(2), 2002. Any set of equations is a program, because what it reads from the others is recorded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fusionlab.progress import SILENT, Stages, Stopped

from .program import Small, cut, inward

Attempt = Callable[[Small], str]  # what a program shows, in words; "" where it does not show the fault


@dataclass(frozen=True, eq=False)
class Found:
    """The end of a search.

    Attributes:
      program: the smallest that shows the fault.
      observed: what it shows, in words.
      trials: how many programs were tried.
      stopped: "", or why the search ended early ("cancelled", "budget").
    """

    program: Small
    observed: str
    trials: int
    stopped: str = ""


class _Over(Exception):  # noqa: N818 - the way out of a search, not an error
    """The budget is spent."""


class Search:
    """The search for the smallest program that shows a fault.

    Args:
      attempt: what a program shows.
      whole: a program that shows the fault.
      observed: what it shows, in words.
      stages: called before each trial, where a cancel ends the search.
      budget_s: seconds after which no further trial begins.
    """

    def __init__(
        self, attempt: Attempt, whole: Small, observed: str, stages: Stages = SILENT, budget_s: float = math.inf
    ) -> None:
        self.attempt, self.stages, self.budget_s = attempt, stages, budget_s
        self.best, self.smallest = whole, (whole, observed)
        self.trials = 0
        self._ends = math.inf
        self._tried: dict[tuple[int, ...], Small] = {}

    def run(self, hints: Iterable[Callable[[], Small | None]] = (), steps: Sequence[int] = ()) -> Found:
        """
        Args:
          hints: make smaller programs that may show it, tried first.
          steps: the steps of loops in which it is likely to show.
        """
        self._ends = time.perf_counter() + self.budget_s
        stopped = ""
        try:
            for hint in hints:
                smaller = hint()
                if smaller is not None and smaller.jaxpr.eqns and self._shows(smaller):
                    break
            self._shrink()
            while any(self._shows(inside) for inside in inward(self.best, steps)):
                self._shrink()
        except Stopped:
            stopped = "cancelled"
        except _Over:
            stopped = "budget"
        return Found(*self.smallest, self.trials, stopped)

    def _shows(self, program: Small) -> bool:
        """Whether a program shows the fault; then the search goes on from it. None is tried twice."""
        key = tuple(map(id, program.jaxpr.eqns))
        if key in self._tried:
            return False
        if time.perf_counter() > self._ends:
            raise _Over
        self.trials += 1
        self.stages(f"trial {self.trials}, {program.count} of {self.best.count} equations")
        self._tried[key] = program  # holds the equations, whose ids are not used again then
        observed = self.attempt(program)
        if observed:
            self.best = program
            if program.count < self.smallest[0].count:
                self.smallest = program, observed
        return bool(observed)

    def _shrink(self) -> None:
        """Leaves equations out until no single one can be."""
        parts = 2
        while (total := len(self.best.jaxpr.eqns)) > 1:
            parts = min(parts, total)
            whole = self.best
            chunks = [range(total * k // parts, total * (k + 1) // parts) for k in range(parts)]
            if any(self._shows(cut(whole, chunk)) for chunk in chunks):
                parts = 2
            elif parts > 2 and any(self._shows(cut(whole, _without(total, chunk))) for chunk in chunks):
                parts = max(parts - 1, 2)
            elif parts < total:
                parts *= 2
            else:
                return


def _without(total: int, chunk: range) -> list[Any]:
    return [i for i in range(total) if i not in chunk]
