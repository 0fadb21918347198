"""Finds the sites that explain an error or a slowdown: the smallest sets of sites that show it, found by halving.

A set of sites is bad if the program with these alone fused shows the fault. As long as adding sites to a bad set leaves it bad, one
cause of k sites among n costs about k log2(n) trials (Junker, QuickXplain, AAAI 2004, for one minimal conflict; here with the
shortest bad prefix found by halving), and another search over the remaining sites decides whether there is one more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusionlab.progress import SILENT, Stages, Stopped
from fusionlab.showing import Shown, plural


@dataclass(frozen=True, repr=False)
class Trial(Shown):
    """The program with only these sites fused: whether it shows the fault, and the observation in words."""

    sites: tuple[str, ...]
    bad: bool
    observed: str

    def __str__(self) -> str:
        return f"{' with '.join(self.sites) or 'no site'}: {'bad' if self.bad else 'not bad'}, {self.observed}"


@dataclass(frozen=True, repr=False)
class Cause(Shown):
    """The smallest set of sites found that shows the fault on its own; no site of it can be left out.

    Attributes:
      sites: ids, in program order.
      observed: the fault of the program with only these fused, in words.
    """

    sites: tuple[str, ...]
    observed: str

    def __str__(self) -> str:
        return f"{' with '.join(self.sites)}: {self.observed}"


@dataclass(frozen=True, repr=False)
class Bisection(Shown):
    """The result of a bisection.

    Attributes:
      name: the function.
      of: "error" or "time".
      sites: the sites searched.
      causes: each enough on its own; empty if all sites together do not show the fault.
      trials: every program tried, in order.
      stopped: "", or why the search ended early ("cancelled", "most trials").
    """

    _listed = "trials"

    name: str
    of: str
    sites: tuple[str, ...]
    causes: tuple[Cause, ...]
    trials: tuple[Trial, ...] = field(repr=False)
    stopped: str = ""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Bisection:
        """Reads `dataclasses.asdict` of one back."""
        if data["of"] not in ("error", "time"):
            raise ValueError(f"of: {data['of']!r:.40}")
        causes = (Cause(tuple(map(str, c["sites"])), str(c["observed"])) for c in data["causes"])
        trials = (Trial(tuple(map(str, t["sites"])), bool(t["bad"]), str(t["observed"])) for t in data["trials"])
        sites = tuple(map(str, data["sites"]))
        return cls(str(data["name"]), data["of"], sites, tuple(causes), tuple(trials), str(data["stopped"]))

    def __str__(self) -> str:
        fault = {"error": "worse than before against float64", "time": "slower than before"}[self.of]
        head = f"{self.name}: {_many('site', self.sites)}, {_many('trial', self.trials)}"
        if self.stopped:
            head += f", stopped: {self.stopped}"
        if self.stopped and not self.trials:
            return f"{head}: not known whether it is {fault}"
        if not self.causes:
            seen = f" ({self.trials[0].observed})" if self.trials else ""
            return f"{head}: fused, it is not {fault}{seen}"
        return "\n".join(
            [f"{head}: fused, it is {fault}; each of these alone makes it so", *(f"  {c}" for c in self.causes)]
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able."""
        return {
            "name": self.name,
            "of": self.of,
            "sites": list(self.sites),
            "causes": [{"sites": list(c.sites), "told": c.observed} for c in self.causes],
            "trials": [{"sites": list(t.sites), "bad": t.bad, "told": t.observed} for t in self.trials],
            "stopped": self.stopped,
        }


class _Stop(Exception):  # noqa: N818 - the way out of a search, not an error
    """The search must end here; the message is the reason."""


class _Bisection:
    """The trials of one bisection, none made twice."""

    def __init__(
        self, attempt: Callable[[tuple[str, ...]], tuple[bool, str]], of: int, most: int, stages: Stages
    ) -> None:
        self.attempt, self.of, self.most, self.stages = attempt, of, most, stages
        self.tried: dict[tuple[str, ...], Trial] = {}

    def bad(self, sites: tuple[str, ...]) -> bool:
        if sites not in self.tried:
            if len(self.tried) >= self.most:
                raise _Stop("most trials")
            n = len(self.tried) + 1
            about = max(n, math.ceil(math.log2(self.of)) + 3) if self.of > 1 else n
            self.stages(f"trial {n} of about {about}, {len(sites)} site{'s' if len(sites) > 1 else ''}")
            self.tried[sites] = Trial(sites, *self.attempt(sites))
        return self.tried[sites].bad

    def cause(self, sites: tuple[str, ...]) -> Cause:
        """The smallest bad subset of a bad set, last member first: the site with which a prefix turns bad cannot be left out."""
        needed: tuple[str, ...] = ()
        pool = sites
        while not (needed and self.bad(needed)):
            good, bad = 0, len(pool)  # the whole of it is bad with what is needed so far
            while bad - good > 1:
                middle = (good + bad) // 2
                good, bad = (good, middle) if self.bad((*pool[:middle], *needed)) else (middle, bad)
            needed = (pool[bad - 1], *needed)
            pool = pool[: bad - 1]
        return Cause(needed, self.tried[needed].observed)


def bisect_sites(
    name: str,
    of: str,
    sites: Sequence[str],
    attempt: Callable[[tuple[str, ...]], tuple[bool, str]],
    *,
    most: int = 200,
    stages: Stages = SILENT,
) -> Bisection:
    """The sets of sites that explain a fault.

    Args:
      name: of the function, for the record.
      of: "error" or "time".
      sites: ids, in program order.
      attempt: sites -> (whether the program with only these fused shows the fault, the observation in words).
      most: trials at most.
      stages: called at each trial; if cancelled, the causes found so far are returned.
    """
    causes: list[Cause] = []
    stopped = ""
    search = _Bisection(attempt, len(sites), most, stages)
    left = tuple(sites)
    try:
        while left and search.bad(left):
            causes.append(search.cause(left))
            left = tuple(s for s in left if s not in causes[-1].sites)
    except _Stop as why:
        stopped = str(why)
    except Stopped:
        stopped = "cancelled"
    return Bisection(name, of, tuple(sites), tuple(causes), tuple(search.tried.values()), stopped)


def _many(noun: str, things: Sequence[Any]) -> str:
    return f"{len(things)} {plural(noun, len(things))}"
