"""The view model: everything a picture shows, as plain JSON-able dicts. Widget, HTML, DOT and JSON all read this one.

Top keys: `format`, `version`, `title`, `header` (one sentence), `counts`, `passes`, `sites` (the ledger's rows), `structures`,
`groups`, `boxes`, `edges` (the visible, folded graph), `revealed`, `inspector` (node id -> dict), `hidden_inputs`,
`evidence`. Boxes and groups say by `members` which nodes they stand for, hidden copies included: pairs (first, last) of node ids.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.program.graph import Graph

from .pictures import Pictures
from .summaries import FORMAT as FORMAT
from .summaries import VERSION as VERSION
from .summaries import header as header
from .summaries import summary as summary


def view_model(
    graph: Graph,
    findings: Findings | None = None,
    *,
    enabled: Collection[str] | None = (),
    evidence: Any = None,
    formulas: Mapping[str, str] | None = None,
    expanded: Collection[str] | str = (),
    collapsed: Collection[str] = (),
    reveal: Collection[int] = (),
    max_nodes: int = 60,
) -> dict[str, Any]:
    """Builds the view model of a graph and what was found in it.

    Args:
      graph: what is drawn.
      findings: candidates and rejections over this graph, or None.
      enabled: ids of the candidates that are applied; None means all of them that are not idle.
      evidence: a measured comparison, or None.
      formulas: pass name -> what it computes.
      expanded, collapsed: group ids to open or close ("all" opens everything).
      reveal: ids of nodes that have to be visible; `revealed` then says in which box each one is.
      max_nodes: about how many boxes may be visible; sites are shown beyond it.
    """
    return Pictures(graph, findings).view(
        enabled=enabled,
        evidence=evidence,
        formulas=formulas,
        expanded=expanded,
        collapsed=collapsed,
        reveal=reveal,
        max_nodes=max_nodes,
        structures=True,
    )
