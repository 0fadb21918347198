"""Small pieces of HTML for the inspector and the tabs. Every text is escaped here; arguments named `inner` are HTML already."""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterable, Sequence
from html import escape
from typing import Any

from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Node, Value
from fusionlab.graph.program.scopes import Source
from fusionlab.graph.program.text import node_text

ID_PREFIX = "fl-"  # of ids in a picture
Fact = tuple[str, str]  # name, HTML
_PICKS, _MORE = 12, 60
_VALUE = re.compile(r"(%\d+)(?!\d)")


def short(text: str, limit: int) -> str:
    """The text, cut in the middle of nowhere but marked so: at most `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def as_on_screen(observed: object) -> str:
    """A measurement's own line with the signs of the tables and the sentence: "3.3 ms → 3.56 ms, 0.93×"."""
    return re.sub(r"(\d)x\b", r"\1×", str(observed).replace("->", "→"))


def text(value: Any, limit: int = 600) -> str:
    """A value as escaped text."""
    return escape(short(str(value), limit))


def pick(name: str, label: str | None = None) -> str:
    """A button that selects `name`: a value, a node, a site, an XLA kernel or a source line."""
    shown = name if label is None else label
    return f'<button type="button" class="fl-pick" data-fl-pick="{escape(name)}">{text(shown, 200)}</button>'


def prose(sentence: str) -> str:
    """A sentence as escaped text, the values it names selectable."""
    parts = _VALUE.split(short(sentence, 1000))
    return "".join(pick(part) if i % 2 else escape(part) for i, part in enumerate(parts))


def pick_node(node: Node) -> str:
    """A button that selects a node: "n7 add"."""
    return pick(f"n{node.id}", f"n{node.id} {node.primitive}")


def picks(buttons: Sequence[str], most: int = _PICKS) -> str:
    """Buttons in a row, the first `most` of them at once and the others when asked for."""
    shown = " ".join(buttons[:most])
    rest = buttons[most:]
    if not rest:
        return shown
    more = f"<details><summary>{len(rest):,} more</summary>{' '.join(rest[:_MORE])}"
    return f"{shown}{more}{' …' if len(rest) > _MORE else ''}</details>"


def pick_nodes(graph: Graph, ids: Iterable[int], most: int = _PICKS) -> str:
    """Buttons for nodes; those that are not in the graph are left out."""
    known = [graph.node_by_id[i] for i in ids if i in graph.node_by_id]
    return picks([pick_node(n) for n in known], most)


def mono(value: Any) -> str:
    """Escaped text in a fixed width."""
    return f"<code>{text(value)}</code>"


def source_line(source: Source | None) -> str:
    """A button that selects the line, and the line; "" if there is no line."""
    if source is None:
        return ""
    return f"{pick(source.short)} {mono(short(source.text, 200))}" + (
        f' <span class="quiet">in {text(source.function, 80)}</span>' if source.function else ""
    )


def facts(rows: Iterable[Fact]) -> str:
    """Names with their facts; empty rows are left out."""
    inner = "".join(f"<dt>{text(name)}</dt><dd>{inner}</dd>" for name, inner in rows if inner)
    return f'<dl class="fl-facts">{inner}</dl>' if inner else ""


def section(title: str, inner: str) -> str:
    """A heading with its content below; "" if there is no content."""
    return f"<h4>{text(title)}</h4>{inner}" if inner else ""


def folded(title: str, inner: str) -> str:
    """Content that unfolds on a click."""
    return f"<details><summary>{text(title)}</summary>{inner}</details>" if inner else ""


def quiet(sentence: str) -> str:
    """A remark."""
    return f'<p class="quiet">{text(sentence)}</p>' if sentence else ""


def code(lines: str) -> str:
    """Code as it is written, whole."""
    return f'<pre class="fl-code"><code>{escape(lines)}</code></pre>'


def equation(node: Node) -> str:
    """The node as text, its values selectable."""
    known = {v.name for v in (*node.outputs, *node.inputs) if isinstance(v, Value)}
    parts = _VALUE.split(short(node_text(node, sources=False, scopes=False), 1000))
    shown = "".join(pick(p) if p in known else escape(p) for p in parts)
    return f'<p class="fl-equation"><code>{shown}</code></p>'


class Html(str):
    """Text that is HTML already, as a cell of a table."""

    __slots__ = ()


def table(heads: Collection[str], rows: Collection[Collection[Any]], numeric: Collection[int] = ()) -> str:
    """An HTML table of escaped texts; a cell that is a `(text, css class)` pair carries that class, one of `Html` is as it is."""
    if not rows:
        return ""
    head = "".join(f'<th{_num(i, numeric)} scope="col">{escape(str(h))}</th>' for i, h in enumerate(heads))
    body = "".join("<tr>" + "".join(_cell(c, i, numeric) for i, c in enumerate(r)) + "</tr>" for r in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def aligned(html: str) -> str:
    """Tables as `table` makes them, for a notebook: its own style may set every cell to the right, break 1e-06 in two, or leave no room."""
    html = re.sub(r'<t[dh](?= class="num")', r'\g<0> style="text-align:right;padding:2px 8px"', html)
    html = re.sub(r"<t[dh](?! style)(?=[ >])", r'\g<0> style="text-align:left;padding:2px 8px"', html)
    return html.replace('<td style="text-align:right;', '<td style="white-space:nowrap;text-align:right;')


def _cell(value: Any, index: int, numeric: Collection[int]) -> str:
    if isinstance(value, Html):
        return f"<td>{value}</td>"
    text, css = value if isinstance(value, tuple) else (value, "num" if index in numeric else "")
    return f'<td class="{css}">{escape(str(text))}</td>' if css else f"<td>{escape(str(text))}</td>"


def _num(index: int, numeric: Collection[int]) -> str:
    return ' class="num"' if index in numeric else ""


def printable(text: str) -> str:
    """A text with a space for each character that no printer shows, and that XML and DOT do not take."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def dom_id(name: str) -> str:
    """A name as one that SVG, CSS and DOT all take; the same name always gives the same id."""
    if re.fullmatch(r"[A-Za-z0-9_]{1,60}", name):
        return name
    slug = re.sub(r"[^A-Za-z0-9_]+", "_", name)[:40]
    return f"{slug}_{zlib.crc32(name.encode()):08x}"


def inline_svg(svg: str) -> str:
    """An SVG text without XML prologue, comments, metadata and namespace declarations."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg, flags=re.S)
    return re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg)
