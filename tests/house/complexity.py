"""Cyclomatic complexity of the package's functions, room by room.

Run from the repository's root: `python -m tests.house.complexity [--over N]` prints, for each room, how many functions are over N
(10 if it is not given) and which are, the worst first.

A function counts 1, and 1 more for each of these in it:

- a branch: `if`, `elif`, `for`, `while`, `except`, `case`, a conditional expression;
- each operand of `and` or `or` beyond the first;
- each `for` and each `if` of a comprehension.

`assert`, `else`, `with` and `try` count nothing. A nested function counts for itself and not for the function around it; a lambda is
an expression of the function that it stands in. Decorators and default values belong to the function around.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "fusionlab"
BRANCHES = ast.If | ast.For | ast.AsyncFor | ast.While | ast.ExceptHandler | ast.match_case | ast.IfExp
Def = ast.FunctionDef | ast.AsyncFunctionDef
# Most nodes: they have nothing to count.
LEAVES = ast.Name | ast.Constant | ast.expr_context | ast.operator | ast.cmpop | ast.unaryop


@dataclass(frozen=True)
class Function:
    """A function and its complexity. `name` has the classes and functions it is in before it."""

    path: Path
    line: int
    name: str
    complexity: int

    @property
    def room(self) -> str:
        """The folder of the package that it is in; of a module at the top, the module."""
        return self.path.relative_to(PACKAGE).parts[0].removesuffix(".py")

    def __str__(self) -> str:
        return f"{self.complexity:4}  {self.path.relative_to(PACKAGE.parent)}:{self.line} {self.name}"


def own_cost(node: ast.AST) -> int:
    """What a node adds to the function that it stands in, without what stands in the node."""
    if isinstance(node, BRANCHES):
        return 1
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    return 0


def functions_of(code: str, path: Path) -> list[Function]:
    """Every function of a module, the nested ones too."""
    found: list[Function] = []

    def cost(node: ast.AST, around: str) -> int:
        """What a node and all in it add to the function that it stands in. Definitions are recorded on the way."""
        if isinstance(node, Def | ast.ClassDef):
            return definition(node, f"{around}.{node.name}".lstrip("."))
        total = own_cost(node)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, LEAVES):
                total += cost(child, around)
        return total

    def definition(node: Def | ast.ClassDef, name: str) -> int:
        inside = sum(cost(statement, name) for statement in node.body)
        if not isinstance(node, ast.ClassDef):
            found.append(Function(path, node.lineno, name, 1 + inside))
        return sum(cost(part, name) for part in evaluated_outside(node))

    cost(ast.parse(code), "")
    return found


def evaluated_outside(node: Def | ast.ClassDef) -> list[ast.expr]:
    """What of a definition is evaluated where it stands: decorators, default values, bases."""
    if isinstance(node, ast.ClassDef):
        return [*node.decorator_list, *node.bases]
    return [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]


def functions_of_package() -> tuple[Function, ...]:
    """Every function of the package, the most complex first."""
    paths = sorted(PACKAGE.rglob("*.py"))
    found = [f for path in paths for f in functions_of(path.read_text(encoding="utf-8"), path)]
    return tuple(sorted(found, key=lambda f: -f.complexity))


def summary(functions: Sequence[Function], over: int) -> str:
    rooms: dict[str, list[Function]] = defaultdict(list)
    for f in functions:
        rooms[f.room].append(f)
    rows = [(room, rooms[room]) for room in sorted(rooms, key=lambda room: -len(rooms[room]))]
    lines = [f"{'room':12} {'functions':>9} {f'over {over}':>8} {'share':>6} {'worst':>6}"]
    for room, its in (*rows, ("all", functions)):
        many = sum(f.complexity > over for f in its)
        worst = max(f.complexity for f in its)
        lines.append(f"{room:12} {len(its):9} {many:8} {many / len(its):6.1%} {worst:6}")
    return "\n".join(lines)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m tests.house.complexity", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--over", type=int, default=10, metavar="N", help="count and list functions over N (default: 10)"
    )
    over = parser.parse_args().over
    functions = functions_of_package()
    print(summary(functions, over), "", *(f for f in functions if f.complexity > over), sep="\n")


if __name__ == "__main__":
    main()
