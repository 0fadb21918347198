"""Faults that a measurement found in the enabled sites, and the sites to blame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusionlab.evidence.bisection import Bisection
from fusionlab.evidence.instruments.timing import Verdict

from ..markup import as_on_screen, pick, quiet, text

FAULTS = "time", "error"
TAB = {"time": "Timing", "error": "Errors"}


@dataclass(frozen=True)
class Fault:
    """Something that got worse by fusing.

    Attributes:
      of: "time" or "error", as for `fusionlab.bisect`.
      grad: whether it shows in the gradient, so that each trial has to compute that as well.
    """

    of: str
    grad: bool


def faults_of(evidence: Any) -> list[Fault]:
    """The faults of a measurement: slower, or worse, than before."""
    if evidence is None:
        return []
    slower = [t for t in evidence.timings if t.verdict == Verdict.SLOWER]
    faults = [Fault("time", evidence.timing not in slower)] if slower else []
    worse = evidence.numerics.regressions if evidence.numerics is not None else ()
    return faults + ([Fault("error", any(leaf.kind == "gradient" for leaf in worse))] if worse else [])


def blamed_sites(found: Mapping[str, Bisection]) -> dict[str, str]:
    """Site id -> what it was found to do, in words, alone or with others."""
    notes: dict[str, str] = {}
    for of, bisection in found.items():
        does = {"time": "the program slower", "error": "results worse against float64"}[of]
        for cause in bisection.causes:
            for site in cause.sites:
                others = [s for s in cause.sites if s != site]
                who = f"with {' and '.join(others)}" if others else "alone"
                notes.setdefault(site, f"{who}, it makes {does}: {as_on_screen(cause.observed)}")
    return notes


def site_html(found: Mapping[str, Bisection], site: str) -> str:
    """The inspector's first line for a site that is to blame; "" for any other."""
    note = blamed_sites(found).get(site, "")
    return f'<p class="fl-blamed">⚠ To blame: {text(note)}.</p>' if note else ""


def sentence_html(found: Bisection) -> str:
    """The result of a bisection, as sentences; the sites in them can be selected."""
    trials = f"{len(found.trials)} trial{'s' if len(found.trials) != 1 else ''}"
    if found.stopped:
        trials += f", stopped: {found.stopped}"
    if not found.causes:
        seen = f" ({found.trials[0].observed})" if found.trials else ""
        again = (
            "was not measured"
            if found.stopped and not found.trials
            else f"did not recur with all of them fused{text(seen)}"
        )
        return quiet(f"Which site? The fault {again}; {trials}.")
    does = {"time": "makes the program slower", "error": "makes results worse against float64"}[found.of]
    causes = [
        f"{' with '.join(map(pick, c.sites))} alone {does}: {text(as_on_screen(c.observed))}" for c in found.causes
    ]
    return f'<p class="fl-blamed" data-fl="blamed"><b>⚠ Which site?</b> {"; ".join(causes)} ({text(trials)}).</p>'
