"""The gradients of a loss whose value the program does not have where they are: of `jax.grad` alone, and of a checkpoint's backward pass.

There the softmax of the logits and the labels make the cotangent of the product, and that the gradients of x, w and bias. They are a site
of their own: the op is called for its gradients, with the cotangents of the rows as their weights.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace

from ....graph.canonical.view import CanonicalView
from ....graph.declined import Declined
from ....graph.matching.region import CASTS, VIEWS
from ....graph.matching.walks import source_of
from ....graph.program.ir import Node, Value
from ....graph.program.scopes import in_backward
from ...engine.declining import FUSE_FIRST
from ...engine.outcomes import Candidate, Rejection
from ...engine.site import Site
from .heads import check_head, head_of, product_of
from .numbers import beside, numbers_of
from .out_of_range import ODD, ODD_EDIT, Treatment, treatment
from .planning import CONCEPTS, EDIT, Loss, notes_of, planned, with_more
from .rows import Cut, Downstream, cuts_with_weights, labels_of
from .softmaxes import exponentials

_THROUGH = VIEWS | CASTS
_SUM_FIRST = "sum the loss over the examples before it is differentiated, if each example's gradient is not needed"


class GradientsOfLoss(Site):
    """One sum of exponentials of logits, from there to a candidate; None where it belongs to no loss."""

    def examine(self, logits: Value, total: Node | None, *values: Value) -> Candidate | Rejection | None:
        """`values`: the losses by row, and what else is reported of the logits, if the program has them as well."""
        found = self.found(logits)
        if found is None or not (roots := gradients_of(found)):
            return None
        first, *others = roots.values()
        if not labels_of(found, first):
            return None  # of a router, or another softmax
        self.nodes = (found.head.product, *found.head.chain, self.anchor)
        check_head(self.view, found.head, total)
        _check_sizes(found, roots)
        argmax = found.argmax()
        others += [*values] if argmax is None else [argmax, *values]
        problem: Declined | None = None
        with contextlib.suppress(StopIteration):
            tried = cuts_with_weights(found, first, *others)
            while True:
                try:
                    loss = self.loss(found, next(tried), tuple(roots), argmax is not None, values)
                    plan = planned(self.search, loss)
                    return self.offered(loss.region, plan, EDIT, notes_of(self.view, loss), CONCEPTS)
                except Declined as declined:
                    problem = problem or declined
        problem = problem or Declined(f"{first!r} is no gradient of a loss by labels")
        raise Declined(problem.sentence, problem.code, problem.nodes, problem.edit or FUSE_FIRST)

    def found(self, logits: Value) -> Downstream | None:
        """What the program makes of the logits, if they are a head's."""
        with contextlib.suppress(Declined):
            head = head_of(self.view, logits)
            return None if head is None else Downstream(self.view, head, whole=True)
        return None

    def loss(
        self, found: Downstream, cut: Cut, slots: tuple[str, ...], argmax: bool, values: tuple[Value, ...]
    ) -> Loss:
        """The loss whose gradients a region computes. Raises Declined if it computes something else."""
        head, first = found.head, replace(cut, region=cut.region.of(cut.region.root))
        numbers = numbers_of(first, head, slots[0])
        made = tuple(beside(cut, head, v, numbers) for v in values)
        if None in made:
            raise Declined(f"{values[made.index(None)]!r} is made of another loss than its gradients")
        loss = with_more(Loss(head, cut, numbers, Treatment(), slots, (None,) * argmax + made))
        odd = treatment(loss.cut, head, lambda odd: planned(self.search, replace(loss, odd=odd)), loss.labelled)
        if odd is None:
            raise Declined(f"{cut.region.root!r} {ODD}", "value", edit=ODD_EDIT)
        return replace(loss, odd=odd)


def sums_of_exponentials(view: CanonicalView, known: Set[int]) -> Iterator[tuple[Node, Value, Node]]:
    """(node, logits, node) of each sum of exponentials of logits, apart from those of products that are `known`."""
    seen = set(known)
    for node in view.block.nodes:
        found = exponentials(view, node) if node.primitive == "reduce_sum" else None
        product = None if found is None else product_of(view, found[0])
        if found is not None and product is not None and product.id not in seen:
            seen.add(product.id)
            yield node, *found


def gradients_of(found: Downstream) -> dict[str, Value]:
    """The gradients of the operands that a program computes from the logits, by name; `found` goes into the backward pass."""
    head, block = found.head, found.view.block
    named = {source_of(block, v, _THROUGH).id: name for name, v in head.leaves.items() if name != "bias"}
    made: dict[str, list[Value]] = {}
    for node in found.nodes[1:]:
        name, turned = _gradient(found, node, named)
        if name is not None:
            made.setdefault(name, []).append(_as_operand(found, node.outputs[0], head.leaves[name], turned))
    if not {"x", "w"} & made.keys() or not any(map(in_backward, found.nodes)):
        return {}
    # That of a bias may be summed up in steps.
    return {name: values[-1] for name, values in made.items() if len(values) == 1 or name == "bias"}


def _gradient(found: Downstream, node: Node, named: Mapping[int, str]) -> tuple[str | None, bool]:
    """(the operand whose gradient a node may be, whether it is turned)."""
    head = found.head
    if node.primitive == "reduce_sum":
        return ("bias" if head.bias is not None and node.outputs[0].shape == (head.classes,) else None), False
    inside = [isinstance(a, Value) and a.id in found.ids for a in node.inputs]
    if node.primitive != "dot_general" or sum(inside) != 1:
        return None, False
    other = source_of(found.view.block, node.inputs[inside.index(False)], _THROUGH)
    # The product with w makes the gradient of x.
    name = {"x": "w", "w": "x"}.get(named.get(other.id, "")) if isinstance(other, Value) else None
    return name, name == "w" and inside[0] != head.transposed


def _check_sizes(found: Downstream, roots: Mapping[str, Value]) -> None:
    """Raises Declined where a gradient is not of its operand's size: of each example, as by vmap(grad(loss)), or of a part."""
    for name, root in roots.items():
        operand = found.head.leaves[name]
        if math.prod(root.shape) != math.prod(operand.shape):
            sentence = f"{root!r} is no gradient of {operand!r}, but one for each example or for a part of it"
            raise Declined(sentence, "structure", edit=_SUM_FIRST)


def _as_operand(found: Downstream, value: Value, operand: Value, turned: bool) -> Value:
    """The value of the operand's type that is a gradient, cast, or turned if it is `turned`, for its only reader."""
    at = value
    while at.aval.shape != operand.aval.shape or at.dtype != operand.dtype or turned:
        users = found.view.block.users.get(at.id, ())
        if len(users) != 1 or users[0].primitive not in _THROUGH or at.id in found.view.block.returned:
            return value
        turned = turned != (users[0].primitive == "transpose")
        at = users[0].outputs[0]
    return at
