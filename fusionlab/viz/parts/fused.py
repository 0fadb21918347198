"""The cost of a program with its sites fused, node by node of the program as written, and the lines about each site."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from fusionlab.fusers.engine.grouping import nameless
from fusionlab.fusers.engine.outcomes import Candidate, Rejection
from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.cost.cost import Costs, cost_of
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Node

from ..cards.card import Amount
from ..model.sites import is_applied
from .nodes import is_light
from .sites import Found

_LETTERS = 46  # of a line
Key = tuple[str, str]  # primitive of a fused op, scope
_NODE = re.compile(r"^:\S+ = \S+ ?: ")  # what a sentence says first of the node that it is of
_SIGNS = {
    "add": "+",
    "add_any": "+",
    "sub": "−",
    "mul": "×",
    "div": "÷",
    "dot_general": "@",
    "square": "^2",
    "select_n": "where",
    "reduce_sum": "sum",
    "reduce_max": "max",
    "conv_general_dilated": "conv",
}


def fused_amounts(
    written: Mapping[int, Amount], found: Collection[Found], applied: Collection[str], costs: Costs, fused: Graph
) -> tuple[dict[int, Amount], Amount]:
    """Node id -> its cost where the applied sites are fused, and the cost of the whole program then.

    A site that runs what XLA runs anyway changes nothing, and costs what it costs as written.
    Operations are those of the program as written.

    A fused site moves what its ops move in the fused program; where these cannot be identified, its inputs from outside count as read
    once and its results read outside as written once. All of it is counted at one of the site's nodes.

    Args:
      written: node id -> its cost as written.
      found: the sites.
      applied: ids of the candidates that are fused.
      costs: of the program as written.
      fused: the program with the sites fused.
    """
    after = cost_of(fused)
    placed = _sites_by_key(s for s in found if s.record.id in applied and _changes(s))
    ops = _with_strays(_by_key(fused.nodes(), {_primitive(s) for s in found}), placed)
    amounts = dict(written)
    for key, sites in placed.items():
        for site, nodes in zip(sites, _dealt(ops.get(key, []), len(sites)), strict=True):
            moved = sum(after.nodes[n.id].bytes_moved for n in nodes) if nodes else _ideal(costs, site, written)
            amounts |= _at_one(site.nodes, moved, written)
    return amounts, sum(amounts.values(), Amount())


def _changes(site: Found) -> bool:
    return not (isinstance(site.record, Candidate) and site.record.same_code)


def _primitive(site: Found) -> str:
    op = site.record.op if isinstance(site.record, Candidate) else ""
    return f"{op}_cotangent" if site.backward else op


def _by_key(nodes: Iterable[Node], primitives: Collection[str]) -> dict[Key, list[Node]]:
    ops: dict[Key, list[Node]] = {}
    for node in nodes:
        if node.primitive in primitives:
            ops.setdefault((node.primitive, node.scope), []).append(node)
    return ops


def _sites_by_key(sites: Iterable[Found]) -> dict[Key, list[Found]]:
    """In program order, as the fused ops are."""
    found: dict[Key, list[Found]] = {}
    for site in sorted(sites, key=lambda s: max(s.nodes, default=0)):
        found.setdefault((_primitive(site), site.record.scope), []).append(site)
    return found


def _with_strays(ops: Mapping[Key, list[Node]], sites: Mapping[Key, list[Found]]) -> dict[Key, list[Node]]:
    """With the ops in a scope without sites for the sites whose own scope has no ops, where they are the only ones of their primitive: the
    backward pass of a site may be in another scope."""
    lost = [key for key in sites if key not in ops]
    strays = {p: [key for key in ops if key[0] == p and key not in sites] for p, _ in lost}
    alone = [key for key in lost if sum(p == key[0] for p, _ in lost) == len(strays[key[0]]) == 1]
    return {**ops, **{key: ops[strays[key[0]][0]] for key in alone}}


def _dealt(nodes: Sequence[Node], count: int) -> list[Sequence[Node]]:
    """As many of the nodes for each of so many sites; none where they cannot be dealt evenly."""
    each, rest = divmod(len(nodes), count)
    return [() if rest else nodes[k * each : (k + 1) * each] for k in range(count)]


def _ideal(costs: Costs, site: Found, written: Mapping[int, Amount]) -> int:
    now = sum(written[i].bytes for i in site.nodes)
    blocks = {costs.graph.block_of[i].path for i in site.nodes}
    return min(now, costs.fused(site.nodes).bytes_moved) if len(blocks) == 1 else now


def _at_one(nodes: Collection[int], moved: int, written: Mapping[int, Amount]) -> dict[int, Amount]:
    first = min(nodes, default=None)
    return {i: replace(written[i], bytes=moved if i == first else 0) for i in nodes}


# What is said ------------------------------------------------------------------------------------------------------------


def said_before(graph: Graph, nodes: Iterable[int]) -> str:
    """The operations of a site in program order, as one would write the formula: "sum ÷ − ^2 rsqrt × +"."""
    words = (_word(graph.node_by_id[i]) for i in sorted(nodes) if not is_light(graph.node_by_id[i]))
    return " ".join(words)


def _word(node: Node) -> str:
    if node.primitive == "integer_pow":
        return f"^{node.params['y']}"
    return _SIGNS.get(node.primitive, node.primitive.removeprefix("reduce_"))


def said_after(findings: Findings, enabled: Collection[str] | None) -> dict[str, tuple[str, ...]]:
    """Site id -> what it is with the sites fused: what one operation replaces and why it is chosen, or why it stays and what would help."""
    said = {c.id: _of_candidate(c, is_applied(c, enabled)) for c in findings.candidates}
    return said | {r.id: _of_rejection(r) for r in findings.rejections}


def _of_candidate(site: Candidate, applied: bool) -> tuple[str, ...]:
    what = f"{site.nodes_after} operation{'s' if site.nodes_after > 1 else ''} for {site.nodes_before}"
    if not applied:
        return _lines(f"stays: {site.idle or f'switched off; it would be {what}'}", 2)
    backend = site.backend
    if backend is None:
        return (what,)
    return (what if site.same_code else f"{what} · {backend.name} kernel", *_lines(backend.reason, 2))


def _of_rejection(site: Rejection) -> tuple[str, ...]:
    why = _lines(f"stays: {_NODE.sub('', nameless(site.sentence))}", 3)
    return (*why, *_lines(f"would help: {nameless(site.edit)}", 1)) if site.edit else why


def _lines(text: str, most: int) -> tuple[str, ...]:
    """A sentence in lines that a box has room for."""
    return tuple(textwrap.wrap(text, _LETTERS, max_lines=most, placeholder=" …"))
