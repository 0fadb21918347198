"""A view model without its picture: header, counts, passes, sites, structures, lints and evidence."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fusionlab.fusers.engine.grouping import states_said
from fusionlab.fusers.engine.outcomes import Candidate, Rejection
from fusionlab.fusers.lints.lint import Lint
from fusionlab.fusers.report.findings import Findings
from fusionlab.fusers.report.structures import Structure
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.meshes import mesh_of_arguments

from ..palette import colour_of, tint_of
from .evidence_view import evidence_dict, headline
from .node_data import site_dict, source_dict
from .sites import is_applied

FORMAT, VERSION = "fusionlab.view", 3


def summary(
    graph: Graph,
    findings: Findings | None = None,
    enabled: Collection[str] | None = (),
    evidence: Any = None,
    formulas: Mapping[str, str] | None = None,
    structures: bool = True,
) -> dict[str, Any]:
    """The view model without the picture: header, counts, passes, sites, structures if wanted, lints, and evidence."""
    counts = _counts(graph, findings, enabled)
    measured = evidence_dict(evidence)
    return {
        "format": FORMAT,
        "version": VERSION,
        "title": graph.name,
        "header": header(graph, counts, findings, measured),
        "counts": counts,
        "passes": _passes(findings, enabled, formulas or {}),
        "sites": _ledger(findings, enabled),
        "structures": _listed(findings.structures) if findings is not None and structures else [],
        "lints": _listed(findings.lints) if findings is not None else [],
        "evidence": measured,
    }


def _listed(found: Sequence[Structure | Lint]) -> list[dict[str, Any]]:
    """`to_dict` of each structure or lint, its source as a dict."""
    return [item.to_dict() | {"source": source_dict(item.source)} for item in found]


def header(graph: Graph, counts: Mapping[str, int], findings: Findings | None, measured: Mapping | None) -> str:
    """One sentence with the whole truth: sizes, what can be and is fused, and a speed only with its interval."""
    parts = [f"{graph.name} · {counts['nodes']:,} nodes"]
    parts += [f"mesh {mesh}"] if (mesh := mesh_of_arguments(graph.in_shardings)) else []
    if findings is not None:
        device = getattr(findings, "device", "")
        parts += [device] if device else []
        parts += [str(findings.waiting)] if findings.waiting is not None else []
        parts += [states(counts), headline(measured, brief=True)]
    return " · ".join(parts)


def sentence(counts: Mapping[str, int], measured: Mapping[str, Any] | None) -> str:
    """The sentence at the top of the explorer, next to the program's name and the device."""
    return f"{counts['nodes']:,} nodes · {states(counts)} · {headline(measured, brief=True)}"


def states(counts: Mapping[str, int]) -> str:
    """How many sites are in which state: "9 fused · 3 can be fused · 2 declined"."""
    return " · ".join(states_said(counts["applied"], counts["candidate"], counts["declined"]))


def _counts(graph: Graph, findings: Findings | None, enabled: Collection[str] | None) -> dict[str, int]:
    found = findings.candidates if findings else ()
    applied = sum(is_applied(c, enabled) for c in found)
    declined = len(findings.rejections) if findings else 0
    return {
        "nodes": graph.node_count,
        "applied": applied,
        "candidate": len(found) - applied,
        "declined": declined,
    }


def _state(sites: int, applied: int) -> str:
    """How much of a pass is applied."""
    if not sites:
        return "none"
    return "on" if applied == sites else "partial" if applied else "off"


def _passes(
    findings: Findings | None, enabled: Collection[str] | None, formulas: Mapping[str, str]
) -> list[dict[str, Any]]:
    rows = []
    for name in findings.passes if findings else ():
        assert findings is not None
        mine = [c for c in findings.candidates if c.pass_name == name]
        ids, on = [c.id for c in mine], sum(is_applied(c, enabled) for c in mine)
        rows.append(
            {
                "name": name,
                "colour": colour_of(name),
                "tint": tint_of(name),
                "formula": formulas.get(name, ""),
                "sites": len(ids),
                "applied": on,
                "declined": sum(r.pass_name == name for r in findings.rejections),
                "state": _state(len(ids), on),
                "site_ids": ids,
            }
        )
    return rows


def _ledger(findings: Findings | None, enabled: Collection[str] | None) -> list[dict[str, Any]]:
    records: list[Candidate | Rejection] = [*findings.candidates, *findings.rejections] if findings else []
    return [site_dict(r, enabled) for r in records]
