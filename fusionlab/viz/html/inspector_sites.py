"""The inspector's HTML for a site (a candidate, a rejection) or a structure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from fusionlab.errors import REJECTIONS
from fusionlab.evidence.attribution import SiteShares
from fusionlab.evidence.roofline import Roofline
from fusionlab.evidence.units import binary_bytes
from fusionlab.fusers.engine.grouping import STATE_WORDS
from fusionlab.fusers.engine.outcomes import Candidate, Rejection
from fusionlab.fusers.report.findings import Findings
from fusionlab.fusers.report.site_kernels import kinds
from fusionlab.fusers.report.structures import Structure
from fusionlab.graph.cost.cost import Cost, Costs, quantity
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Atom, Node, Value, type_text
from fusionlab.graph.xla.modules import CompiledModule

from ..markup import (
    Fact,
    facts,
    folded,
    mono,
    pick,
    pick_node,
    pick_nodes,
    picks,
    prose,
    quiet,
    section,
    source_line,
    table,
    text,
)
from ..model.sites import is_applied
from .kernel_sources import kernels_html

SiteRecord = Candidate | Rejection


def site_html(
    site: SiteRecord,
    graph: Graph,
    costs: Costs,
    enabled: Collection[str] | None,
    compiled: CompiledModule | None,
    shares: SiteShares | None,
    roofline: Roofline | None,
    *,
    arch: str = "",
    sources: bool = True,
) -> str:
    """Everything known of a candidate or a rejection; see `inspecting.inspect`."""
    if isinstance(site, Rejection):
        return _rejected(site, graph, costs, compiled)
    return _candidate(site, graph, costs, enabled, compiled, shares, roofline, arch, sources)


def _candidate(
    c: Candidate,
    graph: Graph,
    costs: Costs,
    enabled: Collection[str] | None,
    compiled: CompiledModule | None,
    shares: SiteShares | None,
    roofline: Roofline | None,
    arch: str,
    sources: bool,
) -> str:
    rows: list[Fact] = [
        ("state", _state(c, enabled)),
        ("computes", mono(c.formula)),
        ("arithmetic", text(f"products in {c.arithmetic}") if c.arithmetic else ""),
        ("op", f"{mono(c.op)} {_attrs(c)}"),
        ("reads", ", ".join(f"{text(k)} {_value(v)}" for k, v in c.leaves.items())),
        ("gives", ", ".join(map(_value, c.roots))),
        ("nodes", f"{c.nodes_before} → {c.nodes_after}: {pick_nodes(graph, sorted(c.node_ids))}"),
        ("source", source_line(c.source)),
    ]
    body = [facts(rows), section("Cost", _cost(c, costs)), section("Gain", _gain(c, shares, roofline))]
    body += [section("Backends", _backends(c)), section("Residuals", _residuals(c))]
    body += [section("Backward pass", backward_html(c, graph)), section("XLA", xla_html(c.all_node_ids, compiled))]
    body += ["".join(map(quiet, c.notes))]
    if sources:
        dtype = str(getattr(c.root.dtype, "name", ""))
        body.append(section("CUDA kernels", kernels_html(c.op, dtype, c.attrs, arch)))
    return "".join(body)


def _state(c: Candidate, enabled: Collection[str] | None) -> str:
    applied = is_applied(c, enabled)
    idle = f": left as it is unless asked for, {c.idle}" if c.idle and not applied else ""
    return text(STATE_WORDS["applied" if applied else "candidate"] + idle)


def _attrs(c: Candidate) -> str:
    return text(", ".join(f"{k}={v}" for k, v in c.attrs.items() if v is not None), 300)


def _value(v: Atom) -> str:
    return f"{pick(v.name) if isinstance(v, Value) else mono(repr(v))} {mono(type_text(v.aval))}"


def _cost(c: Candidate, costs: Costs) -> str:
    """The site's own nodes, one by one and as one kernel; both as the program states them, before XLA fuses anything."""
    ids = [i for i in c.node_ids if i in costs.graph.node_by_id]
    if len(ids) < len(c.node_ids):
        return ""
    alone, fused = costs.of(ids), costs.fused(ids)
    saved = alone.bytes_moved - fused.bytes_moved
    rows = [("node by node", text(alone)), ("as one kernel", text(fused))]
    if saved > 0 and alone.bytes_moved:
        rows.append(("memory traffic", f"{quantity(saved)}B less ({100 * saved / alone.bytes_moved:.0f} %)"))
    return facts(rows) + quiet(
        "Counted from the program, each node reading its operands and writing its results; XLA fuses some of it anyway."
    )


def _gain(c: Candidate, shares: SiteShares | None, roofline: Roofline | None) -> str:
    return facts([*_measured_gain(c, shares), *_predicted_gain(c, roofline)])


def _measured_gain(c: Candidate, shares: SiteShares | None) -> list[Fact]:
    if shares is None:
        return []
    measured = next((s for s in shares.sites if s.site == c.id), None)
    if measured is None:
        alike = c.id in shares.same_code
        return [("measured", "not timed by itself: it runs what XLA runs anyway")] if alike else []
    gain = f"{measured}".removeprefix(f"{c.id}: ")
    rows: list[Fact] = [("measured", text(f"saves {gain} (time without / with this site, 95 %)"))]
    if measured.is_clear and measured.saved_s < 0:
        rows.append(("losing", '<span class="warn">⚠ the program is slower with it</span>'))
    return rows


def _predicted_gain(c: Candidate, roofline: Roofline | None) -> list[Fact]:
    predicted = next((p for p in roofline.predictions if p.site == c.id), None) if roofline is not None else None
    if predicted is not None:
        return [("predicted", text(str(predicted).removeprefix(f"{c.id}: ")))]
    return [("predicted", "nothing: it is what XLA runs anyway")] if c.same_code else []


def _backends(c: Candidate) -> str:
    rows = [[(b.name, "mono"), b.verdict, b.reason] for b in c.backends]
    return table(["backend", "verdict", "reason"], rows) or quiet("No backend was judged.")


def _residuals(c: Candidate) -> str:
    """The residuals of the fused forward, and the gradients that read them: those of this program if it has any."""
    if not c.residuals:
        return ""
    there = c.backward.gradients if c.backward is not None else {}
    rows = []
    for r in c.residuals:
        readers = [pick(v.name, f"d{k} {v.name}") for k, v in there.items() if f"d{k}" in r.readers]
        others = [x for x in r.readers if x.removeprefix("d") not in there]
        shape = ",".join(map(str, r.shape))
        kept = f"{mono(f'{r.dtype}[{shape}]')} {binary_bytes(r.nbytes)}"
        rows.append((r.name, f"{kept}, read by {' '.join([*readers, *map(text, others)])}"))
    return facts(rows)


def backward_html(site: SiteRecord, graph: Graph) -> str:
    """The site's backward pass in a program that has it."""
    pair = site.backward
    if pair is None:
        return ""
    rows = [
        ("cotangent", _value(pair.cotangent)),
        *((f"d{name}", _value(v)) for name, v in pair.gradients.items()),
        ("no gradient of", text(", ".join(pair.absent))),
        ("stays as it is", prose(pair.stays or "")),
        ("fused with it", pick_nodes(graph, sorted(pair.node_ids)) if pair.stays is None else ""),
        ("grouping", text(pair.grouping or "")),
    ]
    return facts(rows)


def xla_html(nodes: Iterable[int], compiled: CompiledModule | None) -> str:
    """The kernels that XLA makes of some nodes as the program was written."""
    if compiled is None:
        return ""
    kernels = compiled.kernels_of(*nodes)
    if not kernels:
        return quiet("No kernel: XLA removed all of it.")
    return f"<p>{text(kinds(kernels))}</p>" + picks([pick(k.name) for k in kernels])


def _rejected(r: Rejection, graph: Graph, costs: Costs, compiled: CompiledModule | None) -> str:
    rest = sorted(r.site_ids - frozenset(r.node_ids))
    rows: list[Fact] = [
        ("declined", f"{mono(r.code)} {text(REJECTIONS.get(r.code, ''))}"),
        ("because", prose(r.sentence)),
        ("matched", f"<b>{r.matched} of {r.total}</b>"),
        ("nearest miss", _guilty(r, graph)),
        ("edit", f"<b>{text(r.edit)}</b>" if r.edit else ""),
        ("taken by", pick(r.winner) if r.winner else ""),
        ("matched nodes", pick_nodes(graph, rest)),
        ("source", source_line(r.source)),
    ]
    known = [i for i in (*rest, *r.node_ids) if i in costs.graph.node_by_id]
    cost = facts([("node by node", text(costs.of(known)))]) if known else ""
    body = [facts(rows), section("Cost", cost), section("Backward pass", backward_html(r, graph))]
    return "".join([*body, section("XLA", xla_html(known, compiled))])


def _guilty(r: Rejection, graph: Graph) -> str:
    """The nodes that stopped the match, each with its line."""
    nodes: list[Node] = [graph.node_by_id[i] for i in r.node_ids if i in graph.node_by_id]
    return "<br>".join(f"{pick_node(n)} {source_line(n.source)}" for n in nodes[:8])


def touching_html(
    sites: Collection[SiteRecord], graph: Graph, enabled: Collection[str] | None, asked: Collection[str]
) -> str:
    """The sites a node is in, in short: what each is, its nearest miss, the edit that would help."""
    if not sites:
        return quiet(f"In no site: no pass asked ({', '.join(asked)}) has its anchor here.") if asked else ""
    return "".join(_touching(s, graph, enabled) for s in sites)


def _touching(site: SiteRecord, graph: Graph, enabled: Collection[str] | None) -> str:
    if isinstance(site, Candidate):
        chosen = site.backend
        rows: list[Fact] = [
            ("site", f"{pick(site.id)} {_state(site, enabled)}"),
            ("computes", mono(site.formula)),
            ("nodes", f"{site.nodes_before} → {site.nodes_after}"),
            ("backend", text(f"{chosen.name} ({chosen.verdict}): {chosen.reason}") if chosen else ""),
            ("keeps", text(", ".join(f"{r.name}, read by {' and '.join(r.readers)}" for r in site.residuals))),
        ]
        return facts(rows)
    rows = [
        ("declined", f"{pick(site.id)} {mono(site.code)} <b>{site.matched} of {site.total}</b>"),
        ("because", prose(site.sentence)),
        ("nearest miss", _guilty(site, graph)),
        ("edit", f"<b>{text(site.edit)}</b>" if site.edit else ""),
        ("taken by", pick(site.winner) if site.winner else ""),
    ]
    return facts(rows)


def structure_html(
    s: Structure, graph: Graph, findings: Findings, costs: Costs, compiled: CompiledModule | None
) -> str:
    """A structure: what it is, its sites, nodes and cost."""
    known = [i for i in sorted(s.node_ids) if i in graph.node_by_id]
    rows: list[Fact] = [
        ("is", text(s.text)),
        ("sites", picks([pick(site) for site in s.sites])),
        ("nodes", f"{len(known):,}"),
        ("cost", text(total_cost(costs, known))),
        ("source", source_line(s.source)),
    ]
    return facts(rows) + folded("nodes", pick_nodes(graph, known)) + section("XLA", xla_html(known, compiled))


def total_cost(costs: Costs, ids: Iterable[int]) -> Cost:
    """The cost of nodes given one by one: regions cost nothing themselves, so what is inside them has to be among the ids."""
    found: Any = Cost()
    for i in ids:
        found += costs.nodes[i]
    return found
