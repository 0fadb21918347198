"""The weighted sum of a loss by row: the nodes that make a scalar of it, linearly, by weights that do not depend on the logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from ....graph.canonical.view import CanonicalView
from ....graph.dtypes import is_float
from ....graph.matching.region import CASTS, VIEWS, Region
from ....graph.primitives import having
from ....graph.program.equations import slice_jaxpr
from ....graph.program.ir import Node, Value, values_in
from .rows import Downstream, makers_of

_OF_ONE = VIEWS | CASTS | having("copy", "variance") | {"neg", "reduce_sum"}


@dataclass(frozen=True, eq=False)
class WeightedSum:
    """A scalar that is a weighted sum of the losses.

    Attributes:
      value: the scalar.
      rows: the losses.
      nodes: from the losses to the scalar, in order.
      beside: what they read besides; `numbers`: the nodes of the constants among that, by id.
      masks: whether a loss may be left out, whatever it is, and not only be multiplied by 0.
    """

    value: Value
    rows: Value
    nodes: tuple[Node, ...]
    beside: tuple[Value, ...]
    numbers: Mapping[int, Node]
    masks: bool

    def weights(self, region: Region, beside: list[Any]) -> Any:
        """The weights, with the losses' shape, from the values `beside`."""
        inside = {n.id for n in self.nodes}
        nodes = [n for n in (*region.nodes, *region.support) if n.id in inside or n.id in self.numbers]
        nodes.sort(key=lambda n: n.id)
        closed = slice_jaxpr(region.block, nodes, (self.rows, *self.beside), self.value, region.known)
        fn = jex_core.jaxpr_as_fun(closed)
        rows = jax.ShapeDtypeStruct(self.rows.shape, self.rows.dtype)
        (weights,) = jax.linear_transpose(lambda r: fn(r, *beside)[0], rows)(jnp.ones((), self.value.dtype))
        return weights


def weighted_sum(view: CanonicalView, found: Downstream, rows: Value) -> WeightedSum | None:
    """The last scalar that is a weighted sum of the losses of all rows; None if there is none."""
    nodes, value, best, masks = list[Node](), rows, None, False
    while value.id not in view.block.returned or value is rows:
        readers = found.readers(value)
        if len(readers) != 1 or value.id in view.block.returned or not _is_linear(view, found, readers[0], value):
            break
        (node,) = readers
        nodes.append(node)
        value, masks = node.outputs[0], masks or node.primitive == "select_n"
        if not value.shape:
            best = value, tuple(nodes), masks
    if best is None:
        return None
    scalar, chosen, masked = best
    own = {rows.id} | {v.id for n in chosen for v in n.outputs}
    read = {v.id: v for n in chosen for v in values_in(n.inputs) if v.id not in own and v.id not in view.known_inputs}
    fixed = {i: v for i, v in read.items() if view.is_literal(view.ref[i])}
    numbers = {n.id: n for v in fixed.values() for n in makers_of(view, v)}
    return WeightedSum(scalar, rows, chosen, tuple(v for i, v in read.items() if i not in fixed), numbers, masked)


def _is_linear(view: CanonicalView, found: Downstream, node: Node, value: Value) -> bool:
    """Whether a node is linear in a value that it reads once, by factors that no logit goes into."""
    if node.blocks or len(node.outputs) != 1 or not is_float(node.outputs[0].dtype):
        return False
    if sum(a is value for a in node.inputs) != 1 or sum(a.id in found.ids for a in values_in(node.inputs)) != 1:
        return False
    if node.primitive in _OF_ONE | {"mul", "dot_general"}:
        return True
    if node.primitive == "div":
        return node.inputs[0] is value
    if node.primitive != "select_n" or len(node.inputs) != 3 or node.inputs[0] is value:
        return False
    other = view.read(next(a for a in node.inputs[1:] if a is not value))
    return view.is_literal(other) and other.coef == 0
