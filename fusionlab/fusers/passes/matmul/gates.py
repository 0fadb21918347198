"""The parts of a gated pair, act(x @ w) * (x @ v), read off the raw graph: from the multiplication back to a bare product on one
side, and through an activation to a product of the same value on the other. The pass `gated_matmul` (`gated`) and the structures use
them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ....graph.canonical.rules import TRANSPARENT
from ....graph.canonical.view import CanonicalView
from ....graph.certify.activations import ACTIVATION_PRIMITIVES, NONLINEAR
from ....graph.matching.region import VIEWS
from ....graph.matching.walks import given, maker_of, upstream
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
    """A product and the nodes between it and a value, from the value back; `copies` do not separate them."""

    product: Node
    between: tuple[Node, ...]
    copies: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Sides:
    """The sides of a multiplication: the activated value, its product, and the other product."""

    activated: Value
    gate: Node
    up: GateSide

    def alike(self, view: CanonicalView) -> bool:
        """Whether both products have one operand as it is, along the same axes."""
        gate, up = self.gate, self.up.product
        same = any(_as_read(view, a) == _as_read(view, b) for a, b in zip(gate.inputs, up.inputs, strict=True))
        return same and gate.params["dimension_numbers"] == up.params["dimension_numbers"]

    def nodes(self, view: CanonicalView) -> dict[int, Node]:
        """Both products, and the nodes between them and the multiplication, by id."""
        found = {n.id: n for n in (self.gate, self.up.product, *self.up.between, *self.up.copies)}
        way = upstream(view.block, [self.activated], lambda n: () if n.id in found else n.values)
        return found | {n.id: n for _, n in way}


def sides_of(view: CanonicalView, multiplication: Node) -> Sides | None:
    """The sides of a multiplication of two products that share an operand; None for any other."""
    left, right = multiplication.inputs
    for activated, bare in ((left, right), (right, left)):
        if not isinstance(activated, Value) or not isinstance(bare, Value):
            continue
        origin, up = _made_of(view, activated, {"dot_general"}), _product_behind(view, bare)
        if origin is None or not origin.activated or up is None or origin.node is up.product:
            continue
        if _share_a_value(view, origin.node, up.product):
            return Sides(activated, origin.node, up)
    return None


@dataclass(frozen=True)
class _Origin:
    """The value from which another is computed, its node, whether an activation lies in between, and all nodes on the way."""

    value: Value
    node: Node
    activated: bool
    nodes: dict[int, Node]


def packed(view: CanonicalView, multiplication: Node) -> dict[int, Node] | None:
    """The nodes of a pair with packed weights: an activated part of one product times another part of it."""
    left, right = (_made_of(view, a, _PARTS) for a in multiplication.inputs)
    if left is None or right is None or left.activated == right.activated:
        return None
    whole = left.node.inputs[0]
    if whole is not right.node.inputs[0] or _as_read(view, left.value) == _as_read(view, right.value):
        return None
    behind = _product_behind(view, whole) if isinstance(whole, Value) else None
    if behind is None:
        return None
    return {n.id: n for n in (behind.product, *behind.between, *behind.copies)} | left.nodes | right.nodes


def _made_of(view: CanonicalView, atom: Any, ends: Collection[str]) -> _Origin | None:
    """The one result of a node of the primitives `ends` from which an operand is computed elementwise, with only parameters (a bias) as
    further operands; None if there is no such result.
    """
    nodes: dict[int, Node] = {}
    found: dict[int, tuple[Value, Node]] = {}
    activated = False

    def above(node: Node) -> list[Value]:
        return [a for a in node.values if node.primitive not in ends and not _is_number(view, a)]

    for value, node in upstream(view.block, [atom], above):
        if len(nodes) >= _STEPS or (node.primitive not in _BY_ENTRY and node.primitive not in ends):
            return None
        nodes[node.id] = node
        activated |= node.primitive in NONLINEAR | _RULES  # jax.nn.relu is a custom_jvp_call
        if node.primitive in ends:
            found[value.id] = value, node
    if len(found) != 1:
        return None
    ((value, node),) = found.values()
    return _Origin(value, node, activated, nodes)


def _is_number(view: CanonicalView, value: Value) -> bool:
    ref = view.ref.get(value.id)  # none has what is inside a folded site
    return ref is not None and view.is_literal(ref)


def _product_behind(view: CanonicalView, value: Value) -> GateSide | None:
    """The product that a value is, or would be without a step or two that separate it."""
    passed: list[Node] = []
    copies: list[Node] = []
    while (node := maker_of(view.block, value)) is not None and len(passed) < _STEPS:
        if node.primitive == "dot_general":
            return GateSide(node, tuple(passed), tuple(copies))
        # Of an addition not what is given, as a bias is.
        sources = [a for a in node.values if node.primitive != "add" or not given(view.block, a)]
        if node.primitive not in COPIES | BETWEEN.keys() or len(sources) != 1:
            return None
        (copies if node.primitive in COPIES else passed).append(node)
        (value,) = sources
    return None


def _share_a_value(view: CanonicalView, gate: Node, up: Node) -> bool:
    """Whether the products share an operand, by value."""
    first, second = ({getattr(_as_read(view, a), "nid", a) for a in node.inputs} for node in (gate, up))
    return bool(first & second)


def _as_read(view: CanonicalView, atom: Any) -> Any:
    """An operand with its axes in their order, or itself where the view has none of it."""
    return view.read(atom) if not isinstance(atom, Value) or atom.id in view.ref else atom
