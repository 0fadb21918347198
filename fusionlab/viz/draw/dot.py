"""DOT text for any graph. Needs nothing installed; the text alone is a complete description of the picture.

No HTML-like labels: some Graphviz builds drop them silently. Every cluster sets its id, class and style itself, because
a nested cluster would otherwise inherit its parent's.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Mapping
from typing import Any

from fusionlab.errors import unknown_name
from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.program.graph import Graph

from ..model.view_model import view_model
from ..palette import INK, LINE, PAPER, QUIET, REGION_FILL, SCOPE_FILL

_FONT = "Helvetica"
_LABEL_LIMIT = 60
_MANY = 400  # beyond this many boxes Graphviz needs its network simplex bounded to stay under a second or two


def to_dot(
    graph: Graph,
    findings: Findings | None = None,
    enabled: Collection[str] | None = (),
    *,
    expanded: Collection[str] | str = (),
    collapsed: Collection[str] = (),
    max_nodes: int = 60,
    direction: str = "TB",
    id_prefix: str = "fl-",
) -> str:
    """DOT text of the graph, folded to about `max_nodes` boxes, with sites coloured by pass and marked by state.

    Args:
      graph, findings, enabled, expanded, collapsed, max_nodes: as for `view_model`.
      direction: "TB" (top to bottom), "LR", "BT" or "RL".
      id_prefix: put before every SVG id, so that several pictures can share a page.

    Raises:
      UnknownNameError: `direction` is none of the four.
    """
    view = view_model(graph, findings, enabled=enabled, expanded=expanded, collapsed=collapsed, max_nodes=max_nodes)
    return dot_of_view(view, direction=direction, id_prefix=id_prefix)


def dot_of_view(view: Mapping[str, Any], *, direction: str = "TB", id_prefix: str = "fl-") -> str:
    """DOT text of a view model."""
    if direction not in ("TB", "LR", "BT", "RL"):
        raise unknown_name("direction", direction, ("TB", "LR", "BT", "RL"))
    lines = [
        f"digraph {quote(view['title'])} {{",
        f"  graph [rankdir={direction}, nodesep=0.22, ranksep=0.32, compound=true, fontname={_FONT}, fontsize=10, "
        f'bgcolor="{PAPER}", pad=0.15, tooltip=" ", fontcolor="{QUIET}", label="{escape(_footnote(view))}"'
        f"{_bounded(view)}];",
        f'  node [shape=box, style="rounded,filled", fillcolor="{PAPER}", color="{LINE}", fontcolor="{INK}", '
        f'fontname={_FONT}, fontsize=10, margin="0.12,0.05", height=0.3, width=0.5, penwidth=1];',
        f'  edge [color="{QUIET}", arrowsize=0.55, penwidth=0.9];',
    ]
    children: dict[str | None, list[str]] = {}
    for box in view["boxes"]:
        children.setdefault(box["parent"], []).append(_box(box, id_prefix))
    groups: dict[str | None, list[Mapping[str, Any]]] = {}
    for group in view["groups"]:
        groups.setdefault(group["parent"], []).append(group)
    lines += _level(None, groups, children, id_prefix, "  ")
    for edge in view["edges"]:
        attrs = {"tooltip": edge["type"] + (f" ×{edge['count']}" if edge["count"] > 1 else "")}
        lines.append(f"  {quote(dom_id(edge['from']))} -> {quote(dom_id(edge['to']))} {_attrs(attrs)};")
    return "\n".join([*lines, "}", ""])


def _bounded(view: Mapping[str, Any]) -> str:
    return ", nslimit=1, nslimit1=1, splines=polyline" if len(view["boxes"]) > _MANY else ""


def _footnote(view: Mapping[str, Any]) -> list[str]:
    hidden = view["hidden_inputs"]
    return [f"{hidden:,} arguments (parameters) not drawn"] if hidden else []


def _level(
    parent: str | None,
    groups: Mapping[str | None, list[Mapping[str, Any]]],
    boxes: Mapping[str | None, list[str]],
    id_prefix: str,
    indent: str,
) -> list[str]:
    lines = [indent + text for text in boxes.get(parent, ())]
    for group in groups.get(parent, ()):
        lines.append(f"{indent}subgraph {quote('cluster_' + dom_id(group['id']))} {{")
        lines.append(f"{indent}  graph {_attrs(_cluster_style(group, id_prefix))};")
        inner = indent + "  "
        double = group["state"] == "applied"
        if double:  # Graphviz draws no double border around a cluster, so two clusters stand in for it
            lines.append(f"{inner}subgraph {quote('cluster_in_' + dom_id(group['id']))} {{")
            lines.append(f"{inner}  graph {_attrs(_inner_style(group, id_prefix))};")
            inner += "  "
        lines += _level(group["id"], groups, boxes, id_prefix, inner)
        lines += [f"{indent}  }}"] if double else []
        lines.append(f"{indent}}}")
    return lines


def _cluster_style(group: Mapping[str, Any], id_prefix: str) -> dict[str, Any]:
    style = {
        "label": group["label"],
        "id": id_prefix + dom_id(group["id"]),
        "class": f"group {group['kind']} {group['state'] or ''}".strip(),
        "tooltip": f"{group['id']}: {group['nodes']:,} nodes",
        "fontname": _FONT,
        "fontsize": 10,
        "fontcolor": QUIET,
        "labeljust": "l",
        "margin": 9,
        "style": "rounded,filled",
        "fillcolor": REGION_FILL if group["kind"] in ("region", "branch") else SCOPE_FILL,
        "color": "#cbd2d9",
        "penwidth": 1,
    }
    if group["kind"] == "run":
        style |= {"fillcolor": PAPER, "style": "rounded,filled", "color": QUIET}
    if group["state"] is None:
        return style
    style |= {"fontname": f"{_FONT}-Bold", "fontcolor": INK, "color": group["colour"], "penwidth": 1.6}
    if group["state"] == "declined":
        return style | {"style": "rounded,dashed", "fillcolor": "transparent", "penwidth": 1.8}
    fill = style | {"fillcolor": group["tint"]}
    return fill | {"margin": 5} if group["state"] == "applied" else fill


def _inner_style(group: Mapping[str, Any], id_prefix: str) -> dict[str, Any]:
    style = _cluster_style(group, id_prefix)
    bare = {"label": "", "style": "rounded", "bgcolor": "transparent", "margin": 7, "penwidth": 1}
    return style | bare | {"id": style["id"] + "-inner", "class": "inner"}


def _box(box: Mapping[str, Any], id_prefix: str) -> str:
    state, kind = box["state"], box["kind"]
    marker = "+ " if box["closed"] else ""
    attrs: dict[str, Any] = {
        "label": [marker + box["lines"][0], *box["lines"][1:]],
        "id": id_prefix + dom_id(box["id"]),
        "class": " ".join(_classes(box)),
        "tooltip": box["tooltip"],
    }
    if box["quiet"]:
        attrs |= {"color": "#e1e6eb", "fontcolor": QUIET, "fontsize": 9}
    if kind in ("input", "output"):
        attrs |= {"fillcolor": "#e4e9ee", "penwidth": 0}
    elif box["closed"]:
        attrs |= {"fillcolor": SCOPE_FILL, "penwidth": 1.3}
    if state == "declined":
        attrs |= {"style": "rounded,filled,dashed", "color": box["colour"], "penwidth": 1.8, "fontcolor": INK}
    elif state is not None:
        attrs |= {"fillcolor": box["tint"], "color": box["colour"], "penwidth": 1.4, "fontcolor": INK}
    if state == "applied":
        attrs["peripheries"] = 2
    if box["fused"]:
        attrs |= {"fillcolor": box["tint"], "color": box["colour"], "penwidth": 2.5, "fontname": f"{_FONT}-Bold"}
    return f"{quote(dom_id(box['id']))} {_attrs(attrs)};"


def _classes(box: Mapping[str, Any]) -> list[str]:
    """What style sheets know a box by."""
    states = [box["state"]] if box["state"] else []
    return ["box", box["kind"], *states, *(word for word in ("fused", "quiet") if box[word])]


def _attrs(attrs: Mapping[str, Any]) -> str:
    return "[" + ", ".join(f"{k}={_attr(k, v)}" for k, v in attrs.items()) + "]"


def _attr(key: str, value: Any) -> str:
    if isinstance(value, int | float):
        return str(value)
    if key in ("label", "tooltip"):
        return '"' + escape(value if isinstance(value, list) else str(value).split("\n")) + '"'
    return quote(value)


def escape(lines: list[str]) -> str:
    """Label lines as the inside of a DOT string: quotes, backslashes, entities and control characters made harmless."""
    return "\\n".join(_escape_line(line) for line in lines)


def _escape_line(line: str) -> str:
    line = "".join(c if c.isprintable() else " " for c in str(line))
    line = line if len(line) <= 4 * _LABEL_LIMIT else line[: 4 * _LABEL_LIMIT - 1] + "…"
    return line.replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')


def quote(name: str) -> str:
    """A name as a DOT id."""
    return '"' + _escape_line(name) + '"'


def dom_id(name: str) -> str:
    """A group's or box's id as one that SVG, CSS and DOT all take; the same name always gives the same id."""
    if re.fullmatch(r"[A-Za-z0-9_]{1,60}", name):
        return name
    slug = re.sub(r"[^A-Za-z0-9_]+", "_", name)[:40]
    return f"{slug}_{zlib.crc32(name.encode()):08x}"
