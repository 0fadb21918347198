"""The results of the verbs: graphs and findings that can draw, show and save themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..fusers import Findings as PlainFindings
from ..fusers import registry
from ..graph.program.graph import Graph as PlainGraph
from ..progress import noticed
from ..tracebacks import errors_for_users


@errors_for_users
@dataclass(frozen=True, eq=False, repr=False)
class Graph(PlainGraph):
    """A traced program (see `fusionlab.graph.program.graph.Graph`) that can show and save itself."""

    def to_dot(self, **options: Any) -> str:
        """The picture as Graphviz DOT text; options as of `to_svg`, and `direction` ("TB", "LR", "BT" or "RL")."""
        from ..viz.export import to_dot

        return to_dot(self, **options)

    def to_svg(self, **options: Any) -> str:
        """The picture as SVG text; `show=["%143", "model.py:41"]` opens the cards around these, `show="all"` all of them.

        Raises:
          ArgumentError: the graph contains nothing of that name.
        """
        from ..viz.export import to_svg

        return to_svg(self, **options)

    def save(self, path: Any, **options: Any) -> Any:
        """Writes .svg, .dot, .png, .pdf, .html, .json or .txt, by suffix; returns the path. Options as of `to_svg`.

        Raises:
          ArgumentError: another suffix. OutputError: the file cannot be written. MissingDependencyError: PDF without the
          extra.
        """
        from ..viz.explorer.files import save

        with noticed("drawing the graph"):
            return save(self, path, **options)

    def _repr_html_(self) -> str:
        from ..viz.html.report import graph_html

        return graph_html(self)

    def _ipython_display_(self) -> None:
        from ..viz.notebook import graph_outputs, show

        show(graph_outputs(self))


@errors_for_users
class Findings(PlainFindings):
    """The result of a search (see `fusionlab.fusers.Findings`), with a picture for notebooks."""

    def _repr_html_(self) -> str:
        from ..viz.html.report import graph_html

        return graph_html(self.graph, self)

    def _ipython_display_(self) -> None:
        from ..viz.notebook import graph_outputs, show

        show(graph_outputs(self.graph, self, plain=repr(self)))

    def _makers(self) -> dict[str, Callable[[], str | bytes]]:
        from ..viz.explorer.files import picture_makers

        return super()._makers() | {".html": self.to_html} | picture_makers(self.graph, self)

    def save(self, path: Any) -> Path:
        """Writes .html (the page of `to_html`), .txt (the report), .json, .csv (a row per site), or the picture: .svg .png .pdf .dot.

        Raises:
          ArgumentError: another suffix. OutputError: the file cannot be written. MissingDependencyError: PNG or PDF without the extra.
        """
        return super().save(path)

    def to_html(self, path: Any = None) -> str:
        """A self-contained page: the graph, every pass that ran, candidates, rejections; written to `path` when given.

        Raises:
          OutputError: the file cannot be written.
        """
        from ..output import write_file
        from ..viz.html.report import report_html

        with noticed("writing the page"):
            text = report_html(self.graph, self, formulas={name: p.formula for name, p in registry().items()})
            if path is not None:
                write_file(path, text)
        return text


def fields_of(record: Any, **changed: Any) -> dict[str, Any]:
    """The fields of a record, some of them changed, as arguments for a class derived from the record's."""
    return {f.name: getattr(record, f.name) for f in dataclasses.fields(record)} | changed
