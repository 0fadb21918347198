"""Restores the values that a function closes over, after a run of which its test does not know."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

_VALUES = (int, float, complex, str, bytes, type(None))


@contextlib.contextmanager
def put_back(fn: Callable) -> Iterator[None]:
    """Restores the numbers, strings, lists, dictionaries and sets that `fn`, or a function in its closure, closes over."""
    cells = list(_cells(fn))
    kept = [(cell, cell.cell_contents, _content(cell.cell_contents)) for cell in cells]
    try:
        yield
    finally:
        for cell, value, content in kept:
            _restore(cell, value, content)


def _cells(fn: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """The filled cells of a function and of the functions in them, once each."""
    seen = set() if seen is None else seen
    fn = inspect.unwrap(fn) if callable(fn) else fn
    for cell in getattr(fn, "__closure__", None) or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if id(cell) not in seen:
            seen.add(id(cell))
            yield cell
            if inspect.isfunction(value):
                yield from _cells(value, seen)


def _content(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict, set) else None


def _restore(cell: Any, value: Any, content: Any) -> None:
    if isinstance(value, _VALUES):
        cell.cell_contents = value
    elif type(value) is list:
        value[:] = content
    elif type(value) in (dict, set):
        value.clear()
        value.update(content)
