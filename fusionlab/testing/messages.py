"""The message of a failed assertion: the result, the expectation, and the near misses, each with its line and edit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..fusers import Candidate, Findings, Rejection
from ..fusers.engine.grouping import grouped_by, nameless, which
from ..graph.program.scopes import Source
from .survivors import Survivor

_MOST = 3  # near misses, sites or results that a message tells; the rest is counted
_LONGEST = 400  # characters of a sentence


class FusionAssertionError(AssertionError):
    """An assertion on a program's fusions failed.

    Attributes:
      found: the findings; None if there are none.
      evidence: the measurements; None if there are none.
    """

    def __init__(self, message: str, found: Any = None, evidence: Any = None) -> None:
        super().__init__(message)
        self.found, self.evidence = found, evidence


def nearest(
    found: Findings, passes: Iterable[str], concepts: Iterable[str] = (), survivors: Sequence[Survivor] = ()
) -> list[Candidate | Rejection]:
    """The sites that came nearest to the expectation, nearest first.

    Args:
      found: the findings.
      passes: the passes that fused too little.
      concepts: the concepts fused too rarely: sites of any pass where one was recognised go first.
      survivors: unwanted survivors: a site that was declined for one of them, or on its line, goes first.
    """
    passes = set(passes)
    ids = {s.site.id for s in survivors if s.site is not None}
    names = {*concepts, *(s.name for s in survivors)}
    lines = {s.source for s in survivors}

    def rank(item: Candidate | Rejection) -> tuple[bool, bool, bool, float]:
        matched = item.matched / max(item.total, 1) if isinstance(item, Rejection) else 1.0
        return (
            item.id not in ids,
            not names & set(item.concepts),
            not lines & set(sources_of(found, item)),
            -matched,
        )

    fused = {c.id for c in found.select()}
    left = [c for c in found.candidates if c.id not in fused and c.idle]
    items = [i for i in (*found.rejections, *left) if names or i.pass_name in passes]
    return sorted(items, key=rank)


def nearest_lines(found: Findings, items: Sequence[Candidate | Rejection]) -> list[str]:
    """The lines for the near misses: code, sentence, the user's line, the edit, with similar ones grouped."""
    if not items:
        return ["nearest miss: none; no site was declined, so nothing else in the program looks like a site"]
    groups = grouped_by(items, lambda i: (i.pass_name, _code(i), nameless(_why(i))))
    lines = ["nearest miss:"]
    for alike in groups[:_MOST]:
        first = alike[0]
        lines.append(f"  [{_code(first)}] {which(alike)}: {_short(_why(first))}")
        lines += [f"    {line}" for line in source_lines(sources_of(found, first))]
        lines += [f"    edit: {first.edit}"] if isinstance(first, Rejection) and first.edit else []
    more = sum(map(len, groups[_MOST:]))
    return [*lines, f"  and {more} more: print(fl.find(...))"] if more else lines


def sources_of(found: Findings, item: Candidate | Rejection) -> list[Source]:
    """The user's lines for which a site was declined, then its own."""
    guilty = item.node_ids if isinstance(item, Rejection) else ()
    lines = [found.graph.node_by_id[i].source for i in guilty if i in found.graph.node_by_id]
    return [s for s in dict.fromkeys((*lines, item.source)) if s is not None]


def source_lines(sources: Sequence[Source]) -> list[str]:
    """ "model.py:12: h = nn.Dense(8)(x)", the first few."""
    return [f"{s}: {s.text}" for s in sources[:_MOST] if s.text]


def survivor_lines(survivors: Sequence[Survivor]) -> list[str]:
    """The place of each survivor."""
    lines = [f"  {s.name} at {s.source}: {s.source.text}" if s.source else f"  {s.name}" for s in survivors[:_MOST]]
    return [*lines, f"  and {len(survivors) - _MOST} more"] if len(survivors) > _MOST else lines


def site_lines(items: Sequence[Candidate]) -> list[str]:
    """The fused sites, where there are too many."""
    lines = [f"  {c.id}: {c.formula}{f' at {c.source}' if c.source else ''}" for c in items[:_MOST]]
    return [*lines, f"  and {len(items) - _MOST} more"] if len(items) > _MOST else lines


def _code(item: Candidate | Rejection) -> str:
    return item.code if isinstance(item, Rejection) else "left as it is"


def _why(item: Candidate | Rejection) -> str:
    return item.sentence if isinstance(item, Rejection) else item.idle


def _short(sentence: str) -> str:
    return sentence if len(sentence) <= _LONGEST else f"{sentence[:_LONGEST]}..."
