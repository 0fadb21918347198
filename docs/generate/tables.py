"""Tables of measurements: which numbers of which record, and how they are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .markdown import table, text_of
from .records import Record, at, cell, newest, ratio, samples_in

Keys = tuple[str | int, ...]


@dataclass(frozen=True)
class Column:
    """A column of measurements: its head, and where a row's part of the record has the number.

    Attributes:
      head: the words above it.
      keys: the way from the row's part to the number.
      before: of a ratio, the way to the number that it is divided into.
    """

    head: str
    keys: Keys
    before: Keys | None = None

    def text(self, part: Any) -> str:
        value = at(part, self.keys)
        if self.before is not None:
            return ratio(at(part, self.before), value, str(self.before[-1]))
        if value is None and self.keys[-1] in part.get("left out", ()):
            return "refuses"
        return cell(value)


@dataclass(frozen=True)
class Row:
    """A row: its label, and the way to its part of the record."""

    label: str
    keys: Keys


@dataclass(frozen=True)
class Measured:
    """A table of measurements.

    Attributes:
      title: its heading.
      card, benchmark: whose newest record it is of.
      about: a paragraph about the programs.
      columns: the columns of numbers.
      rows: the rows, or a function of the record's data that gives them.
      passes: the passes that the difference is due to.
      after: a paragraph behind the table, or a function of the record's data that gives it.
      case: of the records, the newest with this case; "": the newest of all.
    """

    title: str
    card: str
    benchmark: str
    about: str
    columns: Sequence[Column]
    rows: Sequence[Row] | Callable[[Mapping[str, Any]], Sequence[Row]]
    passes: Sequence[str] = ()
    after: str | Callable[[Mapping[str, Any]], str] = ""
    case: str = ""

    @property
    def record(self) -> Record:
        return newest(self.card, self.benchmark, self.case)

    @property
    def anchor(self) -> str:
        """The name that links lead to."""
        return f"measured-{self.card}-" + "-".join(
            "".join(c if c.isalnum() else " " for c in self.title.lower()).split()
        )

    def lines(self) -> list[list[str]]:
        """The cells of every row, its label first."""
        data = self.record.data
        return [[row.label, *(column.text(at(data, row.keys)) for column in self.columns)] for row in self._rows()]

    def span(self) -> tuple[float, float]:
        """The smallest and the largest ratio of the first column that has some: of times where there are some, else of memory."""
        column = next(column for column in self.columns if column.before is not None)
        parts = [at(self.record.data, row.keys) for row in self._rows()]
        times = [part for part in parts if samples_in(at(part, column.keys))]
        found = [float(column.text(part).partition("x")[0]) for part in times or parts]
        return min(found), max(found)

    @property
    def of_time(self) -> bool:
        """Whether it has times at all."""
        data = self.record.data
        return any(samples_in(at(at(data, row.keys), column.keys)) for row in self._rows() for column in self.columns)

    @property
    def of_one_pass(self) -> bool:
        """Whether it is about one pass, or about whole layers."""
        return len(self.passes) == 1 or all("multi_transformer" in name for name in self.passes)

    def _rows(self) -> Sequence[Row]:
        return self.rows(self.record.data) if callable(self.rows) else self.rows

    def text(self, page: Path, level: int = 2) -> str:
        """The table with its heading, what was measured, and where the numbers are from."""
        after = self.after(self.record.data) if callable(self.after) else self.after
        return text_of(
            f"({self.anchor})=\n{'#' * level} {self.title}" if level == 2 else f"{'#' * level} {self.title}",
            self.about,
            table(["", *(column.head for column in self.columns)], self.lines()),
            after,
            f"{self._samples()}{self.record.origin(page)}",
        )

    def _samples(self) -> str:
        """How many samples the medians are of."""
        data = self.record.data
        counts = [samples_in(at(at(data, row.keys), c.keys)) for row in self._rows() for c in self.columns]
        counts = sorted({count for count in counts if count})
        return f"Medians of {' to '.join(str(n) for n in sorted({counts[0], counts[-1]}))} samples. " if counts else ""
