"""Programs that differ by the lengths of their axes alone: what is proved of one at some lengths holds of the other.

A product of 128 and of 512 features, the same layer for two lengths of a sequence: neither asks how long an axis is. A program is like
another where that becomes it by other names for its sizes: every number in it is the same, and sizes that were equal stay equal. Those that
were not may become so: a square weight is a case of any weight, and not the other way, since there an axis may stand for another. A program
that can tell how long an axis is (by positions, by counting, by a window) is like no other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..canonical.rules import is_jax_rule
from ..cost.rules import EXPANDED, TRANSCENDENTAL, UNIT_COST_ELEMENTWISE
from ..interpret.evaluate import Inline
from ..interpret.numpy_rules import KEPT_SIZES
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
    """Nodes by how many lengths their operands have, the most first: what is proved of one of them may hold of those with fewer."""
    return sorted(nodes, key=lambda n: -len({size for a in n.inputs for size in a.shape}))


@dataclass(frozen=True)
class _Proved:
    """A region and what stands in its place, by the names of their sizes; whether neither can tell how long an axis is; what was proved."""

    region: Any
    replacement: Callable[[], Any]
    is_blind: Callable[[], bool]
    verdict: Any


@dataclass
class Alike:
    """What was proved of programs that may be like one that is still to be."""

    inline: Inline
    _proved: dict[Any, list[_Proved]] = field(default_factory=dict)

    def once(self, region: Region, replacement: Callable[[], Block], description: Any, prove: Callable[[], Any]) -> Any:
        """`prove()`, or what it gave for a region and a replacement like these, if that was a proof (`ok`)."""
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
    """Whether a signature is another by other names for its sizes; `renamed` holds those known, and is extended."""
    if not isinstance(of, tuple):
        return bool(signature == of)
    if not isinstance(signature, tuple) or len(signature) != len(of):
        return False
    if of[:1] == ("size",):
        return signature[:1] == ("size",) and renamed.setdefault(of, signature) == signature
    return all(_is_case(a, b, renamed) for a, b in zip(signature, of, strict=True))


def _is_blind(region: Region) -> bool:
    """Whether a region cannot tell how long its axes are."""
    types = [v.aval for v in (*region.inputs, *region.roots)]
    if region.sums.axes or region.known or any(varies(a) or sharding_in_type(a) is not None for a in types):
        return False
    nodes = sorted((*region.nodes, *region.support), key=lambda n: n.id)
    return _are_blind(nodes, {v.id for v in region.inputs})


def _are_blind(nodes: Sequence[Node], moving: set[int]) -> bool:
    """Whether nodes, in order, cannot; `moving` are the values that operands have a part in: a sum of others may count its terms."""
    moving = set(moving)
    for node in nodes:
        if not _is_blind_node(node, moving):
            return False
        if not moving.isdisjoint(_read(node)):
            moving.update(v.id for v in node.outputs)
    return True


def _is_blind_node(node: Node, moving: set[int]) -> bool:
    """Whether one node cannot, `moving` as of several."""
    if node.primitive in FLATTENED or is_jax_rule(node):
        inside = all(_are_blind(b.nodes, {v.id for v in b.inputs}) for b in node.blocks)
        return inside and moving.issuperset(_read(node))
    if node.primitive in _SUMS:
        return moving.issuperset(_read(node))
    return node.primitive in _OF_ENTRIES | _OF_SHAPES


def _is_blind_written_out(block: Block, inline: Inline) -> bool:
    """Whether a program with fused ops in it cannot tell how long its axes are: nor what the ops compute."""
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
