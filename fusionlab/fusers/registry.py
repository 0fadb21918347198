"""The registered passes: the built-in ones, then those that users register.

A built-in pass is listed in `PASSES` of a module in `passes/`: its place in the order of execution -> the pass.
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
    """Place in the order of execution -> pass, from every module of the passes' folders."""
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
    """Adds a pass: a `Pass`, or an object with the attributes that a pass needs.

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
    """A `Pass` from an object that has a pass's attributes but not its class; missing ones get their defaults."""
    parts = {part: getattr(written, part) for part in (*_PARTS, *_MAY_LACK) if hasattr(written, part)}
    own = {part: staticmethod(value) if callable(value) else value for part, value in parts.items()}
    return type(type(written).__name__, (Pass,), own)()


def remove_pass(name: str) -> None:
    """Removes a pass that `add_pass` added; functions already fused with it keep working.

    Raises:
      ArgumentError: it is built in. UnknownNameError: there is no pass of that name.
    """
    if name in _ADDED:
        del _ADDED[name]
    elif name in registry():
        raise ArgumentError(f"unregister: {name!r} is built in; exclude it with passes=[...] or skip={name!r}")
    else:
        raise unknown_name("pass", name, registry())


def implementations() -> Mapping[str, tuple[str, ...]]:
    """Op -> the names of its implementations, for every op."""
    ops = {**OPS, **{p.op: p.fused_op for p in registry().values()}}
    return {name: tuple(op.implementations) for name, op in ops.items()}
