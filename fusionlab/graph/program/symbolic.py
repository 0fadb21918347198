"""Programs with symbolic sizes (`jax.export.symbolic_shape`), and the same programs at concrete sizes.

Patterns are compared and kernels are launched at concrete sizes, so a search needs numbers. The same function traced at numbers has the
same operations in the same order, apart from computations with sizes, so findings are reported on the nodes of the program itself.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.export import is_symbolic_dim

from ...errors import ArgumentError
from .graph import Graph

_FUNCTIONS = {"floordiv": lambda a, b: a // b, "mod": lambda a, b: a % b, "max": max, "min": min}
_OPERATORS = {ast.Add: int.__add__, ast.Sub: int.__sub__, ast.Mult: int.__mul__, ast.Pow: int.__pow__}


@dataclass(frozen=True, eq=False)
class Numbered:
    """A program of symbolic sizes at concrete sizes.

    Attributes:
      graph: traced at numbers, None if it traces at none of those tried; symbols: the symbols they replace.
      nodes: node of that graph -> the corresponding node of the program, if there is one.
    """

    graph: Graph | None
    symbols: tuple[str, ...]
    nodes: dict[int, int]


def needs_numbers(graph: Graph, action: str) -> None:
    """Raises ArgumentError for a program with symbolic sizes."""
    if graph.numbered is not None:
        names = ", ".join(graph.numbered.symbols)
        raise ArgumentError(f"{graph.name}: got symbolic sizes ({names}); {action} needs concrete sizes")


def symbols_of(avals: Iterable[Any]) -> tuple[str, ...]:
    """The symbols in the sizes of values, in the order of their first use."""
    sizes = (size for aval in avals for size in getattr(aval, "shape", ()) if is_symbolic_dim(size))
    names = (name for size in sizes for name in re.findall(r"[A-Za-z_]\w*", str(size)) if name not in _FUNCTIONS)
    return tuple(dict.fromkeys(names))


def at_numbers(arrays: Any, numbers: dict[str, int]) -> Any:
    """Shapes as those of a pytree of arrays, with these numbers for the symbols."""

    def number(node: ast.AST) -> int:
        match node:
            case ast.Name(id=name):
                return numbers[name]
            case ast.Constant(value=int(value)):
                return value
            case ast.UnaryOp(operand=operand):  # JAX writes no other than a minus
                return -number(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return _OPERATORS[type(op)](number(left), number(right))
            case ast.Call(func=ast.Name(id=name), args=args):
                return _FUNCTIONS[name](*map(number, args))
        raise ValueError(f"{ast.dump(node)} is no part of a size")

    def shape(x: Any) -> Any:
        aval = jax.typeof(x) if not isinstance(x, jax.ShapeDtypeStruct) else x
        sizes = tuple(number(ast.parse(str(n), mode="eval").body) if is_symbolic_dim(n) else n for n in aval.shape)
        return jax.ShapeDtypeStruct(sizes, aval.dtype, weak_type=getattr(aval, "weak_type", False))

    return jax.tree.map(shape, arrays)


def choices(symbols: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """Numbers for the symbols, the likeliest first: different from each other, and multiples of 8, which usual divisors of a size divide;
    ascending and descending, large and small, because a program may require an order of sizes or a limit."""
    count = len(symbols)
    rising = [8 * (3 + 2 * i) for i in range(count)]
    for numbers in (rising, rising[::-1], [8 * (1 + i) for i in range(count)], [8 * (count - i) for i in range(count)]):
        yield dict(zip(symbols, numbers, strict=True))
    for size in (64, 512, 8, 4, 2, 1):
        yield dict.fromkeys(symbols, size)


def numbered(graph: Graph, symbols: tuple[str, ...], own: Graph | None) -> Numbered:
    """`own`, the program of `graph`, at numbers. Its nodes are identified by their primitive and its number of earlier occurrences."""
    places: dict[str, list[int]] = defaultdict(list)
    for node in graph.nodes():
        places[node.primitive].append(node.id)
    seen: dict[str, int] = defaultdict(int)
    nodes = {}
    for node in own.nodes() if own is not None else ():
        if seen[node.primitive] < len(places[node.primitive]):
            nodes[node.id] = places[node.primitive][seen[node.primitive]]
        seen[node.primitive] += 1
    return Numbered(own, symbols, nodes)
