"""The surroundings of the root of a mean of squares in the raw program: the normalised value, how far the norm may reach, and
the canonical view of the nodes in between. The examples of a pass decide whether it is a norm, and which.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....graph.canonical.factoring import factored
from ....graph.canonical.nodes import Ref
from ....graph.canonical.view import CanonicalView
from ....graph.dtypes import is_float
from ....graph.matching.region import CASTS, VIEWS, widens
from ....graph.matching.walks import maker_of, source_of, upstream
from ....graph.primitives import having
from ....graph.program.ir import Literal, Node, Value
from ....graph.program.scopes import is_backward
from ...engine.base import Search

ROOTS = having("root") | {"pow"}
_WRAPPERS = having("mark", "variance", "rule") | {"copy"}
_LINEAR = VIEWS | CASTS | _WRAPPERS | having("difference", "scaling") | {"add"}
# What may stand between the root and a norm.
_BEHIND = _LINEAR | {"integer_pow"}
# What may stand between x and a norm of it.
INNER = _LINEAR | ROOTS | having("extreme") | frozenset("square integer_pow select_n reduce_sum abs".split())
_NODE_LIMIT = 96  # of the nodes looked at around an anchor; a norm in bfloat16 has about 30


def as_written(epsilon: float) -> float:
    """A number as the user wrote it: the shortest that is the same float32, where it is one."""
    short = float(str(np.float32(epsilon)))
    return short if abs(float(np.float32(epsilon)) - epsilon) <= 1e-11 * epsilon else epsilon


def reduced_axes(node: Node, x: Value | None = None) -> tuple[int, ...]:
    """The axes of a sum; for a product, the contracted axes of an operand (the first that has the shape of x)."""
    if node.primitive == "reduce_sum":
        return tuple(sorted(int(a) for a in node.params["axes"]))
    side = next((i for i, a in enumerate(node.inputs) if x is not None and a.shape == x.shape), 0)
    return tuple(sorted(int(a) for a in node.params["dimension_numbers"][0][side]))


class DerivedFrom:
    """Whether a value is computed from x by the operations of a norm.

    Attributes:
      known: value id -> the answer.
      nodes: those on the way, by id.
    """

    def __init__(self, around: Surroundings, x: Value) -> None:
        self.around, self.first = around, around.maker(x)
        self.known: dict[int, bool] = {x.id: True}
        self.nodes: dict[int, Node] = {}

    def __call__(self, atom: Any) -> bool:
        if not isinstance(atom, Value):
            return False
        if atom.id in self.known:
            return self.known[atom.id]
        self.known[atom.id] = False
        node = self.around.maker(atom)
        if node is None or not self.around.is_inner(node) or len(self.known) > _NODE_LIMIT:
            return False
        if self.first is not None and node.id < self.first.id:
            return False
        found = [self(a) for a in node.inputs]  # each is looked at, for its nodes
        if any(found):
            self.known[atom.id] = True
            self.nodes[node.id] = node
        return self.known[atom.id]


class Surroundings:
    """The surroundings of a root of a mean of squares.

    Attributes:
      x: the normalised value.
      sums: the sums below the root.
      results: the values that may be the norm's result, the furthest first.
      view: the canonical view of the nodes between x and the results.
      is_norm: whether the root is that of a mean of x or its squares, and divides (or multiplies) a value computed from x.
      is_mean: whether a factor may turn the sums below the root into means; if none does, x is divided by its length.
      quotients: the nodes in which the root divides (or multiplies) a value computed from x.
      shifts: those that add two values computed from the root.
    """

    def __init__(self, search: Search, anchor: Node) -> None:
        self.search, self.block, self.anchor = search, search.block, anchor
        self.is_norm = self.is_mean = False
        self.sums = self._sums()
        self.quotients: list[Node] = []
        self.shifts: list[Node] = []
        if not self.sums:
            return
        self.x = self._normalised(self.sums[0])
        self.of_x = DerivedFrom(self, self.x)
        self._derived, self._nodes = self.of_x.known, self.of_x.nodes
        self.results = self._results() if self.of_x(anchor.outputs[0]) else []
        self.is_norm = bool(self.quotients) and (self.is_mean or self._of_x_alone())
        if self.is_norm:
            self.view = self._view()
            self._factor(self.view)

    @property
    def sums_of_x(self) -> list[Node]:
        """The sums of x, or of values computed from it, in program order."""
        sums = ((n, self.summed(n)) for _, n in sorted(self._nodes.items()))
        return [n for n, of in sums if of is not None and of.shape == self.x.shape]

    def first(self, primitive: str) -> Node | None:
        return next((n for _, n in sorted(self._nodes.items()) if n.primitive == primitive), None)

    def is_inner(self, node: Node) -> bool:
        """Whether a node may come between x and a norm of it."""
        return node.primitive in INNER or self.summed(node) is not None

    def summed(self, node: Node) -> Value | None:
        """The value that a node of the user's own sums over non-unit axes: by a sum, or by a product of a value with itself or with one
        number everywhere, which the view has as a sum.
        """
        sums = node.primitive in ("reduce_sum", "dot_general") and not is_backward(node.eqn)
        values = [a for a in node.values if not self._literal(a)] if sums else []
        if not values or math.prod(values[0].shape) <= math.prod(node.outputs[0].shape):
            return None
        view = self.search.view
        if node.primitive == "dot_general" and view.nodes[view.ref[node.outputs[0].id].nid].op != "reduce_sum":
            return None
        return values[0]

    def maker(self, atom: Any) -> Node | None:
        return maker_of(self.block, atom)

    def _made(self, atom: Any, above: Callable[[Node], bool]) -> Iterator[Node]:
        """The nodes that compute an operand, nearest first, as far as the search `above` continues."""
        made = upstream(self.block, [atom], lambda n: n.inputs if above(n) else ())
        return (node for _, node in itertools.islice(made, _NODE_LIMIT))

    def _sums(self) -> list[Node]:
        """The sums below the anchor's root, nearest first."""
        found: list[Node] = []

        def above(node: Node) -> bool:
            return node.primitive in INNER and not is_backward(node.eqn) and self.summed(node) is None

        for node in self._made(self.anchor.inputs[0], above):
            if self.summed(node) is not None:
                found.append(node)
            elif not above(node):
                continue
            # A product with one number everywhere is a sum of its multiples.
            factor = node.primitive in ("mul", "div", "dot_general")
            self.is_mean |= factor and any(map(self._literal, node.inputs))
        return found

    def _of_x_alone(self) -> bool:
        """Whether all sums below the root are of x, or of its squares: the length of several arrays is not a statistic of one."""
        return all(self._normalised(total) is self.x for total in self.sums)

    def _literal(self, atom: Any) -> bool:
        return isinstance(atom, Literal) or self.search.view.is_literal(self.search.view.ref[atom.id])

    def base(self, value: Value, through: frozenset[str] = VIEWS) -> Value:
        """The value below views and widening casts of the same canonical node."""
        view = self.search.view
        while (node := self.maker(value)) is not None and (node.primitive in through or widens(node)):
            below = node.inputs[0]
            if not isinstance(below, Value) or view.ref[below.id].nid != view.ref[value.id].nid:
                break
            if through is not VIEWS and view.ref[below.id].dims != view.ref[value.id].dims:
                break
            value = below
        return value

    def _as_read(self, value: Any) -> Value:
        """The value below widening casts and reshapes of unit axes."""
        return self.base(value, frozenset({"reshape", "squeeze", "expand_dims", "broadcast_in_dim"}))

    def _normalised(self, total: Node) -> Value:
        """The value whose squares, or which itself, is summed: below the square, and below the subtraction of its mean."""
        of = self.summed(total)
        assert of is not None
        value = self._past_square(self._as_read(of))
        node = self.maker(value)
        if node is not None and node.primitive == "sub" and isinstance(node.inputs[0], Value):
            start = self._as_read(node.inputs[0])
            if self._is_mean_of(node.inputs[1], start):
                return start
        return value

    def _past_square(self, value: Value) -> Value:
        """The value of which another is the square, through wrappers; the value itself if it is not a square."""
        for _ in range(4):
            node = self.maker(value)
            if node is None or node.primitive not in _WRAPPERS | {"square", "integer_pow", "pow", "mul", "abs"}:
                break
            read = [self._as_read(a) for a in node.values]
            if len({self.search.view.ref[v.id] for v in read}) != 1:
                break  # a product of two values: x itself
            value = read[0]
            if node.primitive not in _WRAPPERS | {"abs"}:
                break
        return value

    def _is_mean_of(self, atom: Any, x: Value) -> bool:
        made = self._made(atom, lambda n: n.primitive in _LINEAR and self.summed(n) is None)
        return any((of := self.summed(n)) is not None and self._as_read(of).id == x.id for n in made)

    def _results(self) -> list[Value]:
        """The values as large as x that follow the root through factors and one added term."""
        found: list[Value] = []
        stack = [(self.anchor.outputs[0], False)]
        seen = {self.anchor.id}
        while stack and len(seen) < _NODE_LIMIT:
            value, ended = stack.pop(0)
            for node in self.block.users.get(value.id, ()):
                if node.id in seen or node.primitive not in _BEHIND or is_backward(node.eqn):
                    continue
                others = self._others(node, value)
                if ended and others:
                    continue
                seen.add(node.id)
                self._nodes[node.id] = node
                result = node.outputs[0]
                self._derived[result.id] = True
                if self._may_be_result(node):
                    found.append(result)
                stack.append((result, ended | self._join(node, others)))
        return sorted(found, key=lambda v: -v.id)

    def _others(self, node: Node, value: Value) -> list[Value]:
        """The operands of a node other than this value and numbers."""
        return [a for a in node.values if a.id != value.id and not self._literal(a)]

    def _join(self, node: Node, others: Sequence[Value]) -> bool:
        """Records a node after the root as a quotient or a shift, if it is one; returns whether it adds a term not computed from the root.

        Args:
          others: its operands that are not computed from the root.
        """
        scales, shifted = node.primitive in ("mul", "div"), all(map(self._after_root, others))
        # Each of the others is looked at, for its nodes: x, or a mean that x is shifted by.
        met = list(filter(self.of_x, others)) if scales or shifted else []
        if scales and any(map(self._is_whole, met)):
            self.quotients.append(node)
        elif not scales and met and len(met) == len(others):
            self.shifts.append(node)
        return node.primitive in ("add", "sub") and not shifted

    def _is_whole(self, value: Value) -> bool:
        """Whether a value is as large as x."""
        return math.prod(value.shape) == math.prod(self.x.shape)

    def _may_be_result(self, node: Node) -> bool:
        result = node.outputs[0]
        return self._is_whole(result) and node.primitive not in VIEWS and is_float(result.dtype)

    def _after_root(self, value: Value) -> bool:
        """Whether a value is computed from the root, like the shift of a norm written as a scale and a shift."""
        view = self.search.view
        root = view.ref[self.anchor.outputs[0].id].nid  # which may be made more than once
        behind = self._made(value, lambda n: n.primitive in _LINEAR and n.id >= self.anchor.id)
        return any(n.id >= self.anchor.id and view.ref[n.outputs[0].id].nid == root for n in behind)

    def _factor(self, view: CanonicalView) -> None:
        """The view with the root factored out of the sums: `x * r + (b - mean * r)` as `(x - mean) * r + b`."""
        root = view.nodes[view.ref[self.anchor.outputs[0].id].nid]
        if root.op != "prod" or len(root.operands) != 1:
            return
        for value in self.results:
            ref = view.ref[value.id]
            product = factored(view, ref.nid, root.operands[0].nid)
            if product.nid != ref.nid:
                dims = tuple(product.dims[d] if d >= 0 else d for d in ref.dims)
                view.ref[value.id] = Ref(ref.coef * product.coef, product.nid, dims)
                view.values_of.setdefault(product.nid, []).append(value)

    def _view(self) -> CanonicalView:
        """The view of the nodes between x and the results, with the nodes that compute numbers or views of their other operands."""

        def made(node: Node) -> list[Value]:
            return [a for a in node.values if a is not self.x and (self._literal(a) or self.base(a) is not a)]

        read = [a for n in self._nodes.values() for a in made(n)]
        nodes = self._nodes | {n.id: n for _, n in upstream(self.block, read, made)}
        return self.search.view.over([self.x], [nodes[i] for i in sorted(nodes)])


@dataclass(frozen=True)
class ChannelGroups:
    """Channels in groups: channels split by a reshape, with statistics over a group's channels and over one more axis, or several.

    Attributes:
      x: the value before the reshape.
      groups, each: the number of groups, and of channels per group.
      batch_axes: the number of leading axes of x over which nothing is summed, followed by the positions and then the channels; None in any
        other layout.
    """

    x: Value
    groups: int
    each: int
    batch_axes: int | None

    @classmethod
    def of(cls, around: Surroundings) -> ChannelGroups | None:
        """The groups that are normalised at a root; None if there are none."""
        value, sums = source_of(around.block, around.x, CASTS), around.sums_of_x or around.sums
        maker = around.maker(value)
        if maker is None or maker.primitive != "reshape" or not isinstance(x := maker.inputs[0], Value):
            return None
        summed = set(reduced_axes(sums[0], around.x))
        for i, groups, each in _taken_apart(x.shape, value.shape):
            if summed & {i, i + 1} == {i + 1} and len(summed) > 1:
                return cls(x, groups, each, _batch_axes(x.shape, value.shape, i, summed))
        return None


def _taken_apart(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The first of the two axes into which a reshape splits one, and the lengths of both."""
    starts = {math.prod(before[:i]): n for i, n in enumerate(before)}  # entries before an axis -> its length
    for i, (outer, inner) in enumerate(itertools.pairwise(after)):
        if min(outer, inner) > 1 and starts.get(math.prod(after[:i])) == outer * inner:
            yield i, outer, inner


def _batch_axes(before: Sequence[int], after: Sequence[int], i: int, summed: set[int]) -> int | None:
    """The number of axes before the positions, if the channels are the last axis, and axes `i` and `i + 1` after the reshape."""
    batch = min(a for a in summed if a != i + 1)
    last = (*before[:-1],) == (*after[:i],) and len(after) == i + 2
    return batch if last and summed == {*range(batch, i), i + 1} else None


def crossing(view: CanonicalView, x: int, root: int) -> int | None:
    """The canonical node in which two different axes of x meet, as where a mean over rows is read along columns.

    Args:
      x, root: canonical nodes; the nodes between them are examined.
    """
    known: dict[int, dict[int, int]] = {x: {i: i for i in range(len(view.nodes[x].shape))}}
    for node in view.nodes[: root + 1]:  # operands stand before their readers
        if node.id in known or node.op in ("leaf", "one"):
            continue
        mine: dict[int, int] = {}  # axis of the node -> the axis of x that it is
        for operand in node.operands:
            for axis, of in known.get(operand.nid, {}).items():
                slot = operand.axes[axis] if axis < len(operand.axes) else -1  # a reshape's operand names none
                if slot >= 0 and mine.setdefault(slot, of) != of:
                    return node.id
        known[node.id] = mine
    return None
