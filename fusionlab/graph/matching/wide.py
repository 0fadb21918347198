"""Programs that compute, on purpose, in a wider dtype than their replacement would, such as float64 statistics of float32.

Certification does not see it, because casts are the identity there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..dtypes import is_float, narrows
from ..program.ir import Block, Node, Value, values_in
from .region import CASTS, VIEWS, Region


def wider_in(region: Region, dtype: Any) -> Node | None:
    """As `computed_wider`, for a region."""
    return computed_wider(sorted((*region.nodes, *region.support), key=lambda n: n.id), region.inputs, dtype)


def computed_wider(nodes: Iterable[Node], inputs: Iterable[Value], dtype: Any) -> Node | None:
    """The first node, in program order, that computes from the inputs a float that `dtype` does not hold; None if there is no such node.

    Casts and views do not count, nor do values computed only from numbers: with 64-bit types enabled, these have 64 bits until they
    meet an array.
    """
    given = {v.id for v in inputs}
    for node in nodes:
        if given.isdisjoint(v.id for v in values_in(node.inputs)):
            continue
        given.update(v.id for v in node.outputs)
        if node.primitive in CASTS | VIEWS:
            continue
        if _is_wider(node, dtype):
            return node
        inner = _first_inside(node, given, dtype)
        if inner is not None:
            return inner
    return None


def _first_inside(node: Node, given: set[int], dtype: Any) -> Node | None:
    """As `computed_wider`, in the blocks of a node."""
    found = (_inside(b, node, given, dtype) for b in node.blocks)
    return next((n for n in found if n is not None), None)


def _is_wider(node: Node, dtype: Any) -> bool:
    """Whether a node makes a float that a dtype does not hold."""
    return any(is_float(v.dtype) and narrows(dtype, v.dtype) for v in node.outputs)


def _inside(block: Block, node: Node, given: set[int], dtype: Any) -> Node | None:
    """As `computed_wider`, in a block of a node: an input counts if the node's operand does, if both have equally many."""
    pairs = list(zip(block.inputs, node.inputs, strict=False)) if len(block.inputs) == len(node.inputs) else []
    plain = {v.id for v, a in pairs if not (isinstance(a, Value) and a.id in given)}
    return computed_wider(block.nodes, [v for v in block.inputs if v.id not in plain], dtype)
