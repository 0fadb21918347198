"""Patterns by example: an ordinary JAX function becomes a canonical pattern.

The example is traced twice, with different sizes and different values for its scalar parameters. Every edge coefficient that
differs between the two is a captured scalar (and the power in which it enters is solved for); everything else must match.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from .canonical import ONE, CNode, Coef, View
from .trace import trace_raw

_SIZES = ((2, 3, 5, 7, 11, 13), (4, 6, 9, 17, 19, 23))
# Dyadic fractions: exact in every float format, so that coefficients solve exactly.
_MAGIC = (
    (0.13671875, 0.34765625, 0.56640625, 0.77734375, 0.44921875, 0.19140625, 0.60546875, 0.91796875),
    (0.65234375, 0.87890625, 0.23828125, 0.41015625, 0.16015625, 0.70703125, 0.33203125, 0.53515625),
)
_POWERS = (1.0, -1.0, 2.0, 0.5, -0.5, -2.0)


@dataclass(frozen=True)
class Example:
    """A pattern as a function.

    Attributes:
      name: unique within its pass.
      fn: `fn(*leaves, *scalars) -> array`, in plain jnp.
      leaves: argument name -> axis letters ("bqd"); equal letters are equal sizes.
      scalars: names of the scalar parameters that follow the leaves.
      bools: leaves of dtype bool.
      optional: axis letter -> leaves that may lack this axis (a mask broadcast over the batch).
      bare: leaves carry no factor (as in `View.over`), so that every coefficient has to be the example's.
    """

    name: str
    fn: Callable[..., Any]
    leaves: Mapping[str, str]
    scalars: tuple[str, ...] = ()
    bools: frozenset[str] = frozenset()
    optional: Mapping[str, frozenset[str]] = field(default_factory=dict)
    bare: bool = False


@dataclass(frozen=True)
class ScalarEdge:
    """An edge whose coefficient is `const * scalar ** power`."""

    scalar: str
    power: float
    const: float


@dataclass(frozen=True, eq=False)
class Pattern:
    """A compiled example.

    Attributes:
      example: where it came from.
      nodes: the canonical nodes (ids index into it).
      root: id of the result's node.
      leaf_of: node id -> leaf name.
      edges: (node id, operand index) -> ScalarEdge, for edges that carry a captured scalar.
      gauged: nodes whose value is known only up to a scalar factor, since a leaf may carry one.
      letters: axis letter -> the set of nodes that have this axis.
      size: number of nodes that are neither leaves nor the constant one.
    """

    example: Example
    nodes: tuple[CNode, ...]
    root: int
    leaf_of: Mapping[int, str]
    edges: Mapping[tuple[int, int], ScalarEdge]
    gauged: frozenset[int]
    letters: Mapping[str, frozenset[int]]
    size: int


@functools.lru_cache(maxsize=256)
def compile_example(example_key: _ById) -> Pattern:
    """The pattern of an example (cached by the example object)."""
    example = example_key.example
    first, second = (_trace_example(example, i) for i in (0, 1))
    if len(first.nodes) != len(second.nodes):
        raise ValueError(f"example {example.name}: its structure depends on sizes or scalar values")
    leaf_of = {first.ref[v.id].nid: name for v, name in zip(first.block.inputs, example.leaves, strict=True)}
    root = first.read(first.block.outputs[0]).nid
    edges = {}
    for a, b in zip(first.nodes, second.nodes, strict=True):
        for i, (x, y) in enumerate(zip(a.operands, b.operands, strict=True)):
            if x.coef != y.coef:
                edges[a.id, i] = _solve(example, x.coef, y.coef)
    needed = _reachable(first, root)
    gauged = frozenset() if example.bare else _gauged(first, leaf_of)
    letters = _letters(first, example, leaf_of, needed)
    size = sum(n not in leaf_of and n != ONE for n in needed)
    return Pattern(example, tuple(first.nodes), root, leaf_of, edges, gauged, letters, size)


class _ById:
    """Hashes an Example (which holds a dict) by identity, for the cache."""

    def __init__(self, example: Example) -> None:
        self.example = example

    def __hash__(self) -> int:
        return id(self.example)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.example is self.example


def pattern_of(example: Example) -> Pattern:
    """The compiled pattern of an example."""
    return compile_example(_ById(example))


def _trace_example(example: Example, which: int) -> View:
    letters = sorted({c for axes in example.leaves.values() for c in axes})
    size = dict(zip(letters, _SIZES[which], strict=False))
    args = [
        jax.ShapeDtypeStruct(tuple(size[c] for c in axes), jnp.bool_ if name in example.bools else jnp.float32)
        for name, axes in example.leaves.items()
    ]
    scalars = _MAGIC[which][: len(example.scalars)]
    graph = trace_raw(lambda *leaves: example.fn(*leaves, *scalars), tuple(args), {})
    return View(graph.top)


def _solve(example: Example, a: Coef, b: Coef) -> ScalarEdge:
    for i, name in enumerate(example.scalars):
        m, n = _MAGIC[0][i], _MAGIC[1][i]
        for power in _POWERS:
            if abs(a / m**power - b / n**power) <= 1e-5 * abs(a / m**power):
                return ScalarEdge(name, power, a / m**power)
    raise ValueError(
        f"example {example.name}: a constant depends on sizes, or on scalars in a way that cannot be solved"
    )


def _reachable(view: View, root: int) -> frozenset[int]:
    seen, stack = set(), [root]
    while stack:
        nid = stack.pop()
        if nid not in seen:
            seen.add(nid)
            stack.extend(o.nid for o in view.nodes[nid].operands)
    return frozenset(seen)


def _gauged(view: View, leaf_of: Mapping[int, str]) -> frozenset[int]:
    """A factor on a leaf travels through linear nodes; a sum fixes coefficients absolutely, and functions take them as they are."""
    gauged = set(leaf_of)
    for node in view.nodes:
        if node.op in ("dot", "prod", "reduce_sum", "reduce_max", "reduce_min", "select", "reshape") and any(
            o.nid in gauged for o in node.operands
        ):
            gauged.add(node.id)
    return frozenset(gauged)


def _letters(
    view: View, example: Example, leaf_of: Mapping[int, str], needed: frozenset[int]
) -> dict[str, frozenset[int]]:
    inner = [nid for nid in needed if nid not in leaf_of]
    links = [
        link for nid in inner for link in axis_links(view.nodes[nid], nid, [o.nid for o in view.nodes[nid].operands])
    ]
    classes = axis_classes(links)
    by_class: dict[int, set[int]] = {}
    name_of: dict[int, str] = {}
    for (nid, axis), c in classes.items():
        if isinstance(axis, int):
            by_class.setdefault(c, set()).add(nid)
    for value, axes in zip(view.block.inputs, example.leaves.values(), strict=True):
        nid = view.ref[value.id].nid
        for axis, letter in enumerate(axes):
            if (nid, axis) in classes:
                name_of[classes[nid, axis]] = letter
    letters = {name_of[c]: frozenset(nids) for c, nids in by_class.items() if c in name_of}
    if len(letters) != len(by_class):
        raise ValueError(f"example {example.name}: an axis belongs to no leaf, or one letter names two axes")
    return letters


Axis = tuple[Any, Any]  # (node, axis number), or (node, ("label", l)) for a contracted label of a dot


def axis_links(node: CNode, key: Any, operand_keys: Sequence[Any]) -> list[tuple[Axis, Axis | None]]:
    """Pairs of axes that are the same axis: each operand axis with the node's own (None: reduced away here).

    Args:
      node: the canonical node.
      key, operand_keys: what to call the node and its operands in the result.
    """
    links: list[tuple[Axis, Axis | None]] = []
    for operand, source in zip(node.operands, operand_keys, strict=True):
        for axis, slot in enumerate(operand.axes):
            if node.op == "dot":
                mine: Any = node.params.index(slot) if slot in node.params else ("label", slot)
                links.append(((source, axis), (key, mine)))
            else:
                links.append(((source, axis), (key, slot) if slot >= 0 else None))
    return links


def axis_classes(links: Iterable[tuple[Axis, Axis | None]]) -> dict[Axis, int]:
    """Numbers the classes of equal axes."""
    parent: dict[Axis, Axis] = {}

    def find(x: Axis) -> Axis:
        parent.setdefault(x, x)
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    for one, other in links:
        root = find(one)
        if other is not None:
            parent[root] = find(other)
    numbers: dict[Axis, int] = {}
    return {key: numbers.setdefault(find(key), len(numbers)) for key in list(parent)}
