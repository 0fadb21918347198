"""The error boundary of a search: a failure inside it is recorded for its place, and the search continues.

A search interprets, traces and evaluates arbitrary programs. A bug in FusionLab there costs the site, never the call:
it becomes a `Fault`, from which the caller makes a rejection. No other handler in `graph` and `fusers` catches every error. If the
environment variable FUSIONLAB_RAISE is set, as in the tests, errors propagate unchanged, so that none is hidden.
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
    """An error after which a search continued.

    Attributes:
      text: its type and message, on one line.
      origin: the innermost line of FusionLab or of the user's code that it passed through: "fusers/layer_axes.py:237 in arranged".
    """

    text: str
    origin: str

    def __str__(self) -> str:
        return f"the search failed on it at {self.origin}: {self.text} It is left as it is; set {VARIABLE}=1 to raise the error instead"


def guarded(make: Callable[[], T], instead: Callable[[Fault], T]) -> T:
    """The result of `make`, or that of `instead` for the error that `make` raised.

    Raises:
      MemoryError, jax.errors.JaxRuntimeError: this machine or a device is out of memory. With FUSIONLAB_RAISE, any error of `make`.
    """
    try:
        return make()
    except Exception as error:
        if _comes_through(error):
            raise
        fault = Fault(error_text(error), origin_of(error))
    return instead(fault)


def raises() -> bool:
    """Whether the environment requests that errors propagate."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def _comes_through(error: Exception) -> bool:
    exhausted = isinstance(error, jax.errors.JaxRuntimeError) and _OUT_OF_MEMORY in str(error)
    return exhausted or isinstance(error, MemoryError) or raises()


def origin_of(error: Exception) -> str:
    """The innermost line of FusionLab or of the user's code that an error passed through, as written by `place_text`."""
    frames = [Source(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    known = [f for f in frames if kind_of_file(f.file) in ("own", "user")]
    last = known[-1] if known else frames[-1]
    return place_text(last.file, last.line, last.function)


def place_text(file: str, line: int, function: str) -> str:
    """ "fusers/engine/site.py:203 in near_miss": a line of this package by its path in it, any other by its file's name."""
    path = Path(file)
    place = path.relative_to(_PACKAGE).as_posix() if path.is_relative_to(_PACKAGE) else path.name
    return f"{place}:{line} in {function}"
