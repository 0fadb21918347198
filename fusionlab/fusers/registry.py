"""The passes there are: the built-in ones, then those users register.

A built-in one is here by standing in `PASSES` of a module in `passes/`: place in the order in which all of them run -> pass.
"""

from __future__ import annotations

import operator
import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module

from ..errors import ArgumentError, unknown_name
from ..kernels import OPS
from ..kernels.op.op import Op
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


def registry() -> dict[str, Pass]:
    """Name -> pass, built-in ones first."""
    return BUILT_IN | _ADDED


def add_pass(pass_: Pass) -> None:
    """Adds a pass.

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
    _ADDED[pass_.name] = pass_


def remove_pass(name: str) -> None:
    """Takes away a pass that `add_pass` added; what was fused with it stays as it is.

    Raises:
      ArgumentError: it is built in. UnknownNameError: there is none of that name.
    """
    if name in _ADDED:
        del _ADDED[name]
    elif name in registry():
        raise ArgumentError(f"unregister: {name!r} is built in; leave it out with passes=[...] or skip={name!r}")
    else:
        raise unknown_name("pass", name, registry())


def op_of(pass_: Pass) -> Op:
    """The op that a pass rewrites to: one of this package's, by name, or the pass's own."""
    return getattr(pass_, "fused_op", None) or OPS[pass_.op]


def implementations() -> Mapping[str, tuple[str, ...]]:
    """Op -> the names of its implementations: every op there is."""
    ops = {**OPS, **{p.op: op_of(p) for p in registry().values()}}
    return {name: tuple(op.implementations) for name, op in ops.items()}
