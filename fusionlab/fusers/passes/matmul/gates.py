"""What a gated pair is made of, act(x @ w) * (x @ v), read off the raw layer: from the multiplication back to a bare product on one
side, and on the other to a product of the same value through its activation. What becomes of it is for the pass `matmul_schedule`
(`gated`) and for the structures to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....graph.canonical.rules import TRANSPARENT
from ....graph.canonical.view import CanonicalView
from ....graph.certify.activations import ACTIVATION_PRIMITIVES, NONLINEAR
from ....graph.matching.region import VIEWS
from ....graph.primitives import having
from ....graph.program.ir import Node, Value

_STEPS = 40  # between a product and what it is multiplied with
# What may stand between the bare product and the multiplication so that it is no pair, and the code that says so.
BETWEEN = {
    "name": "named_residual",
    "reduce_precision": "named_residual",
    "stop_gradient": "stop_gradient",
    "convert_element_type": "dtype",
    "add": "bias",
    **dict.fromkeys(VIEWS, "axes"),
}
COPIES = TRANSPARENT - VIEWS  # the value itself
_PARTS = having("part")
_RULES = having("rule")  # JAX's own, or a user's, which is declined
_BY_ENTRY = ACTIVATION_PRIMITIVES | COPIES | _RULES | BETWEEN.keys()


@dataclass(frozen=True)
class GateSide:
    """A product, and what stands between it and a value, from the value back; `copies` set nothing apart."""

    product: Node
    between: tuple[Node, ...]
    copies: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Sides:
    """The sides of a multiplication: what is activated, of which product, and the product beside it."""

    activated: Value
    gate: Node
    up: GateSide

    def alike(self, view: CanonicalView) -> bool:
        """Whether both products have one operand as it is, along the same axes."""
        gate, up = self.gate, self.up.product
        same = any(_as_read(view, a) == _as_read(view, b) for a, b in zip(gate.inputs, up.inputs, strict=True))
        return same and gate.params["dimension_numbers"] == up.params["dimension_numbers"]

    def nodes(self, view: CanonicalView) -> dict[int, Node]:
        """Both products, and what stands between them and the multiplication, by their ids."""
        found = {n.id: n for n in (self.gate, self.up.product, *self.up.between, *self.up.copies)}
        stack = [self.activated]
        while stack:
            node = view.block.producer.get(stack.pop().id)
            if node is not None and node.id not in found:
                found[node.id] = node
                stack += node.values
        return found


def sides_of(view: CanonicalView, multiplication: Node) -> Sides | None:
    """What a multiplication of two products with one operand in common is made of; None for any other."""
    left, right = multiplication.inputs
    for activated, bare in ((left, right), (right, left)):
        if not isinstance(activated, Value) or not isinstance(bare, Value):
            continue
        gate, up = _origin(view, activated), _product_behind(view, bare)
        if gate is not None and up is not None and gate is not up.product and _share_a_value(view, gate, up.product):
            return Sides(activated, gate, up)
    return None


@dataclass(frozen=True)
class _Part:
    """A part of a value that a side of a multiplication is made of, what it is a part of, and whether by way of an activation."""

    value: Value
    whole: Value
    activated: bool
    nodes: dict[int, Node]


def packed(view: CanonicalView, multiplication: Node) -> dict[int, Node] | None:
    """The nodes of a pair whose weights are packed in one product: a part of it, activated, times another part of it."""
    left, right = (_part_of(view, a) if isinstance(a, Value) else None for a in multiplication.inputs)
    if (
        left is None
        or right is None
        or left.whole is not right.whole
        or _as_read(view, left.value) == _as_read(view, right.value)
    ):
        return None
    behind = _product_behind(view, left.whole)
    if behind is None or left.activated == right.activated:
        return None
    return {n.id: n for n in (behind.product, *behind.between, *behind.copies)} | left.nodes | right.nodes


def _part_of(view: CanonicalView, value: Value) -> _Part | None:
    """The one part of another value that a value is made of, entry by entry, whatever else is read on the way if it is given."""
    nodes: dict[int, Node] = {}
    found: dict[int, tuple[Value, Value]] = {}  # parts, each with what it is one of
    stack, activated = [value], False
    while stack and len(nodes) < _STEPS:
        at = stack.pop()
        node = view.block.producer.get(at.id)
        if node is None or _is_number(view, at):
            continue  # given
        whole = node.inputs[0] if node.primitive in _PARTS else None
        if isinstance(whole, Value):
            nodes[node.id] = node
            found[at.id] = at, whole
        elif node.primitive not in _BY_ENTRY:
            return None
        elif node.id not in nodes:
            nodes[node.id] = node
            activated |= node.primitive in NONLINEAR | _RULES  # jax.nn.relu is a custom_jvp_call
            stack += node.values
    if len(found) != 1 or stack:
        return None
    ((part, whole),) = found.values()
    return _Part(part, whole, activated, nodes)


def given(view: CanonicalView, atom: Any) -> bool:
    """Whether an operand is an input or captured array of the block, through views and casts: a parameter, as a bias is."""
    while isinstance(atom, Value):
        maker = view.block.producer.get(atom.id)
        if maker is None:
            return True
        if maker.primitive not in VIEWS | {"convert_element_type"}:
            return False
        atom = maker.inputs[0]
    return True


def _is_number(view: CanonicalView, value: Value) -> bool:
    ref = view.ref.get(value.id)  # none has what is inside a folded site
    return ref is not None and view.is_literal(ref)


def _product_behind(view: CanonicalView, value: Value) -> GateSide | None:
    """The product that a value is, or would be but for a step or two that set it apart."""
    passed: list[Node] = []
    copies: list[Node] = []
    while (node := view.block.producer.get(value.id)) is not None and len(passed) < _STEPS:
        if node.primitive == "dot_general":
            return GateSide(node, tuple(passed), tuple(copies))
        if node.primitive in COPIES and isinstance(node.inputs[0], Value):
            copies.append(node)
            value = node.inputs[0]
            continue
        sources = _sources(view, node)
        if node.primitive not in BETWEEN or len(sources) != 1:
            return None
        passed.append(node)
        value = sources[0]
    return None


def _sources(view: CanonicalView, node: Node) -> list[Value]:
    """What a node reads; of an addition not what is given, as a bias is."""
    return [a for a in node.values if not given(view, a)] if node.primitive == "add" else node.values


def _origin(view: CanonicalView, value: Value) -> Node | None:
    """The one product that an activated value is made of, whatever else is read on the way if it is given (a bias); None for what is
    made otherwise, and for the bare product."""
    products: dict[int, Node] = {}
    seen: set[int] = set()
    stack, steps, activated = [value], 0, False
    while stack and steps < _STEPS:
        operand, steps = stack.pop(), steps + 1
        node = view.block.producer.get(operand.id)
        if operand.id in seen or _is_number(view, operand):
            continue
        seen.add(operand.id)
        if node is None:
            continue  # given
        if node.primitive == "dot_general":
            products[node.id] = node
        elif node.primitive in _BY_ENTRY:
            activated |= node.primitive in NONLINEAR | _RULES  # jax.nn.relu is a custom_jvp_call
            stack += node.values
        else:
            return None
    found = list(products.values())
    return found[0] if len(found) == 1 and not stack and activated else None


def _share_a_value(view: CanonicalView, gate: Node, up: Node) -> bool:
    """Whether the products have an operand in common, as numbers."""
    refs = [{_shown(view, a) for a in node.inputs} for node in (gate, up)]
    return bool(refs[0] & refs[1])


def _shown(view: CanonicalView, atom: Any) -> Any:
    """The canonical node that an operand shows, or the operand itself where the view has none."""
    return view.read(atom).nid if not isinstance(atom, Value) or atom.id in view.ref else atom


def _as_read(view: CanonicalView, atom: Any) -> Any:
    """An operand with its axes in their order, or itself where the view has none of it."""
    return view.read(atom) if not isinstance(atom, Value) or atom.id in view.ref else atom
