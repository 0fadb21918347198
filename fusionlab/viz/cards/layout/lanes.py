"""The columns of a picture: how wide lanes are, in a pane of a given width and when a card of one is open; their titles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusionlab.fusers.engine.grouping import STATE_WORDS

from ..card import BESIDE, Amount, Overview
from .faces import TITLE, Scale
from .measure import bytes_text, cut, share_text, text_width
from .picture import Lane, Mark, Rect, Swatch, Text
from .rows import TOP

MARGIN = 16.0
_ALONE, _NARROW_LANE, _NARROW_UPDATE, _NARROW_COLUMN = 420.0, 190.0, 122.0, 56.0
_OPENED, _DEEPER, _WIDEST = 300.0, 26.0, 760.0


@dataclass(frozen=True)
class Span:
    """A stretch of the width."""

    x: float
    width: float

    @property
    def right(self) -> float:
        return self.x + self.width


def _natural(phases: Sequence[str], room: float, buses: Sequence[float]) -> tuple[list[float], list[float]]:
    """Widths of the lanes, and of the columns between them, while nothing is open."""
    columns = [min(max(room * (0.082 - 0.006 * i), _NARROW_COLUMN), 74.0) + bus for i, bus in enumerate(buses)]
    update = min(max(room * 0.165, 118.0), 148.0) if len(phases) > 1 and phases[-1] == "update" else 0.0
    rest = room - update - sum(columns)
    wide = [p for p in phases if not (update and p == "update")]
    parts = {"forward": 31.0 if len(wide) > 1 else 1.0, "backward": 30.0}
    whole = sum(parts.get(p, 1.0) for p in wide)
    return [min(rest * parts.get(p, 1.0) / whole, _ALONE) if p in wide else update for p in phases], columns


def spans_of(phases: Sequence[str], width: float, buses: Sequence[float], depths: Mapping[str, int]) -> list[Span]:
    """The position of each lane. `buses`: the width of the vertical lines between lanes; `depths`: how deep cards of a lane are open.

    The first lane with an open card takes the width; those before it stay, so that the card stays where it is, those after it go to
    their narrow form. Where it does not get the least width then, the picture is wider than the pane.
    """
    room = width - 2 * MARGIN
    if tuple(phases) == BESIDE:
        return _beside(room, max(depths.values(), default=0))
    lanes, columns = _natural(phases, room, buses)
    first = next((i for i, p in enumerate(phases) if depths.get(p)), None)
    if first is not None:
        for i in range(first + 1, len(phases)):
            lanes[i] = min(lanes[i], _NARROW_UPDATE if phases[i] == "update" else _NARROW_LANE)
            columns[i - 1] = min(columns[i - 1], max(_NARROW_COLUMN + buses[i - 1], columns[i - 1] - 10))
        rest = room - sum(columns) - sum(lanes) + lanes[first]
        lanes[first] = max(lanes[first], min(rest, _WIDEST))
        for i, phase in enumerate(phases):
            if depths.get(phase):
                lanes[i] = max(lanes[i], _OPENED + _DEEPER * depths[phase])
    spans: list[Span] = []
    x = MARGIN
    for i, lane in enumerate(lanes):
        spans.append(Span(x, lane))
        x += lane + (columns[i] if i < len(columns) else 0)
    return spans


def _beside(room: float, depth: int) -> list[Span]:
    """Two lanes of one width, so that one side is as the other, and room for a line of numbers between them."""
    column = min(max(room * 0.17, 104.0), 156.0)
    wide = max((room - column) / 2, (_OPENED + _DEEPER * depth) if depth else 0.0)
    return [Span(MARGIN, wide), Span(MARGIN + wide + column, wide)]


def lane_of(phase: str, span: Span, bottom: float, overview: Overview) -> Lane:
    """A lane with its title and its share of the program."""
    turns = "" if overview.is_beside else _turns(overview)
    title = Text(span.x + 12, TOP + 19, " ".join(filter(None, (phase, turns))), TITLE, True, kind="lane-title")
    if overview.is_beside:
        return Lane(
            phase, Rect(span.x, TOP, span.width, bottom - TOP), (title, *_side_texts(overview, phase, span, title))
        )
    cost = (overview.totals or {}).get(phase, Amount())
    scale = Scale(overview.total)
    operations, moved = map(share_text, scale.shares(cost))
    of_bytes = f"{moved} of {scale.unit}" if moved else ""
    both = f"{operations} of operations · {of_bytes}" if operations and moved else ""
    room = span.width - 24 - title.width - 12
    text = next((t for t in (both, of_bytes, moved) if t and text_width(t, 10) <= room), "")
    share = Text(span.right - 12, TOP + 19, text, muted=True, kind="lane-share", anchor="end")
    return Lane(phase, Rect(span.x, TOP, span.width, bottom - TOP), (title, share) if text else (title,))


_SIDES = {
    "before": ("as written",),
    "after": ("as it would run with the sites chosen now", "with the sites chosen now", "sites fused"),
}


def _side_texts(overview: Overview, phase: str, span: Span, title: Text) -> list[Text]:
    """The name of a side, and the bytes of the whole program on it."""
    moved, turns = (overview.totals or {}).get(phase, Amount()).bytes, _turns(overview)
    total = Text(span.right - 12, TOP + 19, bytes_text(moved), TITLE, True, kind="lane-share", anchor="end")
    x = title.rect.right + 8
    notes = (*(f"{note}, {turns}" for note in _SIDES[phase] if turns), *_SIDES[phase])
    note = next((t for t in notes if x + text_width(t, 10) + 10 <= total.rect.x), "")
    return [*([Text(x, TOP + 19, note, muted=True, kind="lane-note")] if note else []), total]


def _turns(overview: Overview) -> str:
    """How often a program that is one loop runs the content of the lane."""
    if not overview.turns:
        return ""
    return f"×{overview.turns:,} turns" if overview.turns > 0 else "in a loop, turns unknown"


def heads_of(phases: Sequence[str], spans: Sequence[Span], buses: Sequence[float], overview: Overview) -> list[Text]:
    """The headings of the columns between lanes."""
    heads: list[Text] = []
    if overview.is_beside:
        x = (spans[0].right + spans[1].x) / 2
        room, words = spans[1].x - spans[0].right - 8, "bytes of each row, counted"
        words = words if text_width(words, 10) <= room else words.partition(",")[0]
        return [Text(x, TOP + 19, words, muted=True, kind="column-title", anchor="middle")]
    titles = {"backward": ("kept", overview.kept), "update": ("gradients", overview.gradients)}
    for i, phase in enumerate(phases[1:]):
        title, amount = titles.get(phase, ("", 0))
        if not amount:
            continue
        x = (spans[i].right + buses[i] + spans[i + 1].x) / 2
        heads.append(Text(x, TOP + 13, title, muted=True, kind="column-title", anchor="middle"))
        heads.append(Text(x, TOP + 27, bytes_text(amount), bold=True, kind="column-number", anchor="middle"))
    return heads


_BESIDE_NOTES = (
    "each row shows the same work before and after · bars between: bytes of all copies, one scale · parts that XLA runs anyway stay",
    "each row shows the same work before and after · bars between: bytes of all copies, one scale",
    "each row shows the same work before and after",
    "a row: the same work",
)


def legend_of(
    spans: Sequence[Span], y: float, backward: bool, mesh: str = "", beside: bool = False, unit: str = "bytes"
) -> list[Mark]:
    """The meaning of shapes, widths and bars, and the mesh that the program is spread over."""
    marks: list[Mark] = []
    x, right = spans[0].x + 2, spans[-1].right - 2
    entries = [(s, word, False) for s, word in STATE_WORDS.items()]
    for state, word, is_backward in [*entries, ("applied", "lighter: backward", True)][: 4 if backward else 3]:
        text = Text(x + 17, y, word, muted=True, kind="legend")
        if text.rect.right > right:
            return marks
        marks += [Swatch(Rect(x, y - 9, 11, 11), "", state, is_backward), text]
        x = text.rect.right + 15
    if mesh:
        text = Text(x, y, cut(mesh, right - x, 10), bold=True, kind="mesh")
        marks, x = [*marks, text], text.rect.right + 15
    note = f"bars: share of all operations (dark) and {unit}"
    wishes = (f"an edge is as wide as the bytes it carries · {note}", note, f"bars: operations (dark), {unit}")
    for words in _BESIDE_NOTES if beside else wishes:
        if x + 10 + text_width(words, 10) <= right:
            return [*marks, Text(right, y, words, muted=True, kind="legend", anchor="end")]
    return marks
