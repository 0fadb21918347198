"""XLA's own fusions as grey hulls on a picture: what runs as one kernel, drawn below the boxes it holds."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape, unescape
from typing import Any

from fusionlab.graph.xla.modules import CONTROL, CompiledModule, ModuleKernel

from ..markup import plural, short
from ..palette import QUIET
from .dot import dom_id
from .layered import text_width

XY = tuple[float, float]
Rect = tuple[float, float, float, float]  # left, top, right, bottom

_PAD = 5.0
_FONT = 7.5
_INK = "#3e4c59"  # as quiet as small text may be on a pass's tint
_LABEL = 34
_NUMBER = r"-?\d+(?:\.\d+)?"


def hulls(compiled: CompiledModule, view: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The kernels that a picture can show: those holding two visible boxes or more, or most, but not all, of one closed group.

    A kernel holds a box if more than half of the box's nodes are in it; the copies of a run that are not shown count for nothing, and
    a kernel whose nodes are only guessed is left out.

    Args:
      compiled: what XLA made of the program (`findings.xla()`).
      view: a view model of the same program.

    Returns:
      Dicts `{"id", "kernel", "label", "boxes"}`: the id that, behind the picture's prefix, the hull has in the SVG; the kernel's name;
      what to say of it; the ids of its boxes in the view model. Larger hulls come first, so that smaller ones lie on top.
    """
    boxes = _Boxes.of(view)
    found = []
    for kernel in compiled.kernels:
        if kernel.kind == CONTROL or kernel.inferred:
            continue
        if inside := boxes.held_by(kernel):
            found.append(_hull(kernel, inside))
    return sorted(found, key=lambda h: -len(h["boxes"]))


@dataclass(frozen=True)
class _Boxes:
    """The boxes of a picture.

    Attributes:
      box_of: node id -> the id of its box.
      sizes: id of a box -> how many nodes it stands for.
      closed: ids of the closed groups.
    """

    box_of: Mapping[int, str]
    sizes: Mapping[str, int]
    closed: frozenset[str]

    @classmethod
    def of(cls, view: Mapping[str, Any]) -> _Boxes:
        nodes = {b["id"]: [n for first, last in b["members"] for n in range(first, last + 1)] for b in view["boxes"]}
        box_of = {nid: name for name, ids in nodes.items() for nid in ids}
        closed = frozenset(b["id"] for b in view["boxes"] if b["closed"])
        return cls(box_of, {name: len(ids) for name, ids in nodes.items()}, closed)

    def held_by(self, kernel: ModuleKernel) -> list[str]:
        """Ids of the boxes of which a kernel holds more than half, if there are two, or one is a group that it does not hold all of."""
        held = Counter(self.box_of[nid] for nid in kernel.nodes if nid in self.box_of)
        inside = [name for name, n in held.items() if 2 * n > self.sizes[name]]
        if len(inside) > 1 or any(name in self.closed and held[name] < self.sizes[name] for name in inside):
            return inside
        return []


def _hull(kernel: ModuleKernel, boxes: list[str]) -> dict[str, Any]:
    n = len(kernel.nodes)
    label = f"{kernel.name}: {kernel.kind} ({kernel.target}), {n} {plural('op', n)}"
    return {"id": dom_id(f"xla {kernel.name}"), "kernel": kernel.name, "label": label, "boxes": boxes}


def with_hulls(svg: str, drawn: Sequence[Mapping[str, Any]], id_prefix: str = "fl-") -> str:
    """The picture with hulls below its boxes, each labelled where no text is in the way.

    Args:
      svg: of any of the layout engines, drawn with `id_prefix`.
      drawn: what `hulls` gives; a hull whose boxes are not in the picture is left out.
    """
    places = _places(svg)
    texts = [*places.values(), *_texts(svg)]
    page = _page(svg)
    parts = []
    for hull in drawn:
        rects = [places[i] for i in (id_prefix + dom_id(name) for name in hull["boxes"]) if i in places]
        if not rects:
            continue
        outline = _convex([p for r in rects for p in _corners(r)])
        # A hull may pass over boxes that are not its own: those that are have a rim.
        parts.append(_drawn(hull, outline, id_prefix, texts, page) + "".join(map(_rim, rects)))
    at = _below_boxes(svg)
    return svg[:at] + f'<g class="hulls">{"".join(parts)}</g>\n' + svg[at:] if parts else svg


def _drawn(hull: Mapping[str, Any], outline: list[XY], prefix: str, texts: list[Rect], page: Rect) -> str:
    name = short(hull["kernel"], _LABEL)
    where = _label_place(outline, text_width(name, _FONT), texts, page)
    texts.append(where)
    return (
        f'<path id="{escape(prefix + hull["id"])}" class="hull" d="{_rounded(outline, _PAD)}" fill="{QUIET}" fill-opacity="0.13" '
        f'stroke="{QUIET}" stroke-width="1.2" stroke-dasharray="1.2,2.6" stroke-linecap="round">'
        f"<title>{escape(hull['label'])}</title></path>"
        f'<text class="hull-name" x="{where[0]:.2f}" y="{where[3] - 0.2 * _FONT:.2f}" font-family="Helvetica,Arial,sans-serif" '
        f'font-style="italic" font-size="{_FONT:g}" fill="{_INK}">{escape(name)}</text>'
    )


def _rim(rect: Rect) -> str:
    left, top, right, bottom = rect
    size = f'x="{left - 3:.2f}" y="{top - 3:.2f}" width="{right - left + 6:.2f}" height="{bottom - top + 6:.2f}"'
    return (
        f'<rect class="hull-rim" {size} rx="9" fill="{QUIET}" fill-opacity="0.35" stroke="none" pointer-events="none"/>'
    )


# Reading the picture ------------------------------------------------------------------------------------------------
def _places(svg: str) -> dict[str, Rect]:
    """SVG id -> rectangle of each box; coordinates are those of the element the boxes stand in."""
    found = {}
    for match in re.finditer(r'<g id="([^"]+)" class="node[ "].*?(?=<g (?:id="[^"]+" )?class=|</svg>)', svg, re.S):
        points = list(_outline(match.group()))
        if points:
            found[unescape(match.group(1))] = _around(points)  # Graphviz writes "-" as an entity
    return found


def _outline(element: str) -> Iterable[XY]:
    """The corners that an element's outline touches: of rectangles, polygons and paths."""
    for rect in re.finditer(
        rf'<rect x="({_NUMBER})" y="({_NUMBER})" width="({_NUMBER})" height="({_NUMBER})"', element
    ):
        x, y, width, height = map(float, rect.groups())
        yield from ((x, y), (x + width, y + height))
    for shape in re.finditer(r'<(?:path|polygon)\b[^>]*?\b(?:d|points)="([^"]*)"', element):
        numbers = [float(n) for n in re.findall(_NUMBER, shape.group(1))]
        yield from zip(numbers[::2], numbers[1::2], strict=False)


def _texts(svg: str) -> list[Rect]:
    """Where texts outside boxes stand: the labels of frames."""
    found = []
    for match in re.finditer(r"<text\b([^>]*)>([^<]*)</text>", svg):
        given = dict(re.findall(r'([\w-]+)="([^"]*)"', match.group(1)))
        size = float(given.get("font-size", "10"))
        width = text_width(unescape(match.group(2)), size)
        x, y = float(given["x"]), float(given["y"])
        left = {"middle": x - width / 2, "end": x - width}.get(given.get("text-anchor", ""), x)
        found.append((left, y - size, left + width, y + 0.25 * size))
    return found


def _page(svg: str) -> Rect:
    """The whole picture, in the coordinates of its boxes."""
    box = re.search(rf'viewBox="({_NUMBER}) ({_NUMBER}) ({_NUMBER}) ({_NUMBER})"', svg)
    x, y, width, height = map(float, box.groups()) if box else (0.0, 0.0, math.inf, math.inf)
    moved = re.search(rf'class="graph"[^>]*translate\(({_NUMBER})[ ,]+({_NUMBER})\)', svg)
    dx, dy = map(float, moved.groups()) if moved else (0.0, 0.0)
    return x - dx, y - dy, x - dx + width, y - dy + height


def _below_boxes(svg: str) -> int:
    """Where in the text to draw: above the frames' fills, below every box and edge."""
    match = re.search(r'(?:<!--[^>]*-->\s*)?<g (?:id="[^"]+" )?class="(?:node|edge)[ "]', svg)
    return match.start() if match else svg.rindex("</svg>")


# Geometry -----------------------------------------------------------------------------------------------------------
def _around(points: Iterable[XY]) -> Rect:
    xs, ys = zip(*points, strict=True)
    return min(xs), min(ys), max(xs), max(ys)


def _corners(rect: Rect) -> tuple[XY, ...]:
    left, top, right, bottom = rect
    return (left, top), (right, top), (right, bottom), (left, bottom)


def _convex(points: Iterable[XY]) -> list[XY]:
    """The convex hull, clockwise as seen on a screen (Andrew's monotone chain)."""
    ordered = sorted(set(points))
    if len(ordered) < 3:
        return ordered

    def chain(some: Iterable[XY]) -> list[XY]:
        line: list[XY] = []
        for p in some:
            while len(line) > 1 and _turn(line[-2], line[-1], p) <= 0:
                line.pop()
            line.append(p)
        return line[:-1]

    return chain(ordered) + chain(reversed(ordered))


def _turn(a: XY, b: XY, c: XY) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def _rounded(outline: list[XY], pad: float) -> str:
    """The outline moved outwards by `pad`, its corners arcs."""
    parts = []
    for i, b in enumerate(outline):
        a, c = outline[i - 1], outline[(i + 1) % len(outline)]
        for k, (dx, dy) in enumerate((_outwards(a, b, pad), _outwards(b, c, pad))):
            arc = f"A{pad:g} {pad:g} 0 0 1 " if k else "L" if parts else "M"
            parts.append(f"{arc}{b[0] + dx:.2f},{b[1] + dy:.2f}")
    return " ".join(parts) + " Z"


def _outwards(a: XY, b: XY, pad: float) -> XY:
    length = math.hypot(b[0] - a[0], b[1] - a[1]) or 1.0
    return (b[1] - a[1]) / length * pad, -(b[0] - a[0]) / length * pad


def _label_place(outline: list[XY], width: float, texts: Sequence[Rect], page: Rect) -> Rect:
    """Where the label fits at a corner of the hull: the first place that hides nothing, else the one that hides least."""
    left, top, right, bottom = _around(outline)
    peak, foot = min(outline, key=lambda p: (p[1], p[0])), max(outline, key=lambda p: (p[1], -p[0]))
    high, low = top - _PAD - 1 - _FONT, bottom + _PAD + 1
    corners = [(peak[0], high), (right - width, high), (left, high), (foot[0], low), (right - width, low), (left, low)]
    middle = (top + bottom - _FONT) / 2
    corners += [(right + _PAD + 2, y) for y in (top, middle, bottom - _FONT)]
    corners += [(left - _PAD - 2 - width, y) for y in (top, middle, bottom - _FONT)]
    places = [_within((x, y, x + width, y + _FONT), page) for x, y in corners]
    return min(places, key=lambda r: sum(_overlap(r, t) for t in texts))


def _within(rect: Rect, page: Rect) -> Rect:
    """The rectangle moved into the page."""
    dx = max(0.0, page[0] + 2 - rect[0]) - max(0.0, rect[2] - page[2] + 2)
    dy = max(0.0, page[1] + 2 - rect[1]) - max(0.0, rect[3] - page[3] + 2)
    return rect[0] + dx, rect[1] + dy, rect[2] + dx, rect[3] + dy


def _overlap(a: Rect, b: Rect) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
