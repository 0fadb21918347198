"""What a body's inputs are known to be at the call: numbers, and masks and positions that the block around computes from constants alone.

JAX moves what is the same in every iteration out of a loop when it differentiates it, so a mask that a program makes in the body of a
loop is an input of that body then.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ..jax_compat import has_side_effects, varying_axes
from ..primitives import having
from ..program.captured import readable
from ..program.equations import Made, kind, slice_jaxpr
from ..program.explicit_axes import sharding_in_type
from ..program.ir import Node, Value, values_in
from ..program.signature import node_signature
from .nodes import Coef
from .rules import passed_whole

if TYPE_CHECKING:
    from .view import CanonicalView

# What masks and positions are made of; tables of sines, and what else is expensive, stay operands.
_MAKES = having(
    "addition", "difference", "scaling", "extreme", "equality", "order", "logic", "choice", "layout", "slice", "cast", "copy"
) | {"iota", "concatenate"}  # fmt: skip
_MOST = 32  # nodes


Known = Coef | Made


def known_inputs(view: CanonicalView, node: Node) -> dict[int, Known]:
    """What the inputs of a region's body are known to be, by number: constants of a scan; any of a remat, jit, shard_map."""
    found: dict[int, Known] = {}
    for i, atom in enumerate(node.inputs[: passed_whole(node)]):
        ref = view.read(atom)
        made = _made(view, atom, node.blocks[0].inputs[i]) if isinstance(atom, Value) else None
        if view.is_literal(ref):
            found[i] = ref.coef
        elif made is not None:
            found[i] = made
    return found


def _made(view: CanonicalView, value: Value, inside: Value) -> Made | None:
    """How a value is made from constants, if `inside`, which it is in a body, has its shape and layout, and varies along no mesh axis."""
    if kind(inside.aval) != kind(value.aval) or varying_axes(inside.aval):
        return None
    nodes = _makers(view, value)
    if nodes is None:
        return None
    ordered = [nodes[i] for i in sorted(nodes, key=view.block.position.__getitem__)]
    number: dict[int, Any] = {i: ("known", known) for i, known in view.known_inputs.items()}
    number.update((v.id, ("const", id(const))) for v, const in view.block.consts)
    signatures = tuple(node_signature(n, number) for n in ordered)
    sliced = functools.partial(slice_jaxpr, view.block, ordered, (), value, view.known_inputs)
    sharding = sharding_in_type(inside.aval)
    return Made(
        sliced(constant=True),
        (signatures, number.get(value.id), sharding),
        None if sharding is None else sliced(),
    )


def _makers(view: CanonicalView, value: Value) -> dict[int, Node] | None:
    """The nodes by which a value is made from constants, by id; None if it is not."""
    known = {v.id for v, const in view.block.consts if _is_mask(const)} | view.known_inputs.keys()
    nodes: dict[int, Node] = {}
    stack = [value]
    while stack and len(nodes) <= _MOST:
        v = stack.pop()
        node = view.block.producer.get(v.id)
        if v.id in known:
            continue
        if node is None or not _is_simple(node):
            return None
        if node.id not in nodes:
            nodes[node.id] = node
            stack += values_in(node.inputs)
    return None if stack else nodes


def _is_simple(node: Node) -> bool:
    return node.primitive in _MAKES and not node.blocks and not has_side_effects(node.eqn)


def _is_mask(const: Any) -> bool:
    """Whether a captured array has whole numbers or bools, and several."""
    if math.prod(getattr(const, "shape", ())) <= 1 or not readable(const):
        return False
    return np.dtype(const.dtype).kind in "biu"
