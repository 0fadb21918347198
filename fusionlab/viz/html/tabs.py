"""The tabs below the graph that show what was measured, and what is known without measuring: HTML, every text of the program escaped."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fusionlab.device import Device
from fusionlab.errors import ArgumentError
from fusionlab.evidence.roofline import Roofline, roofline
from fusionlab.fusers.engine.outcomes import Candidate
from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.cost.cost import Cost, quantity, total_of
from fusionlab.graph.program.graph import Graph

from ..markup import quiet, section, table, text
from ..model.evidence_view import EvidenceTable, evidence_dict, evidence_tables, measured_on
from ..model.sites import is_applied
from .diff import diff_html
from .kernel_sources import kernels_html
from .measured.memory import memory_html
from .pictures import evidence_pictures

NOT_MEASURED = "Nothing measured for these sites yet: press Measure. Its progress is shown next to the button."
AWAITED = "Being measured: the progress is shown next to the Measure button."
HOW_TO_RATE = quiet("In an explorer, lab.measure_rates() measures them in a few seconds.")
Tab = dict[str, Any]
# Predicting a site's gain fuses it alone and counts the whole program: so many nodes are counted while nobody waits long.
_PREDICTED_NODES = 100_000
_COUNTED_AT_ONCE = (
    20_000  # nodes; those of a longer program are counted when they are asked for, so that it opens at once
)
_SCOPES = 24


def evidence_tabs(
    evidence: Any,
    findings: Findings | None,
    *,
    enabled: Collection[str] | None = (),
    after: Graph | None = None,
    device: Device | None = None,
    under: Roofline | None = None,
    sources: bool = True,
) -> list[Tab]:
    """The tabs Timing, Errors, Memory, Roofline, Kernels and Graph diff, in this order: `[{"name", "html"}]`.

    Each has content; one that only explains why it has nothing to show has "empty", True, too.

    Args:
      evidence: what was measured with just these sites, or None.
      findings: what was found, or None where there is only a measurement.
      enabled: ids of the candidates that are applied; None means all of them that are not idle.
      after: the fused program, for the diff, or None.
      device: one with measured rates (`fusionlab.evidence.instruments.peaks.measure_peaks()`), for the roofline, or None.
      under: a roofline of the findings, where there is one already; `device` is then not needed.
      sources: with the text of the CUDA kernels of the applied sites.
    """
    measured = evidence_dict(evidence)
    tables = {entry[0]: entry for entry in evidence_tables(measured)}
    figures = _figures(evidence)
    kernels = _kernels(evidence, findings, enabled, sources)
    tabs = {
        "Timing": figures.get("Timing", "") + _table(tables.get("Timing")) or _missing(evidence, "timed"),
        "Errors": figures.get("Errors", "") + _table(tables.get("Errors")) or _missing(evidence, "compared"),
        "Memory": _memory(evidence, findings, tables) or _missing(evidence, "asked for memory"),
        "Roofline": _roofline(findings, device, under),
        "Kernels": kernels + _titled(tables, "Collectives") + _titled(tables, "Time of each device"),
        "Graph diff": _diff(findings, after, enabled),
    }
    notes = "".join(quiet(note) for note in measured["notes"]) if measured is not None else ""
    where = quiet(f"Measured on {measured_on(evidence)}.") if evidence is not None else ""
    below = {"Timing": where + notes, "Errors": where, "Memory": where}
    empty = {
        "Timing": "Timing" not in tables,
        "Errors": "Errors" not in tables,
        "Memory": "Compiled memory" not in tables,
        "Roofline": findings is None,
        "Kernels": getattr(evidence, "kernels", None) is None and not _applied(findings, enabled),
        "Graph diff": findings is None or after is None,
    }
    return [tab(name, html + below.get(name, ""), empty[name]) for name, html in tabs.items()]


def tab(name: str, html: str, empty: bool = False) -> Tab:
    """A tab; `empty`: it only explains why there is nothing to show."""
    return {"name": name, "html": html} | ({"empty": True} if empty else {})


def _memory(evidence: Any, findings: Findings | None, tables: dict[str, Any]) -> str:
    graph = findings.graph if findings is not None else None
    return _table(tables.get("Compiled memory")) + memory_html(evidence, graph)


def _titled(tables: dict[str, Any], name: str) -> str:
    return section(name, _table(tables.get(name)))


def _missing(evidence: Any, done: str) -> str:
    return quiet(NOT_MEASURED if evidence is None else f"Not {done}: {evidence.verdict}.")


def _table(entry: EvidenceTable | None) -> str:
    return table(entry[1], entry[2], entry[3]) if entry is not None else ""


def _figures(evidence: Any) -> dict[str, str]:
    """Name -> pictures; errors in units of the last place stand below the errors themselves."""
    if evidence is None:
        return {}
    from ..plots import plot_ulps  # matplotlib is imported only where there is something to plot

    figures = evidence_pictures(evidence)
    for kind in ("output", "gradient"):
        leaves = evidence.numerics.leaves if evidence.numerics is not None else ()
        if any(leaf.kind == kind and leaf.after.ulp_histogram for leaf in leaves):
            figures["Errors"] += _figure(f"Errors of {kind}s in ulp", plot_ulps(evidence, kind=kind).figure)
    return figures


def _figure(name: str, figure: Any) -> str:
    from ..markup import inline_svg
    from ..plots import figure_svg

    return f'<figure aria-label="{text(name)}">{inline_svg(figure_svg(figure))}</figure>'


# Roofline -----------------------------------------------------------------------------------------------------------
def _roofline(findings: Findings | None, device: Device | None, under: Roofline | None) -> str:
    """The program under the roof of a device; without one, what it costs, and why there is no roof."""
    if findings is None:
        return quiet("There is no program to count here, only a measurement.")
    if under is None and device is None:
        why = quiet("No roof: the rates of this device were not measured.") + HOW_TO_RATE
        nodes = findings.graph.node_count
        if nodes > _COUNTED_AT_ONCE:
            later = f"Costs are shown for the selection and under the roof; counting all {nodes:,} nodes takes a while."
            return why + quiet(later)
        return _costs(findings) + why
    costs = _costs(findings)
    try:
        known = roofline_of(findings, device) if under is None and device is not None else under
    except ArgumentError as error:  # a device whose rates are not known
        return costs + quiet(f"No roof: {error}")
    assert known is not None
    return _pictures(known) + _predictions(known, len(findings.candidates)) + costs


def roofline_of(findings: Findings, device: Device) -> Roofline:
    """The findings under the roof of a device; with predicted gains where that takes no longer than anybody waits."""
    few = findings.graph.node_count * len(findings.candidates) <= _PREDICTED_NODES
    return roofline(findings if few else findings.graph, device)


def _pictures(known: Roofline) -> str:
    from ..roofline_plots import plot_predicted, plot_roofline

    shown = ""
    if any(p.operations and p.bytes_moved for p in known.points):
        shown += _figure("Roofline", plot_roofline(known).figure)
    else:
        shown += quiet("No kernel computes anything, so there is no roofline to draw.")
    if known.predictions:
        shown += _figure("Predicted gains", plot_predicted(known).figure)
    return shown + "".join(quiet(note) for note in known.notes)


def _predictions(known: Roofline, candidates: int) -> str:
    if not known.predictions and candidates:
        return quiet(
            "Gains are not predicted here: each of these many sites would have to be fused alone and the whole program counted. "
            "fusionlab.evidence.roofline.roofline(findings, device) predicts them."
        )
    rows = [[p.site, str(p).partition(": ")[2]] for p in known.predictions]
    return table(["site", "predicted beyond XLA, at best"], rows)


def _costs(findings: Findings) -> str:
    """Operations and bytes by scope, from the program alone."""
    costs = findings.cost()
    found = sorted(costs.by_scope(2).items(), key=lambda kv: -kv[1].bytes_moved - kv[1].operations)
    rows = [_cost_row(scope or "(top)", cost) for scope, cost in found[:_SCOPES]]
    rows += [_cost_row(f"({len(found) - _SCOPES} more scopes)", total_of(c for _, c in found[_SCOPES:]))] * (
        len(found) > _SCOPES
    )
    rows.append(_cost_row("total", costs.total))
    heads = ["scope", "flop", "transcendentals", "read", "written", "flop/byte"]
    return section("Operations and bytes, each node by itself", table(heads, rows, (1, 2, 3, 4, 5)))


def _cost_row(scope: str, cost: Cost) -> list[Any]:
    some = "" if cost.known else "≥ "
    numbers = (f"{some}{quantity(cost.flops or 0)}".strip(), quantity(cost.transcendentals).strip())
    moved = (f"{quantity(n)}B" for n in (cost.bytes_read, cost.bytes_written))
    return [(scope, "mono"), *numbers, *moved, f"{cost.intensity:.3g}"]


# Kernels and the diff -----------------------------------------------------------------------------------------------
def _kernels(evidence: Any, findings: Findings | None, enabled: Collection[str] | None, sources: bool) -> str:
    """How many kernels each version was compiled to, and the CUDA kernels behind the ops of the applied sites."""
    counts = evidence.kernels if evidence is not None else None
    shown = quiet("The kernels were not counted: nothing was compiled here, or the backend shows no HLO.")
    if counts is not None:
        kinds = dict.fromkeys((*counts.before, *counts.after))
        rows = [[kind, counts.before.get(kind, 0), counts.after.get(kind, 0)] for kind in kinds]
        rows.append(["together", *counts.total])
        note = quiet("Loop bodies are counted once; a fused op's custom call counts as one, whatever it launches.")
        shown = table(["kind", "before", "after"], rows, (1, 2)) + note
    return shown + (_cuda(_applied(findings, enabled), findings) if sources else "")


def _applied(findings: Findings | None, enabled: Collection[str] | None) -> list[Candidate]:
    return [c for c in (findings.candidates if findings is not None else ()) if is_applied(c, enabled)]


def _cuda(applied: list[Candidate], findings: Findings | None) -> str:
    """Each op once, with the backend that its sites run on."""
    by_op: dict[tuple[str, str, str], list[Candidate]] = {}
    for c in applied:
        backend = c.backend.name if c.backend is not None else "no backend judged"
        by_op.setdefault((c.op, str(getattr(c.root.dtype, "name", "")), backend), []).append(c)
    parts, shown = [], set()
    for (op, dtype, backend), sites in by_op.items():
        n = len(sites)
        device = f" on {findings.device}" if findings is not None and findings.device else ""
        title = f"{op}, {dtype}: {n} site{'s' if n > 1 else ''}, run by {backend}{device}"
        inner = kernels_html(op, dtype, sites[0].attrs) if op not in shown else quiet("Its source is above.")
        shown.add(op)
        parts.append(section(title, inner))
    nothing = quiet("No site is fused, so there is no kernel of a fused op.") if findings is not None else ""
    return "".join(parts) or nothing


def _diff(findings: Findings | None, after: Graph | None, enabled: Collection[str] | None) -> str:
    if findings is None:
        return quiet("There is no program to compare here, only a measurement.")
    return diff_html(findings.graph, after, findings, enabled)
