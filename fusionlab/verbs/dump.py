"""Dumps: the graph before and after each pass, as text, DOT and SVG, with a report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..device import Device
from ..fusers import Findings, Pass, find_in
from ..graph.program.graph import Graph
from ..graph.program.text import graph_text
from ..output import output_folder, write_file


def write_dump(
    folder: Any,
    graph: Graph,
    passes: Iterable[tuple[Pass, Mapping[str, Any]]],
    device: Device,
    implementation: str | None = None,
) -> None:
    """Writes `NN_<pass>.before.txt/.dot/.svg`, `NN_<pass>.after.*` and `report.json`, passes applied in order.

    Passes for whole structures (`Pass.whole`) are applied first.

    Raises:
      OutputError: the folder cannot be written; nothing is left half-written.
    """
    with output_folder(folder) as into:
        reports = []
        # A pass of wholes would find nothing of what another has rewritten.
        for i, (pass_, options) in enumerate(sorted(passes, key=lambda asked: not asked[0].whole)):
            found = find_in(graph, [(pass_, options)], device, implementation)
            stem = f"{i:02d}_{pass_.name}"
            _write(into, f"{stem}.before", graph, found)
            graph = found.apply()
            _write(into, f"{stem}.after", graph, None)
            reports.append({"order": i, **found.to_dict()})
        write_file(into / "report.json", json.dumps({"version": 1, "passes": reports}, indent=2) + "\n")


def _write(folder: Path, stem: str, graph: Graph, found: Findings | None) -> None:
    from ..viz.export import to_dot, to_svg

    write_file(folder / f"{stem}.txt", graph_text(graph) + "\n")
    write_file(folder / f"{stem}.dot", to_dot(graph, found))
    write_file(folder / f"{stem}.svg", to_svg(graph, found))
