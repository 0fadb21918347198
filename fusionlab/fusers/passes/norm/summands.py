"""The terms of a norm's input: a residual, or a vector of its features, that the fused op adds itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from ....graph.matching.region import CASTS, VIEWS, Region, widens
from ....graph.matching.walks import maker_of, source_of
from ....graph.program.ir import Block, Node, Value
from ....graph.program.scopes import is_backward

_ADDS = ("add", "add_any")


@dataclass(frozen=True)
class Summands:
    """x = base + shift + residual, as far as present, and the nodes that add them.

    Attributes:
      base, residual: of the shape and dtype of x.
      shift: a vector with one entry for each feature, of any shape; of the dtype of x.
      nodes: the additions, and the broadcast of the shift.
    """

    base: Value
    residual: Value | None
    shift: Value | None
    nodes: tuple[Node, ...]

    def joined_to(self, region: Region, others: tuple[Value, ...] = ()) -> Region:
        """The region of a norm with its additions; `others`: the sum, if it is one of its results."""
        named: Mapping[str, Value | None] = {"x": self.base, "residual": self.residual, "shift": self.shift}
        leaves = {n: v for n, v in ({**region.leaves, **named}).items() if v is not None}
        nodes = {n.id: n for n in (*region.nodes, *self.nodes)}
        support = tuple(n for n in region.support if n.id not in nodes)
        return replace(
            region, leaves=leaves, nodes=tuple(nodes[i] for i in sorted(nodes)), support=support, others=others
        )


def summands_of(block: Block, x: Value, feature: int | None, norm_results: Collection[int]) -> Summands | None:
    """The sum that makes x right before the norm; None if there is none, or if folding it in would not help.

    Only additions in the dtype of x count: XLA joins one that widens its operands with their casts. A vector added to a product stays with
    the product, and the bias of another norm with that norm.

    Args:
      feature: the normalised axis; None for several, in which case no vector is sought.
      norm_results: ids of the results of norms found earlier.
    """
    outer = _addition(block, x, norm_results)
    if outer is None:
        return None
    shifted = _shifted(block, x, outer, feature)
    if shifted is not None:
        return shifted
    left, right = outer.values
    if not (_fits(left, x) and _fits(right, x)):
        return None
    for side, other in ((left, right), (right, left)):
        inner = _addition(block, side, norm_results)
        if inner is None or block.users[side.id] != (outer,) or side.id in {other.id, *block.returned}:
            continue
        shifted = _shifted(block, x, inner, feature)
        if shifted is not None:
            return replace(shifted, residual=other, nodes=(outer, *shifted.nodes))
    return Summands(left, right, None, (outer,))


def _shifted(block: Block, x: Value, added: Node, feature: int | None) -> Summands | None:
    """An addition of a vector of features; None if neither operand is one."""
    for full, vector in itertools.permutations(added.values):
        found = _vector(block, x, full, vector, feature)
        if found is not None:
            return Summands(full, None, found[0], (added, *found[1]))
    return None


def _addition(block: Block, value: Value, norm_results: Collection[int]) -> Node | None:
    """The node that computes a value as a sum of two others of its dtype; None for the result of another norm, which adds its own bias."""
    node = block.producer.get(value.id)
    if node is None or node.primitive not in _ADDS or is_backward(node.eqn) or value.id in norm_results:
        return None
    if [a.dtype for a in node.values] != [value.dtype] * 2:
        return None
    makers = filter(None, (block.producer.get(a.id) for a in node.values))
    return None if any(map(widens, makers)) else node


def _fits(value: Value, x: Value) -> bool:
    return tuple(value.shape) == tuple(x.shape) and value.dtype == x.dtype


def _vector(
    block: Block, x: Value, full: Value, value: Value, feature: int | None
) -> tuple[Value, tuple[Node, ...]] | None:
    """The vector of features of which a value is a broadcast, by the addition or by a node, and that node; None if there is none, or if it
    is added to a product."""
    if feature is None or not _fits(full, x) or _is_product(block, full):
        return None
    return (value, ()) if _along(value, x, feature) else _broadcast(block, x, value, feature)


def _broadcast(block: Block, x: Value, value: Value, feature: int) -> tuple[Value, tuple[Node, ...]] | None:
    """The vector of features that a node broadcasts to a value, and that node; None if there is none."""
    node = block.producer.get(value.id)
    source = node.inputs[0] if node is not None and node.primitive == "broadcast_in_dim" else None
    if node is None or not isinstance(source, Value) or not _fits(value, x):
        return None
    along = [axis for axis, size in zip(node.params["broadcast_dimensions"], source.shape, strict=True) if size != 1]
    return (source, (node,)) if along == [feature] and math.prod(source.shape) == x.shape[feature] else None


def _along(value: Value, x: Value, feature: int) -> bool:
    """Whether a value has the features of x, and one entry along its other axes."""
    wanted = tuple(size if axis == feature else 1 for axis, size in enumerate(x.shape))
    return tuple(value.shape) == wanted != tuple(x.shape)


def _is_product(block: Block, value: Value) -> bool:
    maker = maker_of(block, source_of(block, value, VIEWS | CASTS))
    return maker is not None and maker.primitive == "dot_general"
