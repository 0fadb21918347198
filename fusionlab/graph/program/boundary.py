"""The one boundary of a search: whatever fails inside of it is told of the place that it failed at, and the rest is searched on.

A search interprets, traces and evaluates programs that nobody foresaw. A mistake of FusionLab's own there costs the site, never the call:
it comes out as a `Fault`, of which the caller makes a rejection. No other handler in `graph` and `fusers` catches every error. Where the
environment variable FUSIONLAB_RAISE is set, as the tests do, errors come through as they are, so that none hides.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import jax

from .scopes import Source, kind_of_file
from .trace import error_text

VARIABLE = "FUSIONLAB_RAISE"
_OUT_OF_MEMORY = (
    "RESOURCE_EXHAUSTED"  # XLA's word for a device without memory: no mistake of ours, nor one of the site's
)
_PACKAGE = Path(__file__).parents[2]

T = TypeVar("T")


@dataclass(frozen=True)
class Fault:
    """An error that a search went on after.

    Attributes:
      text: its type and message, on one line.
      origin: the innermost line of FusionLab's or of the user's that it passed through: "fusers/layer_axes.py:237 in arranged".
    """

    text: str
    origin: str

    def __str__(self) -> str:
        return f"the search failed on it at {self.origin}: {self.text} It is left as it is; set {VARIABLE}=1 to raise the error instead"


def guarded(make: Callable[[], T], instead: Callable[[Fault], T]) -> T:
    """What `make` gives, or what `instead` makes of the error that it raised.

    Raises:
      MemoryError, jax.errors.JaxRuntimeError: out of memory, of this machine or of a device. With FUSIONLAB_RAISE whatever `make` raised.
    """
    try:
        return make()
    except Exception as error:
        if _comes_through(error):
            raise
        fault = Fault(error_text(error), origin_of(error))
    return instead(fault)


def raises() -> bool:
    """Whether the environment asks for errors as they are."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def _comes_through(error: Exception) -> bool:
    exhausted = isinstance(error, jax.errors.JaxRuntimeError) and _OUT_OF_MEMORY in str(error)
    return exhausted or isinstance(error, MemoryError) or raises()


def origin_of(error: Exception) -> str:
    """The innermost line of FusionLab's or of the user's that an error passed through, as `place_text` writes it."""
    frames = [Source(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    known = [f for f in frames if kind_of_file(f.file) in ("own", "user")]
    last = known[-1] if known else frames[-1]
    return place_text(last.file, last.line, last.function)


def place_text(file: str, line: int, function: str) -> str:
    """ "fusers/engine/site.py:203 in near_miss": a line of this package by its path in it, any other by its file's name."""
    path = Path(file)
    place = path.relative_to(_PACKAGE).as_posix() if path.is_relative_to(_PACKAGE) else path.name
    return f"{place}:{line} in {function}"
