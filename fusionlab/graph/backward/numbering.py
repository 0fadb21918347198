"""Value numbering: the values of a program that are computed alike have one number, also in different loops.

Two values with one number are equal, bit by bit, in the same trips of the loops around them. A body that JAX calls once, such as a
checkpoint's, is read through. Global value numbering by hashing; see Alpern, Wegman and Zadeck, "Detecting equality of variables in
programs", POPL 1988.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import jax
import numpy as np

from ..jax_compat import draws_by_entry, has_side_effects, scan_counts
from ..primitives import FAMILIES, having
from ..program.graph import Graph
from ..program.ir import Atom, Block, Literal, Node, Value
from ..program.signature import as_it_is, holds_jaxpr, params_signature, type_key

_ONCE = having("remat", "jit")
_PROGRAMS = having("jit", "call", "remat", "rule", "branch", "loop", "mesh")
# What is the same function of its operands and parameters wherever it stands, unlike `rng_uniform`, callbacks and calls of other libraries.
_FUNCTIONS = frozenset().union(*FAMILIES.values()) - _PROGRAMS | frozenset(
    "iota concatenate pad rev sort top_k dynamic_update_slice cumsum cumprod cummax cummin cumlogsumexp atan2 nextafter shift_left "
    "shift_right_logical shift_right_arithmetic population_count clz real imag complex conj bitcast_convert_type lgamma digamma "
    "random_bits random_split random_fold_in random_seed random_wrap random_unwrap threefry2x32".split()
)


class Numbering:
    """The numbers of the values of a program.

    Attributes:
      of: value id -> number.
      holders: number -> the values that have it, in program order.
    """

    def __init__(self, graph: Graph) -> None:
        self.of: dict[int, int] = {}
        self.holders: dict[int, list[Value]] = {}
        self._numbers: dict[Hashable, int] = {}
        self._stacked: dict[
            int, tuple[int, int]
        ] = {}  # number of a scan's per-step results -> (depth of its body, number there)
        self._fresh(graph.top.inputs)
        self._block(graph.top, 0)

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _give(self, values: Sequence[Value], numbers: Sequence[int]) -> None:
        for value, number in zip(values, numbers, strict=True):
            self.of[value.id] = number
            self.holders.setdefault(number, []).append(value)

    def _fresh(self, values: Sequence[Value]) -> None:
        """Numbers that nothing else has."""
        self._give(values, [self._number(("itself", v.id)) for v in values])

    def _atom(self, atom: Atom) -> int:
        if isinstance(atom, Value):
            return self.of[atom.id]
        bits = np.asarray(atom.val).astype(atom.dtype).tobytes() if _is_plain(atom) else id(atom)
        return self._number(("literal", str(atom.dtype), atom.shape, bits))

    def _block(self, block: Block, depth: int) -> None:
        """Numbers what a block makes; `depth` scans are around it."""
        for value, array in block.consts:
            self._give([value], [self._number(("captured", id(array)))])
        for node in block.nodes:
            self._node(node, [self._atom(a) for a in node.inputs], depth)

    def _node(self, node: Node, given: list[int], depth: int) -> None:
        if node.primitive == "scan":
            self._scan(node, given, depth)
        elif node.primitive in _ONCE:
            (body,) = node.blocks
            self._give(body.inputs, given)
            self._block(body, depth)
            self._give(node.outputs, [self._atom(a) for a in body.outputs])
        elif node.blocks or _is_alone(node):
            for block in node.blocks:
                self._fresh(block.inputs)
                self._block(block, depth)
            self._fresh(node.outputs)
        else:
            key = node.primitive, params_signature(node), draws_by_entry(node.eqn), *given
            types = (type_key(v, as_it_is) for v in node.outputs)
            self._give(node.outputs, [self._number((key, i, kind)) for i, kind in enumerate(types)])

    def _scan(self, node: Node, given: list[int], depth: int) -> None:
        consts, carried = scan_counts(node.params)
        body, first = node.blocks[0], consts + carried
        self._give(body.inputs[:consts], given[:consts])
        self._fresh(body.inputs[consts:first])
        self._give(body.inputs[first:], [self._entry(number, depth + 1) for number in given[first:]])
        self._block(body, depth + 1)
        self._fresh(node.outputs[:carried])
        inside = [self._atom(a) for a in body.outputs[carried:]]
        stacks = [self._number(("stacked", depth + 1, number, node.params["length"])) for number in inside]
        self._stacked.update((stack, (depth + 1, number)) for stack, number in zip(stacks, inside, strict=True))
        self._give(node.outputs[carried:], stacks)

    def _entry(self, array: int, depth: int) -> int:
        """The number of one entry of an array, the one of the trip of the scan at that depth."""
        at, number = self._stacked.get(array, (None, 0))
        return number if at == depth else self._number(("entry", depth, array))


def _is_plain(literal: Literal) -> bool:
    return isinstance(literal.dtype, np.dtype)


def _is_alone(node: Node) -> bool:
    """Whether the results of a node are equal to nothing. The signature of a parameter leaves programs out, and shortens arrays."""
    opaque = any(holds_jaxpr(p) or isinstance(p, np.ndarray | jax.Array) for p in node.params.values())
    return opaque or node.primitive not in _FUNCTIONS or has_side_effects(node.eqn)
