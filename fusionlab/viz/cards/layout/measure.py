"""Text: its width, how it is cut to the available room, and the formats of amounts and shares."""

from __future__ import annotations

import functools
import math

# Advance widths of Helvetica and Helvetica-Bold (Adobe's font metrics; Arial's are the same) in thousandths of the size, from " " to "~".
_REGULAR = """
278 278 355 556 556 889 667 191 333 333 389 584 278 333 278 278 556 556 556 556 556 556 556 556 556 556 278 278 584 584 584 556
1015 667 667 722 722 667 611 778 722 278 500 667 556 833 722 778 667 778 722 667 611 722 667 944 667 667 611 278 278 278 469 556
333 556 556 500 556 556 278 556 556 222 222 500 222 833 556 556 556 556 333 500 278 556 500 722 500 500 500 334 260 334 584
"""
_BOLD = """
278 333 474 556 556 889 722 238 333 333 389 584 278 333 278 278 556 556 556 556 556 556 556 556 556 556 333 333 584 584 584 611
975 722 722 722 722 667 611 778 722 278 556 722 611 833 722 778 667 778 722 667 611 722 667 944 667 667 611 333 278 333 584 556
333 556 611 556 611 556 333 611 611 278 278 556 278 889 611 611 611 611 389 556 333 611 556 778 556 556 500 389 280 389 584
"""
_WIDTHS = tuple(tuple(map(int, table.split())) for table in (_REGULAR, _BOLD))
_OTHERS = {"…": 1000, "·": 278, "×": 584, "−": 584, "–": 556, "‹": 333, "›": 333, "→": 1000, "÷": 584}
_LETTER, _IDEOGRAPH, _EMOJI = 780, 1000, 1400
_SLACK = 1.01  # viewers round


@functools.lru_cache(maxsize=20_000)
def text_width(text: str, size: float, bold: bool = False) -> float:
    """Width of a line in px."""
    return sum(_advance(c, bold) for c in text) * size / 1000 * _SLACK


def _advance(letter: str, bold: bool) -> int:
    code = ord(letter)
    if 32 <= code < 127:
        return _WIDTHS[bold][code - 32]
    if letter in _OTHERS:
        return _OTHERS[letter]
    return _EMOJI if code >= 0x1F000 else _IDEOGRAPH if code > 0x2E7F else _LETTER


@functools.lru_cache(maxsize=20_000)
def cut(text: str, room: float, size: float, bold: bool = False) -> str:
    """The text, with "…" in the middle if it is wider than `room`; "" where not even two letters fit."""
    if text_width(text, size, bold) <= room:
        return text
    if " … " in text:  # the ends of a run say all of it
        return cut(text.replace(" … ", "…"), room, size, bold)
    low, high = 0, len(text) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text_width(_shortened(text, middle), size, bold) <= room else (low, middle - 1)
    return _shortened(text, low) if low >= 2 else ""


@functools.lru_cache(maxsize=20_000)
def cut_at_end(text: str, room: float, size: float) -> str:
    """As many of its first words as fit, with "…" behind them; "" where not even one does."""
    if text_width(text, size) <= room:
        return text
    words = text.split()
    while words and text_width(f"{' '.join(words)} …", size) > room:
        words.pop()
    return f"{' '.join(words)} …" if words else ""


def _shortened(text: str, letters: int) -> str:
    """So many of its letters, more of the beginning than of the end."""
    head = math.ceil(letters * 0.6)
    return f"{text[:head].rstrip()}…{text[len(text) - letters + head :].lstrip() if letters > head else ''}"


def share_text(share: float) -> str:
    """ "30 %", "2.9 %"; "" below 0.1 %."""
    if share < 0.001:
        return ""
    return f"{share:.0%}".replace("%", " %") if share >= 0.0995 else f"{share * 100:.1f} %"


def operations_text(n: float) -> str:
    """ "5.81 Top"."""
    return f"{_quantity(n)}op"


def bytes_text(n: float) -> str:
    """ "360 GB"."""
    return f"{_quantity(n)}B"


def _quantity(n: float) -> str:
    """Three digits, "56.0 G", so that columns of them are of one width."""
    for power, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if n >= 0.9995 * 10**power:
            return f"{f'{n / 10**power:#.3g}'.rstrip('.')} {prefix}"
    return f"{n:.0f} "
