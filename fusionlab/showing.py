"""Results of public functions: each prints as a sentence, is a table in a notebook, and saves itself by the suffix of a file.

A class configures this with class attributes; all else is `Shown`'s:

    class Cause(Shown):
        _says = "{0.observed} with {0.sites}"  # its sentence, unless it has a `__str__` of its own
        _listed = "trials"                     # whose items are the rows of its table; "" has a row for each of its fields
        _told = ("site", "saved_s")            # the columns of its row, where it is one of several; () has all plain fields
        _name = "cause"                        # what several are counted as; "" is the name of the class

Pictures belong to `viz`: classes in `verbs` add them.
"""

from __future__ import annotations

import csv
import dataclasses
import enum
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from html import escape
from pathlib import Path
from typing import Any, ClassVar, TypeVar, overload

from .errors import ArgumentError, MissingDependencyError, did_you_mean
from .output import write_file

Makers = Mapping[str, Callable[[], "str | bytes"]]
_MOST_ROWS = 100  # of a table in a notebook
_MOST_LETTERS = 200  # of a cell
_MOST_ITEMS = 8  # of a list in a cell
_UNITS = {"s": "s", "us": "µs", "ms": "ms", "mhz": "MHz", "c": "°C", "w": "W"}

_Item = TypeVar("_Item", covariant=True)


def save_as(path: str | os.PathLike[str], makers: Makers, **options: Any) -> Path:
    """Writes the content made by the maker for the file's suffix; returns the path.

    Args:
      path: the file.
      makers: suffix -> what makes the content.
      **options: as for `write_file`.

    Raises:
      ArgumentError: no maker has that suffix; the message names those that have. OutputError: the file cannot be written.
    """
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(f"path: got {path!r:.80}, needed the name of a file that ends in {_one_of(makers)}")
    return write_file(path, content_as(suffix_of(path, makers), str(path), makers), **options)


def suffix_of(path: str | os.PathLike[str], makers: Iterable[str]) -> str:
    """The longest suffix of a file among those there are, ".perfetto.json.gz"; its last one if none of them fits."""
    name = Path(path).name.lower()
    known = sorted((s for s in makers if name.endswith(s)), key=len)
    return known[-1] if known else Path(path).suffix.lower()


def content_as(suffix: str, name: str, makers: Makers) -> str | bytes:
    """The content for a suffix; `name` is the file's, for the error, which is as of `save_as`."""
    if suffix not in makers:
        near = did_you_mean(suffix, makers, alike=0.8)  # ".csv" is no slip for ".svg"
        raise ArgumentError(
            f"path: got the suffix {suffix!r} in {name!r}, needed one of {', '.join(sorted(makers))}{near and '.'}{near}"
        )
    return makers[suffix]()


def plural(noun: str, number: float) -> str:
    """ "op" or "ops", as the number wants it."""
    return noun if number == 1 else f"{noun}es" if noun.endswith("ch") else f"{noun}s"


def counted(number: float, noun: str) -> str:
    """ "1 op", "2 ops"; a number that is no whole one is an average: "1.5 ops"."""
    return f"{number:g} {plural(noun, number)}" if isinstance(number, float) else f"{number} {plural(noun, number)}"


def seconds_text(value: float) -> str:
    """Three digits with a unit that reads well: "1.23 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def _one_of(makers: Makers) -> str:
    return " or ".join(sorted(makers))


@dataclasses.dataclass(frozen=True)
class Table:
    """Column `heads`, and `rows` of values as they are."""

    heads: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def html(self, most: int = _MOST_ROWS) -> str:
        """As HTML, its texts escaped, with at most so many rows and without empty columns; "" if there is no row."""
        if not self.rows:
            return ""
        told = [k for k in range(len(self.heads)) if any(cell(row[k]) for row in self.rows)]
        head = "".join(f"<th>{escape(self.heads[k])}</th>" for k in told)
        rows = ("".join(_td(row[k]) for k in told) for row in self.rows[:most])
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        more = len(self.rows) - most
        rest = f"<p>... and {more:,} more: .save('rows.csv') has them all</p>" if more > 0 else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"

    def csv(self) -> str:
        """As comma-separated values; numbers in full."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(self.heads)
        writer.writerows([v if isinstance(v, int | float) else cell(v) for v in row] for row in self.rows)
        return file.getvalue()

    def dataframe(self) -> Any:
        """As a pandas frame.

        Raises:
          MissingDependencyError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingDependencyError(
                "to_dataframe needs pandas, which is not installed: pip install pandas (or use to_dict)"
            ) from error
        return pd.DataFrame(list(self.rows), columns=list(self.heads))


def _td(value: Any) -> str:
    align = ' style="text-align:right"' if isinstance(value, int | float) and not isinstance(value, bool) else ""
    return f"<td{align}>{escape(cell(value))}</td>"


class Shown:
    """A result: `str` and `repr` are sentences, a notebook shows a table, `save` writes it by suffix."""

    __slots__ = ()
    _says: ClassVar[str] = ""
    _name: ClassVar[str] = ""
    _listed: ClassVar[str] = ""
    _told: ClassVar[tuple[str, ...]] = ()

    def __str__(self) -> str:
        if self._says:
            return self._says.format(self)
        if type(self).__repr__ is not Shown.__repr__:
            return repr(self)
        told = "; ".join(f"{head(k)} {cell(v)}" for k, v in self._row().items() if cell(v))
        return f"{_kind(type(self))}: {told}" if told else _kind(type(self))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._sentence()}>"

    def _sentence(self) -> str:
        """The first line of its text."""
        return str(self).partition("\n")[0]

    def _row(self) -> dict[str, Any]:
        """Its row in a table of several: column -> value."""
        if self._told:
            return {name: getattr(self, name) for name in self._told}
        fields = (f.name for f in _fields(self) if f.repr)
        return {name: value for name in fields if _is_plain(value := getattr(self, name))}

    def _table(self) -> Table:
        if self._listed:
            items = getattr(self, self._listed)
            return table_of(items.items() if isinstance(items, Mapping) else items)
        columns = self._row()
        return Table(("", ""), tuple((head(k), v) for k, v in columns.items() if cell(v)))

    def _repr_html_(self) -> str:
        return f"<p>{escape(self._sentence())}</p>{self._table().html()}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able."""
        return {f.name: plain(getattr(self, f.name)) for f in _fields(self) if f.repr}

    def _makers(self) -> dict[str, Callable[[], str | bytes]]:
        """The makers of its files, by suffix."""
        return {
            ".csv": lambda: self._table().csv(),
            ".html": lambda: page(self._sentence(), self._repr_html_()),
            ".json": lambda: json.dumps(plain(self.to_dict()), indent=1, allow_nan=False) + "\n",
            ".txt": lambda: f"{self}\n",
        }

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes it by suffix: .txt (as it prints), .html (as a notebook shows it), .csv (its table) or .json (all of it).

        Raises:
          ArgumentError: another suffix; the message names those it knows. OutputError: the file cannot be written.
        """
        return save_as(path, self._makers())


class Records(tuple[_Item, ...], Shown):
    """Several results of one kind, in order: a tuple that prints a line for each."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join([self._sentence(), *(f"  {line(item)}" for item in self)])

    __repr__ = __str__

    def _sentence(self) -> str:
        if not self:
            return "none"
        kinds = {getattr(type(item), "_name", "") or _kind(type(item)) for item in self}
        return f"{len(self):,} {_plural(kinds.pop() if len(kinds) == 1 else 'record', len(self))}"

    def _table(self) -> Table:
        return table_of(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able: `records` has a dict of each."""
        return {"records": [plain(item) for item in self]}

    @overload
    def __getitem__(self, index: int) -> _Item: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def __getitem__(self, index: slice) -> Records[_Item]: ...
    def __getitem__(self, index: Any) -> Any:
        found = tuple.__getitem__(self, index)
        return Records(found) if isinstance(index, slice) else found


class Facts(dict[str, Any], Shown):
    """Names with their numbers, in order: a dict that is a table in a notebook. As text, like any dict."""

    def __str__(self) -> str:
        return ", ".join(f"{name} {cell(value)}" for name, value in self.items()) or "nothing to count"

    def __repr__(self) -> str:
        return dict.__repr__(self)

    def _table(self) -> Table:
        return Table(("name", "value"), tuple(self.items()))

    def to_dict(self) -> dict[str, Any]:
        return dict(self)


class Text(str, Shown):
    """Lines to read: a text that also prints as itself where its `repr` is asked for, and in a notebook keeps its lines."""

    def __str__(self) -> str:
        return str.__str__(self)

    def __repr__(self) -> str:
        return str(self)

    def _table(self) -> Table:
        return Table(("line",), tuple((line,) for line in self.splitlines()))

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self)}</pre>"

    def to_dict(self) -> dict[str, Any]:
        return {"text": str(self)}


def table_of(items: Iterable[Any]) -> Table:
    """A row for each item; the columns are those of the first, and further ones of the others."""
    rows = [item._row() if isinstance(item, Shown) else _as_row(item) for item in items]
    names = list(dict.fromkeys(name for row in rows for name in row))
    return Table(tuple(map(head, names)), tuple(tuple(row.get(name) for name in names) for row in rows))


def _as_row(item: Any) -> dict[str, Any]:
    if isinstance(item, tuple) and len(item) == 2:
        name, value = item
        return {"name": name} | (value._row() if isinstance(value, Shown) else {"value": value})
    return {"value": item}


def page(title: str, body: str) -> str:
    """A page of HTML that needs nothing else; `body` is HTML already."""
    style = "body{font:14px system-ui,sans-serif;margin:2em}td,th{padding:2px 10px;text-align:left;vertical-align:top}"
    return f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{style}</style>{body}</html>\n'


def head(name: str) -> str:
    """The head of a column: "saved_s" is "saved (s)"."""
    stem, _, unit = name.rpartition("_")
    return f"{stem.replace('_', ' ')} ({_UNITS[unit]})" if stem and unit in _UNITS else name.replace("_", " ")


def cell(value: Any) -> str:
    """A value as the text of a table's cell; "" for nothing."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, Records):
        return value._sentence()
    return _cut(_words(value))


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {cell(v)}" for k, v in value.items())
    if isinstance(value, Set):
        value = sorted(value, key=str)
    if isinstance(value, Sequence) and not isinstance(value, str | Shown):
        more = f" and {len(value) - _MOST_ITEMS:,} more" if len(value) > _MOST_ITEMS else ""
        return ", ".join(map(cell, value[:_MOST_ITEMS])) + more
    return line(value)


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..."


def line(value: Any) -> str:
    """One line for a value."""
    return value._sentence() if isinstance(value, Shown) else str(value).partition("\n")[0]


def plain(value: Any) -> Any:
    """JSON-able data: NaN and the infinities, which JSON lacks, become texts, as does what has no plain form."""
    if isinstance(value, bool | int | str | None):
        return str(value) if isinstance(value, enum.Enum | Text) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, Shown) and not isinstance(value, Records):
        return plain(value.to_dict())
    if isinstance(value, Set):
        return sorted(map(plain, value), key=str)
    if isinstance(value, Sequence):
        return [plain(v) for v in value]
    return {f.name: plain(getattr(value, f.name)) for f in _fields(value) if f.repr} or str(value)


def _fields(value: Any) -> Iterator[dataclasses.Field[Any]]:
    yield from dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()


def _is_plain(value: Any) -> bool:
    """Whether a column may tell it: a text, a number, a time, a few of them, or a result that is a sentence."""
    if isinstance(value, Sequence | Set) and not isinstance(value, str | Records):
        return all(isinstance(v, str | int | float | Shown) for v in value)
    return not callable(value) and (isinstance(value, str | int | float | Path | Shown | Mapping) or value is None)


def _kind(cls: type) -> str:
    """ "SiteErrors" is "site errors"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", cls.__name__).lower().strip("_ ")


def _plural(kind: str, count: int) -> str:
    return kind if count == 1 or kind.endswith("s") else f"{kind}s"
