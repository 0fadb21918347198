"""The meaning of a name in an explorer: a node, a site, an XLA kernel, a source line, or a group of the picture."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fusionlab.errors import ArgumentError, did_you_mean
from fusionlab.fusers.engine.outcomes import Candidate, Rejection
from fusionlab.fusers.report.findings import Findings
from fusionlab.fusers.report.structures import Structure
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Node
from fusionlab.graph.xla.modules import CompiledModule, ModuleKernel
from fusionlab.showing import Shown

from .node_data import find_node, node_dict, site_dict

_LINE = re.compile(r".+:\d+")


@dataclass(frozen=True, repr=False)
class Selection(Shown):
    """A selection; without arguments, of nothing.

    Attributes:
      name: the name that selects it again: "%12", a site's id, a kernel's name, "model.py:41", a group's id.
      kind: "", "node", "argument", "site", "structure", "kernel", "line" or "group".
      target: what is selected, as `inspect` takes it: a Node, a record, a name, or the node ids of a group.
      nodes: ids of its nodes.
    """

    _says = "{0.name} ({0.kind})"
    _told = ("name", "kind", "nodes")

    name: str = ""
    kind: str = ""
    target: Any = None
    nodes: tuple[int, ...] = ()

    def info(self, graph: Graph, findings: Findings | None, enabled: Collection[str]) -> dict[str, Any]:
        """It as plain data: `node_dict` of a node, `site_dict` of a site, else its name, kind and nodes."""
        if isinstance(self.target, Node):
            return node_dict(graph, self.target, findings, enabled)
        if isinstance(self.target, Candidate | Rejection):
            return site_dict(self.target, enabled)
        return {"name": self.name, "kind": self.kind, "nodes": list(self.nodes)}


def selection(
    graph: Graph,
    findings: Findings | None,
    target: object,
    compiled: CompiledModule | None = None,
    groups: Mapping[str, Collection[int]] | None = None,
) -> Selection:
    """Resolves a name to a selection.

    Args:
      graph, findings: the drawn program.
      target: a node, a value, a node id, or a name as a `Selection` has it.
      compiled: XLA's kernels of the graph, if known; they have names.
      groups: id -> node ids of the groups in the picture.

    Raises:
      ArgumentError: the name is not one of these.
    """
    node = find_node(graph, target)
    if node is not None:
        return Selection(node.outputs[0].name if node.outputs else f"n{node.id}", "node", node, (node.id,))
    text = str(target)
    found = _argument(graph, text) or _record(findings, text) or _kernel(compiled, text) or _line(graph, text)
    if found is not None:
        return found
    if groups and text in groups:
        return Selection(text, "group", tuple(groups[text]), tuple(groups[text]))
    raise _names_nothing(graph, findings, compiled, text)


def _names_nothing(
    graph: Graph, findings: Findings | None, compiled: CompiledModule | None, text: str
) -> ArgumentError:
    first = next((n for n in graph.nodes() if n.outputs), None)
    example = f"{first.outputs[0].name!r}, " if first is not None else ""
    return ArgumentError(
        f"select: got {text!r:.120}, needed a value of the graph shown ({example}'n0'), a site's id, a source line ('model.py:41')"
        + (", or an XLA kernel." if compiled is not None else "; XLA kernels have names once they are shown.")
        + did_you_mean(text, _names(graph, findings, compiled))
    )


def _names(graph: Graph, findings: Findings | None, compiled: CompiledModule | None) -> list[str]:
    """Sites, source lines and kernels. Values are numbered: one number is not nearer than another."""
    found = [r.id for r in (*findings.candidates, *findings.rejections)] if findings is not None else []
    lines = {n.source.short for n in graph.nodes() if n.source is not None}
    return [*found, *lines, *(k.name for k in compiled.kernels)] if compiled is not None else [*found, *lines]


def _argument(graph: Graph, text: str) -> Selection | None:
    """An argument of the program, by its value's name: its nodes are those that read it."""
    for value in graph.top.inputs:
        if value.name == text:
            readers = tuple(n.id for n in graph.top.users.get(value.id, ()))
            return Selection(text, "argument", text, readers)
    return None


def record_named(findings: Findings, name: str) -> Candidate | Rejection | Structure | None:
    """The candidate, the rejection or the structure with this id."""
    record = next((r for r in (*findings.candidates, *findings.rejections) if r.id == name), None)
    if record is not None or "@" not in name:
        return record  # no structure's id; looking for structures takes as long as the search itself
    return next((s for s in findings.structures if s.id == name), None)


def _record(findings: Findings | None, text: str) -> Selection | None:
    record = record_named(findings, text) if findings is not None else None
    if record is None:
        return None
    if isinstance(record, Structure):
        return Selection(text, "structure", record, tuple(sorted(record.node_ids)))
    nodes = (getattr(record, "site_ids", None) or frozenset()) | frozenset(record.node_ids)
    return Selection(text, "site", record, tuple(sorted(nodes)))


def kernel_named(compiled: CompiledModule | None, name: str) -> ModuleKernel | None:
    """The kernel of XLA's with this name, where the program was compiled."""
    return next((k for k in compiled.kernels if k.name == name), None) if compiled is not None else None


def _kernel(compiled: CompiledModule | None, text: str) -> Selection | None:
    kernel = kernel_named(compiled, text)
    return Selection(text, "kernel", text, kernel.nodes) if kernel is not None else None


def _line(graph: Graph, text: str) -> Selection | None:
    if not _LINE.fullmatch(text):
        return None
    nodes = tuple(n.id for n in graph.nodes() if n.source is not None and n.source.short == text)
    return Selection(text, "line", text, nodes) if nodes else None
