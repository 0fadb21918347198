"""The facts about one node, as a plain dict, for the inspector pane and the HTML report."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fusionlab.fusers.engine.outcomes import Candidate, Rejection
from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Atom, Literal, Node, Value, literal_text, type_text
from fusionlab.graph.program.scopes import Source
from fusionlab.graph.program.text import params_text

from ..markup import short
from .sites import is_applied

_PARAMS_LENGTH = 300


def source_dict(source: Source | None) -> dict[str, Any] | None:
    """File name without its folder (a report is for other people's eyes), line, function and the line's text."""
    if source is None:
        return None
    return {"where": source.short, "function": source.function, "text": short(source.text, 200)}


def atom_dict(atom: Atom, producer: dict[int, Node], names: dict[int, str]) -> dict[str, Any]:
    if isinstance(atom, Literal):
        return {"name": literal_text(atom.val), "type": type_text(atom.aval), "bytes": 0, "from": "constant"}
    maker = producer.get(atom.id)
    origin = f"n{maker.id} {maker.primitive}" if maker else names.get(atom.id, "outside this block")
    return {"name": atom.name, "type": type_text(atom.aval), "bytes": atom.nbytes, "from": origin}


def site_dict(record: Candidate | Rejection, enabled: Collection[str] | None) -> dict[str, Any]:
    """One candidate or rejection as plain data; `enabled` None means every candidate is applied that is not idle."""
    common = {
        "id": short(record.id, 200),
        "pass": record.pass_name,
        "scope": record.scope,
        "source": source_dict(record.source),
        "backward": _backward_dict(record),
    }
    if isinstance(record, Candidate):
        return common | {
            "state": "applied" if is_applied(record, enabled) else "candidate",
            "text": record.formula,
            "arithmetic": record.arithmetic,
            "op": record.op,
            "attrs": {
                str(k): v if isinstance(v, int | float | str | bool) else str(v) for k, v in record.attrs.items()
            },
            "nodes_before": record.nodes_before,
            "nodes_after": record.nodes_after,
            "nodes": sorted(record.node_ids),
            "root": record.root.name,
            "others": [v.name for v in record.others],
            "same_code": record.same_code,
            "waits": record.waits,
            "notes": list(record.notes),
            "backends": [{"name": b.name, "verdict": b.verdict, "reason": b.reason} for b in record.backends],
            "residuals": [
                {
                    "name": r.name,
                    "type": f"{r.dtype}[{','.join(map(str, r.shape))}]",
                    "bytes": r.nbytes,
                    "readers": list(r.readers),
                }
                for r in record.residuals
            ],
        }
    return common | {
        "state": "declined",
        "text": record.sentence,
        "code": record.code,
        "matched": record.matched,
        "total": record.total,
        "edit": record.edit,
        "winner": record.winner,
        "nodes": sorted(record.site_ids | frozenset(record.node_ids)),
        "guilty": list(record.node_ids),
    }


def _backward_dict(record: Candidate | Rejection) -> dict[str, Any] | None:
    """The site's backward pass, where the program has it: what is found of it, its nodes that go, why it stays if it does."""
    pair = record.backward
    if pair is None:
        return None
    return {
        "text": f"gradients of {', '.join(pair.gradients)}"
        + (f"; none of {', '.join(pair.absent)}" if pair.absent else ""),
        "nodes": sorted(pair.node_ids),
        "fused": pair.stays is None,
        "stays": pair.stays,
    }


def node_dict(
    graph: Graph,
    node: Node,
    findings: Findings | None = None,
    enabled: Collection[str] | None = None,
    touching: Collection[Candidate | Rejection] | None = None,
) -> dict[str, Any]:
    """Primitive, operands, results, params, scope, source line, and every site that touches the node (`touching`, where known)."""
    block = graph.block_of[node.id]
    names = {v.id: name for v, name in zip(graph.top.inputs, graph.in_names, strict=False)}
    if touching is None:
        touching = findings.of_node(node) if findings is not None else ()
    return {
        "node": node.id,
        "name": " ".join(v.name for v in node.outputs),
        "primitive": node.primitive,
        "inputs": [atom_dict(a, block.producer, names) for a in node.inputs],
        "outputs": [{"name": v.name, "type": type_text(v.aval), "bytes": v.nbytes} for v in node.outputs],
        "params": short(params_text(node), _PARAMS_LENGTH),
        "scope": node.scope,
        "block": block.path,
        "source": source_dict(node.source),
        "sites": [site_dict(r, enabled) for r in touching],
    }


def find_node(graph: Graph, wanted: object) -> Node | None:
    """The node meant by "%143" (the value it makes), "n12", 12 (a node id), a Value or a Node; None where none is."""
    if isinstance(wanted, Node):
        return graph.node_by_id.get(wanted.id)
    if isinstance(wanted, int):
        return graph.node_by_id.get(wanted)
    text = wanted.name if isinstance(wanted, Value) else str(wanted)
    sign, digits = text[:1], text[1:]
    if not digits.isdecimal():
        return None
    if sign == "n":
        return graph.node_by_id.get(int(digits))
    if sign == "%":
        vid = int(digits)
        return next((n for n in graph.nodes() if any(v.id == vid for v in n.outputs)), None)
    return None
