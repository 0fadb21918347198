"""Two records side by side as HTML: the verdicts, then each group of quantities, what differs first."""

from __future__ import annotations

from typing import Any

from fusionlab.evidence.record_diff import GROUPS, RecordChange, RecordDiff

from ...markup import aligned, as_on_screen, folded, quiet, section, table, text
from ..pictures import evidence_pictures

_TITLES = {
    "workload": "Are they of the same work?",
    "environment": "Environment",
    "time": "Times",
    "memory": "Memory",
    "kernels": "Kernels",
    "sites": "Sites",
    "errors": "Errors",
}
_WORK = {
    True: "The same arguments and matrix products: the records are of the same work.",
    False: "Other arguments or matrix products: the records are of other work, so nothing is judged.",
    None: "Unknown: records from before 0.2.0 carry no fingerprint of the program.",
}


def records_html(diff: RecordDiff, pictures: bool = True) -> str:
    """The comparison as HTML, all texts escaped.

    Args:
      diff: of two records.
      pictures: with the timings of both drawn.
    """
    regressions = [as_on_screen(c) for c in diff.regressions]
    parts = [f"<p><b>{text(diff._sentence())}</b></p>", quiet(_measured(diff))]
    parts += [f'<p class="fl-blamed">⚠ {text(line)}</p>' for line in regressions]
    parts += [quiet(note) for note in diff.notes]
    for group in GROUPS:
        inner = quiet(_WORK[diff.same_work]) if group == "workload" else ""
        inner += _pictures(diff) if group == "time" and pictures else ""
        parts.append(section(_TITLES[group], inner + _group(diff.of(group))))
    return "".join(parts)


def _measured(diff: RecordDiff) -> str:
    told = (
        f"{word}: {r.environment.hardware}, jax {r.environment.versions.get('jax', '?')}, {r.environment.time}"
        for word, r in (("Older", diff.old), ("Newer", diff.new))
        if r is not None
    )
    return "; ".join(told)


def _pictures(diff: RecordDiff) -> str:
    drawn = ((word, evidence_pictures(r).get("Timing", "")) for word, r in (("older", diff.old), ("newer", diff.new)))
    shown = "".join(f"<div>{quiet(f'The {word} record:')}{picture}</div>" for word, picture in drawn if picture)
    return f'<div style="display:flex;flex-wrap:wrap;gap:0 16px">{shown}</div>' if shown else ""


def _group(changes: tuple[RecordChange, ...]) -> str:
    alike = [c for c in changes if c.verdict == "equal" or (c.verdict == "same" and c.group == "errors")]
    word = "no better and no worse" if changes and changes[0].group == "errors" else "equal"
    return _table([c for c in changes if c not in alike]) + folded(f"{len(alike)} {word}", _table(alike))


def _table(changes: list[RecordChange]) -> str:
    heads = ["what", "older", "newer", "verdict", *(["why"] if any(c.why for c in changes) else [])]
    return table(heads, [_row(c)[: len(heads)] for c in changes])


def _row(c: RecordChange) -> list[Any]:
    verdict = (c.verdict, "warn") if c.verdict == "worse" else c.verdict
    return [c.what, as_on_screen(c.old), as_on_screen(c.new), verdict, c.why]


def records_page(diff: RecordDiff) -> str:
    """A whole page that loads nothing."""
    from ..report import whole_page

    return whole_page(f"FusionLab: {diff.name}, two records", f'<div class="fl-records">{records_html(diff)}</div>')


def records_summary(diff: RecordDiff) -> str:
    """For a notebook, whose own style it takes."""
    return aligned(records_html(diff, pictures=False))
