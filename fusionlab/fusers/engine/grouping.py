"""How findings are printed: similar sites grouped, and everything about one site in sentences."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...graph.matching.pattern import Example

if TYPE_CHECKING:
    from .outcomes import Candidate


@dataclass(frozen=True)
class Form:
    """An example of a structure or of one spelling, with its name in a report."""

    kind: str
    text: str
    example: Example


def grouped_by(items: Iterable[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    """Items grouped by key, in order of first appearance."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def common_scope(scopes: Iterable[str]) -> str:
    """The innermost scope common to all of them."""
    parts = zip(*(scope.split("/") for scope in scopes), strict=False)
    return "/".join(names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, parts))


def nameless(sentence: str) -> str:
    """A sentence without value names and line numbers, by which otherwise similar sites differ."""
    return re.sub(r"%\d+|\([^\s()]+:\d+\)", "", sentence)


def which(alike: list[Any], noun: str = "sites") -> str:
    """ "gemm_epilogue@mlp#1 at model.py:12"; "12 sites, gemm_epilogue@layer_0#1 and more at model.py:12, ..."."""
    sources = list(dict.fromkeys(str(item.source) for item in alike if item.source))
    at = f" at {', '.join(sources[:3])}{', ...' if len(sources) > 3 else ''}" if sources else ""
    return f"{alike[0].id}{at}" if len(alike) == 1 else f"{len(alike)} {noun}, {alike[0].id} and more{at}"


# One wording for each state of a site, wherever it is read.
STATE_WORDS = {"applied": "fused", "candidate": "can be fused", "declined": "declined"}


def states_said(applied: int, candidates: int, declined: int) -> list[str]:
    """["9 fused", "3 can be fused", "2 declined"]; zero counts are omitted, except that of the declined."""
    counted = zip((applied, candidates), ("applied", "candidate"), strict=True)
    said = [f"{n} {STATE_WORDS[state]}" for n, state in counted if n] or ["nothing can be fused"]
    return [*said, f"{declined} {STATE_WORDS['declined']}"]


def code_counts(codes: list[str]) -> list[str]:
    """["rank", "bias x2"]: each code once, in order of first appearance."""
    return [c if (n := codes.count(c)) == 1 else f"{c} x{n}" for c in dict.fromkeys(codes)]


def columns_of(c: Candidate) -> dict[str, str]:
    """A candidate's backends and notes, one text each."""
    backends = "; ".join(f"{b.name}: {b.verdict}, {b.reason}" for b in c.backends)
    return {"backend": c.backend.name if c.backend else "", "backends": backends, "notes": "; ".join(c.notes)}
