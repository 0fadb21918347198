"""Programs that differ only in the lengths of their axes: a proof for one holds for the other.

A product of 128 or 512 features, or one layer for two sequence lengths, does not depend on the length of an axis. A program is a case of
another if renaming sizes turns the latter into it: all numbers are the same, and equal sizes stay equal. Different sizes may become
equal: a square weight is a case of any weight, but not the reverse, because there one axis may be used for another. A program that
depends on the length of an axis (by positions, counting, or a window) is like no other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..canonical.rules import is_jax_rule
from ..cost.rules import EXPANDED, TRANSCENDENTAL, UNIT_COST_ELEMENTWISE
from ..interpret.evaluate import Inline
from ..interpret.limits import KEPT_SIZES
from ..jax_compat import varies
from ..matching.region import Region, region_signature
from ..primitives import having
from ..program.explicit_axes import make_typed_jaxpr, sharding_in_type
from ..program.in_shard_map import make_jaxpr
from ..program.ir import Block, Node, values_in
from ..program.signature import block_signature, node_signature
from ..program.trace import FLATTENED, block_of_jaxpr

_OF_ENTRIES = UNIT_COST_ELEMENTWISE | TRANSCENDENTAL | EXPANDED.keys() | {"integer_pow", "stop_gradient", "copy"}
_OF_SHAPES = having("layout")
_SUMS = having("row reduction") | {"dot_general"}


class Names(dict[int, Any]):
    """Size of an axis -> its name, in order of appearance. Those that proofs leave as they are keep their number."""

    def __call__(self, size: int) -> Any:
        return size if size <= KEPT_SIZES else self.setdefault(int(size), ("size", len(self)))


def most_sizes_first(nodes: Iterable[Node]) -> list[Node]:
    """Nodes ordered by the number of lengths of their operands, most first: a proof for one may also hold for those with fewer."""
    return sorted(nodes, key=lambda n: -len({size for a in n.inputs for size in a.shape}))


@dataclass(frozen=True)
class _Proved:
    """A region and its replacement, with named sizes; whether neither depends on the length of an axis; and the outcome of the proof."""

    region: Any
    replacement: Callable[[], Any]
    is_blind: Callable[[], bool]
    verdict: Any


@dataclass
class Alike:
    """The proofs so far, for reuse by similar programs."""

    inline: Inline
    _proved: dict[Any, list[_Proved]] = field(default_factory=dict)

    def once(self, region: Region, replacement: Callable[[], Block], description: Any, prove: Callable[[], Any]) -> Any:
        """`prove()`, or its earlier outcome for a similar region and replacement, if that was a proof (`ok`)."""
        if not _is_blind(region):
            return prove()
        names = Names()
        signature = region_signature(region, names)
        earlier = self._proved.setdefault((len(region.nodes), description), [])

        @functools.cache
        def replaced() -> Any:
            return block_signature(replacement(), Names(names))

        for other in earlier:
            renamed: dict[Any, Any] = {}
            if (
                _is_case(signature, other.region, renamed)
                and other.is_blind()
                and _is_case(replaced(), other.replacement(), renamed)
            ):
                return other.verdict
        verdict = prove()
        if verdict.ok:
            is_blind = functools.cache(lambda: _is_blind_written_out(replacement(), self.inline))
            earlier.append(_Proved(signature, replaced, is_blind, verdict))
        return verdict


def _is_case(signature: Any, of: Any, renamed: dict[Any, Any]) -> bool:
    """Whether renaming sizes turns one signature into another; `renamed` holds the known names and is extended."""
    if not isinstance(of, tuple):
        return bool(signature == of)
    if not isinstance(signature, tuple) or len(signature) != len(of):
        return False
    if of[:1] == ("size",):
        return signature[:1] == ("size",) and renamed.setdefault(of, signature) == signature
    return all(_is_case(a, b, renamed) for a, b in zip(signature, of, strict=True))


def _is_blind(region: Region) -> bool:
    """Whether a region does not depend on the lengths of its axes."""
    types = [v.aval for v in (*region.inputs, *region.roots)]
    if region.sums.axes or region.known or any(varies(a) or sharding_in_type(a) is not None for a in types):
        return False
    nodes = sorted((*region.nodes, *region.support), key=lambda n: n.id)
    return _are_blind(nodes, {v.id for v in region.inputs})


def _are_blind(nodes: Sequence[Node], moving: set[int]) -> bool:
    """As `_is_blind`, for nodes in order; `moving` are the values that depend on operands: a sum of others may count its terms."""
    moving = set(moving)
    for node in nodes:
        if not _is_blind_node(node, moving):
            return False
        if not moving.isdisjoint(_read(node)):
            moving.update(v.id for v in node.outputs)
    return True


def _is_blind_node(node: Node, moving: set[int]) -> bool:
    """As `_are_blind`, for one node."""
    if node.primitive in FLATTENED or is_jax_rule(node):
        inside = all(_are_blind(b.nodes, {v.id for v in b.inputs}) for b in node.blocks)
        return inside and moving.issuperset(_read(node))
    if node.primitive in _SUMS:
        return moving.issuperset(_read(node))
    return node.primitive in _OF_ENTRIES | _OF_SHAPES


def _is_blind_written_out(block: Block, inline: Inline) -> bool:
    """Whether a program with fused ops, and the meaning of these ops, do not depend on the lengths of axes."""
    moving = {v.id for v in block.inputs}
    for node in block.nodes:
        meaning = inline(node.eqn)
        if meaning is None:
            blind = _are_blind([node], moving)
        else:
            closed = make_typed_jaxpr(meaning, [v.aval for v in node.inputs]) if callable(meaning) else meaning
            blind = moving.issuperset(_read(node)) and _stands_alone(block_of_jaxpr(closed))
        if not blind:
            return False
        if not moving.isdisjoint(_read(node)):
            moving.update(v.id for v in node.outputs)
    return True


def _read(node: Node) -> list[int]:
    return [v.id for v in values_in(node.inputs)]


def _stands_alone(block: Block) -> bool:
    return not block.consts and _are_blind(block.nodes, {v.id for v in block.inputs})


def is_same_equation(region: Region, program: Block, inline: Inline) -> bool:
    """Whether a region is one equation, and a program one op whose plain meaning is that very equation of the same inputs: the same
    function, also where JAX has no derivative of it.
    """
    nodes, calls = [*region.nodes, *region.support], program.nodes
    if len(nodes) != 1 or len(calls) != 1:
        return False
    (node,), (call,) = nodes, calls
    meaning = inline(call.eqn)
    if meaning is None:
        return False
    if callable(meaning):  # to be traced with the types of its operands
        meaning = make_jaxpr(meaning, [v.aval for v in call.eqn.invars])
    meant = block_of_jaxpr(meaning)
    given, taken = ({v.id: i for i, v in enumerate(values)} for values in (region.inputs, program.inputs))
    operands = {inner.id: taken.get(v.id) for inner, v in zip(meant.inputs, call.values, strict=True)}
    alike = [node_signature(n, operands) for n in meant.nodes] == [node_signature(node, given)]
    return alike and len(node.outputs) == 1 and not node.blocks and not meant.consts
