"""A graph and its findings as SVG, DOT and plain data: the picture that explorer, page and notebook show."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Node, Value, literal_text, type_text

from .cards.album import Album
from .cards.dot import dot
from .cards.plain import plain
from .model.selection import selection
from .model.summaries import summary

LIVE = "fusionlab.explore(fn, *args)"
CAPTION = f"FusionLab · to open cards, switch sites and measure them: {LIVE}"
DRIFTING = "FusionLab · stripe: error of the fused program; broad and coloured where it is more than rounding explains"
Show = Collection[object] | str


def album(
    graph: Graph,
    findings: Findings | None,
    enabled: Collection[str] | None,
    show: Show = (),
    drift: Mapping[int, float] = MappingProxyType({}),
) -> Album:
    """The pictures of a graph, with the requested names visible.

    Args:
      graph, findings: the program, and candidates and rejections over it, or None.
      enabled: ids of the candidates that are applied; None means all of them that are not idle.
      show: names of things to make visible: nodes ("%143", "n12"), sites, structures, source lines ("model.py:41"); "all" opens
        every card.
      drift: node id -> an error, for a stripe on each card (see `Album`).

    Raises:
      ArgumentError: the graph contains nothing of that name.
    """
    pictures = Album(graph, findings)
    pictures.drift = drift
    if isinstance(show, str) and show == "all":
        pictures.open_all(enabled)
        return pictures
    for what in (show,) if isinstance(show, str) else show:
        pictures.reveal(enabled, selection(graph, findings, what, None, {}).nodes)
    return pictures


def to_svg(
    graph: Graph,
    findings: Findings | None = None,
    enabled: Collection[str] | None = (),
    *,
    show: Show = (),
    id_prefix: str = "fl-",
    drift: Mapping[int, float] = MappingProxyType({}),
) -> str:
    """The picture as the text of an SVG file; args and errors as of `album`. `id_prefix` keeps the ids of pictures on one page distinct."""
    return album(graph, findings, enabled, show, drift).still(enabled, id_prefix, DRIFTING if drift else CAPTION)


def to_dot(
    graph: Graph,
    findings: Findings | None = None,
    enabled: Collection[str] | None = (),
    *,
    show: Show = (),
    direction: str = "TB",
) -> str:
    """The picture as Graphviz DOT text; args and errors as of `album` and `dot`."""
    pictures = album(graph, findings, enabled, show)
    return dot(pictures.overview(enabled), pictures.opened, direction)


def view_model(
    graph: Graph,
    findings: Findings | None = None,
    *,
    enabled: Collection[str] | None = (),
    evidence: Any = None,
    formulas: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """All that a picture and its tables show, as plain data that JSON can hold.

    Top keys: `format`, `version`, `title`, `header` (one sentence), `counts`, `passes`, `sites` (the ledger's rows), `structures`, `lints`,
    `evidence`, `picture` (its lanes, rows, cards and edges, as `cards/card.py` names them) and `nodes`, which cards name by `id`.

    Args:
      graph, findings, enabled: as for `album`.
      evidence: a measured comparison, or None.
      formulas: pass name -> what it computes.
    """
    facts = summary(graph, findings, enabled, evidence, formulas)
    nodes = [_node_dict(node) for node in graph.nodes()]
    return facts | {"picture": plain(Album(graph, findings).overview(enabled)), "nodes": nodes}


def _node_dict(node: Node) -> dict[str, Any]:
    return {
        "id": node.id,
        "primitive": node.primitive,
        "inputs": [a.name if isinstance(a, Value) else literal_text(a.val) for a in node.inputs],
        "outputs": [{"name": v.name, "type": type_text(v.aval)} for v in node.outputs],
        "scope": node.scope,
        "source": node.source.short if node.source else "",
    }
