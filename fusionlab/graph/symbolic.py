"""Programs whose sizes are symbolic (`jax.export.symbolic_shape`), and the same at numbers.

A pattern is compared at sizes, and a kernel is launched for sizes, so that a search needs numbers. The same function traced at numbers has
the same operations in the same order, but for what computes with a size: what is found there is told by the nodes of the program itself.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.export import is_symbolic_dim

from ..errors import ArgumentError
from .ir import Graph

_FUNCTIONS = {"floordiv": lambda a, b: a // b, "mod": lambda a, b: a % b, "max": max, "min": min}


@dataclass(frozen=True, eq=False)
class Numbered:
    """A program of symbolic sizes at numbers.

    Attributes:
      graph: traced at numbers; symbols: what those are for.
      nodes: of each node there, the node of the program that it is; those that are none are left out.
    """

    graph: Graph
    symbols: tuple[str, ...]
    nodes: dict[int, int]


def needs_numbers(graph: Graph, what: str) -> None:
    """Raises ArgumentError for a program whose sizes are symbolic."""
    if graph.numbered is not None:
        names = ", ".join(graph.numbered.symbols)
        raise ArgumentError(f"{graph.name}: got symbolic sizes ({names}), {what} needs numbers: trace it at numbers")


def symbols_of(avals: Iterable[Any]) -> tuple[str, ...]:
    """The symbols in the sizes of values, in the order of their first use."""
    sizes = (size for aval in avals for size in getattr(aval, "shape", ()) if is_symbolic_dim(size))
    names = (name for size in sizes for name in re.findall(r"[A-Za-z_]\w*", str(size)) if name not in _FUNCTIONS)
    return tuple(dict.fromkeys(names))


def at_numbers(arrays: Any, symbols: tuple[str, ...]) -> Any:
    """Shapes as those of a pytree of arrays, with a number for each symbol."""
    numbers = dict(zip(symbols, _numbers(), strict=False))
    names = _FUNCTIONS | numbers | {"__builtins__": {}}

    def shape(x: Any) -> Any:
        aval = jax.typeof(x) if not isinstance(x, jax.ShapeDtypeStruct) else x
        # A size is an expression of JAX's own making, of names, integers, + - * and the functions above.
        sizes = (int(eval(str(n), names)) if is_symbolic_dim(n) else n for n in aval.shape)
        return jax.ShapeDtypeStruct(tuple(sizes), aval.dtype, weak_type=getattr(aval, "weak_type", False))

    return jax.tree.map(shape, arrays)


def _numbers() -> Iterator[int]:
    """Unlike each other, and multiples of 8: what divides a size in practice divides these."""
    n = 3
    while True:
        yield 8 * n
        n += 2


def numbered(graph: Graph, symbols: tuple[str, ...], own: Graph) -> Numbered:
    """`own` is the program of `graph` at numbers. Its nodes are told by their primitive and how many of it came before."""
    places: dict[str, list[int]] = defaultdict(list)
    for node in graph.nodes():
        places[node.primitive].append(node.id)
    seen: dict[str, int] = defaultdict(int)
    nodes = {}
    for node in own.nodes():
        if seen[node.primitive] < len(places[node.primitive]):
            nodes[node.id] = places[node.primitive][seen[node.primitive]]
        seen[node.primitive] += 1
    return Numbered(own, symbols, nodes)
