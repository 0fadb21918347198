"""Programs that a reader can copy: made of the functions that passes and tests have as examples, and run as they are printed."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import inspect
import io
import linecache
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .inline import Inlining

NAME = "program.py"
_LONG = 86  # characters of a line that a page shows as a whole
_HEAD = {
    "jax": "import jax",
    "jnp": "import jax.numpy as jnp",
    "np": "import numpy as np",
    "lax": "from jax import lax",
}
_LAST = "import fusionlab as fl"
_SINGLE = re.compile(r"'([^'\"\\]*)'")


@dataclass(frozen=True)
class Program:
    """A program: its text, and what it prints."""

    text: str
    printed: str


def run(text: str) -> Program:
    """The program, run."""
    out = io.StringIO()
    linecache.cache[NAME] = len(text), None, text.splitlines(keepends=True), NAME
    with contextlib.redirect_stdout(out):
        exec(compile(text, NAME, "exec"), {"__name__": "program"})
    return Program(text, out.getvalue().rstrip())


@functools.cache
def module_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def function_source(fn: Any) -> tuple[ast.expr | ast.FunctionDef, ast.Module]:
    """The definition of a function or lambda, and the module that it stands in.

    Raises:
      LookupError: several functions or lambdas start on its line.
    """
    module = module_of(Path(inspect.getsourcefile(fn) or ""))
    line = fn.__code__.co_firstlineno
    found = [n for n in ast.walk(module) if isinstance(n, ast.FunctionDef | ast.Lambda) and n.lineno == line]
    named = [n for n in found if isinstance(n, ast.FunctionDef) == (fn.__name__ != "<lambda>")]
    if len(named) != 1:
        raise LookupError(f"{fn.__name__}: {len(named)} definitions on line {line}")
    return named[0], module


def written(node: ast.AST) -> str:
    """Code as the project writes it: strings in double quotes."""
    text = _SINGLE.sub(r'"\1"', ast.unparse(node)).replace("1000000000.0", "1e9")
    return "\n".join(map(_unbracketed, re.sub(r"e-0(\d)", r"e-\1", text).splitlines()))


def _unbracketed(line: str) -> str:
    """A line that returns a tuple, without the brackets around it."""
    head, returned, value = line.partition("return (")
    if not returned or head.strip() or not value.endswith(")"):
        return line
    bare = f"{head}return {value[:-1]}"
    try:
        same = ast.dump(ast.parse(bare.strip())) == ast.dump(ast.parse(line.strip()))
    except SyntaxError:
        return line
    return bare if same else line


def as_function(node: ast.expr | ast.FunctionDef, name: str, module: ast.Module | None = None) -> list[str]:
    """A definition by that name, without annotations; an expression that makes a function is called."""
    plain = _bare(node, module)
    if isinstance(plain, ast.FunctionDef):
        plain.name = name
        plain.body[-1:] = _short(plain.body[-1], {n.id for n in ast.walk(plain) if isinstance(n, ast.Name)})
        return written(plain).splitlines()
    if isinstance(plain, ast.Lambda):
        lines = [f"    {written(line)}" for line in _steps(plain)]
        return [f"def {name}({written(plain.args)}):", *lines]
    return [f"{name} = {written(plain)}"]


def _steps(function: ast.Lambda) -> list[ast.stmt]:
    """The body of a lambda; that of `(lambda h: f(h))(g(x))` in two steps."""
    called = function.body
    if (
        isinstance(called, ast.Call)
        and isinstance(called.func, ast.Lambda)
        and len(called.args) == 1
        and not called.keywords
    ):
        (param,) = called.func.args.args
        if param.arg not in {a.arg for a in function.args.args}:
            first = ast.Assign([ast.Name(param.arg)], called.args[0], lineno=1)
            return [first, ast.Return(called.func.body)]
    return _short(ast.Return(called), {n.id for n in ast.walk(function) if isinstance(n, ast.Name)})


def _short(statement: ast.stmt, taken: set[str]) -> list[ast.stmt]:
    """A statement that returns; where its line is long, in two steps of which the longer is as short as can be."""
    if not isinstance(statement, ast.Return) or len(written(statement)) <= _LONG:
        return [statement]
    name = next(name for name in "shy" if name not in taken)
    splits = [_split(statement, i, name) for i in _movable(statement)]
    return min(splits, key=lambda steps: max(len(written(step)) for step in steps), default=[statement])


def _movable(statement: ast.Return) -> list[int]:
    """The expressions inside a statement, by their place in a walk, that are not inside a lambda of it."""
    inside = {id(n) for f in ast.walk(statement) if isinstance(f, ast.Lambda) for n in ast.walk(f)}
    nodes = enumerate(ast.walk(statement))
    return [
        i for i, n in nodes if isinstance(n, ast.Call | ast.BinOp) and n is not statement.value and id(n) not in inside
    ]


def _split(statement: ast.Return, place: int, name: str) -> list[ast.stmt]:
    """The expression at a place of the walk by itself, and the statement with its name there."""
    rest = copy.deepcopy(statement)
    moved = list(ast.walk(rest))[place]
    first = ast.Assign([ast.Name(name)], copy.deepcopy(moved), lineno=1)  # type: ignore[arg-type]
    return [first, _Replacing(moved, ast.Name(name)).visit(rest)]


class _Replacing(ast.NodeTransformer):
    """Another node in the place of one."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else super().visit(node)


def _bare(node: Any, module: ast.Module | None = None) -> Any:
    """Code without annotations and docstrings; numbers and other names of JAX's functions (relu = jax.nn.relu) are written out, and so
    are small functions of the module.
    """
    plain = _Bare(_aliases(module)).visit(copy.deepcopy(node))
    return plain if module is None else _Bare(_aliases(module)).visit(Inlining(module).visit(plain))


def _aliases(module: ast.Module | None) -> dict[str, ast.expr]:
    """Name -> the number or the function of JAX's that it stands for, in a module."""
    assigned = [s for s in (module.body if module else ()) if isinstance(s, ast.Assign)]
    short = (s for s in assigned if isinstance(s.value, ast.Attribute | ast.Constant))
    return {target.id: s.value for s in short for target in s.targets if isinstance(target, ast.Name)}


class _Bare(ast.NodeTransformer):
    """See `_bare`."""

    def __init__(self, aliases: Mapping[str, ast.expr]) -> None:
        self.aliases = aliases

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self.aliases[node.id]) if node.id in self.aliases else node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.returns = None
        if ast.get_docstring(node):
            node.body = node.body[1:]
        return node


def helpers(node: ast.AST, module: ast.Module) -> list[str]:
    """The statements of a module that a definition needs, in order: other definitions, constants."""
    at = {name: i for i, statement in enumerate(module.body) for name in _bound(statement)}
    needed: set[int] = set()
    todo = [node]
    while todo:
        found = {at[name] for name in _names(todo.pop(), module) if name in at} - needed
        needed |= found
        todo += [module.body[i] for i in found]
    # A statement on a name that is defined already, as f.defvjp(...), belongs to it.
    for i, statement in enumerate(module.body):
        if (
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Call)
            and at.get(_root(statement)) in needed
        ):
            needed.add(i)
    return [line for i in sorted(needed) for line in _statement(module.body[i], module)]


def _statement(statement: ast.stmt, module: ast.Module) -> list[str]:
    if isinstance(statement, ast.FunctionDef):
        return ["", *written(_bare(statement, module)).splitlines(), ""]
    return [written(_bare(statement, module))]


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module binds, imports aside."""
    if isinstance(statement, ast.FunctionDef):
        yield statement.name
    elif isinstance(statement, ast.Assign):
        yield from (n.id for target in statement.targets for n in ast.walk(target) if isinstance(n, ast.Name))


def _root(statement: ast.Expr) -> str:
    """The name that an expression begins with."""
    node: ast.AST = statement.value
    while isinstance(node, ast.Call | ast.Attribute):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _names(node: ast.AST, module: ast.Module) -> set[str]:
    """The names that code reads, annotations aside."""
    bare = _bare(node, module)
    return {n.id for n in ast.walk(bare) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def arrays(names: Sequence[str], values: Iterable[Any]) -> list[str]:
    """A line for each argument: zeros of its shape and dtype."""
    return [f"{name} = {_zeros(value)}" for name, value in zip(names, values, strict=True)]


def _zeros(value: Any) -> str:
    array = np.asarray(value) if not hasattr(value, "dtype") else value
    shape = f"{array.shape[0]}" if len(array.shape) == 1 else repr(tuple(array.shape))
    dtype = "" if str(array.dtype) == "float32" else f", {_dtype(str(array.dtype))}"
    return f"jnp.zeros({shape}{dtype})"


def _dtype(name: str) -> str:
    return "bool" if name == "bool" else f"jnp.{name}"


def whole(body: Sequence[str], last: Sequence[str]) -> str:
    """A program's text: imports of what it names, its definitions, and what it does with them."""
    lines = [*_tidy(body), "", *last]
    named = {n.id for n in ast.walk(ast.parse("\n".join(lines))) if isinstance(n, ast.Name)}
    imports = [line for name, line in _HEAD.items() if name in named]
    if "checkpoint_name" in named:
        imports.append("from jax.ad_checkpoint import checkpoint_name")
    return "\n".join([*imports, _LAST, "", *lines])


def _tidy(body: Sequence[str]) -> list[str]:
    """Without two empty lines in a row, nor one at an end."""
    kept = [line for i, line in enumerate(body) if line or (i and body[i - 1])]
    while kept and not kept[0]:
        kept.pop(0)
    while kept and not kept[-1]:
        kept.pop()
    return kept
