"""The tables of a layer's rotary embedding as values of the program.

A user's rotary function often computes its cosines and sines itself, for queries and again for keys: then the program contains them twice,
and the layer reads their common inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jex_core

from ....graph.canonical.nodes import ONE
from ....graph.canonical.view import CanonicalView
from ....graph.jax_compat import has_side_effects
from ....graph.matching.region import look_through
from ....graph.program.equations import slice_jaxpr
from ....graph.program.ir import Block, Literal, Node, Value
from .axes import Side, Unread
from .rotary import Rotary

_FREELY_MADE = ("one", "iota")  # numbers and positions: what else is made of them, as a mask, has them of its own
_NODES = 64  # that make a table, at most


@dataclass(frozen=True)
class RotaryTable:
    """A table of cosines or sines, `[.., t, w]`: `value` in the program, computed from `inputs` by `nodes`, or given if it occurs once."""

    value: Value
    side: Side
    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]

    def program(self, block: Block, known: Mapping[int, Any]) -> Callable[..., Any]:
        """(inputs) -> the table. `known`: scalar block inputs that are literals at the call, by value id."""
        function = jex_core.jaxpr_as_fun(slice_jaxpr(block, self.nodes, self.inputs, self.value, known))
        return lambda *given: function(*given)[0]


def tables_of(view: CanonicalView, base: CanonicalView, rotary: Rotary) -> dict[str, RotaryTable]:
    """ "cos" and "sin".

    Args:
      view: the block's folded view, in which the layer was read. base: its view without folding.

    Raises:
      Unread: the program computes one several times in different ways.
    """
    return {slot: _table(view, base, rotary.products, getattr(rotary, slot)) for slot in ("cos", "sin")}


def _table(view: CanonicalView, base: CanonicalView, products: frozenset[int], side: Side) -> RotaryTable:
    copies = {v.id: v for nid in products for v in _read(view, base, nid, side.nid)}
    if not copies or any(base.ref[i].coef != 1 for i in copies):
        raise Unread("its rotary embedding reads a table times a number", side.nid, "rotary")
    values = [copies[i] for i in sorted(copies)]
    if len(values) == 1:
        return RotaryTable(values[0], side, (values[0],), ())
    inputs, nodes = _common_sources(base, values, side.nid)
    return RotaryTable(values[0], side, inputs, nodes)


def _read(view: CanonicalView, base: CanonicalView, product: int, table: int) -> Iterator[Value]:
    """The table's values that the multiplications of a node read, without views."""
    for value in view.values_of.get(product, ()):
        node = view.block.producer.get(value.id)
        if node is None or node.primitive not in ("mul", "dot_general"):
            continue
        for a in node.inputs:
            if isinstance(a, Value) and view.ref[a.id].nid == table:
                yield _beneath(base, a)[0]


def _beneath(base: CanonicalView, value: Value) -> tuple[Value, list[Node]]:
    """The value to which a site's operand is bound where this value is read, and the views between."""
    return look_through(base, value, through_casts=True)


def _common_sources(
    base: CanonicalView, copies: Sequence[Value], nid: int
) -> tuple[tuple[Value, ...], tuple[Node, ...]]:
    """(the common inputs of several copies of one value, the nodes that compute the first copy from them).

    Raises:
      Unread: they are computed in different ways, by too many nodes, or by nodes with side effects.
    """
    block = base.block
    inputs: dict[int, Value] = {}
    nodes: dict[int, Node] = {}
    stack = [list(copies)]
    while stack:
        values = stack.pop()
        if base.ref[values[0].id].nid == ONE and values[0].id in base.known_inputs:
            continue
        if _is_shared(base, values):
            given, views = _beneath(base, values[0])
            inputs[given.id] = given
            nodes.update((n.id, n) for n in views)
            continue
        first = block.producer.get(values[0].id)
        if first is not None and first.id in nodes:
            continue
        makers = _like_makers(block, values)
        if not makers or len(nodes) >= _NODES:
            raise Unread("the tables of its rotary embedding are computed in different ways", nid, "rotary")
        nodes[makers[0].id] = makers[0]
        stack += _inputs_of(makers)
    return tuple(inputs.values()), tuple(nodes[i] for i in sorted(nodes))


def _is_shared(base: CanonicalView, values: Sequence[Value]) -> bool:
    """Whether copies are one value that may be an input of a table."""
    if len({base.twins.get(v.id, v.id) for v in values}) > 1:
        return False
    return base.nodes[base.ref[values[0].id].nid].op not in _FREELY_MADE or values[0].id not in base.block.producer


def _like_makers(block: Block, copies: Sequence[Value]) -> list[Node]:
    """The nodes that compute several copies of one value; none if they differ or have side effects."""
    makers = [n for v in copies if (n := block.producer.get(v.id)) is not None]
    if len(makers) < len(copies) or has_side_effects(makers[0].eqn):
        return []
    return makers if all(_alike(makers[0], n) for n in makers) else []


def _inputs_of(makers: Sequence[Node]) -> Iterator[list[Value]]:
    """The operands of several equal nodes in each place, without numbers."""
    for atoms in zip(*(n.inputs for n in makers), strict=True):
        values = [a for a in atoms if isinstance(a, Value)]
        if values:
            yield values


def _alike(first: Node, second: Node) -> bool:
    """Whether two nodes have the same form. The values of their parameters and numbers need not be equal: copies are one canonical value,
    and only the first is computed again.
    """
    ours, theirs = ([isinstance(a, Literal) for a in node.inputs] for node in (first, second))
    alike = first.primitive == second.primitive and ours == theirs
    return alike and jax.tree.structure(first.params) == jax.tree.structure(second.params)
