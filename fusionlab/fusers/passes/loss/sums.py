"""The weighted sum of a loss by row: the nodes that make a scalar of it, linearly, by weights that do not depend on the logits.

Other numbers may be added to the losses, as the constant that makes a smoothed loss 0 at its least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from ....graph.canonical.view import CanonicalView
from ....graph.dtypes import is_float
from ....graph.matching.constants import constant_array
from ....graph.matching.region import CASTS, VIEWS, Region
from ....graph.matching.walks import makers_of, source_of
from ....graph.primitives import having
from ....graph.program.equations import slice_jaxpr
from ....graph.program.in_shard_map import as_varying
from ....graph.program.ir import Node, Value, values_in
from ....graph.program.signature import Memo
from .rows import Downstream

_ADDS = frozenset({"add", "sub"})
_OF_ONE = VIEWS | CASTS | having("copy", "variance") | {"neg", "reduce_sum"}


@dataclass(frozen=True, eq=False)
class WeightedSum:
    """A scalar that is a weighted sum of the losses.

    Attributes:
      value: the scalar.
      rows: the losses.
      nodes: from the losses to the scalar, in order.
      given: what they read besides; `numbers`: the nodes of the constants among that, by id.
      masks: whether a loss may be left out, whatever it is, and not only be multiplied by 0.
      adds: whether other numbers are added to the losses.
    """

    value: Value
    rows: Value
    nodes: tuple[Node, ...]
    given: tuple[Value, ...]
    numbers: Mapping[int, Node]
    masks: bool
    adds: bool

    def weights(self, region: Region, given: list[Any]) -> Any:
        """The weights, with the losses' shape, from the values `given`: 0 for a row that is left out, whatever its factors are."""
        weights = self._factors(region, given)
        if not self.masks or not given:
            return weights
        ones = [jnp.ones_like(a) if is_float(a.dtype) else a for a in given]
        return jnp.where(self._factors(region, ones) == 0, 0, weights)

    def _factors(self, region: Region, given: list[Any]) -> Any:
        one = as_varying(jnp.ones((), self.value.dtype), self.value.aval)
        (factors,) = jax.vjp(self._as_function(region, given), self._zeros())[1](one)
        return factors

    def rest(self, region: Region, given: list[Any]) -> Any:
        """The scalar of losses that are 0."""
        return self._as_function(region, given)(self._zeros())

    def _zeros(self) -> Any:
        return as_varying(jnp.zeros(self.rows.shape, self.rows.dtype), self.rows.aval)

    def _as_function(self, region: Region, given: list[Any]) -> Any:
        """The losses -> the scalar."""
        inside = {n.id for n in self.nodes}
        nodes = [n for n in (*region.nodes, *region.support) if n.id in inside or n.id in self.numbers]
        nodes.sort(key=lambda n: n.id)
        closed = slice_jaxpr(region.block, nodes, (self.rows, *self.given), self.value, region.known)
        fn = jex_core.jaxpr_as_fun(closed)
        return lambda rows: fn(rows, *given)[0]


def weighted_sum(view: CanonicalView, found: Downstream, rows: Value, memo: Memo) -> WeightedSum | None:
    """The last scalar that is a weighted sum of the losses of all rows; None if the program has no such scalar."""
    nodes = _linear_in(view, found, rows)
    while nodes and nodes[-1].outputs[0].shape:
        nodes.pop()
    if not nodes:
        return None
    own = {rows.id} | {v.id for n in nodes for v in n.outputs}
    given, numbers = _read_besides(view, nodes, own)
    masks, adds = any(_leaves_out(view, n, memo) for n in nodes), any(n.primitive in _ADDS for n in nodes)
    return WeightedSum(nodes[-1].outputs[0], rows, tuple(nodes), given, numbers, masks, adds)


def _leaves_out(view: CanonicalView, node: Node, memo: Memo) -> bool:
    """Whether a node leaves losses out whatever they are: by a choice, or as XLA has a product with a mask of bools, by which NaN is 0.

    A constant mask XLA makes numbers of first: NaN times their 0 is NaN.
    """
    if node.primitive != "mul":
        return node.primitive == "select_n"
    sources = (source_of(view.block, a, VIEWS | CASTS) for a in node.inputs)
    masks = (a for a in sources if isinstance(a, Value) and a.dtype == bool)
    return any(constant_array(view, a, memo) is None for a in masks)


def _linear_in(view: CanonicalView, found: Downstream, rows: Value) -> list[Node]:
    """The nodes after the losses that are linear in them, each the only one that reads the one before."""
    nodes, value = list[Node](), rows
    while value.id not in view.block.returned:
        readers = found.readers(value)
        if len(readers) != 1 or not _is_linear(view, found, readers[0], value):
            break
        nodes += readers
        value = readers[0].outputs[0]
    return nodes


def _read_besides(
    view: CanonicalView, chosen: Sequence[Node], own: set[int]
) -> tuple[tuple[Value, ...], dict[int, Node]]:
    """(values, makers of constants by id) that nodes read besides what they make themselves."""
    left_out = own | view.known_inputs.keys()
    read = {v.id: v for n in chosen for v in values_in(n.inputs) if v.id not in left_out}
    fixed = {i: v for i, v in read.items() if view.is_literal(view.ref[i])}
    numbers = {n.id: n for v in fixed.values() for n in makers_of(view, v)}
    return tuple(v for i, v in read.items() if i not in fixed), numbers


def _is_linear(view: CanonicalView, found: Downstream, node: Node, value: Value) -> bool:
    """Whether a node is linear in a value that it reads once, by factors that no logit goes into."""
    if node.blocks or len(node.outputs) != 1 or not is_float(node.outputs[0].dtype):
        return False
    if sum(a is value for a in node.inputs) != 1 or sum(a.id in found.ids for a in values_in(node.inputs)) != 1:
        return False
    return _is_linear_in(view, node, value)


def _is_linear_in(view: CanonicalView, node: Node, value: Value) -> bool:
    """Whether a node is linear in a value, whatever its factors are."""
    if node.primitive == "div":
        return node.inputs[0] is value
    if node.primitive in _ADDS:  # to a scalar other losses are added
        return node.outputs[0].shape == value.shape != ()
    return node.primitive in _OF_ONE | {"mul", "dot_general"} or _masks(view, node, value)


def _masks(view: CanonicalView, node: Node, value: Value) -> bool:
    """Whether a node is a choice between a value and 0."""
    if node.primitive != "select_n" or len(node.inputs) != 3 or node.inputs[0] is value:
        return False
    other = view.read(next(a for a in node.inputs[1:] if a is not value))
    return view.is_literal(other) and other.coef == 0
