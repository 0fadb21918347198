"""The inspector: everything known of a node, a value, a site, a structure, an XLA kernel, a source line or a group, as HTML.

Its content can be followed: an element with `data-fl-pick="NAME"` selects NAME, which `inspect` takes in turn. All text of the
program is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from fusionlab.errors import ArgumentError
from fusionlab.evidence.attribution import SiteShares
from fusionlab.evidence.roofline import Roofline
from fusionlab.evidence.units import binary_bytes
from fusionlab.fusers.engine.outcomes import Candidate, Rejection
from fusionlab.fusers.report.findings import Findings
from fusionlab.fusers.report.structures import Structure
from fusionlab.graph.cost.cost import Costs, cost_of
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Atom, Block, Literal, Node, Value, literal_text, type_text
from fusionlab.graph.program.meshes import sharding_text
from fusionlab.graph.program.scopes import Source
from fusionlab.graph.xla.modules import CONTROL, CompiledModule, ModuleKernel
from fusionlab.showing import plural

from ..markup import (
    Fact,
    equation,
    facts,
    folded,
    mono,
    pick,
    pick_node,
    pick_nodes,
    picks,
    quiet,
    section,
    source_line,
    text,
)
from ..model.node_data import find_node
from ..model.selection import kernel_named, record_named
from .inspector_rows import (
    cost_rows,
    counts_text,
    device_rows,
    nearest_misses,
    nodes_of_kernels,
    pick_lines,
    pick_sites,
    place_rows,
    primitives_text,
    sites_text,
    value_text,
)
from .inspector_sites import site_html, structure_html, total_cost, touching_html, xla_html

_LINE = re.compile(r".+:\d+")
_OWNER = re.compile(r"(?:^|\.)n(\d+)\.")


@dataclass(frozen=True)
class Inspected:
    """The content of the inspector.

    Attributes:
      title: plain text.
      html: escaped; elements with `data-fl-pick` select what they name.
      near: node ids of the nearest miss: what stopped the match of the declined sites that are selected or touched.
      linked: node ids in the same XLA kernels, or on the same source line.
    """

    title: str
    html: str
    near: tuple[int, ...] = ()
    linked: tuple[int, ...] = ()


def inspect(
    graph: Graph,
    findings: Findings | None,
    what: Any,
    *,
    enabled: Collection[str] | None = (),
    compiled: CompiledModule | None = None,
    shares: SiteShares | None = None,
    roofline: Roofline | None = None,
    costs: Costs | None = None,
    sources: bool = True,
) -> Inspected:
    """Everything known of one thing.

    Args:
      graph: the program shown.
      findings: what was found in it; None for a graph that was not searched, such as the fused one.
      what: a Node, its id or "n7"; a Value or "%12"; the id of a candidate, rejection or structure; the name of an XLA kernel; a source
        line ("model.py:41"); or several node ids, for a group.
      enabled: ids of the candidates that are applied; None means all of them that are not idle.
      compiled: XLA's kernels of `graph` (`findings.xla()`), or None if it was not compiled.
      shares: the measured saving of each site (`fusionlab.evidence.attribution.sites_of`), or None.
      roofline: of the findings on a device, for predicted gains, or None.
      costs: of the graph; None takes the findings', or counts them.
      sources: with the text of the CUDA kernels (tens of kilobytes a site).

    Raises:
      ArgumentError: the graph contains no such thing.
    """
    own = findings if findings is not None and findings.graph is graph else None
    xla = compiled if compiled is not None and compiled.graph is graph else None
    if costs is None or costs.graph is not graph:
        costs = own.cost() if own is not None else cost_of(graph)
    return _Inspector(graph, own, costs, enabled, xla, shares, roofline, sources).inspect(what)


@dataclass(frozen=True)
class _Inspector:
    graph: Graph
    findings: Findings | None
    costs: Costs
    enabled: Collection[str] | None
    compiled: CompiledModule | None
    shares: SiteShares | None
    roofline: Roofline | None
    sources: bool

    def inspect(self, what: Any) -> Inspected:
        if isinstance(what, Candidate | Rejection | Structure):
            what = what.id
        if not isinstance(what, str | int | Node | Value) and isinstance(what, Iterable):
            return self.group(tuple(what))
        node = find_node(self.graph, what)
        if node is not None:
            return self.node(node)
        name = what.name if isinstance(what, Value) else str(what)
        for kind in (self.given, self.kernel, self.site, self.line):
            found = kind(name)
            if found is not None:
                return found
        raise ArgumentError(
            f"what: got {name!r}, needed a value ('%12'), a node ('n7'), a site, an XLA kernel or a source line ('model.py:41') of "
            f"{self.graph!r}; search(graph, findings, text) finds names"
        )

    # Nodes ---------------------------------------------------------------------------------------------------------
    def node(self, node: Node) -> Inspected:
        touching = self.findings.of_node(node) if self.findings is not None else []
        kernels = self.kernels_of([node.id])
        block = self.graph.block_of[node.id]
        body = [
            equation(node),
            facts([*self.results(node, block), *self.operands(node, block)]),
            section("Devices", facts(device_rows(node))),
            section("Cost", self.cost(node)),
            section("Source", facts([("line", source_line(node.source)), *place_rows(node, block)])),
            section("XLA", self.fate(node, kernels)),
        ]
        if self.findings is not None:
            body.append(section("Sites", touching_html(touching, self.graph, self.enabled, self.findings.passes)))
            body.append(self.structures(node))
        if node.blocks:
            inside = [n for b in node.blocks for n in b.nodes]
            body.append(section("Inside", pick_nodes(self.graph, (n.id for n in inside))))
        title = f"{node.primitive} {' '.join(v.name for v in node.outputs)}".strip()
        return Inspected(title, "".join(body), nearest_misses(touching), nodes_of_kernels(kernels))

    def results(self, node: Node, block: Block) -> list[Fact]:
        return [("result", f"{value_text(v)}<br>{self.readers(v, block)}") for v in node.outputs]

    def readers(self, value: Value, block: Block) -> str:
        """The readers of a value: nodes of its block, and the result of the block."""
        users = [pick_node(n) for n in block.users.get(value.id, ())]
        if value.id in block.returned:
            users.append("the result" if block is self.graph.top else f"the result of {self.owner(block)}")
        return f"read by {picks(users)}" if users else "read by nothing"

    def owner(self, block: Block) -> str:
        """The region that a block is the body of."""
        ids = _OWNER.findall(block.path)
        node = self.graph.node_by_id.get(int(ids[-1])) if ids else None
        return pick_node(node) if node is not None else text(block.path)

    def operands(self, node: Node, block: Block) -> list[Fact]:
        return [("operand", self.operand(a, block)) for a in node.inputs]

    def operand(self, atom: Atom, block: Block) -> str:
        if isinstance(atom, Literal):
            return f"{mono(f'{literal_text(atom.val)} {type_text(atom.aval)}')} constant"
        return f"{value_text(atom)} {self.origin(atom, block)}"

    def origin(self, value: Value, block: Block) -> str:
        maker = block.producer.get(value.id)
        if maker is not None:
            return f"← {pick_node(maker)}"
        if any(v.id == value.id for v, _ in block.consts):
            return "← an array captured by the program"
        if block is not self.graph.top:
            return f"← given to {self.owner(block)}"
        names = {v.id: n for v, n in zip(self.graph.top.inputs, self.graph.in_names, strict=False)}
        placed = dict(
            zip((v.id for v in self.graph.top.inputs), map(sharding_text, self.graph.in_shardings), strict=False)
        )
        sharded = f", sharded {mono(sharding)}" if (sharding := placed.get(value.id)) else ""
        return f"← argument {mono(names.get(value.id, value.name))}{sharded}"

    def cost(self, node: Node) -> str:
        rows = cost_rows(self.costs.of(node))
        trips = self.costs.nodes[node.id].trips
        if trips != 1:
            each = self.costs.each[node.id]
            rows += [("each trip", text(each))] if trips and trips > 1 and not node.blocks else []
        note = self.costs.notes.get(node.id, "")
        return facts(rows) + quiet(note)

    def fate(self, node: Node, kernels: tuple[ModuleKernel, ...]) -> str:
        if self.compiled is None:
            return quiet(
                "Not compiled yet: press XLA kernels in a live explorer, or call findings.xla(), to see which kernel this node is in."
            )
        rows: list[Fact] = []
        for k in kernels:
            others = [i for i in k.nodes if i != node.id]
            ops = f"{len(k.nodes)} {plural('op', len(k.nodes))}"
            kernel_text = f"{pick(k.name)} {text(f'{k.kind}, {k.target}')}, {ops}"
            beside = f"<br>with {pick_nodes(self.graph, others)}" if others else ""
            rows.append(
                (
                    "belongs to" if k.inferred else "fused into" if k.kind == "fusion" else "runs as",
                    kernel_text + beside,
                )
            )
        if not any(not k.inferred for k in kernels):
            rows.append(("fate", text(self.compiled.fate(node))))
        return facts(rows)

    def structures(self, node: Node) -> str:
        """The lints of the node, and the structures that contain it, if they were searched already: the search takes seconds in a large
        program."""
        assert self.findings is not None
        known = [s for s in vars(self.findings).get("structures", ()) if node.id in s.node_ids]
        lints = [x for x in self.findings.lints if node.id in x.node_ids]
        advice = section(
            "Lints", facts([row for x in lints for row in ((x.rule, text(x.sentence)), ("edit", text(x.edit)))])
        )
        return advice + section("Part of", facts([(s.kind, f"{pick(s.id)} {text(s.text)}") for s in known]))

    def given(self, name: str) -> Inspected | None:
        """A value that no node makes: an argument, what a body is given, a captured array."""
        if not re.fullmatch(r"%\d+", name):
            return None
        for block in self.graph.blocks():
            for value in (*block.inputs, *(v for v, _ in block.consts)):
                if value.name != name:
                    continue
                readers = block.users.get(value.id, ())
                rows = [("type", mono(type_text(value.aval))), ("size", binary_bytes(value.nbytes))]
                rows += [("is", self.origin(value, block).removeprefix("← ")), ("", self.readers(value, block))]
                named = dict(zip((v.id for v in self.graph.top.inputs), self.graph.in_names, strict=False))
                title = f"{name} {named.get(value.id, '')}".strip()
                return Inspected(title, facts(rows), (), tuple(n.id for n in readers))
        return None

    # Sites and structures --------------------------------------------------------------------------------------------
    def site(self, name: str) -> Inspected | None:
        if self.findings is None or "@" not in name:
            return None
        record = record_named(self.findings, name)
        if isinstance(record, Structure):
            html = structure_html(record, self.graph, self.findings, self.costs, self.compiled)
            return Inspected(name, html, (), tuple(sorted(record.node_ids)))
        if record is None:
            return None
        arch = self.roofline.device.arch if self.roofline is not None else ""
        html = site_html(
            record,
            self.graph,
            self.costs,
            self.enabled,
            self.compiled,
            self.shares,
            self.roofline,
            arch=arch,
            sources=self.sources,
        )
        html += self.structured(name)
        nodes = record.all_node_ids if isinstance(record, Candidate) else record.site_ids.union(record.node_ids)
        near = record.node_ids if isinstance(record, Rejection) else ()
        return Inspected(name, html, tuple(near), nodes_of_kernels(self.kernels_of(nodes)))

    def structured(self, site: str) -> str:
        known = vars(self.findings).get("structures", ())
        return section("Part of", facts([(s.kind, f"{pick(s.id)} {text(s.text)}") for s in known if site in s.sites]))

    # XLA -------------------------------------------------------------------------------------------------------------
    def kernels_of(self, ids: Iterable[int]) -> tuple[ModuleKernel, ...]:
        return self.compiled.kernels_of(*ids) if self.compiled is not None else ()

    def kernel(self, name: str) -> Inspected | None:
        kernel = kernel_named(self.compiled, name)
        if kernel is None:
            return None
        ids = [i for i in kernel.nodes if i in self.graph.node_by_id]
        relation = "for" if kernel.inferred else "of"
        rows: list[Fact] = [
            ("kind", text(f"{kernel.kind}, {kernel.target}")),
            ("in", text(kernel.computation)),
            (f"{relation} {len(ids)} {plural('op', len(ids))}", pick_nodes(self.graph, ids)),
            ("computes", primitives_text(self.graph.node_by_id[i] for i in ids)),
            *self.traffic(kernel, ids),
        ]
        lines = "<br>".join(map(source_line, kernel.sources[:12]))
        sites = section("Sites", pick_sites(self.sites_in(ids)))
        return Inspected(name, facts(rows) + section("Source lines", lines) + sites, (), tuple(ids))

    def traffic(self, kernel: ModuleKernel, ids: list[int]) -> list[Fact]:
        """The bytes that a kernel moves: each outside input once, each result read outside once."""
        if not ids or kernel.kind == CONTROL or kernel.inferred:
            return []
        if len({self.graph.block_of[i].path for i in ids}) == 1:
            return cost_rows(self.costs.fused(ids))
        return [("node by node", text(total_cost(self.costs, ids)))]

    # Lines and groups ------------------------------------------------------------------------------------------------
    def line(self, name: str) -> Inspected | None:
        if not _LINE.fullmatch(name):
            return None
        nodes, sources = self.at_line(name)
        if not nodes:
            return None
        ids = tuple(n.id for n in nodes)
        rows: list[Fact] = [
            ("line", "<br>".join(map(source_line, sources[:4]))),
            ("equations", f"{len(nodes):,}: {pick_nodes(self.graph, ids)}"),
            ("computes", primitives_text(nodes)),
            *cost_rows(total_cost(self.costs, ids)),
            ("sites", pick_sites(self.sites_in(ids))),
        ]
        return Inspected(name, facts(rows) + section("XLA", xla_html(ids, self.compiled)), (), ids)

    def at_line(self, name: str) -> tuple[list[Node], list[Source]]:
        """The nodes on a source line, and what it is in full: two files may have the same short name."""
        same: dict[Source, bool] = {}
        nodes = []
        for node in self.graph.nodes():
            if node.source is None:
                continue
            if node.source not in same:
                same[node.source] = node.source.short == name
            if same[node.source]:
                nodes.append(node)
        return nodes, [source for source, here in same.items() if here]

    def group(self, ids: tuple[int, ...]) -> Inspected:
        nodes = [self.graph.node_by_id[i] for i in ids if i in self.graph.node_by_id]
        if not nodes:
            raise ArgumentError(
                f"what: got {len(ids)} node ids, all of them unknown to {self.graph!r}; needed ids of its nodes"
            )
        known = [n.id for n in nodes]
        rows: list[Fact] = [
            ("nodes", f"{len(nodes):,}"),
            ("computes", primitives_text(nodes)),
            *cost_rows(total_cost(self.costs, known)),
            ("scopes", text(", ".join(counts_text((n.scope or "(top)" for n in nodes), 6)))),
            ("lines", pick_lines(nodes)),
        ]
        sites = self.sites_in(known)
        body = [
            facts(rows),
            *([section("Sites", sites_text(sites))] if sites else []),
            section("XLA", xla_html(known, self.compiled)),
            folded("all nodes", pick_nodes(self.graph, known, 100)),
        ]
        title = f"{len(nodes):,} {plural('node', len(nodes))}"
        return Inspected(title, "".join(body), nearest_misses(sites))

    def sites_in(self, ids: Iterable[int]) -> list[Candidate | Rejection]:
        """The sites that hold some of the nodes."""
        if self.findings is None:
            return []
        wanted = frozenset(ids)
        found: list[Candidate | Rejection] = [
            c for c in self.findings.candidates if not wanted.isdisjoint(c.all_node_ids)
        ]
        return found + [r for r in self.findings.rejections if not wanted.isdisjoint(r.site_ids.union(r.node_ids))]
