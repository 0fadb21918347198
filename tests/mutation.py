"""Thirty small mistakes, planted one at a time, and which test notices each.

    python -m tests.mutation list                                # the mutants that the seed draws: six a room
    python -m tests.mutation show 7                              # the diff of one
    python -m tests.mutation apply 7 --into DIR                  # a copy of the tree with it
    python -m tests.mutation run 7 9 --out results.json          # runs the suite against some, or against all
    python -m tests.mutation hits -m "" --out hits.json          # which tests execute the mutated places
    python -m tests.mutation run 9 --tier full --hits hits.json --out full.json
    python -m tests.mutation table results.json full.json        # a Markdown table; a later file adds to an earlier one

A mutant is one change of the text of one file; nothing else of the file changes. Suites run in a copy of the working tree, which
comes first on the path of every process; `run 0` takes the copy without a mutant. This module is a plugin of pytest as well
(`-p tests.mutation`), which writes down what the tests of such a run say.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import difflib
import gc
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = "fusionlab"
SEED = 1
ROOMS = ("graph", "kernels", "fusers", "evidence", "viz")
KINDS = ("coefficient", "comparison", "dropped operand", "swapped axis", "unhandled message")
# The folders of tests nearest to a room, asked in this order; all others follow together.
NEAREST = {
    "graph": ("graph", "soundness", "fusers", "kernels", "acceptance"),
    "kernels": ("kernels", "acceptance", "fusers", "evidence"),
    "fusers": ("fusers", "soundness", "acceptance", "recall", "models"),
    "evidence": ("evidence", "acceptance", "testing", "viz"),
    "viz": ("viz", "testing", "robustness", "browser"),
}
REPORTS = "FUSIONLAB_MUTATION_REPORTS"  # names the file that the plugin adds to
PROBES = "FUSIONLAB_PROBE_DIR"  # names the folder that probes write to
ALL, UNKNOWN = "all", "unknown"

Chain = tuple[ast.AST, Any]  # a node and the chain of what it stands in, None at the top
Edit = tuple[int, int, bytes]  # where it begins and ends, in bytes, and what stands there afterwards


# -- what a file holds ------------------------------------------------------------------------------------------------


class Source:
    """A file of the package, in bytes: ast counts columns in bytes of UTF-8."""

    def __init__(self, root: Path, path: Path):
        self.path = path.relative_to(root).as_posix()
        self.data = path.read_bytes()
        self.tree = ast.parse(self.data)
        self._lines = [0, *(m.end() for m in re.finditer(rb"\r\n|\r|\n", self.data))]

    def start(self, node: Any) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def end(self, node: Any) -> int:
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def span(self, node: Any) -> tuple[int, int]:
        return self.start(node), self.end(node)

    def line_start(self, line: int) -> int:
        return self._lines[line - 1]

    def text(self, node: Any) -> bytes:
        return self.data[slice(*self.span(node))]

    def find(self, what: bytes, first: Any, second: Any) -> int | None:
        """Where it stands between two nodes; None where it does not."""
        found = self.data.find(what, self.end(first), self.start(second))
        return None if found < 0 else found


def _walk(tree: ast.AST) -> Iterator[Chain]:
    """Every node that may be mutated, in the order of the text, with what it stands in."""
    stack: list[Chain] = [(tree, None)]
    while stack:
        chain = stack.pop()
        yield chain
        stack += [(child, chain) for child in reversed(list(_children(chain[0])))]


# Annotations do nothing; how large a cache is, which a decorator says, no test should notice; the rest are no places of their own.
_PASSED_OVER = {"annotation", "returns", "decorator_list", "ctx", "op", "ops"}


def _children(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.JoinedStr):  # before Python 3.12, nodes in it do not say where they stand
        return
    if isinstance(node, ast.If) and _last_name(node.test) == "TYPE_CHECKING":
        yield from node.orelse
        return
    for name in node._fields:
        if name in _PASSED_OVER:
            continue
        value = getattr(node, name)
        if isinstance(value, list):
            yield from (v for v in value if isinstance(v, ast.AST))
        elif isinstance(value, ast.AST):
            yield value


def _ancestors(chain: Chain | None) -> Iterator[ast.AST]:
    """A node and what it stands in, from the inside."""
    while chain is not None:
        yield chain[0]
        chain = chain[1]


def _last_name(node: ast.AST) -> str:
    """`shape` of `x.aval.shape`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


# -- the five kinds ---------------------------------------------------------------------------------------------------

_AXIS_NAMES = re.compile(r"(^|_)(axis|axes|dims?|dimensions?|dimension_numbers|perm|permutation)$")
_SHAPES = re.compile(r"(^|_)(shape|dims|dimensions|axes|sizes|strides|perm|permutation)$")
_AXIS_CALLS = {"swapaxes", "moveaxis", "expand_dims", "transpose", "squeeze"}
_STYLE = re.compile(r"#[0-9a-f]{3,8}\b|\dpx|font|fill|stroke|colou?r", re.I)
_LONG = 20  # characters of a text


def _numbers(source: Source, chain: Chain) -> Iterator[tuple[str, Edit]]:
    """A coefficient, or the number of an axis."""
    node, up = chain
    assert isinstance(node, ast.Constant)
    parent, value = up[0], node.value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if isinstance(value, int) and _is_axis(chain):
        negative = isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.USub)
        axis = _other_axis(-value if negative else value)
        yield "swapped axis", (*source.span(parent if negative else node), str(axis).encode())
    elif not (_is_limit(parent, value) or _is_styling(source, chain)):
        yield "coefficient", (*source.span(node), _other_number(value).encode())


def _is_limit(parent: ast.AST, value: float) -> bool:
    """Whether a text is cut there for the eye."""
    return isinstance(parent, ast.Slice) and value >= _LONG


def _other_number(value: float) -> str:
    if isinstance(value, int):
        return str(value + 1 if value <= 16 else value // 2)
    if value in (0.0, 1.0):
        return repr(value + 1.0)
    text = f"{value * 100 if abs(value) <= 1e-2 else value / 2:.6g}"
    return text if set(text) & set(".en") else f"{text}.0"


def _other_axis(axis: int) -> int:
    """Its neighbour: 0 and 1, -1 and -2 change places."""
    return {0: 1, -1: -2}.get(axis, axis - 1 if axis > 0 else axis + 1)


def _is_axis(chain: Chain) -> bool:
    node, up = chain
    while isinstance(up[0], ast.UnaryOp | ast.Tuple | ast.List):
        node, up = up
    match up[0]:
        case ast.keyword(arg=str(name)):
            return bool(_AXIS_NAMES.search(name))
        case ast.Assign(targets=[ast.Name(id=name)]):
            return bool(_AXIS_NAMES.search(name))
        case ast.Subscript(value=value, slice=index):
            return index is node and not isinstance(index, ast.Tuple) and bool(_SHAPES.search(_last_name(value)))
        case ast.Call(func=func, args=args):
            return _last_name(func) in _AXIS_CALLS and any(a is node for a in args)
    return False


def _is_styling(source: Source, chain: Chain) -> bool:
    """Whether a number is a width of what is printed, or stands in a constant of the drawn page that names colours and the like."""
    nodes = list(_ancestors(chain))
    if any(isinstance(n, ast.FunctionDef) and n.name in ("__repr__", "__str__") for n in nodes):
        return True
    statement = nodes[-2]
    if not source.path.startswith(f"{PACKAGE}/viz/") or not isinstance(statement, ast.Assign | ast.AnnAssign):
        return False
    texts = (n.value for n in ast.walk(statement) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return any(map(_STYLE.search, texts))


# What stands in the text for an operator, and instead of it.
_COMPARISONS: Mapping[type[ast.cmpop], tuple[bytes, bytes]] = {
    ast.Lt: (rb"<", b"<="),
    ast.LtE: (rb"<=", b"<"),
    ast.Gt: (rb">", b">="),
    ast.GtE: (rb">=", b">"),
    ast.Eq: (rb"==", b"!="),
    ast.NotEq: (rb"!=", b"=="),
    ast.Is: (rb"\bis\b", b"is not"),
    ast.IsNot: (rb"\bis\s+not\b", b"is"),
    ast.In: (rb"\bin\b", b"not in"),
    ast.NotIn: (rb"\bnot\s+in\b", b"in"),
}


def _comparisons(source: Source, chain: Chain) -> Iterator[tuple[str, Edit]]:
    node = chain[0]
    assert isinstance(node, ast.Compare)
    for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
        pattern, other = _COMPARISONS[type(operator)]
        found = re.compile(pattern).search(source.data, source.end(left), source.start(right))
        if found:
            yield "comparison", (*found.span(), other)


_OPERATORS: Mapping[type[ast.operator], bytes] = {
    ast.Add: b"+",
    ast.Sub: b"-",
    ast.Mult: b"*",
    ast.MatMult: b"@",
    ast.Div: b"/",
    ast.FloorDiv: b"//",
    ast.Mod: b"%",
    ast.Pow: b"**",
    ast.LShift: b"<<",
    ast.RShift: b">>",
    ast.BitAnd: b"&",
    ast.BitOr: b"|",
    ast.BitXor: b"^",
}


def _operands(source: Source, chain: Chain) -> Iterator[tuple[str, Edit]]:
    """`a + b` becomes `a`."""
    node, up = chain
    assert isinstance(node, ast.BinOp)
    at_the_top = not any(isinstance(n, ast.FunctionDef | ast.Lambda) for n in _ancestors(up))
    if isinstance(node.op, ast.BitOr) and at_the_top:  # the name of a type
        return
    found = source.find(_OPERATORS[type(node.op)], node.left, node.right)
    if found is not None:
        yield "dropped operand", (_without_space(source, found), source.end(node), b"")


def _without_space(source: Source, end: int) -> int:
    return len(source.data[:end].rstrip())


def _conditions(source: Source, chain: Chain) -> Iterator[tuple[str, Edit]]:
    """`a and b` becomes `a`, and becomes `b`."""
    node = chain[0]
    assert isinstance(node, ast.BoolOp)
    word = b"and" if isinstance(node.op, ast.And) else b"or"
    places = [source.find(word, a, b) for a, b in pairwise(node.values)]
    if None in places:
        return
    operators = [p for p in places if p is not None]
    after = operators[0] + len(word)
    yield (
        "dropped operand",
        (source.start(node), after + len(source.data[after:]) - len(source.data[after:].lstrip()), b""),
    )
    for begin, end in zip(operators, [*operators[1:], None], strict=True):
        last = source.end(node) if end is None else _without_space(source, end)
        yield "dropped operand", (_without_space(source, begin), last, b"")


# Calls that do the same with their arguments in either order, or that no program survives.
_ORDERLESS = {
    "max",
    "min",
    "maximum",
    "minimum",
    "gcd",
    "lcm",
    "isinstance",
    "issubclass",
    "getattr",
    "hasattr",
    "setattr",
}


def _calls(source: Source, chain: Chain) -> Iterator[tuple[str, Edit]]:
    """The last element of a list in a call is dropped; the first two arguments change places."""
    node = chain[0]
    assert isinstance(node, ast.Call)
    for a in (*node.args, *(k.value for k in node.keywords)):
        if isinstance(a, ast.Tuple | ast.List | ast.Set) and len(a.elts) > 1:
            comma = source.find(b",", *a.elts[-2:])
            if comma is not None:
                yield "dropped operand", (comma + 1, source.end(a) - 1, b"")
    if len(node.args) > 1 and _last_name(node.func) not in _ORDERLESS:
        first, second = node.args[:2]
        texts = source.text(first), source.text(second)
        if texts[0] != texts[1] and not any(isinstance(a, ast.Starred) for a in (first, second)):
            between = source.data[source.end(first) : source.start(second)]
            yield "swapped arguments", (source.start(first), source.end(second), texts[1] + between + texts[0])


def _raises(source: Source, chain: Chain) -> Iterator[tuple[str, Edit]]:
    node = chain[0]
    assert isinstance(node, ast.Raise)
    kind = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    if kind is not None and _last_name(kind) != "NotImplementedError":
        yield "unhandled message", (*source.span(node), b"pass")


_REFUSALS = re.compile(r"reject|declin|refus", re.I)


def _guards(source: Source, chain: Chain) -> Iterator[tuple[str, Edit]]:
    """A branch that refuses, or that handles one message, is never taken."""
    node = chain[0]
    assert isinstance(node, ast.If)
    last = node.body[-1]
    alone = isinstance(last, ast.Raise) and len(node.body) == 1 and not node.orelse  # then its `raise` is the mutant
    if not alone and (isinstance(last, ast.Raise) or _tells(last) or _asks_for_a_name(node.test)):
        yield "unhandled message", (*source.span(node.test), b"False")


def _tells(statement: ast.stmt) -> bool:
    """Whether it returns or yields a refusal, or a sentence."""
    value = statement.value if isinstance(statement, ast.Return | ast.Expr) else None
    if isinstance(statement, ast.Expr):
        value = value.value if isinstance(value, ast.Yield) else None
    if value is None:
        return False
    return any(_is_text(n) or _REFUSALS.search(_last_name(n)) for n in ast.walk(value))


def _asks_for_a_name(test: ast.expr) -> bool:
    """`kind == "..."`, `kind in ("...", "...")`."""
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq | ast.In):
        return False
    right = test.comparators[0]
    return any(map(_is_text, right.elts if isinstance(right, ast.Tuple | ast.Set) else [right]))


def _cases(source: Source, chain: Chain) -> Iterator[tuple[str, Edit]]:
    node = chain[0]
    assert isinstance(node, ast.match_case)
    if node.guard is None and any(isinstance(n, ast.MatchValue) and _is_text(n.value) for n in ast.walk(node.pattern)):
        end = source.end(node.pattern)
        yield "unhandled message", (end, end, b" if False")


def _handlers(source: Source, chain: Chain) -> Iterator[tuple[str, Edit]]:
    """One entry of a table of functions by name is dropped."""
    node, up = chain
    assert isinstance(node, ast.Dict)
    if len(node.keys) < 2 or not all(k is not None and _is_text(k) for k in node.keys):
        return
    in_a_function = any(isinstance(n, ast.FunctionDef) for n in _ancestors(up))
    # Anything else that a function puts in is data.
    kinds = (ast.Lambda,) if in_a_function else (ast.Lambda, ast.Attribute, ast.Name)
    if not all(isinstance(v, kinds) for v in node.values):
        return
    for key, following in pairwise(node.keys):
        yield "unhandled message", (source.start(key), source.start(following), b"")
    yield "unhandled message", (source.end(node.values[-2]), source.end(node.values[-1]), b"")


_FINDERS: Mapping[type[ast.AST], Any] = {
    ast.Constant: _numbers,
    ast.Compare: _comparisons,
    ast.BinOp: _operands,
    ast.BoolOp: _conditions,
    ast.Call: _calls,
    ast.Raise: _raises,
    ast.If: _guards,
    ast.match_case: _cases,
    ast.Dict: _handlers,
}


# -- the draw ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Site:
    """A place that can be mutated, and how."""

    room: str
    kind: str
    source: Source
    chain: Chain
    edit: Edit

    @property
    def function(self) -> str:
        """The qualified name of the function it stands in."""
        named = (
            n for n in _ancestors(self.chain) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        )
        return ".".join(reversed([n.name for n in named])) or "<module>"

    @property
    def line(self) -> int:
        return self.source.data.count(b"\n", 0, self.edit[0]) + 1

    def mutated(self) -> bytes:
        """The whole file with the mistake in it."""
        start, end, new = self.edit
        return self.source.data[:start] + new + self.source.data[end:]

    def compiles(self) -> bool:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                compile(self.mutated(), self.source.path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            return False
        return True

    def excerpts(self, around: int = 30, most: int = 110) -> tuple[str, str]:
        """What stands there before and after, with some of the line around it."""
        data, (start, end, new) = self.source.data, self.edit
        left = data[data.rfind(b"\n", 0, start) + 1 : start].decode().lstrip()
        right = data[end:].partition(b"\n")[0].decode().rstrip()
        left = left if len(left) <= around else f"…{left[-around:]}"
        right = right if len(right) <= around else f"{right[:around]}…"
        texts = (" ".join(f"{left}{middle.decode()}{right}".split()) for middle in (data[start:end], new))
        before, after = (t if len(t) <= most else f"{t[: most - 30]} … {t[-25:]}" for t in texts)
        return before, after


@dataclass(frozen=True, eq=False)
class Mutant:
    """One of the thirty."""

    number: int
    site: Site

    def to_dict(self) -> dict[str, Any]:
        """How it is told: not by a line alone, since files move."""
        before, after = self.site.excerpts()
        return {
            "room": self.site.room,
            "file": self.site.source.path,
            "function": self.site.function,
            "line": self.site.line,
            "kind": self.site.kind,
            "before": before,
            "after": after,
        }


Pool = Mapping[tuple[str, str], Sequence[Site]]
_FEW = 6  # sites of an axis in a room: with fewer, calls whose arguments change places are drawn from as well


def sites_of(root: Path) -> Pool:
    """All sites of each room and kind, in the order of the files and of their text."""
    pool: dict[tuple[str, str], list[Site]] = {(room, kind): [] for room in ROOMS for kind in KINDS}
    with _no_collection():
        for room in ROOMS:
            swaps = []
            for path in sorted((root / PACKAGE / room).rglob("*.py")):
                for site in _sites_in(room, Source(root, path)):
                    (swaps if site.kind == "swapped arguments" else pool[room, site.kind]).append(site)
            axes = pool[room, "swapped axis"]
            axes += [dataclasses.replace(s, kind="swapped axis") for s in swaps] if len(axes) < _FEW else []
    return pool


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Trees of a whole package make the garbage collector go round for longer than parsing takes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _sites_in(room: str, source: Source) -> Iterator[Site]:
    for chain in _walk(source.tree):
        finder = _FINDERS.get(type(chain[0]))
        if finder:
            for kind, edit in finder(source, chain):
                yield Site(room, kind, source, chain, edit)


def draw(root: Path = ROOT, seed: int = SEED, pool: Pool | None = None) -> list[Mutant]:
    """Six mutants a room: one of each kind, and one more of a kind that the seed draws."""
    pool = sites_of(root) if pool is None else pool
    drawn: list[Site] = []
    for room in ROOMS:
        once_more = random.Random(f"{seed} {room}").choice(KINDS)
        found = {kind: _drawn(pool[room, kind], f"{seed} {room} {kind}", 1 + (kind == once_more)) for kind in KINDS}
        drawn += [sites[0] for sites in found.values()] + found[once_more][1:]
    return [Mutant(number, site) for number, site in enumerate(drawn, 1)]


def _drawn(sites: Sequence[Site], seed: str, count: int) -> list[Site]:
    """So many of them; what would not compile is passed over."""
    order = random.Random(seed).sample(sites, len(sites))
    return [s for s, _ in zip((s for s in order if s.compiles()), range(count), strict=False)]


# -- copies of the tree -----------------------------------------------------------------------------------------------

OWN_TESTS = "tests/house/test_mutation.py"  # they judge the draw: a mutant changes that, which is no merit


def copy_tree(target: Path) -> None:
    """The files of the working tree that git tracks or would, without the tests of this module."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in sorted({n for n in names if n and n != OWN_TESTS}):
        if (ROOT / name).is_file():  # git lists one that was removed since
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def write(root: Path, path: str, data: bytes) -> None:
    """Puts a file in place and forgets what was compiled of it: within one second, Python takes that for the new one's."""
    file = root / path
    file.write_bytes(data)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


@contextlib.contextmanager
def _planted(root: Path, mutant: Mutant | None) -> Iterator[None]:
    if mutant is None:
        yield
        return
    source = mutant.site.source
    write(root, source.path, mutant.site.mutated())
    try:
        yield
    finally:
        write(root, source.path, source.data)


def environment(root: Path, scratch: Path) -> dict[str, str]:
    """The variables of a process that imports the copy's package and keeps all it writes beside the copy.

    What one mutant leaves no other finds, but for the tests' own cache: what lies in that is named by a hash of all it is made from.
    """
    # Where CI is set a skipped test fails; a slice, options and the test that runs now are those of who started this.
    dropped = ("CI", "FUSIONLAB_SLICE", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER")
    folders = {
        "TMPDIR": scratch / "t",
        "FUSIONLAB_ARTIFACTS": scratch / "artifacts",
        "FUSIONLAB_CACHE_DIR": scratch / "cache",
        "FUSIONLAB_TEST_CACHE": Path(os.environ.get("FUSIONLAB_TEST_CACHE") or root.parent / "shared").absolute(),
        "HYPOTHESIS_STORAGE_DIRECTORY": scratch / "hypothesis",
    }
    for folder in folders.values():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {name: str(folder) for name, folder in folders.items()} | {"PYTHONPATH": str(root)}


def check_imports(root: Path, env: Mapping[str, str]) -> None:
    """Ends this where a process in the copy, or in another folder, imports another package than the copy's."""
    command = [sys.executable, "-c", f"import {PACKAGE}; print({PACKAGE}.__file__)"]
    for folder in (root, Path(env["TMPDIR"])):
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True)
        if not _is_of(root, done.stdout.strip()):
            raise SystemExit(f"in {folder}, {PACKAGE} is imported from {done.stdout.strip()}, not from the copy {root}")


def _is_of(root: Path, file: str) -> bool:
    return Path(file).resolve().is_relative_to(root.resolve())


# -- the plugin of pytest ---------------------------------------------------------------------------------------------


class Reporter:
    """Adds a line of JSON to a file for each thing that a test, or its collection, says."""

    def __init__(self, path: str, works_for_another: bool):
        self._path, self._works_for_another = path, works_for_another
        self._has_told_package = False

    def _write(self, **told: Any) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")

    def _report(self, report: Any, when: str) -> None:
        if PACKAGE in sys.modules and not self._has_told_package:
            self._write(package=sys.modules[PACKAGE].__file__)
            self._has_told_package = True
        if self._works_for_another:  # whoever started this worker of pytest-xdist writes it
            return
        why = report.longreprtext.strip() if report.outcome == "failed" else ""
        errors = [line for line in why.splitlines() if line.startswith("E ")] or why.splitlines()[-1:]
        said = " ".join(errors[0].split())[:200] if errors else ""
        marks = {"devices": "devices" in getattr(report, "keywords", ())}
        self._write(id=report.nodeid, when=when, outcome=report.outcome, why=said, at=time.time(), **marks)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._report(report, report.when)

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome == "failed":
            self._report(report, "collect")


def pytest_configure(config: Any) -> None:
    if path := os.environ.get(REPORTS):
        config.pluginmanager.register(Reporter(path, hasattr(config, "workerinput")))


# -- one run of pytest ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What one pytest said.

    Attributes:
      status: how it ended; None where the time was over.
      reports: what the plugin wrote down, in order.
      tail: the end of what it printed.
    """

    status: int | None
    reports: Sequence[Mapping[str, Any]]
    tail: str

    @property
    def cases(self) -> int:
        """How many tests ran."""
        return len({r["id"] for r in self.reports if r.get("when") == "call" and r["outcome"] != "skipped"})

    def foreign(self, root: Path) -> list[str]:
        """The files of another package than the copy's that a process imported."""
        return [r["package"] for r in self.reports if "package" in r and not _is_of(root, r["package"])]


def run_pytest(
    root: Path, env: Mapping[str, str], scratch: Path, args: Sequence[str], limit: float | None = None
) -> Run:
    """Runs pytest in the copy, in a session of its own; what is left of that is ended."""
    reports, output = scratch / "reports.jsonl", scratch / "output.txt"
    reports.unlink(missing_ok=True)
    plugin = f"tests.{Path(__file__).stem}"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", plugin, "--no-header", "-q", *args]
    with output.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=root,
            env={**env, REPORTS: str(reports)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = _status(process, limit, reports if "-x" in args else None)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = reports.read_text("utf-8").splitlines() if reports.exists() else []
    tail = output.read_bytes()[-20_000:].decode(errors="replace")
    return Run(status, [json.loads(line) for line in lines], tail)


def _status(process: subprocess.Popen[bytes], limit: float | None, reports: Path | None) -> int | None:
    """How it ended, None where the time was over. With -x it is not waited for what workers of pytest-xdist still have to do."""
    begun = time.monotonic()
    while process.poll() is None:
        if limit is not None and time.monotonic() - begun > limit:
            return None
        if reports and reports.exists() and b'"outcome": "failed"' in reports.read_bytes():
            return 1
        time.sleep(0.5)
    return process.returncode


def verdict(run: Run) -> dict[str, Any]:
    """{"status": "survived"}, or how the mutant was noticed and by which test."""
    failed = next((r for r in run.reports if r.get("outcome") == "failed"), None)
    if failed is not None:
        by = f"collection error: {failed['id']}" if failed["when"] == "collect" else failed["id"]
        return {"status": "killed", "by": by, "why": failed["why"], "at": failed["at"]}
    if run.status is None:
        return {"status": "timeout"}
    if run.status in (0, 5):  # 5: no test was selected
        return {"status": "survived"}
    # Without a test's word for it, what went wrong is the mutant's doing only where the package has a part in it.
    if f"{PACKAGE}/" in run.tail:
        return {"status": "killed", "by": f"collection error: pytest ended with {run.status}", "why": run.tail[-300:]}
    return {"status": "error", "why": run.tail[-1000:]}


# -- run --------------------------------------------------------------------------------------------------------------

Step = tuple[str, Sequence[str]]  # what it is called, and what pytest is asked to run


def steps_of(root: Path, room: str | None, only: Sequence[str] = ()) -> list[Step]:
    """The room's own tests, those of the nearest folders one by one, then all others at once."""
    if only:
        return [(" ".join(only), only)]
    tests = root / "tests"
    folders = [f"tests/{name}" for name in NEAREST.get(room or "", ()) if (tests / name).is_dir()]
    entries = {p.relative_to(root).as_posix() for p in tests.iterdir() if _has_tests(p)}
    return [*((f, [f]) for f in folders if f in entries), ("the rest", sorted(entries - set(folders)))]


def _has_tests(path: Path) -> bool:
    if path.is_dir():
        return next(path.rglob("test_*.py"), None) is not None
    return path.match("test_*.py")


def narrowed(steps: Sequence[Step], hits: Sequence[str], by: str, folder: Path) -> list[Step]:
    """The same steps, of what can reach the mutant alone.

    By file, a file with one such test runs whole: its tests share fixtures and caches. By test, only those run; a file that stands in
    the hits as a whole does so still. Their names are handed over in a file, as there may be thousands.
    """
    left = sorted(set(hits))
    narrow = []
    for name, paths in steps:
        mine = [h for h in left if any(_is_below(h, p) for p in paths)]
        files = {h.partition("::")[0] for h in mine if by == "file" or "::" not in h}
        if files:
            narrow.append((name, sorted(files)))
        tests = [h for h in mine if h.partition("::")[0] not in files]
        if tests:
            listed = folder / f"tests-{len(narrow)}.txt"
            listed.write_text("\n".join(tests) + "\n", "utf-8")
            narrow.append((name, [f"@{listed}"]))
    return narrow


def _is_below(test: str, path: str) -> bool:
    file = test.partition("::")[0]
    return test == path or file == path or file.startswith(f"{path.rstrip('/')}/")


@dataclass(frozen=True)
class Asked:
    """What `run` was asked for."""

    tier: str = "default"
    only: Sequence[str] = ()
    limit: float | None = None
    hits: Mapping[str, Any] | None = None
    by: str = "file"


def run_mutant(root: Path, folder: Path, mutant: Mutant | None, asked: Asked) -> dict[str, Any]:
    """Runs the suite until a test fails, in the copy with this mutant; what is known of it then."""
    folder.mkdir()
    env = environment(root, folder)
    steps = steps_of(root, mutant.site.room if mutant else None, asked.only)
    hits = asked.hits["hits"][str(mutant.number)] if asked.hits and mutant else ALL
    if hits != ALL and UNKNOWN not in hits:
        steps = narrowed(steps, hits, asked.by, folder)
    options = ["-x", *(["-m", ""] if asked.tier == "full" else [])]
    begun = time.time()
    told: list[dict[str, Any]] = []
    result: dict[str, Any] = {"status": "survived"}
    with _planted(root, mutant):
        for name, paths in steps:
            left = None if asked.limit is None else max(1.0, asked.limit - (time.time() - begun))
            step_begun = time.time()
            run = run_pytest(root, env, folder, [*options, *paths], left)
            told.append({"tests": name, "cases": run.cases, "seconds": round(time.time() - step_begun, 1)})
            result = verdict(run)
            if foreign := run.foreign(root):
                result = {"status": "error", "why": f"{PACKAGE} was imported from {foreign[0]}"}
            if result["status"] != "survived":
                break
    result["seconds"] = round(result.pop("at", time.time()) - begun, 1)
    result |= {"cases": sum(t["cases"] for t in told), "steps": told}
    shutil.rmtree(folder, ignore_errors=True)
    return (mutant.to_dict() if mutant else {}) | result


def run_all(numbers: Sequence[int], seed: int, asked: Asked, out: Path) -> None:
    """Runs the suite against each of these mutants, and adds what is known to a file after each."""
    results = {"seed": seed, "tier": asked.tier, "results": {}}
    if out.exists():
        results = json.loads(out.read_text("utf-8"))
        if (results["seed"], results["tier"]) != (seed, asked.tier):
            raise SystemExit(f"{out} is of seed {results['seed']} and tier {results['tier']}: name another file")
    with tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as folder:
        root, scratch = Path(folder) / "tree", Path(folder) / "s"
        copy_tree(root)
        mutants = {m.number: m for m in draw(root, seed)}
        _check_hits(asked.hits, seed, mutants.values())
        check_imports(root, environment(root, scratch))
        for number in numbers or sorted(mutants):
            results["results"][str(number)] = told = run_mutant(
                root, Path(folder) / str(number), mutants.get(number), asked
            )
            results["results"] = dict(sorted(results["results"].items(), key=lambda item: int(item[0])))
            _save(out, results)
            print(f"{number:3d} {outcome(told)}", flush=True)


def _save(path: Path, data: Any) -> None:
    """In one step, so that a run that is broken off leaves what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", "utf-8")
    new.replace(path)


def _check_hits(hits: Mapping[str, Any] | None, seed: int, mutants: Iterable[Mutant]) -> None:
    """Hits of another draw, or of a tree that has changed since at a mutated place, say nothing."""
    if hits is None:
        return
    if hits["seed"] != seed:
        raise SystemExit(f"the hits are of seed {hits['seed']}, not of {seed}")
    for m in mutants:
        held, now = hits["places"][str(m.number)], place(m)
        if held != now:
            raise SystemExit(f"the hits are of another tree: mutant {m.number} was {held}, and is {now}")


def place(mutant: Mutant) -> str:
    told = mutant.to_dict()
    return f"{told['file']}, {told['function']}: {told['before']}"


# -- hits -------------------------------------------------------------------------------------------------------------

PROBE = "_probe"  # a module of the copy's package
_PROBE_MODULE = '''"""Written by tests/mutation.py: notes which mutated places are executed, and in which test."""

import os

_seen = set()


def __probe__(number):
    key = number, os.environ.get("PYTEST_CURRENT_TEST", "")
    if key not in _seen:
        _seen.add(key)
        folder = os.environ.get({variable!r}, {elsewhere!r})  # a child process may have been given no variables
        with open(os.path.join(folder, f"{{os.getpid()}}.txt"), "a", encoding="utf-8") as file:
            file.write(f"{{number}}\\t{{key[1]}}\\n")
'''
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)


def probe_of(mutant: Mutant) -> list[tuple[int, bytes]] | None:
    """Where to insert what, so that a run notes when it comes by; None where every test counts as one that does.

    That is a place that runs when its module is imported, and one in a function whose results are kept: what a test reads there, another
    test may have computed. In a lambda the probe stands in its body, which may run later than the statement around it.
    """
    source, nodes = mutant.site.source, list(_ancestors(mutant.site.chain))
    outer = [n for inner, n in pairwise(nodes) if isinstance(n, _SCOPES) and isinstance(inner, ast.stmt)]
    if any(_keeps_results(n) for n in outer):
        return None
    call = f"__probe__({mutant.number})".encode()
    for inner, node in pairwise(nodes):
        if isinstance(inner, ast.stmt):
            break
        if isinstance(node, ast.Lambda) and inner is node.body:
            return _around(source, inner, call)
    if not outer:
        return None
    statement = next(n for n in nodes if isinstance(n, ast.stmt))
    start = source.start(statement)
    if isinstance(statement, ast.If) and source.data.startswith(b"elif", start):
        return _around(source, statement.test, call)
    if not hasattr(statement, "body") and not isinstance(statement, ast.Match):
        return [(start, call + b"; ")]  # on its line, which leaves the lines of the file as they are
    first = min([statement, *getattr(statement, "decorator_list", [])], key=lambda n: n.lineno)
    begin = source.line_start(first.lineno)
    indent = source.data[begin : begin + statement.col_offset]
    return [(begin, indent + call + b"\n")]


def _keeps_results(function: Any) -> bool:
    names = {_last_name(n) for d in function.decorator_list for n in ast.walk(d)}
    return bool(names & {"cache", "lru_cache"})


def _around(source: Source, node: ast.AST, call: bytes) -> list[tuple[int, bytes]]:
    """The probe gives None, so that what stands behind `or` is what comes of it."""
    return [(source.start(node), b"(" + call + b" or ("), (source.end(node), b"))")]


def with_probes(mutants: Sequence[Mutant]) -> dict[str, bytes]:
    """path -> the file with a probe at each place that takes one."""
    inserted: dict[str, list[tuple[int, bytes]]] = {}
    sources = {m.site.source.path: m.site.source for m in mutants}
    for m in mutants:
        for at, text in probe_of(m) or ():
            inserted.setdefault(m.site.source.path, []).append((at, text))
    return {path: _with_inserted(sources[path], places) for path, places in inserted.items()}


def _with_inserted(source: Source, places: Iterable[tuple[int, bytes]]) -> bytes:
    data = source.data
    line = source.line_start(_first_line(source.tree))
    for at, text in sorted([*places, (line, f"from {PACKAGE}.{PROBE} import __probe__\n".encode())], reverse=True):
        data = data[:at] + text + data[at:]
    return data


def _first_line(tree: ast.Module) -> int:
    """Of the first statement behind the docstring and the imports from `__future__`."""
    for node in tree.body:
        is_docstring = isinstance(node, ast.Expr) and _is_text(node.value)
        if not is_docstring and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            return min(n.lineno for n in (node, *getattr(node, "decorator_list", ())))
    raise ValueError("a file without a statement")


def hits_of(seed: int, marks: str | None, only: Sequence[str], jobs: int) -> dict[str, Any]:
    """Which tests execute which mutated place. Each file of tests runs in a process of its own, so that nothing one has computed is read
    in another.
    """
    with tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as folder:
        base = Path(folder)
        root, scratch, elsewhere = base / "tree", base / "s", base / "elsewhere"
        copy_tree(root)
        elsewhere.mkdir()
        mutants = draw(root, seed)
        for path, data in with_probes(mutants).items():
            write(root, path, data)
        module = _PROBE_MODULE.format(variable=PROBES, elsewhere=str(elsewhere))
        write(root, f"{PACKAGE}/{PROBE}.py", module.encode())
        check_imports(root, environment(root, scratch))
        files = [p for p in _test_files(root) if not only or any(_is_below(p, o) for o in only)]
        hits: dict[int, set[str]] = {m.number: set() for m in mutants}
        devices: set[str] = set()
        with ThreadPoolExecutor(jobs) as pool:
            jobs_done = pool.map(
                lambda pair: _hits_of_file(root, base / f"{pair[0]}", pair[1], marks), enumerate(files)
            )
            for file, (found, with_devices) in zip(files, jobs_done, strict=True):
                devices |= with_devices
                for number, test in found:
                    hits[number].add(test)
                print(f"{file}: {len({n for n, _ in found})} places", flush=True)
        for number, _ in _read_probes(elsewhere):
            hits[number].add(UNKNOWN)
    return _settled(seed, mutants, hits, devices)


def _test_files(root: Path) -> list[str]:
    return sorted(p.relative_to(root).as_posix() for p in (root / "tests").rglob("test_*.py"))


def _hits_of_file(root: Path, scratch: Path, file: str, marks: str | None) -> tuple[set[tuple[int, str]], set[str]]:
    """(number, test) of each place that a file's tests come by, and those of its tests that run on several devices."""
    probes = scratch / "p"
    probes.mkdir(parents=True)
    env = environment(root, scratch) | {PROBES: str(probes)}
    args = ["-n", "0", *(["-m", marks] if marks is not None else []), file]
    run = run_pytest(root, env, scratch, args)
    if run.status not in (0, 1, 5) or run.foreign(root):
        print(f"{file}: pytest ended with {run.status}\n{run.tail[-1000:]}", file=sys.stderr)
    found = {(number, id_of(current, file)) for number, current in _read_probes(probes)}
    devices = {r["id"] for r in run.reports if r.get("devices")}
    shutil.rmtree(scratch, ignore_errors=True)
    return found, devices


def _read_probes(folder: Path) -> Iterator[tuple[int, str]]:
    for path in folder.iterdir():
        for line in path.read_text("utf-8").splitlines():
            number, _, current = line.partition("\t")
            yield int(number), current


def id_of(current: str, file: str) -> str:
    """The id of a test; or its file, of what a fixture made, what ran at import and what a test's own pytest ran."""
    test, _, phase = current.rpartition(" ")
    return test if test.startswith(f"{file}::") and phase != "(setup)" else file


def _settled(seed: int, mutants: Sequence[Mutant], hits: Mapping[int, set[str]], devices: set[str]) -> dict[str, Any]:
    """Of what runs on several devices a helper may keep the name of the test that started it: all such tests count where one does."""
    told: dict[str, Any] = {}
    for m in mutants:
        found = hits[m.number]
        if found & devices or {d.partition("::")[0] for d in devices} & found:
            found = found | devices
        told[str(m.number)] = ALL if probe_of(m) is None else sorted(found)
    return {"seed": seed, "places": {str(m.number): place(m) for m in mutants}, "hits": told}


# -- what is printed --------------------------------------------------------------------------------------------------


def outcome(told: Mapping[str, Any]) -> str:
    cases = f"{told['cases']} case{'s' if told['cases'] != 1 else ''}"
    if told["status"] == "killed":
        return f"killed by {told['by']} after {told['seconds']:.0f} s ({cases})"
    return f"{told['status']} ({told['seconds']:.0f} s, {cases})"


def list_text(mutants: Sequence[Mutant]) -> str:
    lines = []
    for m in mutants:
        t = m.to_dict()
        lines.append(f"{m.number:2d}  {t['kind']}  {t['file']}:{t['line']}  {t['function']}")
        lines += [f"      - {t['before']}", f"      + {t['after']}"]
    return "\n".join(lines)


def diff_text(mutant: Mutant) -> str:
    site = mutant.site
    before, after = (data.decode().splitlines(keepends=True) for data in (site.source.data, site.mutated()))
    return "".join(difflib.unified_diff(before, after, f"a/{site.source.path}", f"b/{site.source.path}"))


def table_text(files: Sequence[Mapping[str, Any]]) -> str:
    """A row a mutant; what a later file knows stands behind what an earlier one does."""
    rows: dict[int, Mapping[str, Any]] = {}
    said: dict[int, list[str]] = {}
    for file in files:
        for key, told in file["results"].items():
            number = int(key)
            if number:
                if rows.get(number, {}).get("status") != "killed":
                    rows[number] = told
                said.setdefault(number, []).append(f"{file['tier']}: {outcome(told)}")
    lines = ["| | room | place | kind | before | after | outcome |", "|-:|-|-|-|-|-|-|"]
    for number, told in sorted(rows.items()):
        cells = [
            told["room"],
            f"{told['file']}, {told['function']}",
            told["kind"],
            _code(told["before"]),
            _code(told["after"]),
        ]
        lines.append(f"| {number} | {' | '.join([*cells, '; '.join(said[number])])} |")
    return "\n".join([*lines, "", _sum_text(rows.values())])


def _code(text: str) -> str:
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}".replace("|", "\\|")


def _sum_text(rows: Iterable[Mapping[str, Any]]) -> str:
    rows = list(rows)
    counts = Counter(told["status"] for told in rows)
    own = sum(f"tests/{told['room']}/" in told.get("by", "").partition("::")[0] for told in rows)
    others = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()) if status != "killed")
    return f"{counts['killed']} of {len(rows)} killed, {own} of them by the tests of their own room{others and '; '}{others}."


def _apply(mutant: Mutant, target: Path) -> None:
    if target.resolve() == ROOT.resolve():
        raise SystemExit("--into names this tree; give a folder for a copy")
    if not (target / PACKAGE).is_dir():
        copy_tree(target)
    write(target, mutant.site.source.path, mutant.site.mutated())
    print(target / mutant.site.source.path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    every = argparse.ArgumentParser(add_help=False)
    every.add_argument("--seed", type=int, default=SEED)
    verbs.add_parser("list", parents=[every], help="the thirty")
    verbs.add_parser("show", parents=[every], help="the diff of one").add_argument("number", type=int)
    apply = verbs.add_parser("apply", parents=[every], help="write one into a copy of the tree")
    apply.add_argument("number", type=int)
    apply.add_argument(
        "--into", type=Path, required=True, metavar="DIR", help="the copy; it is made where there is none"
    )
    hits = verbs.add_parser("hits", parents=[every], help="which tests execute the mutated places")
    hits.add_argument("-m", dest="marks", metavar="MARKEXPR", help='as of pytest: "" runs everything')
    hits.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1))
    run = verbs.add_parser("run", parents=[every], help="run the suite against mutants")
    run.add_argument("numbers", type=int, nargs="*", metavar="K", help="which; all without one, 0 is the tree as it is")
    run.add_argument("--tier", choices=("default", "full"), default="default")
    run.add_argument("--hits", type=Path, metavar="FILE", help="run what can reach a mutant alone")
    run.add_argument(
        "--by", choices=("file", "test"), default="file", help="with --hits: whole files, or tests (not sure)"
    )
    run.add_argument("--limit", type=float, metavar="SECONDS", help="of one mutant")
    for verb in (hits, run):
        verb.add_argument("--out", type=Path, required=True, metavar="FILE")
        verb.add_argument("--only", action="append", default=[], metavar="PATH", help="tests to run, instead of all")
    verbs.add_parser("table", help="a Markdown table of results").add_argument("files", type=Path, nargs="+")
    return parser


def _one(number: int, seed: int) -> Mutant:
    mutants = draw(seed=seed)
    if not 1 <= number <= len(mutants):
        raise SystemExit(f"mutant {number}: there are 1 to {len(mutants)}")
    return mutants[number - 1]


def main(arguments: Sequence[str]) -> None:
    asked = _parser().parse_args(arguments)
    match asked.verb:
        case "list":
            print(list_text(draw(seed=asked.seed)))
        case "show":
            print(diff_text(_one(asked.number, asked.seed)), end="")
        case "apply":
            _apply(_one(asked.number, asked.seed), asked.into)
        case "hits":
            _save(asked.out, hits_of(asked.seed, asked.marks, asked.only, asked.jobs))
        case "run":
            hits = json.loads(asked.hits.read_text("utf-8")) if asked.hits else None
            plan = Asked(asked.tier, asked.only, asked.limit, hits, asked.by)
            run_all(asked.numbers, asked.seed, plan, asked.out)
        case "table":
            print(table_text([json.loads(path.read_text("utf-8")) for path in asked.files]))


if __name__ == "__main__":
    main(sys.argv[1:])
