"""The loss by row, cut out of the program: from the operands of the product, and the labels, to a value with one entry for each row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ....graph.canonical.nodes import nonunit
from ....graph.canonical.view import CanonicalView
from ....graph.declined import Declined
from ....graph.dtypes import is_float
from ....graph.jax_compat import has_side_effects
from ....graph.matching.constants import is_constant
from ....graph.matching.region import Region, dead_with
from ....graph.matching.walks import makers_of
from ....graph.primitives import having
from ....graph.program.ir import Node, Value, values_in
from ....graph.program.scopes import in_backward
from .heads import Head

RULES = having("rule")
_ADD = "give each row one weight, and add what the loss has besides after the sum of the rows"
_PICK = "pick the label's logit by integers, as jnp.take_along_axis and jax.nn.one_hot do"
_MOST = 8  # values by row that may be weights


class Downstream:
    """What a program computes from logits, apart from its backward pass unless that is `whole`.

    Attributes:
      nodes: in program order, the product first.
      ids: the ids of their results.
    """

    def __init__(self, view: CanonicalView, head: Head, whole: bool = False) -> None:
        block = view.block
        self.view, self.head, self.whole = view, head, whole
        self.nodes: list[Node] = [head.product]
        self.ids = {v.id for v in head.product.outputs}
        for node in block.nodes[block.position[head.product.id] + 1 :]:
            if (whole or not in_backward(node)) and any(v.id in self.ids for v in values_in(node.inputs)):
                self.nodes.append(node)
                self.ids.update(v.id for v in node.outputs)
        self.alike = {v.id for v in head.alike}

    def of_taken_rows(self) -> Downstream | None:
        """The same of the rows that a slice takes of what is made of the logits; None where there is no slice, or slices differ."""
        logits = self.head.logits
        taken = [
            n
            for n in self.nodes
            if n.primitive == "slice"
            and n.inputs[0].aval.shape == logits.shape
            and n.outputs[0].shape[-1:] == logits.shape[-1:]
            and not in_backward(n)
        ]
        if len({(n.params["start_indices"], n.params["limit_indices"], n.params["strides"]) for n in taken}) != 1:
            return None
        return Downstream(self.view, replace(self.head, taken=(taken[0],)), self.whole)

    def readers(self, value: Value) -> list[Node]:
        """The nodes that read a value, apart from the backward pass."""
        return [n for n in self.view.block.users.get(value.id, ()) if not in_backward(n)]

    def losses(self) -> Iterator[Value]:
        """The floats with one entry for each row, or one for all, in program order."""
        wanted = nonunit(self.head.rows), ()
        for node in self.nodes[1:]:
            for value in node.outputs if node.primitive in RULES else node.outputs[:1] if not node.blocks else ():
                if nonunit(value.shape) in wanted and is_float(value.dtype):
                    yield value

    def argmax(self) -> Value | None:
        """The class of the largest logit of each row, if the program asks for it."""
        if self.head.taken:  # it is one of more rows
            return None
        return next((n.outputs[0] for n in self.nodes if n.primitive == "argmax" and self._is_of_logits(n)), None)

    def _is_of_logits(self, node: Node) -> bool:
        """Whether a node reduces the logits of each row, as they are or before they are cast."""
        (value,) = node.values
        last = node.params["axes"] == (len(value.shape) - 1,)
        return last and value.shape == self.head.logits.shape and value.id in self.alike


@dataclass(frozen=True, eq=False)
class Cut:
    """A loss by row as a region, with the value that holds its labels, and the one that holds its weights, if any."""

    region: Region
    labels: Value
    weights: Value | None = None


def cuts(found: Downstream, root: Value, others: tuple[Value, ...], weights: Value | None = None) -> Iterator[Cut]:
    """The regions that compute a value from the product's operands and one value with a label for each row, that which is computed last
    first; and from one with a weight for each row.

    Raises:
      Declined: no region does.
    """
    labels = sorted(labels_of(found, root) or labels_of(found, root, constant=True), key=lambda v: -v.id)
    one = False
    for value in labels:
        cut = _cut(found, root, value, others, weights)
        if isinstance(cut, Region):
            one = True
            yield Cut(cut, value, weights)
    if not one:
        what, edit = (
            ("it reads more than logits and labels", _ADD)
            if labels
            else ("no value holds one label for each row", _PICK)
        )
        raise Declined(f"{root!r} is no loss by labels: {what}", edit=edit)


def cuts_with_weights(found: Downstream, root: Value, *others: Value) -> Iterator[Cut]:
    """The regions that compute a value from the product's operands, labels, and at most one weight for each row.

    Raises:
      Declined: no region does.
    """
    problem, one = None, False
    for weights in (None, *_by_row(found, root)):
        try:
            for cut in cuts(found, root, others, weights):
                one = True
                yield cut
        except Declined as declined:
            problem = problem or declined
    if problem is not None and not one:
        raise problem


def _by_row(found: Downstream, root: Value) -> list[Value]:
    """The numbers by row that a value is computed from and that no logit goes into, the last ones first."""
    block, rows = found.view.block, nonunit(found.head.rows)
    stack, seen, given = [root], {v.id for v in found.head.leaves.values()}, dict[int, Value]()
    while stack:
        value = stack.pop()
        if value.id in seen or is_constant(found.view, value):
            continue
        seen.add(value.id)
        if value.id not in found.ids and nonunit(value.shape) == rows and _is_number(value):
            given[value.id] = value
        maker = block.producer.get(value.id)
        stack += values_in(maker.inputs) if maker is not None and not is_opaque(maker) else []
    return sorted(given.values(), key=lambda v: -v.id)[:_MOST]


def _is_number(value: Value) -> bool:
    return is_float(value.dtype) or value.dtype == bool


def labels_of(found: Downstream, root: Value, constant: bool = False) -> list[Value]:
    """The integers with one entry for each row that a value is computed from, besides the logits.

    With `constant` also those that are computed from numbers alone: where each row is the only one of its class, `jnp.arange(rows)`.
    """
    block, wanted = found.view.block, nonunit(found.head.rows)
    stack, seen, given = [root], {v.id for v in found.head.leaves.values()}, dict[int, Value]()
    while stack:
        value = stack.pop()
        if value.id in seen or (not constant and is_constant(found.view, value)):
            continue
        seen.add(value.id)
        if np.dtype(value.dtype).kind in "iu" and value.id not in found.ids and nonunit(value.shape) == wanted:
            given[value.id] = value
        stack += _beneath(found, value, block.producer.get(value.id))
    return list(given.values())


def _beneath(found: Downstream, value: Value, maker: Node | None) -> list[Value]:
    """The operands of what makes a value, if that may belong to the loss."""
    inside = value.id in found.ids or _may_be_inside(found, value)
    return values_in(maker.inputs) if inside and maker is not None and not is_opaque(maker) else []


def is_opaque(node: Node) -> bool:
    """Whether a node has a program of its own; the one of a scatter only adds."""
    return bool(node.blocks) and not node.primitive.startswith("scatter") and node.primitive not in RULES


def _may_be_inside(found: Downstream, value: Value) -> bool:
    """Whether a value that no logit goes into may belong to the loss: labels, and what is compared with them for each class."""
    return not is_float(value.dtype) or value.shape[-1:] == (found.head.classes,)


def _may_be_made(found: Downstream, value: Value, maker: Node, weighted: bool) -> bool:
    """Whether a region may compute a value that it reads."""
    if has_side_effects(maker.eqn):
        return False
    own = value.id in found.ids or is_constant(found.view, value) or _may_be_inside(found, value)
    return own or maker.primitive == "transpose" or (weighted and nonunit(value.shape) == nonunit(found.head.rows))


def _cut(
    found: Downstream, root: Value, labels: Value, others: tuple[Value, ...], weights: Value | None
) -> Region | Value:
    """The region of a value with some labels, and weights if any; what else it reads, if it reads more."""
    view, block, head = found.view, found.view.block, found.head
    leaves = {**head.leaves, "labels": labels} | ({} if weights is None else {"weights": weights})
    inner, support = dict[int, Node](), dict[int, Node]()
    stack, seen = [root, *others], {v.id for v in leaves.values()} | view.known_inputs.keys()
    while stack:
        value = stack.pop()
        if value.id in seen:
            continue
        seen.add(value.id)
        if view.is_literal(view.ref[value.id]):
            support.update((n.id, n) for n in makers_of(view, value))
            continue
        maker = block.producer.get(value.id)
        if maker is None or not _may_be_made(found, value, maker, found.whole or weights is not None):
            return value
        (inner if value.id in found.ids else support)[maker.id] = maker
        stack += values_in(maker.inputs)
    return region_of(view, root, leaves, inner, support, others, head.classes)


def region_of(
    view: CanonicalView,
    root: Value,
    leaves: dict[str, Value],
    inner: dict[int, Node],
    support: dict[int, Node],
    others: tuple[Value, ...],
    classes: int,
) -> Region:
    """A region of nodes that are replaced, and of others that it needs; those of them that nothing else reads go with it."""
    inner = inner | dead_with(view.block, inner, support, leaves.values())
    nodes = _by_id(inner.values())
    beside = _by_id(n for i, n in support.items() if i not in inner)
    known, positions = view.known_inputs, frozenset({classes})
    return Region(view.block, root, leaves, nodes, beside, known, others, positions=positions, aside=True)


def _by_id(nodes: Iterable[Node]) -> tuple[Any, ...]:
    return tuple(sorted(nodes, key=lambda n: n.id))
