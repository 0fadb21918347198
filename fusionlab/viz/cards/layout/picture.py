"""The picture of a program as plain geometry: what `plan` gives and `svg` draws. Px, from the pane's upper left corner."""

from __future__ import annotations

from dataclasses import dataclass

from .measure import text_width

SHEET = 3  # how far each of the two sheets behind a stack stands out


@dataclass(frozen=True)
class Rect:
    """A rectangle; y grows downwards."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    @property
    def centre(self) -> float:
        return self.x + self.width / 2

    @property
    def middle(self) -> float:
        return self.y + self.height / 2

    def meets(self, other: Rect, slack: float = 0.0) -> bool:
        """Whether both share more than an edge of width `slack`."""
        across = self.x < other.right - slack and other.x < self.right - slack
        return across and self.y < other.bottom - slack and other.y < self.bottom - slack

    def holds(self, other: Rect, slack: float = 0.0) -> bool:
        """Whether the other lies inside."""
        across = self.x - slack <= other.x and other.right <= self.right + slack
        return across and self.y - slack <= other.y and other.bottom <= self.bottom + slack


@dataclass(frozen=True)
class Text:
    """One line of text.

    Attributes:
      x, y: where it begins, ends or has its middle (`anchor`), and its base line.
      kind: class names.
      line: how soon it goes when the picture is zoomed out: 0 last.
    """

    x: float
    y: float
    text: str
    size: float = 10.0
    bold: bool = False
    muted: bool = False
    kind: str = ""
    line: int = 0
    anchor: str = "start"

    @property
    def width(self) -> float:
        return text_width(self.text, self.size, self.bold)

    @property
    def rect(self) -> Rect:
        """The rectangle that its letters cover."""
        left = self.x - self.width * {"start": 0, "middle": 0.5, "end": 1}[self.anchor]
        return Rect(left, self.y - 0.74 * self.size, self.width, 0.95 * self.size)


@dataclass(frozen=True)
class Swatch:
    """A pass (its hue) and a state (its form). `pass_name` is "" in the legend."""

    rect: Rect
    pass_name: str
    state: str
    backward: bool = False
    line: int = 0


@dataclass(frozen=True)
class Bar:
    """A share of the program; `kind` is "operations" or "bytes", or "before" or "after" of one row, with the hue of its pass."""

    rect: Rect
    share: float
    kind: str
    line: int = 1
    pass_name: str = ""


@dataclass(frozen=True)
class Chip:
    """A small label with a ground: "×24", or a step to another copy (`step` is -1 or 1)."""

    rect: Rect
    text: Text
    step: int = 0


@dataclass(frozen=True)
class Rule:
    """A thin level line."""

    rect: Rect
    line: int = 2


@dataclass(frozen=True)
class Cell:
    """A part of a closed card, drawn in it; `card` is the part's id."""

    rect: Rect
    card: str
    marks: tuple[Mark, ...] = ()
    line: int = 3


Mark = Text | Swatch | Bar | Chip | Rule | Cell


@dataclass(frozen=True)
class Box:
    """A card as it is drawn.

    Attributes:
      id, kind: the card's.
      rect: without the sheets behind it.
      state: "opened" or "closed" of what opens; the state of a site; else "".
      level: how many opened cards contain it.
      lane: its phase.
      label: one line that describes the card completely.
      marks: what is written and drawn in it.
      stack: whether two sheets stand behind it.
      line: whether it is one line high and has no ground but its own.
      pass_name, backward: of a site.
    """

    id: str
    kind: str
    rect: Rect
    state: str = ""
    level: int = 0
    lane: str = ""
    label: str = ""
    marks: tuple[Mark, ...] = ()
    stack: bool = False
    line: bool = False
    pass_name: str = ""
    backward: bool = False

    @property
    def outer(self) -> Rect:
        """With its sheets."""
        more = 2 * SHEET * self.stack
        return Rect(self.rect.x, self.rect.y, self.rect.width + more, self.rect.height + more)


@dataclass(frozen=True)
class Pill:
    """Inputs or results of one lane, in one round frame: `texts` stand for the cards `ids`; what found no room has no text."""

    id: str
    ids: tuple[str, ...]
    kind: str
    rect: Rect
    texts: tuple[Text, ...]
    lane: str
    label: str = ""


@dataclass(frozen=True)
class Wire:
    """An edge as it is drawn: its corners, its width, whether it ends in an arrow (not where it joins another edge), its label."""

    start: str
    end: str
    kind: str
    path: tuple[tuple[float, float], ...]
    width: float = 1.3
    arrow: bool = True
    label: tuple[Text, ...] = ()
    title: str = ""


@dataclass(frozen=True)
class Lane:
    """A column of the picture."""

    phase: str
    rect: Rect
    texts: tuple[Text, ...]


@dataclass(frozen=True)
class Picture:
    """Everything that is drawn. `heads` are those of the columns between lanes; `legend` is at the bottom; `between`: the content of
    these columns for each row."""

    width: float
    height: float
    title: str
    lanes: tuple[Lane, ...] = ()
    heads: tuple[Text, ...] = ()
    boxes: tuple[Box, ...] = ()
    pills: tuple[Pill, ...] = ()
    wires: tuple[Wire, ...] = ()
    legend: tuple[Mark, ...] = ()
    between: tuple[Mark, ...] = ()
