"""The program with some of its sites fused, against the original: the effect of single sites on its errors and its time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusionlab.graph.calls.binding import Bound
from fusionlab.progress import SILENT, Stages, Stopped
from fusionlab.showing import Shown

from .bisection import Bisection, bisect_sites
from .errors.numerics import LeafNumerics
from .instruments.timing import Timing, Verdict, time_programs
from .original import Original

Fuser = Callable[[tuple[str, ...]], Callable]  # site ids -> the function with these alone fused


@dataclass(frozen=True, repr=False)
class SiteErrors(Shown):
    """Errors with only one site fused.

    Attributes:
      site: its id.
      leaves: every output and gradient, original ("before") and with that site fused ("after"), against float64: of the program, or of
        the site alone.
      drawn: whether the errors are of the site alone on random values, as the values that reach it differ between iterations.
    """

    _listed = "leaves"
    _name = "site"

    site: str
    leaves: tuple[LeafNumerics, ...]
    drawn: bool = False

    @property
    def ok(self) -> bool:
        """Whether every output and gradient passes, as `LeafNumerics.ok` has it."""
        return all(leaf.ok for leaf in self.leaves)

    @property
    def worst(self) -> LeafNumerics:
        """The output or gradient that this site makes worst."""
        return worst_of(self.leaves)

    def __str__(self) -> str:
        return f"{self.site}: {self.worst}{' (on values drawn at random)' if self.drawn else ''}"

    def _row(self) -> dict[str, Any]:
        return {"site": self.site, **self.worst._row()}


def worst_of(leaves: Sequence[LeafNumerics]) -> LeafNumerics:
    """The leaf that got worst: regressions first, then by the growth of the error relative to the tolerance."""

    def grown(leaf: LeafNumerics) -> tuple[bool, bool, float]:
        growth = (leaf.after.max_abs - leaf.before.max_abs) / (leaf.atol or 1e-300)
        return not leaf.ok, not leaf.is_rounding, growth

    return max(leaves, key=grown)


class Trials:
    """Versions of one original, each with some of its sites fused. `each` is the name of one version in the stages, `total` how many
    there are, where that is known."""

    def __init__(
        self, call: Bound, fused: Fuser, grad: bool | None, stages: Stages = SILENT, each: str = "trial", total: int = 0
    ) -> None:
        self.original, self.fused = Original(call, (), None, grad, stages), fused
        self.stages, self.each, self.total, self._done = stages, each, total, 0

    def errors(self, sites: tuple[str, ...]) -> tuple[LeafNumerics, ...]:
        """Errors of outputs and gradients with these sites fused.

        Raises:
          TraceError: the program has no float64 form, or (with `grad`) no gradient.
        """
        version = self._begun(sites)
        backward = self.original.backward_of(version) if self.original.grad else None
        return tuple(self.original.errors(self.original.forward_of(version), backward))

    def timing(self, sites: tuple[str, ...], samples: int, budget_s: float) -> Timing:
        """Time with these sites fused: of value and gradient, where gradients are compared."""
        version, original = self._begun(sites), self.original
        told = original.stages
        effort = {"samples": samples, "budget_s": budget_s, "progress": told.progress, "cancel": told.cancel}
        call, gradient = original.names
        if original.grad:
            return time_programs(gradient, original.backward, original.backward_of(version), **effort)
        return time_programs(call, original.forward, original.forward_of(version), **effort)

    def _begun(self, sites: tuple[str, ...]) -> Bound:
        """The version with these sites fused; the stages from here on carry its name."""
        self._done += 1
        self.original.stages = self.stages.inside(
            f"{self.each} {self._done}{f' of {self.total}' if self.total else ''}"
        )
        return replace(self.original.call, fn=self.fused(sites))


def each_site(
    sites: Sequence[str],
    errors: Callable[[str], SiteErrors],
    stages: Stages = SILENT,
) -> tuple[SiteErrors, ...]:
    """The errors of every site, in order; fewer where it was cancelled."""
    found: list[SiteErrors] = []
    with contextlib.suppress(Stopped):
        stage = stages("errors site by site", len(sites))
        for site in sites:
            stages.check(site)
            found.append(errors(site))
            stage.step()
    return tuple(found)


def bisect_subsets(
    trials: Trials,
    name: str,
    of: str,
    sites: Sequence[str],
    *,
    samples: int,
    budget_s: float,
    stages: Stages = SILENT,
) -> Bisection:
    """The smallest sets of sites that make an output or gradient worse than before ("error"), or the program slower ("time")."""

    def wrong(chosen: tuple[str, ...]) -> tuple[bool, str]:
        leaf = worst_of(trials.errors(chosen))
        return not leaf.ok, str(leaf)

    def slow(chosen: tuple[str, ...]) -> tuple[bool, str]:
        timing = trials.timing(chosen, samples, budget_s)
        if timing.stopped == "cancelled":
            raise Stopped("the verdict")
        return timing.verdict == Verdict.SLOWER, timing.text

    attempt = wrong if of == "error" else slow
    return bisect_sites(name, of, sites, attempt, stages=stages)
