"""A picture as SVG: light colours as attributes, and class names on everything, so that a style sheet can recolour it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape as _escape
from types import MappingProxyType

from fusionlab.viz.markup import printable
from fusionlab.viz.palette import colour_of, tint_of

from .card import BESIDE
from .layout.picture import SHEET, Bar, Box, Cell, Chip, Lane, Mark, Picture, Pill, Rect, Rule, Swatch, Text, Wire

FONT = "Helvetica, Arial, 'Liberation Sans', sans-serif"
INK, MUTED, PAPER, LANE, BORDER, TRACK, CELL = (
    "#1a2330",
    "#5a6675",
    "#ffffff",
    "#f5f7f9",
    "#c7ced6",
    "#e4e8ed",
    "#e6e9ee",
)
LESS = "#19703e"  # fewer bytes than before
DARK, LIGHT = "#36424f", "#8a98a8"  # bars of operations and of bytes
THIN, WIDE = "#7b8794", "#a7b2bf"  # edges
NEUTRAL, NEUTRAL_TINT = "#5c86b8", "#c9d8ea"  # of the legend
# Up to this error, as a multiple of what rounding explains: width and colour of the stripe.
DRIFT = ((1.0, 3.0, "#9fb3c4"), (10.0, 5.0, "#e69f00"), (math.inf, 8.0, "#d55e00"))
_BROAD = 5.0  # from this width on an edge is light


def svg(
    picture: Picture, id_prefix: str = "fl-", caption: str = "", drift: Mapping[str, float] = MappingProxyType({})
) -> str:
    """The picture as the text of an SVG file.

    Args:
      picture: what `plan` gave.
      id_prefix: prefix of the cards' ids, so that several pictures can be on one page.
      caption: one line below a standalone picture, on paper of its own.
      drift: card id -> the error of the fused program there, as a multiple of what rounding explains: a stripe at the card's edge.
    """
    parts = [
        *map(_lane, picture.lanes),
        *map(_text, picture.heads),
        *(_box(box, id_prefix, drift.get(box.id)) for box in picture.boxes),
        *(_pill(pill, id_prefix) for pill in picture.pills),
        *map(_wire, picture.wires),
        *(_text(t) for wire in picture.wires for t in wire.label),
        f'<g class="between">{_marks(picture.between)}</g>' if picture.between else "",
        f'<g class="legend">{_marks(picture.legend)}</g>' if picture.legend else "",
    ]
    height = picture.height
    if caption:
        parts.insert(0, _frame(Rect(0, 0, picture.width, height + 16), "paper", PAPER))
        parts.append(_text(Text(picture.width - 18, height + 6, caption, muted=True, kind="caption", anchor="end")))
        height += 16
    size = f'width="{_n(picture.width)}" height="{_n(height)}" viewBox="0 0 {_n(picture.width)} {_n(height)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="fl-cards" {size} font-family="{FONT}" font-size="10">'
    return "\n".join([head, f"<title>{escape(picture.title)}</title>", *filter(None, parts), "</svg>"])


def escape(text: str) -> str:
    """A text as XML takes it."""
    return _escape(printable(text))


def _n(number: float) -> str:
    """One decimal, none where it is 0."""
    text = f"{number:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def _frame(rect: Rect, kind: str, fill: str, stroke: str = "", radius: float = 0, more: str = "") -> str:
    line = f' stroke="{stroke}"' if stroke else ""
    round_ = f' rx="{_n(radius)}"' if radius else ""
    place = f'x="{_n(rect.x)}" y="{_n(rect.y)}" width="{_n(rect.width)}" height="{_n(rect.height)}"'
    return f'<rect class="{kind}" {place}{round_} fill="{fill}"{line}{more}/>'


def _lane(lane: Lane) -> str:
    inner = _frame(lane.rect, "lane-body", LANE, radius=8) + _marks(lane.texts)
    return f'<g class="lane {escape(lane.phase)}">{inner}</g>'


def _text(text: Text) -> str:
    weight = ' font-weight="bold"' if text.bold else ""
    anchor = "" if text.anchor == "start" else f' text-anchor="{text.anchor}"'
    kind = " ".join(filter(None, (text.kind, "muted" if text.muted else "", "strong" if text.bold else "")))
    fill = LESS if text.kind == "less" else MUTED if text.muted else INK
    where = f'x="{_n(text.x)}" y="{_n(text.y)}" font-size="{_n(text.size)}"'
    if len(text.text) > 1:  # as wide as it was measured, whatever font the reader's machine has
        where += f' textLength="{_n(text.width)}" lengthAdjust="spacingAndGlyphs"'
    return (
        f'<text class="{kind}" {where}{weight}{anchor} fill="{fill}" data-line="{text.line}">{escape(text.text)}</text>'
    )


def _marks(marks: Iterable[Mark]) -> str:
    return "".join(map(_mark, marks))


def _mark(mark: Mark) -> str:
    match mark:
        case Text():
            return _text(mark)
        case Swatch():
            return _swatch(mark)
        case Bar():
            return _bar(mark)
        case Chip():
            return _chip(mark)
        case Rule():
            return _frame(mark.rect, "rule", TRACK, more=f' data-line="{mark.line}"')
        case Cell():
            ground = _frame(mark.rect, "cell-body", CELL, radius=3)
            return f'<g class="cell" data-card="{escape(mark.card)}" data-line="{mark.line}">{ground}{_marks(mark.marks)}</g>'


def _form(pass_name: str, state: str, backward: bool) -> tuple[str, str, str]:
    """Filling, border and dashes: state is the form, the pass its hue."""
    full = colour_of(pass_name) if pass_name else NEUTRAL
    if state == "applied":
        light = tint_of(pass_name, 0.45) if pass_name else NEUTRAL_TINT
        return (light if backward else full), full, ""
    return PAPER, full, ' stroke-dasharray="2.6 2"' if state == "declined" else ""


def _swatch(swatch: Swatch) -> str:
    fill, stroke, dashes = _form(swatch.pass_name, swatch.state, swatch.backward)
    r = swatch.rect
    kind = f"swatch {swatch.state}{' backward' if swatch.backward else ''}"
    hue = f' color="{stroke}"' if fill not in (stroke, PAPER) else ""  # for a style sheet that thins it on dark paper
    more = f' stroke-width="1.5"{dashes}{hue} data-pass="{escape(swatch.pass_name)}" data-line="{swatch.line}"'
    return _frame(Rect(r.x + 0.75, r.y + 0.75, r.width - 1.5, r.height - 1.5), kind, fill, stroke, 2.5, more)


def _bar(bar: Bar) -> str:
    wide = max(bar.rect.width * bar.share, 1.0) if bar.share > 0 else 0.0
    more = f' data-line="{bar.line}"'
    if bar.kind in BESIDE:
        fill = colour_of(bar.pass_name) if bar.pass_name else DARK if bar.kind == "after" else LIGHT
        known = f' data-pass="{escape(bar.pass_name)}"' if bar.pass_name else ""
        return _frame(
            Rect(bar.rect.x, bar.rect.y, wide, bar.rect.height),
            f"bar-{bar.kind}",
            fill,
            more=more + known,
        )
    track = _frame(bar.rect, "bar-track", TRACK, radius=1, more=more)
    r = bar.rect
    return track + _frame(
        Rect(r.x, r.y, wide, r.height),
        "bar-operations" if bar.kind == "operations" else "bar-bytes",
        DARK if bar.kind == "operations" else LIGHT,
        more=more,
    )


def _chip(chip: Chip) -> str:
    step = f' data-step="{chip.step}"' if chip.step else ""
    kind = "chip step" if chip.step else "chip"
    return f'<g class="{kind}"{step}>{_frame(chip.rect, "chip-body", CELL, radius=chip.rect.height / 2)}{_text(chip.text)}</g>'


def _box(box: Box, id_prefix: str, drift: float | None = None) -> str:
    kind = " ".join(
        filter(None, ("card", box.kind, box.state, "line" if box.line else "", "backward" if box.backward else ""))
    )
    more = f' data-level="{box.level}" data-lane="{escape(box.lane)}"'
    more += f' data-pass="{escape(box.pass_name)}"' if box.pass_name else ""
    head = f'<g id="{escape(id_prefix + box.id)}" class="{kind}"{more}><title>{escape(box.label)}{_drift_text(drift)}</title>'
    return f"{head}{_sheets(box)}{_body(box)}{_drift(box, drift)}{_marks(box.marks)}</g>"


def _drift_text(drift: float | None) -> str:
    return "" if drift is None else f"; error of the fused program {drift:.2g} times what rounding explains"


def _drift(box: Box, drift: float | None) -> str:
    """A stripe along the left edge, broader the more the programs differ: colour is not alone."""
    if drift is None:
        return ""
    width, colour = next((w, c) for most, w, c in DRIFT if drift <= most)
    r = box.rect
    return _frame(
        Rect(r.x, r.y + 2, width, r.height - 4), "drift", colour, radius=1.5, more=f' data-drift="{drift:.3g}"'
    )


def _sheets(box: Box) -> str:
    r = box.rect
    behind = [Rect(r.x + d, r.y + d, r.width, r.height) for d in (2 * SHEET, SHEET)] if box.stack else []
    return "".join(_frame(sheet, "sheet", PAPER, BORDER, 6) for sheet in behind)


def _body(box: Box) -> str:
    radius = 4 if box.line else 6
    if not box.pass_name:
        return _frame(
            box.rect, "card-body", PAPER if box.state != "opened" or box.level % 2 else "#fafbfc", BORDER, radius
        )
    full = colour_of(box.pass_name)
    strength = (0.1 if box.backward else 0.2) * (2 if box.lane == BESIDE[1] else 1)
    fill = tint_of(box.pass_name, strength) if box.state == "applied" else PAPER
    dashes = ' stroke-dasharray="4 3"' if box.state == "declined" else ""
    hue = f' color="{full}"' if box.state == "applied" else ""
    return _frame(box.rect, "card-body", fill, full, radius, f' stroke-width="1.4"{dashes}{hue}')


def _pill(pill: Pill, id_prefix: str) -> str:
    shown = len(pill.texts) - (len(pill.texts) < len(pill.ids))  # the last text says how many more there are
    inner = "".join(
        f'<g id="{escape(id_prefix + name)}" class="card {pill.kind}" data-level="0">{_text(text)}</g>'
        for name, text in zip(pill.ids[:shown], pill.texts, strict=False)
    )
    inner += "".join(map(_text, pill.texts[shown:]))
    head = f'<g id="{escape(id_prefix + pill.id)}" class="pill {pill.kind}"><title>{escape(pill.label)}</title>'
    return f"{head}{_frame(pill.rect, 'pill-body', PAPER, BORDER, 11)}{inner}</g>"


# -- edges ------------------------------------------------------------------------------------------------------------


def _wire(wire: Wire) -> str:
    colour = WIDE if wire.width >= _BROAD else THIN
    kind = f"edge {wire.kind}{' wide' if wire.width >= _BROAD else ''}"
    points = list(wire.path)
    head = ""
    if wire.arrow:
        points[-1], head = _arrow(wire)
    line = f'<path class="edge-line" d="{_rounded(points)}" fill="none" stroke="{colour}" stroke-width="{_n(wire.width)}"/>'
    tip = f'<path class="edge-arrow" d="{head}" fill="{colour}"/>' if head else ""
    ends = f'data-start="{escape(wire.start)}" data-end="{escape(wire.end)}"'
    return f'<g class="{kind}" {ends}><title>{escape(wire.title)}</title>{line}{tip}</g>'


def _arrow(wire: Wire) -> tuple[tuple[float, float], str]:
    """Where the line ends, and the arrow's outline."""
    (x0, y0), (x1, y1) = wire.path[-2:]
    length = abs(x1 - x0) + abs(y1 - y0)
    long, half = min(4.5 + 0.75 * wire.width, length), 3.2 + 0.6 * wire.width
    dx, dy = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
    bx, by = x1 - dx * long, y1 - dy * long
    corners = ((bx - dy * half, by - dx * half), (x1, y1), (bx + dy * half, by + dx * half))
    outline = "L".join(f"{_n(x)} {_n(y)}" for x, y in corners)
    return (bx + dx, by + dy), f"M{outline}Z"


def _rounded(points: Sequence[tuple[float, float]], radius: float = 5.0) -> str:
    """A path with round corners."""
    parts = [f"M{_n(points[0][0])} {_n(points[0][1])}"]
    for (x0, y0), (x, y), (x1, y1) in zip(points, points[1:], points[2:], strict=False):
        before, after = abs(x - x0) + abs(y - y0), abs(x1 - x) + abs(y1 - y)
        r = min(radius, before / 2, after / 2)
        ax, ay = (x0 - x) / (before or 1) * r, (y0 - y) / (before or 1) * r
        bx, by = (x1 - x) / (after or 1) * r, (y1 - y) / (after or 1) * r
        parts.append(f"L{_n(x + ax)} {_n(y + ay)}Q{_n(x)} {_n(y)} {_n(x + bx)} {_n(y + by)}")
    parts.append(f"L{_n(points[-1][0])} {_n(points[-1][1])}")
    return "".join(parts)
