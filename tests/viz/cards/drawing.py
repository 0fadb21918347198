"""An SVG as the reader's eye has it: where each visible text, box and line lies, in px, after transforms and style sheets.

Text is as wide as in Helvetica (Adobe's font metrics); what its table lacks is taken to be wide.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from xml.etree import ElementTree

Point = tuple[float, float]
Style = Mapping[str, str]

# Advance widths in thousandths of the size, from " " to "~".
_REGULAR = (
    "278 278 355 556 556 889 667 191 333 333 389 584 278 333 278 278 556 556 556 556 556 556 556 556 556 556 278 278 584 584 584 556 "
    "1015 667 667 722 722 667 611 778 722 278 500 667 556 833 722 778 667 778 722 667 611 722 667 944 667 667 611 278 278 278 469 556 "
    "333 556 556 500 556 556 278 556 556 222 222 500 222 833 556 556 556 556 333 500 278 556 500 722 500 500 500 334 260 334 584"
)
_BOLD = (
    "278 333 474 556 556 889 722 238 333 333 389 584 278 333 278 278 556 556 556 556 556 556 556 556 556 556 333 333 584 584 584 611 "
    "975 722 722 722 722 667 611 778 722 278 556 722 611 833 722 778 667 778 722 667 611 722 667 944 667 667 611 333 278 333 584 556 "
    "333 556 611 556 611 556 333 611 611 278 278 556 278 889 611 611 611 611 389 556 333 611 556 778 556 556 500 389 280 389 584"
)
_WIDTHS = tuple(tuple(map(int, table.split())) for table in (_REGULAR, _BOLD))
_OTHERS = {"·": 278, "×": 584, "−": 584, "÷": 584, "–": 556, "‹": 333, "›": 333}
_WIDEST, _MONOSPACED = 1000, 602


def text_width(text: str, size: float, bold: bool = False, monospaced: bool = False) -> float:
    """How wide a line is."""
    if monospaced:
        return len(text) * _MONOSPACED * size / 1000
    table = _WIDTHS[bold]
    return sum(table[ord(c) - 32] if " " <= c <= "~" else _OTHERS.get(c, _WIDEST) for c in text) * size / 1000


@dataclass(frozen=True)
class Rect:
    """A rectangle; y grows downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def grown(self, by: float) -> Rect:
        return Rect(self.left - by, self.top - by, self.right + by, self.bottom + by)

    def meets(self, other: Rect, slack: float = 0.5) -> bool:
        """Whether they share more than `slack` px in both directions."""
        across = min(self.right, other.right) - max(self.left, other.left)
        return across > slack and min(self.bottom, other.bottom) - max(self.top, other.top) > slack

    def holds(self, other: Rect, slack: float = 0.5) -> bool:
        room = self.grown(slack)
        across = room.left <= other.left and other.right <= room.right
        return across and room.top <= other.top and other.bottom <= room.bottom

    def has(self, point: Point) -> bool:
        return self.left <= point[0] <= self.right and self.top <= point[1] <= self.bottom

    def from_frame(self, point: Point) -> float:
        """How far a point is from the frame, inside or outside."""
        across = max(self.left - point[0], point[0] - self.right)
        down = max(self.top - point[1], point[1] - self.bottom)
        return -max(across, down) if max(across, down) < 0 else math.hypot(max(across, 0.0), max(down, 0.0))

    def is_crossed(self, start: Point, end: Point) -> bool:
        """Whether a straight segment has a part inside (the clipping of Liang and Barsky)."""
        first, last = 0.0, 1.0
        for low, high, begin, stop in (
            (self.left, self.right, start[0], end[0]),
            (self.top, self.bottom, start[1], end[1]),
        ):
            if begin == stop:
                if not low < begin < high:
                    return False
                continue
            near, far = sorted(((low - begin) / (stop - begin), (high - begin) / (stop - begin)))
            first, last = max(first, near), min(last, far)
        return first < last


def around(points: list[Point]) -> Rect:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    return Rect(min(xs), min(ys), max(xs), max(ys))


@dataclass(frozen=True)
class Move:
    """Scales, then shifts: what transforms of a drawing without rotations come to."""

    x: float = 0.0
    y: float = 0.0
    across: float = 1.0
    down: float = 1.0

    def of(self, point: Point) -> Point:
        return self.x + self.across * point[0], self.y + self.down * point[1]

    def then(self, inner: Move) -> Move:
        x, y = self.of((inner.x, inner.y))
        return Move(x, y, self.across * inner.across, self.down * inner.down)


def numbers(text: str) -> list[float]:
    return [float(n) for n in re.findall(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?", text)]


def _transform(text: str) -> Move:
    move = Move()
    for name, inside in re.findall(r"(\w+)\s*\(([^)]*)\)", text):
        n = numbers(inside)
        if name == "translate":
            move = move.then(Move(n[0], n[1] if len(n) > 1 else 0.0))
        elif name == "scale":
            move = move.then(Move(across=n[0], down=n[-1]))
        elif name == "matrix" and n[1] == n[2] == 0:
            move = move.then(Move(n[4], n[5], n[0], n[3]))
        else:
            raise ValueError(f"a drawing of cards has no {name}({inside})")
    return move


@dataclass(frozen=True)
class Element:
    """An element with what it takes from those around it. `style` holds its own and the inherited properties."""

    xml: ElementTree.Element
    move: Move
    style: Style
    parents: tuple[Element, ...] = field(default=(), repr=False)

    @property
    def tag(self) -> str:
        return self.xml.tag.rpartition("}")[2]

    @cached_property
    def classes(self) -> frozenset[str]:
        return frozenset(self.xml.get("class", "").split())

    @property
    def visible(self) -> bool:
        if self.style.get("visibility") == "hidden":
            return False
        outer = (*self.parents, self)
        return not any(_is_left_out(e) for e in outer)

    def number(self, name: str) -> float:
        return (numbers(self.xml.get(name, "0")) or [0.0])[0]

    def inside(self, kind: str) -> Element | None:
        """The innermost group of this class around it."""
        return next((e for e in reversed(self.parents) if kind in e.classes), None)

    @property
    def rect(self) -> Rect:
        """Of a `rect`."""
        x, y = self.number("x"), self.number("y")
        corners = [(x, y), (x + self.number("width"), y + self.number("height"))]
        return around([self.move.of(c) for c in corners])


def _is_left_out(element: Element) -> bool:
    """Whether nothing inside an element is drawn where it stands."""
    hidden = element.style.get("display") == "none" or element.style.get("opacity") == "0"
    return hidden or element.tag in ("defs", "marker", "symbol", "clipPath")


_INHERITED = frozenset({"font-size", "font-weight", "font-family", "text-anchor", "visibility", "stroke-width"})
_PROPERTIES = _INHERITED | {"display", "opacity"}
Rule = tuple[tuple[int, int], tuple[str, ...], Style]


def _rules(sheet: str) -> list[Rule]:
    """The rules of a style sheet that ask for tags and classes alone, weakest first; those in at-rules are left out."""
    sheet = re.sub(r"/\*.*?\*/", "", sheet, flags=re.S)
    sheet = re.sub(r"@[^{]*\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}", "", sheet)
    found: list[Rule] = []
    for selectors, body in re.findall(r"([^{}]+)\{([^{}]*)\}", sheet):
        for selector in selectors.split(","):
            if not re.search(r"[:\[>+~*#]", selector):
                parts = tuple(selector.split())
                weight = (selector.count("."), sum(not p.startswith(".") for p in parts))
                found.append((weight, parts, _declared(body)))
    return sorted(found, key=lambda rule: rule[0])


def _declared(text: str) -> dict[str, str]:
    pairs = (part.partition(":") for part in text.split(";") if ":" in part)
    told = {name.strip(): value.replace("!important", "").strip() for name, _, value in pairs}
    if short := told.get("font"):
        size = re.search(r"[\d.]+(?=px)", short)
        told |= {"font-size": size.group()} if size else {}
        told |= {"font-weight": "bold"} if re.search(r"\b(?:bold|[6-9]00)\b", short) else {}
    return {name: value for name, value in told.items() if name in _PROPERTIES}


def _is(part: str, tag: str, classes: frozenset[str]) -> bool:
    name, *wanted = part.split(".")
    return name in ("", tag) and classes.issuperset(wanted)


def _applies(parts: tuple[str, ...], element: Element) -> bool:
    *outer, last = parts
    if not _is(last, element.tag, element.classes):
        return False
    around_it = iter(element.parents)
    return all(any(_is(part, e.tag, e.classes) for e in around_it) for part in outer)


def elements(svg: str) -> Iterator[Element]:
    """Every element of a drawing, outermost first."""
    root = ElementTree.fromstring(svg)
    rules = _rules("".join(e.text or "" for e in root.iter() if e.tag.endswith("style")))
    yield from _walk(root, Element(root, _of_view(root), {}), rules)


def _of_view(root: ElementTree.Element) -> Move:
    """How what is drawn is shown: at the size of the root's attributes, where it has both these and a view box."""
    box, width = numbers(root.get("viewBox", "")), root.get("width", "")
    shown = numbers(width) if width and "%" not in width else []
    if not box:
        return Move()
    scale = shown[0] / box[2] if shown else 1.0
    return Move(-box[0] * scale, -box[1] * scale, scale, scale)


def _walk(xml: ElementTree.Element, outer: Element, rules: list[Rule]) -> Iterator[Element]:
    if not isinstance(xml.tag, str):
        return  # a comment
    parents = (*outer.parents, outer) if xml is not outer.xml else ()
    bare = Element(xml, outer.move.then(_transform(xml.get("transform", ""))), {}, parents)
    style = {name: value for name, value in outer.style.items() if name in _INHERITED}
    style |= {name: value for name in _PROPERTIES if (value := xml.get(name))}
    for _, parts, declared in rules:
        if _applies(parts, bare):
            style |= declared
    here = Element(xml, bare.move, style | _declared(xml.get("style", "")), parents)
    yield here
    for child in xml:
        yield from _walk(child, here, rules)


@dataclass(frozen=True)
class Text:
    """A line of text: its letters, their size as shown, what they cover, and the element."""

    text: str
    size: float
    rect: Rect
    bold: bool
    element: Element


def texts(all_elements: list[Element]) -> list[Text]:
    """Every visible line. A `tspan` that has a place of its own is a line, others belong to the one they stand in."""
    lines = (e for e in all_elements if e.visible and (e.tag == "text" or (e.tag == "tspan" and _is_placed(e.xml))))
    return [text for e in lines if (text := _line(e)).text]


def _is_placed(xml: ElementTree.Element) -> bool:
    return bool(xml.get("x") or xml.get("y") or xml.get("dy"))


def _letters(xml: ElementTree.Element) -> str:
    parts = [xml.text or ""]
    for child in xml:
        parts += ["" if _is_placed(child) or child.tag.endswith("title") else _letters(child), child.tail or ""]
    return "".join(parts)


def _line(element: Element) -> Text:
    style, text = element.style, " ".join(_letters(element.xml).split())
    size = (numbers(style.get("font-size", "16")) or [16.0])[0] * element.move.down
    bold = style.get("font-weight", "") in ("bold", "bolder", "600", "700", "800", "900")
    width = text_width(text, size, bold, "mono" in style.get("font-family", "").lower())
    x, y = element.move.of((element.number("x"), element.number("y")))
    left = x - width * {"middle": 0.5, "end": 1.0}.get(style.get("text-anchor", "start"), 0.0)
    return Text(text, size, Rect(left, y - 0.72 * size, left + width, y + 0.2 * size), bold, element)


def polylines(path: str, move: Move) -> list[list[Point]]:
    """The corners of each piece of a path; a rounded corner as points on its curve."""
    pieces: list[list[Point]] = []
    at = (0.0, 0.0)
    for command, inside in re.findall(r"([A-DF-Za-df-z])([^A-DF-Za-df-z]*)", path):
        if command in "Mm":
            pieces.append([])
        pieces[-1] += [pieces[-1][0]] if command in "Zz" else _drawn(command, numbers(inside), at)
        at = pieces[-1][-1]
    return [[move.of(p) for p in piece] for piece in pieces]


def _drawn(command: str, n: list[float], at: Point) -> list[Point]:
    """The points that a command adds to a path that has come so far."""
    kind, is_relative = command.upper(), command.islower()
    if kind in "HV":
        base = at["HV".index(kind)] if is_relative else 0.0
        return [(base + v, at[1]) if kind == "H" else (at[0], base + v) for v in n]
    step = {"M": 1, "L": 1, "Q": 2, "C": 3}.get(kind)
    if step is None:
        raise ValueError(f"an edge of straight lines and round corners has no {command!r}")
    points: list[Point] = []
    for i in range(0, len(n) - 2 * step + 1, 2 * step):
        here = points[-1] if points else at
        shift = here if is_relative else (0.0, 0.0)
        controls = [(shift[0] + n[j], shift[1] + n[j + 1]) for j in range(i, i + 2 * step, 2)]
        points += [_on_curve([here, *controls], t / 4) for t in range(1, 5)] if step > 1 else controls
    return points


def _on_curve(controls: list[Point], t: float) -> Point:
    """By de Casteljau's rule."""
    while len(controls) > 1:
        controls = [(a[0] + t * (b[0] - a[0]), a[1] + t * (b[1] - a[1])) for a, b in pairwise(controls)]
    return controls[0]
