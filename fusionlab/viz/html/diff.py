"""The program before and after, in nodes: by primitive, and by site."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from fusionlab.fusers.engine.grouping import grouped_by
from fusionlab.fusers.engine.outcomes import Candidate
from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.program.graph import Graph

from ..markup import Html, folded, pick, picks, quiet, table, text
from ..model.sites import is_applied
from ..palette import pass_of_op

_ROWS = 40


def diff_html(
    before: Graph, after: Graph | None, findings: Findings | None = None, enabled: Collection[str] | None = ()
) -> str:
    """Nodes before and after by primitive, those that change most first, and what each applied site replaces, alike ones together.

    Args:
      before: the program as it was written.
      after: the program with the enabled sites fused (`findings.apply(enabled)`), or None where it was not made.
      findings: what was found in `before`, or None.
      enabled: ids of the candidates that are applied; None means all of them that are not idle.
    """
    found = findings.candidates if findings is not None else ()
    applied = [c for c in found if is_applied(c, enabled)]
    sites = _sites_html(applied)
    if after is None:
        return quiet("The fused program was not made.") + sites
    was, now = _primitives(before), _primitives(after)
    changed = sorted((p for p in was | now if was[p] != now[p]), key=lambda p: (-abs(now[p] - was[p]), p))
    total = f"<p><b>{before.node_count:,} → {after.node_count:,} nodes</b></p>"
    if not changed:
        return total + quiet("The same nodes: nothing is fused.") + sites
    rows = [
        [(p, "mono"), was[p], now[p], f"{now[p] - was[p]:+,}", _note(p, was[p], now[p]), _where(p, before, applied)]
        for p in changed[:_ROWS]
    ]
    more = len(changed) - _ROWS
    left = quiet(f"{more} more primitives change, each by less.") if more > 0 else ""
    return total + table(["primitive", "before", "after", "change", "", "sites"], rows, (1, 2, 3)) + left + sites


def _primitives(graph: Graph) -> Counter[str]:
    return Counter(n.primitive for n in graph.nodes())


def _note(primitive: str, was: int, now: int) -> str:
    if pass_of_op(primitive) and now > was:
        return "fused op"
    return "all gone" if not now else "new" if not was else ""


def _where(primitive: str, before: Graph, applied: Collection[Candidate]) -> Html:
    """Buttons of the sites that take nodes of this primitive away, or that this fused op is of; of alike ones the first."""
    mine = [c for c in applied if _changes(primitive, before, c)]
    kinds = [(each[0], len(each)) for each in grouped_by(mine, lambda c: (c.pass_name, c.formula))]
    return Html(picks([pick(c.id, f"first of {n}: {c.formula}" if n > 1 else c.formula) for c, n in kinds]))


def _changes(primitive: str, before: Graph, site: Candidate) -> bool:
    if primitive.removesuffix("_cotangent").removesuffix("_tangent") == site.op:
        return True
    return any(before.node_by_id[i].primitive == primitive for i in site.all_node_ids if i in before.node_by_id)


def _sites_html(sites: Collection[Candidate]) -> str:
    """The nodes that each site replaces; sites of one pass with equal numbers share a line."""
    parts = []
    for alike in grouped_by(sites, lambda c: (c.pass_name, c.formula, c.nodes_before, c.nodes_after, _backward(c))):
        first, n = alike[0], len(alike)
        line = f"{first.pass_name}: {first.nodes_before} → {first.nodes_after} nodes{_backward(first)}, {first.formula}"
        shown = pick(first.id) if n == 1 else folded(f"{n} sites", picks([pick(c.id) for c in alike]))
        parts.append(f"<li>{text(line)} {shown}</li>")
    return f"<h4>By site</h4><ul>{''.join(parts)}</ul>" if parts else quiet("No site is fused.")


def _backward(c: Candidate) -> str:
    fused = len(c.backward.node_ids) if c.backward is not None and c.backward.stays is None else 0
    return f" and {fused} of its backward pass" if fused else ""
