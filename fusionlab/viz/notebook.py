"""Outputs of a cell: several, so that a picture is visible wherever the notebook is read.

Readers differ in what they leave out of an output. JupyterLab and Notebook 7 strip an untrusted notebook's HTML of its SVG, whose
texts then appear as a wall of words, draw no SVG output and start no widget; a trusted notebook without a kernel shows "model not
found" where a widget was; GitHub cleans HTML too. All of them draw an output that is a PNG, and text whose HTML is plain. So a
picture is an output of its own, and its description another one; the live explorer comes with a still picture, which its
style sheet hides while the explorer is there.
"""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.program.graph import Graph

from .browser import asset
from .cards.album import Album
from .convert import size_of, to_png
from .export import LIVE
from .markup import aligned, table
from .model.alike import alike
from .model.summaries import summary

_MOST_PIXELS = 4e6  # of a still picture: as many as a screen has


@dataclass(frozen=True)
class Output:
    """One output of a cell: its content and its metadata, by MIME type."""

    data: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)


def show(outputs: Iterable[Output]) -> None:
    """Shows these outputs below the running cell; what an object's `_ipython_display_` calls.

    Raises:
      NotImplementedError: nobody there draws HTML and pictures (a terminal); IPython then shows the object's text.
    """
    if not _draws():
        raise NotImplementedError
    from IPython.display import display

    for output in outputs:
        display(dict(output.data), metadata=dict(output.metadata), raw=True)


def _shell() -> Any:
    from IPython.core.getipython import get_ipython

    return get_ipython()


def _draws() -> bool:
    formatter = getattr(_shell(), "display_formatter", None)
    return formatter is not None and "text/html" in formatter.active_types


def frames_outputs() -> bool:
    """Whether outputs are drawn by VS Code or Colab: in frames of their own, whose style sheets do not see each other."""
    names = getattr(_shell(), "user_ns", {})
    return "google.colab" in sys.modules or "__vsc_ipynb_file__" in names or "VSCODE_PID" in os.environ


def words(html: str, plain: str) -> Output:
    """An output of plain HTML, which needs no style sheet."""
    return Output({"text/html": html, "text/plain": plain})


def png_of(svg: str) -> tuple[bytes, dict[str, int]]:
    """A picture as PNG, sharp if small and no larger than a screen, and its display width."""
    return to_png(svg, most=_MOST_PIXELS), {"width": round(size_of(svg)[0])}


def picture(svg: str, plain: str) -> Output:
    """A picture as an output of its own; `plain` replaces it where nothing is drawn."""
    png, shown = png_of(svg)
    return Output({"image/png": base64.b64encode(png).decode(), "text/plain": plain}, {"image/png": shown})


def graph_outputs(
    graph: Graph, findings: Findings | None = None, *, enabled: Collection[str] | None = (), plain: str = ""
) -> list[Output]:
    """The sentence on a graph, its picture, and what was declined; `plain` is the text of the first one."""
    view = summary(graph, findings, enabled)
    live = f"<br><small>To open these cards, switch sites on and off and measure them: <code>{LIVE}</code>.</small>"
    said = f"<p><b>{escape(view['header'])}</b>{live if findings is not None else ''}</p>"
    shown = [
        words(said, plain or view["header"]),
        picture(Album(graph, findings).still(enabled), f"<picture of {view['title']}>"),
    ]
    more = _reasons(view, findings) if findings is not None else ""
    return [*shown, words(more, f"<declined sites of {view['title']}>")] if more else shown


def _reasons(view: Mapping[str, Any], findings: Findings) -> str:
    """Why sites were declined, alike ones in one row, and the notes on the search."""
    rows = []
    declined = [s for s in view["sites"] if s["state"] == "declined"]
    for alike_ones in alike(declined, ("code", "pass", "source", "edit", "matched", "total")):
        first, more = alike_ones[0], len(alike_ones) - 1
        named = first["id"] + (f" and {more} more like it" if more else "")
        rows.append(
            [named, first["code"], f"{first['matched']} of {first['total']}", first["text"], first["edit"] or ""]
        )
    notes = "".join(f"<p>{escape(note)}</p>" for note in findings.notes)
    return aligned(table(["declined", "reason", "matched", "why", "edit"], rows)) + notes


def explorer_outputs(widget: Mapping[str, Any], title: str, sentence: str, svg: str) -> list[Output]:
    """The live explorer, and a still picture of it that is visible where the explorer is not.

    Args:
      widget: the widget's bundle of MIME types.
      title: the program's name.
      sentence: on what is on.
      svg: the picture.
    """
    said = (
        f'<div class="fl-still"><style>{asset("still.css")}</style><p><b>{escape(title)} · {escape(sentence)}</b><br>'
        "<small>A still picture of the explorer, saved with the notebook. Run the cell for the live explorer.</small></p></div>"
    )
    return [Output(widget), words(said, f"{title} · {sentence}"), picture(svg, f"<picture of {title}>")]


def beside(*svgs: str, gap: float = 24.0) -> str:
    """Pictures of ours as one, from left to right."""
    sizes = [size_of(svg) for svg in svgs]
    lefts = [sum(width + gap for width, _ in sizes[:k]) for k in range(len(sizes))]
    inner = (svg.replace("<svg ", f'<svg x="{left:g}" ', 1) for svg, left in zip(svgs, lefts, strict=True))
    width, height = lefts[-1] + sizes[-1][0], max(height for _, height in sizes)
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(inner)}</svg>'
