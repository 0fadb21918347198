"""Patterns by example: an ordinary JAX function becomes a canonical pattern.

The example is read twice, with different values for its scalar parameters. Every edge coefficient that differs between the two is a
captured scalar (and the power in which it enters is solved for); everything else must match.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from ...showing import Shown
from ..canonical.axes import Axis, AxisPlace, Part, axis_classes, axis_links, places, reshape_parts
from ..canonical.nodes import ONE, CNode, Coef
from ..canonical.view import CanonicalView
from ..program.ir import Block
from ..program.trace import block_of_jaxpr

# Even, so that an example may split an axis in two; no length is another one's half.
_SIZES = ((4, 6, 10, 14, 22, 26, 34, 38), (8, 12, 18, 46, 58, 62, 74, 82))
# Dyadic fractions: exact in every float format, so that coefficients solve exactly.
_MAGIC = (
    (
        *(0.13671875, 0.34765625, 0.56640625, 0.77734375, 0.44921875, 0.19140625, 0.60546875, 0.91796875),
        *(0.69921875, 0.29296875, 0.98828125, 0.08203125),
    ),
    (
        *(0.65234375, 0.87890625, 0.23828125, 0.41015625, 0.16015625, 0.70703125, 0.33203125, 0.53515625),
        *(0.94140625, 0.11328125, 0.80859375, 0.48046875),
    ),
)
_POWERS = (1.0, -1.0, 2.0, 0.5, -0.5, -2.0)


@dataclass(frozen=True, eq=False, repr=False)
class Example(Shown):
    """A pattern as a function. Examples compare by identity.

    Attributes:
      name: unique within its pass.
      fn: `fn(*leaves, *scalars) -> array`, in plain jnp.
      leaves: argument name -> axis letters ("bqd"); equal letters are equal sizes.
      scalars: names of the scalar parameters that follow the leaves.
      bools: leaves of dtype bool.
      optional: axis letter -> leaves that may lack this axis (a mask broadcast over the batch).
      shared: likewise, leaves constant along an axis that their combinations with other leaves do have.
      bare: leaves carry no factor (as in `View.over`), so that every coefficient must be the example's.
      any_of: a trait of the example's fused ops with its value -> the values it stands for in the target.
      loose: fused ops of the target may have operands and numbers that the example's lack (a bias, a mask).
      root: the canonical op of the result and its number of operands, if declared (`fits`).
      may_be_in: likewise, a quick test whether a view may contain the example.
      jitted: it may contain loops or other code that JAX treats differently outside jit.
      concrete: its scalars are numbers while it is traced, as attributes of fused ops are, and as user code may require. It is then
        traced twice, at different sizes; otherwise once.
    """

    name: str
    fn: Callable[..., Any]
    leaves: Mapping[str, str]
    scalars: tuple[str, ...] = ()
    bools: frozenset[str] = frozenset()
    optional: Mapping[str, frozenset[str]] = field(default_factory=dict)
    shared: Mapping[str, frozenset[str]] = field(default_factory=dict)
    bare: bool = False
    any_of: Mapping[tuple[str, Any], frozenset[Any]] = field(default_factory=dict)
    loose: bool = False
    root: tuple[str, int] | None = None
    may_be_in: Callable[[CanonicalView], bool] = field(default=lambda view: True)
    jitted: bool = False
    concrete: bool = False

    def fits(self, view: CanonicalView, nid: int) -> bool:
        """Whether a node of a view may be its result, by a test without tracing: a search needs only a few of many similar examples."""
        return self.ends_in(view, nid) and self.may_be_in(view)

    def ends_in(self, view: CanonicalView, nid: int) -> bool:
        """Whether a node of a view has the op of its result."""
        node = view.nodes[nid]
        return self.root in (None, (node.op, len(node.operands)))


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
      letters: axis letter -> where this axis is: the nodes that have it, and what fused ops call it.
      parts: an axis that a reshape merges or splits, by its part in it -> its letter.
      may_lack: axis letter -> nodes that need not have it: leaves, and nodes computed only from such leaves.
      factor: the factor from the root to the result; the matcher ignores it.
      size: number of nodes that are neither leaves nor the constant one.
    """

    example: Example
    nodes: tuple[CNode, ...]
    root: int
    leaf_of: Mapping[int, str]
    edges: Mapping[tuple[int, int], ScalarEdge]
    gauged: frozenset[int]
    letters: Mapping[str, frozenset[AxisPlace]]
    parts: Mapping[Part, str]
    may_lack: Mapping[str, frozenset[int]]
    factor: Coef | ScalarEdge
    size: int


@functools.lru_cache(maxsize=256)
def pattern_of(example: Example) -> Pattern:
    """The compiled pattern of an example."""
    first, second = views_of(example)
    if len(first.nodes) != len(second.nodes):
        raise ValueError(f"example {example.name}: its structure depends on sizes or scalar values")
    # The scalars come last among the inputs, behind the leaves.
    leaf_of = {first.ref[v.id].nid: name for v, name in zip(first.block.inputs, example.leaves, strict=False)}
    (root, scale), (_, other) = ((ref.nid, ref.coef) for ref in (v.read(v.block.outputs[0]) for v in (first, second)))
    factor = scale if scale == other else _solve(example, scale, other)
    edges = _scalar_edges(example, first, second)
    needed = _reachable(first, root)
    gauged = frozenset() if example.bare else _gauged(first, leaf_of)
    letters, parts = _letters(first, example, leaf_of, needed)
    may_lack = _lacking(example, first, leaf_of)
    size = sum(n not in leaf_of and n != ONE for n in needed)
    _as_written(example, first, root)
    return Pattern(example, tuple(first.nodes), root, leaf_of, edges, gauged, letters, parts, may_lack, factor, size)


def _scalar_edges(example: Example, first: CanonicalView, second: CanonicalView) -> dict[tuple[int, int], ScalarEdge]:
    """(node, number of its operand) -> the scalar that an edge carries, determined from the two views."""
    edges = {}
    for a, b in zip(first.nodes, second.nodes, strict=True):
        for i, (x, y) in enumerate(zip(a.operands, b.operands, strict=True)):
            if x.coef != y.coef:
                edges[a.id, i] = _solve(example, x.coef, y.coef)
    return edges


def _lacking(example: Example, view: CanonicalView, leaf_of: Mapping[int, str]) -> dict[str, frozenset[int]]:
    """Axis letter -> the nodes that need not have it."""
    found = {x: _may_lack(view, leaf_of, names) for x, names in example.optional.items()}
    for x, names in example.shared.items():
        found[x] = found.get(x, frozenset()) | {nid for nid, name in leaf_of.items() if name in names}
    return found


def _as_written(example: Example, view: CanonicalView, root: int) -> None:
    """Raises if the example's declarations about its nodes are wrong."""
    if not example.fits(view, root):
        root_form = view.nodes[root].op, len(view.nodes[root].operands)
        raise ValueError(f"example {example.name}: its root is {root_form}, among {sorted(view.by_op)}")


def views_of(example: Example) -> tuple[CanonicalView, CanonicalView]:
    """The views of an example for two different sets of scalar values."""
    if example.concrete:
        return CanonicalView(_block_of(example, 0)), CanonicalView(_block_of(example, 1))
    block, leaves = _block_of(example, 0), len(example.leaves)
    if not example.scalars:
        return (view := CanonicalView(block)), view
    first, second = ({leaves + i: m[i] for i in range(len(example.scalars))} for m in _MAGIC)
    return CanonicalView(block, first), CanonicalView(block, second)


def _block_of(example: Example, which: int) -> Block:
    """An example as traced, at one of two sets of sizes; its scalars are inputs after its leaves, or the numbers of that set."""
    letters = sorted({c for axes in example.leaves.values() for c in axes})
    size = dict(zip(letters, _SIZES[which], strict=False))
    args = [
        jax.ShapeDtypeStruct(tuple(size[c] for c in axes), jnp.bool_ if name in example.bools else jnp.float32)
        for name, axes in example.leaves.items()
    ]
    scalars = _MAGIC[which][: len(example.scalars)]
    # Not `trace`: an example has no state, names or symbols to look for, and there are many of them. Without a jit around each of jnp's
    # functions, which would only be flattened again, tracing takes two thirds of the time.
    with jax.disable_jit(not example.jitted):
        if example.concrete:
            return block_of_jaxpr(jax.make_jaxpr(lambda *leaves: example.fn(*leaves, *scalars))(*args))
        return block_of_jaxpr(jax.make_jaxpr(example.fn)(*args, *scalars))


def _solve(example: Example, a: Coef, b: Coef) -> ScalarEdge:
    for i, name in enumerate(example.scalars):
        m, n = _MAGIC[0][i], _MAGIC[1][i]
        for power in _POWERS:
            if abs(a / m**power - b / n**power) <= 1e-5 * abs(a / m**power):
                return ScalarEdge(name, power, a / m**power)
    raise ValueError(
        f"example {example.name}: a constant depends on sizes, or on scalars in a way that cannot be solved"
    )


def _reachable(view: CanonicalView, root: int) -> frozenset[int]:
    seen, stack = set(), [root]
    while stack:
        nid = stack.pop()
        if nid not in seen:
            seen.add(nid)
            stack.extend(o.nid for o in view.nodes[nid].operands)
    return frozenset(seen)


def _gauged(view: CanonicalView, leaf_of: Mapping[int, str]) -> frozenset[int]:
    """The nodes known up to a factor: a leaf's factor passes through linear nodes, while sums and functions fix coefficients."""
    gauged = set(leaf_of)
    for node in view.nodes:
        if node.op in ("dot", "prod", "reduce_sum", "reduce_max", "reduce_min", "select", "reshape") and any(
            o.nid in gauged for o in node.operands
        ):
            gauged.add(node.id)
    return frozenset(gauged)


def _may_lack(view: CanonicalView, leaf_of: Mapping[int, str], optional: frozenset[str]) -> frozenset[int]:
    lacking = {nid for nid, name in leaf_of.items() if name in optional}
    for node in view.nodes:
        below = {o.nid for o in node.operands} - {ONE}
        if below and below <= lacking:
            lacking.add(node.id)
    return frozenset(lacking)


def _letters(
    view: CanonicalView, example: Example, leaf_of: Mapping[int, str], needed: frozenset[int]
) -> tuple[dict[str, frozenset[AxisPlace]], dict[Part, str]]:
    """Letter -> the places of its axes, and the letter of each axis that a reshape merges or splits.

    An axis that only exists inside (a head, split from an operand's features) is called "~0", "~1", ...; where one letter is the
    length of several axes, the further ones are called "f'", "f''", ...
    """
    inner = sorted(nid for nid in needed if nid not in leaf_of)
    nodes = [view.nodes[nid] for nid in inner]
    classes = axis_classes([link for n in nodes for link in axis_links(n, n.id, [o.nid for o in n.operands])])
    by_class = places(classes, dict(zip(inner, nodes, strict=True)))
    name_of = _names_of(view, example, classes)
    parts = _parts_of(nodes, classes)
    split = set(parts.values())
    letters: dict[str, frozenset[AxisPlace]] = {}
    for c in sorted(by_class):
        name_of.setdefault(c, f"~{c}")
        if c not in split and (name_of[c] in letters or name_of[c][0] == "~"):
            raise ValueError(f"example {example.name}: an axis belongs to no leaf, or one letter names two axes")
        while name_of[c] in letters:  # it meets its like through the parts it is split into or merged from
            name_of[c] += "'"
        letters[name_of[c]] = frozenset(by_class[c])
    return letters, {part: name_of[c] for part, c in parts.items()}


def _names_of(view: CanonicalView, example: Example, classes: Mapping[Axis, int]) -> dict[int, str]:
    """Class of an axis that a leaf has -> its letter."""
    name_of: dict[int, str] = {}
    for value, axes in zip(view.block.inputs, example.leaves.values(), strict=False):  # the scalars come last
        nid = view.ref[value.id].nid
        for axis, letter in enumerate(axes):
            if (c := classes.get((nid, axis))) is not None and name_of.setdefault(c, letter) != letter:
                raise ValueError(f"example {example.name}: letters {name_of[c]} and {letter} name one axis")
    return name_of


def _parts_of(nodes: Sequence[CNode], classes: Mapping[Axis, int]) -> dict[Part, int]:
    """An axis that a reshape merges or splits, by its part in it -> its class."""
    reshapes = [n for n in nodes if n.op == "reshape"]
    return {part: classes[axis] for n in reshapes for part, axis in reshape_parts(n, n.id, n.operands[0].nid)}
