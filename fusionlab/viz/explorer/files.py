"""The files of an explorer and a graph, by suffix."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fusionlab.errors import ArgumentError
from fusionlab.evidence.scopes.scope_times import TRACE
from fusionlab.fusers import Findings
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.text import graph_text
from fusionlab.showing import content_as, save_as

from ..convert import to_pdf, to_png
from ..export import Show, to_dot, to_svg, view_model
from ..html.report import report_html

if TYPE_CHECKING:
    from .session import Session


def export(
    session: Session,
    suffix: str,
    name: str,
    formulas: Mapping[str, str],
    saved: Callable[[], str],
    script: str = "",
) -> str | bytes:
    """The content of a file of this kind: the picture with the open cards, the whole page, or the state.

    Args:
      session: what is on, shown and measured.
      suffix: ".json" (the state), ".html" (the page), ".svg", ".png", ".pdf", ".dot" or ".txt" (the picture, and the program as text), or
        ".perfetto.json.gz" (a run, kernel by kernel).
      name: of the file, for the error.
      formulas: as for `report_html`.
      saved: makes the state's text.
      script: the program that does the same, for the page.

    Raises:
      ArgumentError: another suffix, or a trace where no kernel was timed. MissingDependencyError: PDF without the extra.
    """

    def trace() -> bytes:
        times = session.scopes()
        if times is None:
            raise ArgumentError(
                f"path: {name}: got no times of kernels to write; call lab.measure() or lab.measure_scopes() first"
            )
        return times.trace()

    def page() -> str:
        after = session.fused_graph() if session.can_fuse else None
        return report_html(
            session.graph,
            session.findings,
            enabled=session.enabled,
            evidence=session.evidence,
            after=after,
            formulas=formulas,
            tabs=session.tabs(script),
            panel=session.panel(),
            times=session.stage.times,
        )

    makers: dict[str, Callable[[], str | bytes]] = {
        ".json": saved,
        ".html": page,
        ".svg": session.svg,
        ".png": lambda: to_png(session.svg()),
        ".pdf": lambda: to_pdf(session.svg()),
        ".dot": session.dot,
        ".txt": lambda: graph_text(session.shown_graph) + "\n",
        TRACE: trace,
    }
    return content_as(suffix, name, makers)


def save(
    graph: Graph,
    path: str | os.PathLike[str],
    findings: Findings | None = None,
    enabled: Collection[str] | None = (),
    *,
    show: Show = (),
) -> Path:
    """Writes a picture of the graph; the suffix sets the format: .svg .dot .png .pdf .json .html .txt.

    Args:
      graph, findings, enabled, show: as for `to_svg`; the whole program is in .html, .json and .txt.
      path: the output file; its folder must exist.

    Returns:
      The path written.

    Raises:
      ArgumentError: the suffix is not one of the seven.
      OutputError: the folder is missing or not writable; nothing is left behind.
      MissingDependencyError: .pdf without the extra `pdf`.
    """
    makers: dict[str, Callable[[], str | bytes]] = {
        ".html": lambda: report_html(graph, findings, enabled=enabled),
        ".json": lambda: json.dumps(view_model(graph, findings, enabled=enabled), indent=1, sort_keys=True),
        ".txt": lambda: graph_text(graph) + "\n",
    }
    return save_as(path, makers | picture_makers(graph, findings, enabled, show=show))


def picture_makers(
    graph: Graph, findings: Findings | None = None, enabled: Collection[str] | None = None, *, show: Show = ()
) -> dict[str, Callable[[], str | bytes]]:
    """Suffix -> what draws the graph as such a file; arguments as for `to_svg`."""

    def svg() -> str:
        return to_svg(graph, findings, enabled, show=show)

    return {
        ".dot": lambda: to_dot(graph, findings, enabled, show=show),
        ".pdf": lambda: to_pdf(svg()),
        ".png": lambda: to_png(svg()),
        ".svg": svg,
    }
