"""Activations of products that the pass `gemm_epilogue` does not reach: one rejection for each node in between.

From a product the pass goes forward through its bias and the elementwise nodes after it. This module traces back from each activation
that no site has reached, through slices, reshapes, factors and sums, to the products from which it is computed. A part that is
multiplied by another part of the same product is a gated pair with packed weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ....graph.certify.activations import ACTIVATION_PRIMITIVES
from ....graph.dtypes import is_float
from ....graph.matching.region import VIEWS
from ....graph.matching.walks import downstream, maker_of, upstream
from ....graph.primitives import SUMS_OVER_DEVICES, having
from ....graph.program.ir import Block, Node, Value
from ....graph.program.scopes import is_backward
from ...engine.base import Pass, Search
from ...engine.declining import examined, reject
from ...engine.outcomes import Candidate, Rejection
from ...engine.wording import anchor_text

PARTS = having("part") | {"squeeze"}
_ACTIVATES = having("sigmoid", "exponential") | {"log1p", "clamp"}
_RULES = having("rule")
_COPIES = having("cast", "mark", "precision", "variance") | {"copy"}
_STEPS = 60  # back from an activation to its products
_SIDE_BY_SIDE = "multiply once, with the weights stacked: jnp.concatenate([x, h], -1) @ jnp.concatenate([w, u])"


@dataclass
class Between:
    """A node computed from products that comes between them and activations.

    Attributes:
      node: the first node, in program order, that is not part of an epilogue.
      products: the products from which it is computed, and `activations` the activations of it.
    """

    node: Node
    products: Mapping[int, Node]
    activations: list[Node] = field(default_factory=list)


def is_float_product(node: Node) -> bool:
    """Whether a node is a product of floats, or a convolution equivalent to one."""
    return is_float(node.outputs[0].dtype) if node.primitive == "dot_general" else is_pointwise_convolution(node)


def is_pointwise_convolution(node: Node) -> bool:
    """Whether a convolution multiplies each position by one matrix."""
    if node.primitive != "conv_general_dilated" or node.params["feature_group_count"] != 1:
        return False
    window = node.params["dimension_numbers"].rhs_spec[2:]
    return all(node.inputs[1].shape[i] == 1 for i in window) and node.params["batch_group_count"] == 1


def activations_beyond(pass_: Pass, search: Search, claimed: Collection[int]) -> Iterator[Candidate | Rejection]:
    """A rejection for each node that separates activations from their products; `claimed`: the nodes of the pass's own sites."""
    found: dict[int, Between] = {}
    for node in search.block.nodes:
        if node.id in claimed or is_backward(node.eqn) or not activates(search, node):
            continue
        between = _read_back(search, node)
        if between is not None and between.node.id not in claimed:
            found.setdefault(between.node.id, between).activations.append(node)
    for between in found.values():
        yield from examined(pass_.name, between.node, lambda b=between: _declined(pass_, search, b))


def activates(search: Search, node: Node) -> bool:
    """Whether a node computes an activation of its operand."""
    if node.primitive in ("exp", "exp2"):
        return not _is_summed(search.block, node)
    if node.primitive == "log1p":  # a softplus; of anything else it is a loss
        return _maker(search, node, {"exp", "exp2"}) is not None
    if node.primitive in ("max", "min"):
        return _reads_a_number(search, node) and is_float(node.outputs[0].dtype)
    if node.primitive == "select_n":
        maker = _maker(search, node, having("order"))
        return maker is not None and _reads_a_number(search, maker)
    return node.primitive in _ACTIVATES or (node.primitive in _RULES and _holds_activation(node.blocks))


def _maker(search: Search, node: Node, names: Collection[str]) -> Node | None:
    """The node that computes a node's first operand, if its primitive is one of these."""
    maker = maker_of(search.block, node.inputs[0])
    return maker if maker is not None and maker.primitive in names else None


def _holds_activation(blocks: Collection[Block]) -> bool:
    inner = [n for b in blocks for n in b.nodes]
    return any(n.primitive in _ACTIVATES | {"max", "select_n"} or _holds_activation(n.blocks) for n in inner)


def _is_number(search: Search, atom: Any) -> bool:
    return not isinstance(atom, Value) or search.view.is_literal(search.view.ref[atom.id])


def _reads_a_number(search: Search, node: Node) -> bool:
    return any(_is_number(search, a) for a in node.inputs)


def _is_summed(block: Block, node: Node) -> bool:
    """Whether exponentials are summed, as in a softmax."""
    passes = VIEWS | _COPIES | {"mul", "select_n"}
    return any(n.primitive == "reduce_sum" for n in downstream(block, node.outputs, lambda n: n.primitive in passes))


def _read_back(search: Search, activation: Node) -> Between | None:
    """The products of an activation and the node in between; None if it reads anything besides products and parameters, or another
    activation.

    Of the nodes in between, this is the one where two products meet, else one that takes a product apart, else the first that is not part
    of an epilogue.
    """
    products: dict[int, Node] = {}
    on_the_way: dict[int, Node] = {}

    def above(node: Node) -> list[Value]:
        values = _passed_on(node) if node.id in on_the_way else ()
        return [a for a in values or () if not _is_number(search, a)]

    start = [a for a in activation.values if not _is_number(search, a)]
    for _, node in upstream(search.block, start, above):
        if len(on_the_way) > _STEPS or activates(search, node):
            return None
        if is_float_product(node):
            products[node.id] = node
        elif _passed_on(node) is None:
            return None
        else:
            on_the_way[node.id] = node
    ranked = _ranked(search, on_the_way, products)
    _, node, product_ids = min(ranked, key=lambda entry: entry[0], default=(0, None, frozenset[int]()))
    return None if node is None else Between(node, {i: products[i] for i in sorted(product_ids)})


def _passed_on(node: Node) -> list[Value] | None:
    """The operands of a node that may be a product on its way to an activation; None if the node lets none through."""
    if node.primitive in ACTIVATION_PRIMITIVES | VIEWS | _COPIES | SUMS_OVER_DEVICES:
        return node.values
    source = node.inputs[0] if node.primitive in PARTS else None
    return [source] if isinstance(source, Value) else None


def _ranked(
    search: Search, nodes: Mapping[int, Node], products: Mapping[int, Node]
) -> Iterator[tuple[int, Node, frozenset[int]]]:
    """Each node computed from products, in program order: its rank, itself, and the products."""
    below: dict[int, frozenset[int]] = {v.id: frozenset({n.id}) for n in products.values() for v in n.outputs}
    for _, node in sorted(nodes.items()):
        sources = {below[a.id] for a in node.values if a.id in below}
        if sources:
            all_of = frozenset[int]().union(*sources)
            below.update((v.id, all_of) for v in node.outputs)
            yield _rank(search, node, len(sources)), node, all_of


def _rank(search: Search, node: Node, operands: int) -> int:
    """The order in which nodes are reported, lowest first; `operands` are computed from different products."""
    if operands > 1:
        return 0
    if node.primitive in PARTS:
        return 1
    given = [a for a in node.values if not _is_number(search, a)]
    bias = node.primitive in _COPIES | {"add"} or (node.primitive in ACTIVATION_PRIMITIVES and len(given) == 1)
    return 3 if bias or _adds_unit_axes(node) else 2


def _adds_unit_axes(node: Node) -> bool:
    """Whether a node is a view that changes only axes of size 1."""
    before, after = (tuple(n for n in v.shape if n > 1) for v in (node.inputs[0], node.outputs[0]))
    return node.primitive in VIEWS and before == after


# -- what is said -------------------------------------------------------------------------------------------------------------


def _declined(pass_: Pass, search: Search, between: Between) -> Rejection:
    node, products = between.node, list(between.products.values())
    packed = node.primitive in PARTS and len(products) == 1
    gates = [g for a in between.activations if packed for g in _gates(search, a)]
    code, reason, edit = _gated(between, gates[0]) if gates else _sentence(between)
    sentence = f"{anchor_text(node)} {reason}"
    rejection = reject(pass_.name, code, sentence, products[0], [node], [node], (1, 2), edit)
    return replace(rejection, site_ids=frozenset(n.id for n in (node, *between.activations, *gates)))


def _names(between: Between) -> str:
    return " and ".join(anchor_text(n) for n in list(between.products.values())[:2])


def _gated(between: Between, gate: Node) -> tuple[str, str, str]:
    """Code, predicate of the node, and edit, for a gated pair with packed weights."""
    reason = (
        f"takes a part of {_names(between)}, whose activation {gate.outputs[0]!r} is multiplied by another part of it: "
        f"a gated pair with its weights packed into one; the fused op activates its whole result"
    )
    return "activation", reason, "to fuse the products, keep the two weights apart: act(x @ w) * (x @ v)"


def _sentence(between: Between) -> tuple[str, str, str | None]:
    """The code, the node's predicate with the requirement, and the edit."""
    primitive, products = between.node.primitive, _names(between)
    before = f"before {anchor_text(between.activations[0])}"
    if len(between.products) > 1 and primitive == "add":
        reason = f"adds up {products} {before}; the fused op activates one product, with its bias"
        return "bias", reason, _SIDE_BY_SIDE
    if primitive in PARTS:
        reason = f"takes a part of {products} {before}; the fused op activates its whole result"
        return "structure", reason, "multiply only by that part of the weight (and of the bias)"
    if primitive in VIEWS:
        reason = f"changes the shape of {products} {before}; the fused op activates its result in its own shape"
        return "axes", reason, "apply the activation first"
    if primitive in SUMS_OVER_DEVICES:
        return "structure", f"sums {products} over devices {before}, and a fused op cannot wait for that sum", None
    after = anchor_text(between.activations[0])
    return "activation", f"comes between {products} and {after}, where the fused op allows only a bias", None


def _gates(search: Search, activation: Node) -> list[Node]:
    """The products of an activated part with another part of the same product."""
    found: list[Node] = []

    def passes(node: Node) -> bool:
        if node.primitive not in ACTIVATION_PRIMITIVES | VIEWS | _COPIES or is_backward(node.eqn):
            return False
        if node.primitive == "mul" and len(_parts_below(search, node)) > 1:
            found.append(node)
            return False
        return True

    for _ in downstream(search.block, activation.outputs, passes):
        pass
    return found


def _parts_below(search: Search, node: Node) -> set[int]:
    """Ids of the parts from which a node is computed by elementwise steps."""

    def is_part(node: Node) -> bool:
        return node.primitive in PARTS and not (node.primitive == "squeeze" and _maker(search, node, PARTS))

    def above(node: Node) -> list[Value]:
        passed = node.primitive in ACTIVATION_PRIMITIVES | VIEWS | _COPIES | _RULES
        return node.values if passed and not is_part(node) else []

    made = itertools.islice(upstream(search.block, node.values, above), _STEPS)
    return {value.id for value, maker in made if is_part(maker)}
