"""The text of a closed card: title, numbers, a line for each pass, a cell for each part; and of a box of one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fusionlab.fusers.engine.grouping import STATE_WORDS
from fusionlab.showing import seconds_text

from ..card import Amount, Card, Strip
from .measure import bytes_text, cut, operations_text, share_text, text_width
from .picture import Bar, Cell, Chip, Mark, Rect, Rule, Swatch, Text
from .said import SAID, said_marks

COMPACT, PLAIN, STRIP, PASSES, CELLS = range(5)  # how much a card says; each says what those before it say
HEIGHT, LOW, LINE = 42.0, 26.0, 24.0  # of a card, of one that is a title alone, of a box inside a card
NARROW = 236.0  # below this width the prefix stands over the name
TITLE = 12.5
_LONG_TITLE, _LEAST_TITLE = 170.0, 72.0
PAD = 11.0
_PASS, _CELL = 18.0, 38.0
_MOST_PASSES, _LEAST_CELL = 5, 84.0
_BOLD_FROM = 0.2


@dataclass(frozen=True)
class Scale:
    """The whole that shares refer to: the program."""

    total: Amount

    @property
    def unit(self) -> str:
        """The unit of the second share: "time" if kernels were timed, else "bytes"."""
        return "time" if self.total.seconds else "bytes"

    def counted(self, cost: Amount) -> tuple[float, float]:
        """Of its operations, of its bytes: these say how the picture is laid out, whatever was measured."""
        return cost.operations / max(self.total.operations, 1), cost.bytes / max(self.total.bytes, 1)

    def shares(self, cost: Amount) -> tuple[float, float]:
        """Of its operations, of its time or bytes."""
        operations, moved = self.counted(cost)
        return operations, cost.seconds / self.total.seconds if self.total.seconds else moved

    def share(self, cost: Amount) -> float:
        """The share that is shown if there is room for only one: of time or bytes."""
        return self.shares(cost)[1]

    def said(self, cost: Amount) -> str:
        """Its time or bytes."""
        return seconds_text(cost.seconds) if self.total.seconds else bytes_text(cost.bytes)


def opens(card: Card) -> bool:
    """Whether something is inside."""
    return bool(card.children)


def says(card: Card, detail: int) -> int:
    """How much of `detail` a card has to say."""
    if detail == CELLS and len(card.children) > 1:
        return CELLS
    return min(detail, PASSES) if card.strips else min(detail, PLAIN)


def height_of(card: Card, detail: int) -> float:
    """Of a closed card."""
    detail = says(card, detail)
    if detail == COMPACT:
        return LOW
    lines = min(len(card.strips), _MOST_PASSES) * (detail >= PASSES)
    height = HEIGHT + (_PASS if detail == STRIP else 8 + _PASS * lines + SAID * len(card.said) if lines else 0)
    return height + (_cell_height(card) + 14 if detail == CELLS else 0)


def closed_face(card: Card, rect: Rect, scale: Scale, detail: int) -> tuple[Mark, ...]:
    """The text of a closed card."""
    detail = says(card, detail)
    if detail == COMPACT:
        return tuple(_compact(card, rect, scale))
    marks = _narrow_head(card, rect, scale, detail) if rect.width < NARROW else _wide_head(card, rect, scale, detail)
    y = rect.y + HEIGHT
    if detail == STRIP:
        marks += _strip_line(card.strips, rect, y + 10)
    if detail >= PASSES and card.strips:
        marks += [_rule(rect, y + 1), *_passes(card.strips, rect, y, scale)]
        y += 8 + _PASS * min(len(card.strips), _MOST_PASSES)
        marks += said_marks(card.said, rect, y - 4)
    if detail == CELLS:
        marks += [_rule(rect, y), *_cells(card, rect, y + 7, scale)]
    return tuple(marks)


def _rule(rect: Rect, y: float) -> Rule:
    return Rule(Rect(rect.x + PAD, y, rect.width - 2 * PAD, 1))


# -- heads ------------------------------------------------------------------------------------------------------------


def _wide_head(card: Card, rect: Rect, scale: Scale, detail: int) -> list[Mark]:
    y = rect.y + 18
    if detail >= STRIP or not card.strips:
        right = _params(card, rect, y)
    else:
        right = _strip_beside(card, rect.right - PAD, rect.x + PAD, y)
    left = min((_left_of(m) for m in right), default=rect.right - PAD + 8)
    title = title_marks(card, rect.x + PAD, left - 10, y)
    return [*title, *right, *_numbers(card, rect, scale)]


def _title_width(card: Card) -> float:
    """Of the whole title and a gap behind it."""
    prefix = text_width(card.prefix, TITLE) + 5 if card.prefix else 0
    return prefix + text_width(card.name, TITLE, True) + _chip_width(card) + 12


def _chip_width(card: Card) -> float:
    return text_width(chip_text(card), 10, True) + 22 if chip_text(card) else 0


def _strip_beside(card: Card, right: float, left: float, y: float) -> list[Mark]:
    """The strip right of a title: with names where the whole title fits, else counts; a long title, then the chip gives way to these."""
    whole = _title_width(card)
    marks: list[Mark] = []
    for title in (
        whole,
        min(whole, _LONG_TITLE),
        min(whole - _chip_width(card), _LONG_TITLE),
        min(whole, _LEAST_TITLE),
    ):
        marks = strip_marks(card.strips, right, right - left - title, y)
        if _all_shown(card, marks):
            break
    return marks


def _all_shown(card: Card, marks: Sequence[Mark]) -> bool:
    return sum(isinstance(m, Swatch) for m in marks) == len(card.strips)


def _params(card: Card, rect: Rect, y: float) -> list[Mark]:
    room = rect.width - 2 * PAD - _title_width(card)
    params = (f"params {bytes_text(card.params)}", bytes_text(card.params)) if card.params else ()
    sends = (*(f"{text} · {card.sends}" for text in params[:1]), card.sends) if card.sends else ()
    for text in (*sends, *params):
        if text_width(text, 10) <= room:
            return [Text(rect.right - PAD, y, text, muted=True, kind="params", line=1, anchor="end")]
    return []


def _narrow_head(card: Card, rect: Rect, scale: Scale, detail: int) -> list[Mark]:
    """The prefix above the name; without a prefix, the sites below the name, or if there are no sites, the numbers."""
    share = _share(card.cost, rect.right - PAD, rect.y + (16 if card.prefix else 18), scale, line=1)
    if share and share[0].rect.x - 8 < rect.x + PAD + text_width(card.prefix, 10):
        share = []
    taken = share[0].rect.x - 8 if share else rect.right - PAD
    if not card.prefix:
        room = rect.width - 2 * PAD
        sites = strip_marks(card.strips, rect.right - PAD, room, rect.y + 34, line=1) if detail < STRIP else []
        return [*title_marks(card, rect.x + PAD, taken, rect.y + 18), *share, *(sites or _numbers(card, rect, scale))]
    y = rect.y + 33
    prefix = cut(card.prefix, taken - rect.x - PAD, 10)
    marks: list[Mark] = [Text(rect.x + PAD, rect.y + 16, prefix, muted=True, kind="prefix", line=1), *share]
    strip = _strip_beside(replace(card, prefix=""), rect.right - PAD, rect.x + PAD, y) if detail < STRIP else []
    left = min((_left_of(m) for m in strip), default=rect.right - PAD + 8)
    return [*marks, *title_marks(replace(card, prefix=""), rect.x + PAD, left - 8, y), *strip]


def _compact(card: Card, rect: Rect, scale: Scale) -> list[Mark]:
    """One line: title, strip, share."""
    y = rect.y + 17.5
    if rect.width < NARROW:
        card = replace(card, prefix="")
    share = _share(card.cost, rect.right - PAD, y, scale, line=0)
    if share and share[0].rect.x < rect.x + PAD + _title_width(card) and rect.width < NARROW:
        share = []
    end = share[0].rect.x - 10 if share else rect.right - PAD
    strip = _strip_beside(card, end, rect.x + PAD, y)
    if share and (not _all_shown(card, strip) or end - rect.x - PAD - _title_width(card) < _span_of(strip)):
        # Sites before the share, which the numbers have too.
        share, end = [], rect.right - PAD
        strip = _strip_beside(card, end, rect.x + PAD, y)
    left = min((_left_of(m) for m in strip), default=end + 8)
    return [*title_marks(card, rect.x + PAD, left - 8, y), *strip, *share]


def _span_of(marks: Sequence[Mark]) -> float:
    return max((m.rect.right for m in marks), default=0.0) - min((m.rect.x for m in marks), default=0.0)


def _share(cost: Amount, right: float, y: float, scale: Scale, line: int) -> list[Text]:
    share = scale.share(cost)
    text = share_text(share)
    bold = share >= _BOLD_FROM
    return [Text(right, y, text, 10, bold, not bold, "number", line, "end")] if text else []


def chip_text(card: Card) -> str:
    """The text of the chip after a name: how many copies, or how often it runs."""
    if card.turns:
        return f"×{card.turns:,} turns" if card.turns > 0 else "a loop"
    return f"×{card.count:,}" if card.count > 1 else ""


def title_marks(card: Card, left: float, right: float, y: float, size: float = TITLE) -> list[Mark]:
    """The prefix, the name, cut to the room there is, and the chip."""
    marks: list[Mark] = []
    chip = chip_text(card)
    wide = text_width(chip, 10, True) + 14 if chip else 0
    room = right - left - (wide + 8 if chip else 0)
    if chip and (room < 40 or 4 * len(cut(card.name, room, size, True)) < 3 * len(card.name) < 60):
        chip, room = "", right - left
    if card.prefix:
        prefix = card.prefix if text_width(card.prefix, size) + 46 <= room else ""
        marks += [Text(left, y, prefix, size, muted=True, kind="prefix")] if prefix else []
        used = text_width(prefix, size) + 5 if prefix else 0
        left, room = left + used, room - used
    name = Text(left, y, cut(card.name, room, size, True), size, True, kind="title")
    marks += [name] if name.text else []
    if chip:
        x = left + name.width + 8
        text = Text(x + wide / 2, y - 0.5, chip, bold=True, kind="count", anchor="middle")
        marks.append(Chip(Rect(x, y - 11.5, wide, 15), text))
    return marks


def _left_of(mark: Mark) -> float:
    return mark.rect.x


# -- numbers ----------------------------------------------------------------------------------------------------------


def _numbers(card: Card, rect: Rect, scale: Scale) -> list[Mark]:
    """Bars and amounts of operations and of time or bytes, as wide as fits: in halves of the card, else closer."""
    inner = rect.width - 2 * PAD
    shares = scale.shares(card.cost)
    amounts = operations_text(card.cost.operations), scale.said(card.cost)
    written = [share_text(s) for s in shares]
    both = [" · ".join(filter(None, pair)) for pair in zip(amounts, written, strict=True)]
    for bar, texts in ((34, both), (24, both), (20, both), (24, amounts), (16, amounts)):
        wides = [bar + 6 + text_width(t, 10, s >= _BOLD_FROM) for t, s in zip(texts, shares, strict=True)]
        second = inner / 2 if max(wides) <= inner / 2 - 8 else inner - wides[1]
        if wides[0] + 8 <= second:
            break
    else:
        bar, texts, second = inner / 2 - 8, ("", ""), inner / 2
    return [
        *_amount(rect.x + PAD, rect.y + 34, bar, shares[0], texts[0], "operations"),
        *_amount(rect.x + PAD + second, rect.y + 34, bar, shares[1], texts[1], scale.unit),
    ]


def _amount(x: float, y: float, wide: float, share: float, text: str, kind: str) -> list[Mark]:
    bold = share >= _BOLD_FROM
    bar = Bar(Rect(x, y - 6.5, wide, 6), min(share, 1), kind)
    return [bar, Text(x + wide + 6, y, text, 10, bold, not bold, "number", 1)] if text else [bar]


# -- strips, passes, cells --------------------------------------------------------------------------------------------


def strip_marks(strips: Sequence[Strip], right: float, room: float, y: float, line: int = 0) -> list[Mark]:
    """Swatches with count and name, or with the count alone, that end at `right`; as many as there is room for."""
    for texts in ([f"{s.count:,} {s.pass_name}" for s in strips], [f"{s.count:,}" for s in strips]):
        widths = [15 + text_width(t, 10) for t in texts]
        if strips and sum(widths) + 9 * (len(widths) - 1) <= room:
            return _strip(strips, texts, right - sum(widths) - 9 * (len(widths) - 1), y, line)
    size, pitch = (11.0, 15.0) if 15 * len(strips) - 4 <= room else (8.0, 10.0)  # closer before one is left out
    shown = strips[: max(int((room + pitch - size) // pitch), 0)]
    first = right - pitch * len(shown) + pitch - size
    return [_swatch(s, first + pitch * i, y, line, size) for i, s in enumerate(shown)]


def _strip(strips: Sequence[Strip], texts: Iterable[str], x: float, y: float, line: int) -> list[Mark]:
    marks: list[Mark] = []
    for strip, text in zip(strips, texts, strict=True):
        marks += [_swatch(strip, x, y, line), Text(x + 15, y, text, kind="strip", line=line)]
        x += 24 + text_width(text, 10)
    return marks


def _strip_line(strips: Sequence[Strip], rect: Rect, y: float) -> list[Mark]:
    """Swatches with counts from the left; where there is no room for all of them, without."""
    texts, room = [f"{s.count:,}" for s in strips], rect.width - 2 * PAD
    if sum(24 + text_width(t, 10) for t in texts) - 9 > room:
        return strip_marks(strips, rect.right - PAD, room, y, 2)
    return _strip(strips, texts, rect.x + PAD, y, 2)


def _swatch(strip: Strip, x: float, y: float, line: int, size: float = 11.0) -> Swatch:
    return Swatch(Rect(x, y - 3.5 - size / 2, size, size), strip.pass_name, strip.state, strip.backward, line)


def _passes(strips: Sequence[Strip], rect: Rect, y: float, scale: Scale) -> list[Mark]:
    """A line for each pass: swatch, count, name, state, share."""
    shown = strips[:_MOST_PASSES]
    marks: list[Mark] = []
    counts = max(text_width(f"{s.count:,}", 10, True) for s in shown)
    for i, strip in enumerate(shown):
        marks += _pass(strip, rect, y + 16 + _PASS * i, rect.x + PAD + 20 + counts, scale)
    return marks


def _pass(strip: Strip, rect: Rect, y: float, counted: float, scale: Scale) -> list[Mark]:
    share = [t for t in _share(strip.cost, rect.right - PAD, y, scale, line=2) if t.rect.x > counted + 6]
    end = (share[0].rect.x if share else rect.right - PAD) - 8
    count = Text(counted, y, f"{strip.count:,}", bold=True, kind="number", line=2, anchor="end")
    x = counted + 7
    name = Text(x, y, cut(strip.pass_name, end - x, 10), kind="strip", line=2)
    word = Text(x + name.width + 7, y, STATE_WORDS[strip.state], 10, muted=True, kind="state", line=2)
    words = [t for t in (name, word) if t.text and t.rect.right <= end]
    return [_swatch(strip, rect.x + PAD, y, 2), count, *words, *share]


def _cells(card: Card, rect: Rect, y: float, scale: Scale) -> list[Mark]:
    """The dearest parts, in program order, as wide as they are dear; of a stack, with what all its copies cost."""
    children = [child.times(card.count) for child in card.children]
    inner = rect.width - 2 * PAD
    most = max(1, int((inner + 3) // (_LEAST_CELL + 3)))
    dearest = sorted(range(len(children)), key=lambda i: (-_weight(children[i], scale), i))[:most]
    shown = [children[i] for i in sorted(dearest)]
    least = min(_LEAST_CELL, inner / len(shown) - 3)
    free = inner - 3 * (len(shown) - 1) - least * len(shown)
    whole = sum(_weight(c, scale) for c in shown) or 1.0
    x, marks = rect.x + PAD, []
    for child in shown:
        wide = least + free * _weight(child, scale) / whole
        marks.append(_cell(child, Rect(x, y, wide, _cell_height(card)), scale))
        x += wide + 3
    return marks


def _cell_height(card: Card) -> float:
    """A line less where no part has a site."""
    return _CELL if any(c.strips or c.site for c in card.children) else _CELL - 16


def _weight(card: Card, scale: Scale) -> float:
    return sum(scale.counted(card.cost))


def _cell(card: Card, rect: Rect, scale: Scale) -> Cell:
    two = rect.height >= _CELL
    share = _share(card.cost, rect.right - 7, rect.y + 15, scale, line=3)
    end = below = rect.right - 7
    if share and two and rect.x + 13 + text_width(card.name, 10, True) > share[0].rect.x:
        share = [replace(share[0], y=rect.y + 31)]
        below = share[0].rect.x - 6
    elif share:
        end = share[0].rect.x - 6
    name = Text(rect.x + 7, rect.y + 15, cut(card.name, end - rect.x - 7, 10, True), bold=True, kind="title", line=3)
    strip: list[Mark] = []
    x = rect.x + 7
    for s in (card.strips or _own_strip(card)) if two else ():
        count = Text(x + 15, rect.y + 31, f"{s.count:,}", kind="strip", line=3)
        if count.rect.right > below:
            break
        strip += [_swatch(s, x, rect.y + 31, 3), count]
        x = count.rect.right + 9
    return Cell(rect, card.id, (*([name] if name.text else []), *share, *strip))


def _own_strip(card: Card) -> tuple[Strip, ...]:
    site = card.site
    return () if site is None else (Strip(site.pass_name, site.state, card.count, site.backward),)


# -- boxes of one line ------------------------------------------------------------------------------------------------


def line_face(card: Card, rect: Rect, scale: Scale) -> tuple[Mark, ...]:
    """A box of one line: name, source line, state; type, bar and share at the right. The line gives way first, then the type."""
    y = rect.y + LINE / 2 + 3.7
    left, right = rect.x + 9, rect.right - 9
    marks: list[Mark] = [_swatch(s, left, y, 0) for s in _own_strip(card)]
    left += 17 * len(marks)
    share = _share(card.cost, right, y, scale, line=0)
    right = share[0].rect.x - 7 if share else right
    chip = chip_text(card)
    spare = right - left - text_width(card.name, 11, True) - 8
    wishes = (
        ("count", chip, text_width(chip, 10, True)),
        ("state", STATE_WORDS[card.site.state] if card.site else "", 0.0),
        ("bar", "bar" if share else "", 26.0),
        ("type", card.type, 0.0),
        ("where", _text_of_line(card), 0.0),
    )
    granted = _granted(wishes, spare)
    at_right = _line_right(granted, right, y, scale.share(card.cost))
    said = said_marks(card.said, rect, rect.y + LINE - 4)
    return (*marks, *_line_left(card, granted, left, right, y), *at_right, *share, *said)


def _granted(wishes: Sequence[tuple[str, str, float]], spare: float) -> dict[str, str]:
    """What there is room for, the first wish first; what comes after one that was refused is refused too."""
    granted: dict[str, str] = {}
    for name, text, wide in wishes:
        need = (wide or text_width(text, 10)) + 8
        if text and need > spare:
            break
        if text:
            granted[name] = text
            spare -= need
    return granted


def _text_of_line(card: Card) -> str:
    """ ":22-24" of "model.py:22-24"; what is no line (a kernel's name) as it is."""
    if ":" not in card.where:
        return card.where
    line = card.where.rpartition(":")[2]
    return f":{line}" if f":{line}" not in card.name else ""


def _line_right(granted: dict[str, str], right: float, y: float, share: float) -> list[Mark]:
    marks: list[Mark] = []
    if "bar" in granted:
        marks.append(Bar(Rect(right - 26, y - 6.5, 26, 6), min(share, 1), "bytes", 1))
        right -= 34
    if "type" in granted:
        marks.append(Text(right, y, granted["type"], muted=True, kind="type", line=1, anchor="end"))
    return marks


def _line_left(card: Card, granted: dict[str, str], left: float, right: float, y: float) -> list[Mark]:
    name = Text(left, y, cut(card.name, right - left, 11, True), 11, True, kind="title")
    marks: list[Mark] = [name] if name.text else []
    x = name.rect.right + 8
    for kind in ("count", "where", "state"):
        if kind in granted:
            text = Text(x, y, granted[kind], 10, kind == "count", kind != "count", kind, int(kind == "where"))
            marks.append(text)
            x = text.rect.right + 8
    return marks
