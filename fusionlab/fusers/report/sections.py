"""The sections of a printed report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.grouping import grouped_by, nameless, which
from ..engine.outcomes import Candidate, Rejection
from ..engine.pairs import Pair, pairs_line
from ..lints.lint import Lint


def reason_lines(rejections: Sequence[Rejection], most: int | None = None) -> list[str]:
    """The reasons for declining, in at most so many lines (None: all); sites that differ only in names are grouped."""
    lines: list[str] = []
    listed = 0
    for alike in grouped_by(rejections, lambda r: (r.pass_name, r.code, r.edit, nameless(r.sentence))):
        entry = [f"  [{alike[0].code}] {which(alike)}: {alike[0].sentence}"]
        entry += [f"    edit: {alike[0].edit}"] if alike[0].edit else []
        if most is not None and len(lines) + len(entry) > most:
            return ["declined:", *lines, f"  ... and {len(rejections) - listed} more: found.rejections"]
        lines += entry
        listed += len(alike)
    return _section("declined:", lines)


def backend_lines(candidates: Sequence[Candidate], device: str) -> list[str]:
    """The backend of each candidate, with the reason, similar sites grouped."""
    groups = grouped_by(candidates, lambda c: (c.pass_name, c.formula, c.backend, *map(nameless, c.notes)))
    lines = []
    for alike in groups:
        first, b = alike[0], alike[0].backend
        where = f"{b.name} ({b.verdict}): {b.reason}" if b else "no backend was considered"
        lines += [f"  {which(alike)}: {first.formula} -> {where}", *(f"    {n}" for n in first.notes)]
    return _section(f"backends on {device}:", lines)


def pair_lines(pairs: Sequence[Pair]) -> list[str]:
    """The pairs, similar ones grouped."""

    def key(p: Pair) -> Any:
        return p.site.partition("@")[0], tuple(p.gradients), p.absent, p.stays, p.idle, p.grouping, p.joins

    groups = grouped_by(pairs, key)
    return _section("backward passes in this program:", [f"  {pairs_line(alike)}" for alike in groups])


def structure_lines(structures: Sequence[Any], why: str = "") -> list[str]:
    """The structures, similar ones grouped; or why none could be found."""
    groups = grouped_by(structures, lambda s: (s.kind, s.text))
    lines = [f"  {which(alike, 'structures')}: {alike[0].text}" for alike in groups]
    return [f"structures: {why}"] if why else _section("structures:", lines)


def lint_lines(lints: Sequence[Lint]) -> list[str]:
    """The lints, each with its edit."""
    lines = [line for x in lints for line in (f"  {which([x])}: {x.sentence}", f"    edit: {x.edit}")]
    return _section("lints (not measured; fusionlab.advise tries them):", lines)


def _section(head: str, lines: list[str]) -> list[str]:
    """Lines of a report under their heading; nothing if there are none."""
    return [head, *lines] if lines else []
