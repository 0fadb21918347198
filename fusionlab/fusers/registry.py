"""The passes there are: the built-in ones, then those users register.

A built-in one is here by standing in `PASSES` of a module in `passes/`: place in the order in which all of them run -> pass.
"""

from __future__ import annotations

import operator
import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from ..errors import ArgumentError, unknown_name
from ..kernels import OPS
from . import passes
from .engine.base import Pass


def _built_in() -> Iterator[tuple[int, Pass]]:
    """Place among all passes -> pass, of each module of the passes' folders that has some."""
    for module in pkgutil.walk_packages(passes.__path__, f"{passes.__name__}."):
        yield from getattr(import_module(module.name), "PASSES", {}).items()


BUILT_IN: dict[str, Pass] = {p.name: p for _, p in sorted(_built_in(), key=operator.itemgetter(0))}
# The one place a user's pass is remembered: `fusionlab.register` is meant to be seen by every later search of the process.
_ADDED: dict[str, Pass] = {}
_PARTS = ("name", "op", "formula", "needs", "options", "sample", "search")
_MAY_LACK = (*Pass.__annotations__, "check", "fused_op")


def registry() -> dict[str, Pass]:
    """Name -> pass, built-in ones first."""
    return BUILT_IN | _ADDED


def add_pass(pass_: Any) -> None:
    """Adds a pass: a `Pass`, or an object with the attributes that one needs.

    Raises:
      ArgumentError: its name is taken, or it lacks an attribute of `fusionlab.fusers.Pass`.
    """
    missing = [part for part in _PARTS if not hasattr(pass_, part)]
    if missing:
        raise ArgumentError(
            f"register: {type(pass_).__name__} lacks {', '.join(missing)}; a pass needs {', '.join(_PARTS)}"
        )
    if pass_.name in registry():
        raise ArgumentError(f"register: a pass named {pass_.name!r} exists already; choose another name")
    _ADDED[pass_.name] = pass_ if isinstance(pass_, Pass) else _as_written(pass_)


def _as_written(written: Any) -> Pass:
    """A pass of an object that has the attributes of one without its class; what it lacks is as by default."""
    parts = {part: getattr(written, part) for part in (*_PARTS, *_MAY_LACK) if hasattr(written, part)}
    own = {part: staticmethod(value) if callable(value) else value for part, value in parts.items()}
    return type(type(written).__name__, (Pass,), own)()


def remove_pass(name: str) -> None:
    """Takes away a pass that `add_pass` added; what was fused with it stays as it is.

    Raises:
      ArgumentError: it is built in. UnknownNameError: there is none of that name.
    """
    if name in _ADDED:
        del _ADDED[name]
    elif name in registry():
        raise ArgumentError(f"unregister: {name!r} is built in; exclude it with passes=[...] or skip={name!r}")
    else:
        raise unknown_name("pass", name, registry())


def implementations() -> Mapping[str, tuple[str, ...]]:
    """Op -> the names of its implementations: every op there is."""
    ops = {**OPS, **{p.op: p.fused_op for p in registry().values()}}
    return {name: tuple(op.implementations) for name, op in ops.items()}
