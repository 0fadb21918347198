"""Dropout masks of jax.random: recognised by their equations, and traced back to their key.

A mask counts as `jax.random.bernoulli(key, keep, shape)` only if its equations are those that this JAX traces for that call: the fused op
draws it again from the key, so a computation that is only mathematically equal would give another mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ....graph.canonical.nodes import ONE
from ....graph.canonical.view import CanonicalView
from ....graph.declined import Declined
from ....graph.jax_compat import threefry_key
from ....graph.matching.region import VIEWS, Region
from ....graph.primitives import having
from ....graph.program.identical import computed_as
from ....graph.program.ir import Block, Node, Value
from ....graph.program.literals import scalar_result
from ....graph.program.signature import Memo
from ....graph.program.trace import block_of_jaxpr
from ....kernels.ops.dot_product_attention.dropout import drawn
from ...engine.layout import BROADCAST, AxisClasses, moved
from .regions import ancestors, grown

_COMPARISONS = having("order")
_STEPS = 12  # equations between a mask and the factors made of it


@dataclass(frozen=True)
class DrawnFactors:
    """Factors that are a mask drawn from a key, times a number.

    Attributes:
      key: the value of dtype key<fry> from which it is drawn.
      keep: the probability of an entry to be kept, a float32.
      mask: the drawn bool, in its own shape.
      factor: the factors where the mask is True; they are 0 where it is False.
      chain: the equations from the factors down to the mask.
    """

    key: Value
    keep: float
    mask: Value
    factor: float
    chain: tuple[Node, ...]

    def axes(self, of_factors: AxisClasses) -> AxisClasses | None:
        """The axes of the mask, from those of the factors; None if they are not known."""
        axes = of_factors
        for node in self.chain:
            if node.primitive in VIEWS:
                before = _before_view(node, axes)
                if before is None:
                    return None
                axes = before
        return None if BROADCAST in axes else axes


def draw_of(view: CanonicalView, factors: Value, memo: Memo) -> DrawnFactors:
    """The draw from which `factors` are computed.

    Raises:
      Declined: there is none, or it differs from jax.random.bernoulli.
    """
    chain = _chain(view, factors)
    mask = _sources(view, chain[-1])[0] if chain else factors
    kept, dropped = (_through(view, chain, mask, which) for which in (True, False))
    if not kept or dropped != 0:
        raise Declined("its factors are not 0 where an entry is dropped")
    probabilities, key_types = _probabilities_and_keys(view, mask)
    for dtype in key_types:
        if dtype != threefry_key():
            raise Declined(f"it is drawn from a {dtype}, and the op draws with threefry2x32")
    for keep in probabilities:
        program = memo.once(("drawn", keep, mask.shape), lambda keep=keep: _program(keep, mask.shape))
        found = computed_as(view.block, mask, program, view.known_inputs)
        if found is not None:
            return DrawnFactors(found[0], keep, mask, float(kept), chain)
    raise Declined("it is not bit for bit what jax.random.bernoulli(key, p, shape) draws with a p known at trace time")


def kept_as_data(view: CanonicalView, factors: Iterable[Value], why: str) -> Iterator[str]:
    """The note on a mask that is drawn in the block and stays an operand."""
    if any(n.primitive == "random_bits" for n in ancestors(view.block, factors)):
        yield f"its dropout mask is an operand, not drawn again from its key: {why}"


def keyed(region: Region, factors: str, draw: DrawnFactors) -> Region:
    """The region as a function of the key instead of the factors of that name; draws that only it reads become part of it."""
    leaves = {
        ("dropout_key" if n == factors else n): (draw.key if n == factors else v) for n, v in region.leaves.items()
    }
    return grown(region, leaves, ancestors(region.block, [region.leaves[factors]], draw.key))


def _before_view(node: Node, axes: AxisClasses) -> AxisClasses | None:
    """The axes of a view's operand, given those of its result; None if one of them is split or merged."""
    shape = node.inputs[0].shape
    at = [moved(node, d) if n != 1 else None for d, n in enumerate(shape)]
    if any(d is None and n != 1 for d, n in zip(at, shape, strict=True)):
        return None
    return tuple(None if d is None else axes[d] for d in at)


def _chain(view: CanonicalView, value: Value) -> tuple[Node, ...]:
    """The equations from factors down to the comparison that makes a mask, each with a single operand that is not a number."""
    found: list[Node] = []
    while len(found) < _STEPS:
        node = view.block.producer.get(value.id)
        if node is None or node.blocks:
            raise Declined("it is computed outside the block")
        if node.primitive in _COMPARISONS:
            return tuple(found)
        sources = _sources(view, node)
        if len(sources) != 1 or len(node.outputs) != 1:
            raise Declined("it is combined with something else after it is drawn")
        if node.primitive not in VIEWS and sources[0].shape != node.outputs[0].shape:
            raise Declined("it is broadcast against another operand after it is drawn")
        found.append(node)
        value = sources[0]
    raise Declined("it is changed in too many steps after it is drawn")


def _sources(view: CanonicalView, node: Node) -> list[Value]:
    """The operands of an equation that are not numbers."""
    return [a for a in node.inputs if isinstance(a, Value) and view.ref[a.id].nid != ONE]


def _through(view: CanonicalView, chain: tuple[Node, ...], mask: Value, which: bool) -> Any:
    """The value of the factors where the mask is `which`, in the dtypes of the program."""
    number: Any = np.bool_(which)
    source = mask
    for node in reversed(chain):
        if node.primitive not in VIEWS:
            operands = [(number if a is source else view.read(a).coef, a.dtype) for a in node.inputs]
            number = scalar_result(node.primitive, node.params, operands, node.outputs[0].dtype)
            if number is None:
                raise Declined(f"a {node.primitive} changes it after it is drawn")
        source = node.outputs[0]
    return number


def _probabilities_and_keys(view: CanonicalView, mask: Value) -> tuple[list[float], list[Any]]:
    """The numbers that may be a mask's probability, nearest first, and the types of the keys of its random bits."""
    nodes = ancestors(view.block, [mask])
    numbers: dict[float, None] = {}
    for node in nodes:
        for atom in node.inputs:
            if not atom.shape and atom.dtype == np.float32 and view.is_literal(view.read(atom)):
                numbers.setdefault(float(view.read(atom).coef))
    keys = [n.inputs[0].dtype for n in nodes if n.primitive == "random_bits"]
    return [x for x in numbers if 0 < x <= 1], keys


def _program(keep: float, shape: tuple[int, ...]) -> Block:
    key = jax.ShapeDtypeStruct((), threefry_key())
    return block_of_jaxpr(jax.make_jaxpr(lambda k: drawn(k, keep, shape))(key))
