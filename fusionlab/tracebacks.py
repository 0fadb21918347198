"""Shortened tracebacks for users: their own lines and the error, without FusionLab's lines in between.

JAX does the same with its own; `JAX_TRACEBACK_FILTERING=off` (or `jax.config.update("jax_traceback_filtering", "off")`) shows all of both.
An internal error of FusionLab keeps its lines, so that it can be reported.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import jax

from .errors import FusionLabError

_HERE = os.path.join(Path(__file__).parent, "")
_MODELS = os.path.join(_HERE, "models", "")  # functions as a user writes them
_JAX = tuple(os.path.join(Path(module.__file__ or "").parent, "") for module in (jax, sys.modules["jaxlib"]))
_PYTHON = os.path.join(Path(inspect.__file__).parent, "")
# What calls functions with the arguments that the user gave for them.
_CALLING = (__file__, os.path.join(_HERE, "graph", "calls", ""), os.path.join(_HERE, "graph", "program", "trace.py"))
_OF_ARGUMENTS = re.compile(r"\S+\(\) (missing|takes|got) ")
_BETWEEN = (contextlib.__file__, functools.__file__)  # decorators and context managers

_Class = TypeVar("_Class", bound=type)
_Function = TypeVar("_Function", bound=Callable[..., Any])


class _OwnLinesHidden:
    """Around a public function: as a decorator, or as a context in one that looks at its caller's frame."""

    def __call__(self, fn: _Function) -> _Function:
        @functools.wraps(fn)
        def public(*args: Any, **kwargs: Any) -> Any:
            with self:
                return fn(*args, **kwargs)

        return public  # pyright: ignore[reportReturnType]

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        # The frame behind this is the public function (or the decorator around it); the one behind that called it, if any did.
        caller = sys._getframe(1).f_back
        if isinstance(error, Exception) and (caller is None or not _is_own(caller.f_code.co_filename)):
            _shorten(error)


own_lines_hidden = _OwnLinesHidden()
_SPECIAL = ("__init__", "__call__", "__getitem__", "__setitem__", "__delitem__")


def errors_for_users(cls: _Class) -> _Class:
    """Class decorator: public methods raise errors shortened by `own_lines_hidden`."""
    for name, value in list(vars(cls).items()):
        if name.startswith("_") and name not in _SPECIAL:
            continue
        if inspect.isfunction(value):
            setattr(cls, name, own_lines_hidden(value))
        elif isinstance(value, classmethod):
            setattr(cls, name, classmethod(own_lines_hidden(value.__func__)))
    return cls


def _shorten(error: BaseException) -> None:
    """Takes the lines of FusionLab and JAX out of an error and of those it came from."""
    if jax.config.jax_traceback_filtering == "off":  # pyright: ignore[reportAttributeAccessIssue]
        return
    if _is_mistake(error):
        return
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if error.__traceback__ is not None and not any(_is_own(_file(e)) for e in _entries(error.__traceback__)):
            break  # another one, which was being handled when the call began
        error.__traceback__ = _without_own(error.__traceback__)
        error = error.__cause__ or error.__context__  # pyright: ignore[reportAssignmentType]


def _is_mistake(error: BaseException) -> bool:
    """Whether FusionLab itself failed: its own line, or a library that it called, raised what it does not raise on purpose."""
    if isinstance(error, FusionLabError) or type(error).__module__.startswith("fusionlab."):
        return False
    files = [f for f in map(_file, _entries(error.__traceback__)) if not _is_librarys(f)]
    # A public function is called with what the user gave it, which may be no arguments of it; so is the user's own function.
    if (
        isinstance(error, TypeError)
        and _OF_ARGUMENTS.match(str(error))
        and files[-1:]
        and files[-1].startswith(_CALLING)
    ):
        return False
    return bool(files) and _is_own(files[-1])


def _is_librarys(file: str) -> bool:
    return _is_pythons(file) or file.startswith(_JAX) or ("site-packages" in file and not _is_own(file))


def _is_own(file: str) -> bool:
    return file.startswith(_HERE) and not file.startswith(_MODELS)


def _is_pythons(file: str) -> bool:
    return file.startswith((_PYTHON, "<frozen ")) and "site-packages" not in file


def _file(entry: TracebackType) -> str:
    return entry.tb_frame.f_code.co_filename


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _without_own(traceback: TracebackType | None) -> TracebackType | None:
    """The same without entries of FusionLab's, of JAX's, and of those between them; None if only Python's library is left."""
    kept = [
        e for e in _entries(traceback) if not (_is_own(_file(e)) or _file(e).startswith(_JAX) or _file(e) in _BETWEEN)
    ]
    if all(_is_pythons(_file(entry)) for entry in kept):
        return None
    short = None
    for entry in reversed(kept):
        short = TracebackType(short, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return short
