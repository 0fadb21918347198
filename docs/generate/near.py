"""The near misses of the tests as programs: each is declined with one rejection code, and some have an edit that makes them match."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .markdown import ROOT
from .programs import Program as Program
from .programs import arrays, as_function, helpers, module_of, run, whole

TESTS = ROOT / "tests"


@dataclass(frozen=True)
class NearMiss:
    """A near miss of the corpus.

    Attributes:
      entry: as in tests/soundness/near.
      call: where it is made in its module, for the text of its program.
      module: that module.
    """

    entry: Any
    call: ast.Call
    module: ast.Module

    @property
    def rank(self) -> tuple[bool, int, bool, int]:
        """What makes an example worse: arrays without entries, helpers, no edit that was tried, many characters."""
        text = "\n".join(self.lines(self._wrong))
        edit = self.entry.repaired
        plain_edit = edit is not None and not inspect.getfullargspec(edit).varargs
        return any(0 in a.shape for a in self.entry.args), text.count("def "), not plain_edit, len(text)

    @property
    def _wrong(self) -> ast.expr:
        return self._argument(2, "fn")

    @property
    def _right(self) -> ast.expr:
        return self._argument(-1, "repaired")

    def _argument(self, position: int, name: str) -> ast.expr:
        """The text of an argument of the call that makes the entry."""
        given = {keyword.arg: keyword.value for keyword in self.call.keywords}
        return given[name] if name in given else self.call.args[position]

    def lines(self, node: ast.expr) -> list[str]:
        """The definitions of a program; `program` is the function."""
        if isinstance(node, ast.Name):
            (node_of,) = [s for s in self.module.body if isinstance(s, ast.FunctionDef) and s.name == node.id]
            return [*helpers(node_of, self.module), "", *as_function(node_of, "program", self.module)]
        return [*helpers(node, self.module), "", *as_function(node, "program", self.module)]

    def _program(self, node: ast.expr, fn: Any) -> str:
        names = list(inspect.signature(fn).parameters)
        if any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(fn).parameters.values()):
            names = [f"a{i}" for i in range(len(self.entry.args))]
        asked = f'fl.find(program, {", ".join(names)}, passes="{self.entry.pass_name}")'
        if self.entry.code == "overlap":
            asked = f"fl.find(program, {', '.join(names)})"
        return whole([*self.lines(node)], [*arrays(names, self.entry.args), f"print({asked})"])

    @functools.cached_property
    def declined(self) -> Program:
        """The program as it is declined."""
        return run(self._program(self._wrong, self.entry.fn))

    @functools.cached_property
    def repaired(self) -> Program | None:
        """The program with the edit; None where the corpus has none."""
        if self.entry.repaired is None:
            return None
        return run(self._program(self._right, self.entry.repaired))


@functools.cache
def near_misses() -> tuple[NearMiss, ...]:
    """Those entries of the corpus that have a code and whose call spells out the program."""
    return tuple(found for module in _modules() for found in _of_module(module))


def _of_module(module: Any) -> Iterator[NearMiss]:
    tree = module_of(Path(module.__file__))
    calls = {names: call for call in ast.walk(tree) if isinstance(call, ast.Call) and (names := _made_by(call))}
    for entry in module.CORPUS:
        if entry.code and (entry.name, entry.code) in calls:
            yield NearMiss(entry, calls[entry.name, entry.code], tree)


def _made_by(call: ast.Call) -> tuple[str, str] | None:
    """Name and code of the entry that a call of `near` with both and a program makes."""
    if not isinstance(call.func, ast.Name) or call.func.id != "near" or len(call.args) < 3:
        return None
    name, code = call.args[:2]
    if isinstance(name, ast.Constant) and isinstance(code, ast.Constant) and code.value is not None:
        return str(name.value), str(code.value)
    return None


def _modules() -> list[Any]:
    """The modules of the corpus, one for each pass."""
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    from soundness import near_misses as corpus  # pyright: ignore[reportMissingImports] - in tests/

    return [module for name, module in vars(corpus).items() if name.startswith("near_") and hasattr(module, "CORPUS")]
