"""A small layered layout of our own, for machines without Graphviz: reads the DOT text we write, draws SVG.

Every cluster is laid out by itself and then stands as one box in the layout around it, so boxes cannot overlap. Edges
are smooth curves from box to box; they may pass behind a box, which Graphviz would avoid.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape as xml
from operator import attrgetter
from typing import Any

from fusionlab.errors import ArgumentError

_TOKEN = re.compile(r'\s*(?:(//[^\n]*)|("(?:[^"\\]|\\.)*")|(->)|([{}\[\];=,])|([\w.#-]+))', re.S)
_GAP_X, _GAP_Y, _PAD = 16.0, 24.0, 10.0
_DEFAULT = {"fillcolor": "#ffffff", "color": "#9aa5b1", "fontcolor": "#1f2933", "fontsize": "10", "penwidth": "1"}


@dataclass(eq=False)
class Box:
    """A node or cluster: attributes, children (clusters only), and after layout its corner and size in points."""

    name: str
    attrs: dict[str, str]
    children: list[Box] = field(default_factory=list)
    is_cluster: bool = False
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0

    def boxes(self) -> Iterator[Box]:
        yield self
        for child in self.children:
            yield from child.boxes()

    @property
    def lines(self) -> list[str]:
        return text_lines(self.attrs.get("label", "" if self.is_cluster else self.name))


@dataclass(frozen=True)
class Drawing:
    """A parsed graph: the outermost cluster, and the edges with their attributes."""

    root: Box
    edges: list[tuple[str, str, dict[str, str]]]
    rankdir: str = "TB"


def text_lines(label: str) -> list[str]:
    """A DOT string's lines, with DOT's escapes and the `&amp;` we write resolved."""
    parts = re.split(r"\\[nlr]", label.replace("\\\\", "\0"))
    return [p.replace('\\"', '"').replace("\0", "\\").replace("&amp;", "&") for p in parts if label]


# Reading ------------------------------------------------------------------------------------------------------------
def parse_drawing(dot_text: str) -> Drawing:
    """Reads the DOT we write: digraph, nested subgraphs, node and edge statements with attribute lists.

    Raises:
      ArgumentError: the text is not such a graph; names the place.
    """
    return _DrawingParser(dot_text).graph()


class _DrawingParser:
    def __init__(self, text: str):
        self.tokens: list[tuple[str, int]] = []
        pos = 0
        end = len(text.rstrip())
        while pos < end:
            match = _TOKEN.match(text, pos)
            if match is None:
                raise ArgumentError(
                    f"dot_text: not DOT at character {pos}: {text[pos : pos + 20]!r}; needed what to_dot gives"
                )
            pos = match.end()
            if match.group(1) is None:
                self.tokens.append((match.group().strip(), match.start()))
        self.at = 0
        self.seen: dict[str, Box] = {}
        self.edges: list[tuple[str, str, dict[str, str]]] = []

    def peek(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def take(self, wanted: str | None = None) -> str:
        got = self.peek()
        if not got or (wanted is not None and got != wanted):
            where = self.tokens[self.at][1] if self.at < len(self.tokens) else "the end"
            raise ArgumentError(f"dot_text: got {got!r} at {where}, needed {wanted or 'more text'!r}")
        self.at += 1
        return got

    def name(self) -> str:
        token = self.take()
        return token[1:-1] if token.startswith('"') else token

    def graph(self) -> Drawing:
        if self.peek() == "strict":
            self.take()
        self.take("digraph")
        name = "" if self.peek() == "{" else self.name()
        root = Box(name, {}, is_cluster=True)
        self.body(root, dict(_DEFAULT))
        return Drawing(root, self.edges, root.attrs.get("rankdir", "TB"))

    def body(self, box: Box, defaults: dict[str, str]) -> None:
        self.take("{")
        while self.peek() != "}":
            self.statement(box, defaults)
        self.take("}")

    def statement(self, box: Box, defaults: dict[str, str]) -> None:
        word = self.peek()
        if word == ";":
            self.take()
        elif word == "subgraph":
            self.take()
            child = Box("" if self.peek() == "{" else self.name(), {}, is_cluster=True)
            self.body(child, dict(defaults))
            box.children.append(child)
        elif word in ("graph", "node", "edge"):
            self.take()
            attrs = self.attributes()
            if word != "edge":
                (box.attrs if word == "graph" else defaults).update(attrs)
        else:
            self.node_or_edge(box, defaults)

    def node_or_edge(self, box: Box, defaults: dict[str, str]) -> None:
        names = [self.name()]
        if self.peek() == "=":
            self.take()
            box.attrs[names[0]] = self.name()
            return
        while self.peek() == "->":
            self.take()
            names.append(self.name())
        attrs = self.attributes()
        for name in names:
            if name not in self.seen:
                self.seen[name] = Box(name, dict(defaults))
                box.children.append(self.seen[name])
        if len(names) == 1:
            self.seen[names[0]].attrs.update(attrs)
        self.edges += [(a, b, attrs) for a, b in itertools.pairwise(names)]

    def attributes(self) -> dict[str, str]:
        attrs: dict[str, str] = {}
        while self.peek() == "[":
            self.take()
            while self.peek() != "]":
                key = self.name()
                attrs[key] = self.name() if self.peek() == "=" and self.take() else "true"
                if self.peek() in (",", ";"):
                    self.take()
            self.take("]")
        return attrs


# Layout -------------------------------------------------------------------------------------------------------------
def layout(drawing: Drawing) -> None:
    """Gives every box its place; boxes of one cluster never overlap, and lie inside their cluster."""
    parents: dict[Box, Box] = {c: b for b in drawing.root.boxes() for c in b.children}
    by_name = {b.name: b for b in drawing.root.boxes() if not b.is_cluster}
    links: dict[Box, set[tuple[Box, Box]]] = {}
    for a, b, _ in drawing.edges:
        up_a, up_b = _chain(by_name[a], parents), _chain(by_name[b], parents)
        depth = 0
        while depth < min(len(up_a), len(up_b)) - 1 and up_a[depth] is up_b[depth]:
            depth += 1
        if up_a[depth] is not up_b[depth]:
            links.setdefault(up_a[depth - 1], set()).add((up_a[depth], up_b[depth]))
    _size(drawing.root, links, drawing.rankdir in ("LR", "RL"))
    _shift(drawing.root, 0, 0)


def _chain(box: Box, parents: dict[Box, Box]) -> list[Box]:
    chain = [box]
    while chain[-1] in parents:
        chain.append(parents[chain[-1]])
    return chain[::-1]


def text_width(text: str, size: float) -> float:
    """Width in points of a line in Helvetica, on the generous side; wide characters (CJK, emoji) count double."""
    return sum(0.35 if c in "il.,:;'|![]()tfj " else 1.05 if ord(c) > 0x2E7F else 0.62 for c in text) * size


def _size(box: Box, links: dict[Box, set[tuple[Box, Box]]], sideways: bool) -> None:
    """Sizes a box, and places the children of a cluster relative to its corner."""
    font = float(box.attrs.get("fontsize", "10"))
    text = max((text_width(line, font) for line in box.lines), default=0.0)
    if not box.is_cluster:
        box.width, box.height = max(40.0, text + 18), max(22.0, len(box.lines) * font * 1.2 + 10)
        return
    for child in box.children:
        _size(child, links, sideways)
    head = font * 1.6 if any(box.lines) else 0.0
    rows = _rows(box.children, links.get(box, set()))
    width, height = _place_rows(rows, _PAD, _PAD + head, sideways)
    box.width, box.height = max(width + _PAD, text + 2 * _PAD), max(height + _PAD, 2 * _PAD + head)


def _place_rows(rows: list[list[Box]], left: float, top: float, sideways: bool) -> tuple[float, float]:
    """Stacks layers along the flow, centres each across it; returns the far corner."""
    width, height = attrgetter("width"), attrgetter("height")
    along, across = (width, height) if sideways else (height, width)
    first, side = (left, top) if sideways else (top, left)
    spans = [sum(across(b) + _GAP_X for b in row) - _GAP_X for row in rows]
    widest = max(spans, default=0.0)
    start = first
    for row, span in zip(rows, spans, strict=True):
        thick = max(along(b) for b in row)
        offset = side + (widest - span) / 2
        for b in row:
            middle = start + (thick - along(b)) / 2
            b.x, b.y = (middle, offset) if sideways else (offset, middle)
            offset += across(b) + _GAP_X
        start += thick + _GAP_Y
    end = max(start - _GAP_Y, first)
    return (end, side + widest) if sideways else (side + widest, end)


def _rows(boxes: list[Box], links: set[tuple[Box, Box]]) -> list[list[Box]]:
    """Layers by longest path (edges that close a cycle are ignored), each ordered by its neighbours' mean place."""
    order = {b: i for i, b in enumerate(boxes)}
    below: dict[Box, list[Box]] = {b: [] for b in boxes}
    for a, b in sorted(links, key=lambda ab: (order[ab[0]], order[ab[1]])):
        below[a].append(b)
    rank = _ranks(boxes, below)
    rows: list[list[Box]] = [[] for _ in range(max(rank.values(), default=-1) + 1)]
    for b in boxes:
        rows[rank[b]].append(b)
    above = _turned_round(below)
    for near in (above, below, above, below):
        _sort_by_neighbours(rows, near)
    return [row for row in rows if row]


def _turned_round(below: dict[Box, list[Box]]) -> dict[Box, list[Box]]:
    above: dict[Box, list[Box]] = {b: [] for b in below}
    for a, targets in below.items():
        for b in targets:
            above[b].append(a)
    return above


def _sort_by_neighbours(rows: list[list[Box]], near: dict[Box, list[Box]]) -> None:
    """Orders each layer by the mean place of its boxes' neighbours, places being those before any is moved."""
    place = {b: (i + 0.5) / len(row) for row in rows for i, b in enumerate(row)}
    for row in rows:
        row.sort(key=lambda b: _mean([place[n] for n in near[b]], place[b]))


def _ranks(boxes: list[Box], below: dict[Box, list[Box]]) -> dict[Box, int]:
    """Longest-path layers of the graph less its back edges, found by an iterative depth-first search."""
    state: dict[Box, int] = {}
    finished: list[Box] = []
    back: set[tuple[Box, Box]] = set()
    for root in boxes:
        stack: list[tuple[Box, Iterator[Box]]] = [(root, iter(below[root]))] if root not in state else []
        state.setdefault(root, 1)
        while stack:
            box, rest = stack[-1]
            nxt = next(rest, None)
            if nxt is None:
                stack.pop()
                state[box] = 2
                finished.append(box)
            elif state.get(nxt) == 1:
                back.add((box, nxt))
            elif nxt not in state:
                state[nxt] = 1
                stack.append((nxt, iter(below[nxt])))
    rank = dict.fromkeys(boxes, 0)
    for box in reversed(finished):
        for nxt in below[box]:
            if (box, nxt) not in back:
                rank[nxt] = max(rank[nxt], rank[box] + 1)
    return rank


def _mean(values: list[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _shift(box: Box, dx: float, dy: float) -> None:
    box.x += dx
    box.y += dy
    for child in box.children:
        _shift(child, box.x, box.y)


# Drawing ------------------------------------------------------------------------------------------------------------
def svg(dot_text: str) -> str:
    """DOT text -> SVG text, laid out here."""
    drawing = parse_drawing(dot_text)
    layout(drawing)
    root = drawing.root
    by_name = {b.name: b for b in root.boxes() if not b.is_cluster}
    parts = [
        f'<svg width="{root.width:.0f}pt" height="{root.height:.0f}pt" '
        f'viewBox="0 0 {root.width:.2f} {root.height:.2f}" xmlns="http://www.w3.org/2000/svg">',
        '<g class="graph">',
        f"<title>{xml(root.name)}</title>",
        f'<polygon fill="{xml(root.attrs.get("bgcolor", "white"))}" stroke="none" '
        f'points="0,0 {root.width:.2f},0 {root.width:.2f},{root.height:.2f} 0,{root.height:.2f}"/>',
    ]
    parts += [_draw(b) for b in root.boxes() if b.is_cluster and b is not root]
    parts += [_edge(by_name[a], by_name[b], attrs, drawing.rankdir) for a, b, attrs in drawing.edges]
    parts += [_draw(b) for b in root.boxes() if not b.is_cluster]
    if any(root.lines):
        parts.append(_text(root.lines, root.x + 8, root.y + 12, root.attrs, "start"))
    return "\n".join([*parts, "</g>", "</svg>", ""])


def _draw(box: Box) -> str:
    a = box.attrs
    kind = "cluster" if box.is_cluster else "node"
    style = a.get("style", "")
    fill = a.get("fillcolor", "none") if "filled" in style else "none"
    rect = _rect(box, 0, fill, style)
    if a.get("peripheries") == "2":
        rect += _rect(box, -3, "none", style)
    font = float(a.get("fontsize", "10"))
    if box.is_cluster:
        text = _text(box.lines, box.x + _PAD, box.y + 4 + font, a, "start")
    else:
        first = box.y + box.height / 2 - (len(box.lines) - 1) * font * 0.6 + font * 0.33
        text = _text(box.lines, box.x + box.width / 2, first, a, "middle")
    tip = "\n".join(text_lines(a.get("tooltip", "")))
    ident = f' id="{xml(a["id"])}"' if a.get("id") else ""
    return f'<g{ident} class="{kind} {xml(a.get("class", ""))}"><title>{xml(tip or box.name)}</title>{rect}{text}</g>'


def _rect(box: Box, inset: float, fill: str, style: str) -> str:
    dash = ' stroke-dasharray="5,3"' if "dashed" in style else ""
    radius = 5 if "rounded" in style else 0
    fill = "none" if fill == "transparent" else fill
    width = float(box.attrs.get("penwidth", "1"))
    stroke = box.attrs.get("color", "black") if width else "none"
    return (
        f'<rect x="{box.x + inset:.2f}" y="{box.y + inset:.2f}" width="{box.width - 2 * inset:.2f}" '
        f'height="{box.height - 2 * inset:.2f}" rx="{radius}" fill="{xml(fill)}" stroke="{xml(stroke)}" '
        f'stroke-width="{width:g}"{dash}/>'
    )


def _text(lines: list[str], x: float, y: float, attrs: dict[str, Any], anchor: str) -> str:
    size = float(attrs.get("fontsize", "10"))
    weight = ' font-weight="bold"' if "Bold" in attrs.get("fontname", "") else ""
    return "".join(
        f'<text x="{x:.2f}" y="{y + i * size * 1.2:.2f}" text-anchor="{anchor}" font-family="Helvetica,sans-serif" '
        f'font-size="{size:g}" fill="{xml(attrs.get("fontcolor", "black"))}"{weight}>{xml(line)}</text>'
        for i, line in enumerate(lines)
    )


def _edge(a: Box, b: Box, attrs: dict[str, str], rankdir: str) -> str:
    if rankdir in ("LR", "RL"):
        start, end = (a.x + a.width, a.y + a.height / 2), (b.x - 5, b.y + b.height / 2)
        bend = max(20.0, abs(end[0] - start[0]) / 2)
        c1, c2 = (start[0] + bend, start[1]), (end[0] - bend, end[1])
        tip = f"{end[0]:.2f},{end[1] - 2.5:.2f} {end[0] + 5:.2f},{end[1]:.2f} {end[0]:.2f},{end[1] + 2.5:.2f}"
    else:
        start, end = (a.x + a.width / 2, a.y + a.height), (b.x + b.width / 2, b.y - 5)
        bend = max(12.0, abs(end[1] - start[1]) / 2)
        c1, c2 = (start[0], start[1] + bend), (end[0], end[1] - bend)
        tip = f"{end[0] - 2.5:.2f},{end[1]:.2f} {end[0]:.2f},{end[1] + 5:.2f} {end[0] + 2.5:.2f},{end[1]:.2f}"
    colour = xml(attrs.get("color", "#7b8794"))
    curve = " ".join(f"{x:.2f},{y:.2f}" for x, y in (c1, c2, end))
    tooltip = " ".join(text_lines(attrs.get("tooltip", "")))
    return (
        f'<g class="edge"><title>{xml(tooltip)}</title><path fill="none" stroke="{colour}" stroke-width="0.9" '
        f'd="M{start[0]:.2f},{start[1]:.2f} C{curve}"/><polygon fill="{colour}" stroke="none" points="{tip}"/></g>'
    )
