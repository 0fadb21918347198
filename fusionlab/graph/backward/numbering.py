"""Value numbering: the values of a program that are computed alike have one number, also in different loops.

Two values with one number are equal, bit by bit, in the same trips of the scans around them. A body that is called once, such as a
checkpoint's, is read through. What a loop carries is equal to what another carries if both begin with the same and do the same in each
trip. Global value numbering by hashing; see Alpern, Wegman and Zadeck, "Detecting equality of variables in
programs", POPL 1988.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from ..jax_compat import draws_by_entry, has_side_effects, scan_counts
from ..primitives import FAMILIES, having
from ..program.graph import Graph
from ..program.ir import Atom, Block, Literal, Node, Value
from ..program.signature import as_it_is, holds_jaxpr, params_signature, type_key

_ONCE = having("remat", "call", "rule")
_PROGRAMS = having("jit", "call", "remat", "rule", "branch", "loop", "mesh")
# What is the same function of its operands and parameters wherever it stands, unlike `rng_uniform`, callbacks and calls of other libraries.
_FUNCTIONS = frozenset().union(*FAMILIES.values()) - _PROGRAMS | frozenset(
    "iota concatenate pad rev sort top_k dynamic_update_slice cumsum cumprod cummax cummin cumlogsumexp atan2 nextafter shift_left "
    "shift_right_logical shift_right_arithmetic population_count clz real imag complex conj bitcast_convert_type lgamma digamma "
    "random_bits random_split random_fold_in random_seed random_wrap random_unwrap threefry2x32 rng_bit_generator".split()
)
# Of these, the name says which program they have.
_SCATTERS = frozenset("scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max".split())


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
        ] = {}  # number of per-step results -> (depth of the scan's body, number there)
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
        """Numbers what a block makes; `depth` loops are around it."""
        for value, array in block.consts:
            self._give([value], [self._number(("captured", id(array)))])
        for node in block.nodes:
            self._node(node, [self._atom(a) for a in node.inputs], depth)

    def _node(self, node: Node, given: list[int], depth: int) -> None:
        regions = {"scan": self._scan, "while": self._while, "cond": self._cond}
        if node.primitive in regions:
            regions[node.primitive](node, given, depth)
        elif node.primitive in _ONCE and [len(b.inputs) for b in node.blocks] == [len(given)]:
            self._give(node.outputs, self._called(node.blocks[0], given, depth))
        elif _is_alone(node):
            self._inside(node, depth)
            self._fresh(node.outputs)
        else:
            key = node.primitive, params_signature(node), draws_by_entry(node.eqn), *given
            types = (type_key(v, as_it_is) for v in node.outputs)
            self._give(node.outputs, [self._number((key, i, kind)) for i, kind in enumerate(types)])

    def _inside(self, node: Node, depth: int) -> None:
        """Numbers what is in the bodies of a node, which are given values that are equal to nothing."""
        for block in node.blocks:
            self._fresh(block.inputs)
            self._block(block, depth)

    def _cond(self, node: Node, given: list[int], depth: int) -> None:
        results = [self._called(branch, given[1:], depth) for branch in node.blocks]
        self._give(node.outputs, [self._number(("cond", given[0], *each)) for each in zip(*results, strict=True)])

    def _called(self, body: Block, given: Sequence[int], depth: int) -> list[int]:
        """The numbers of the results of a body, whose inputs have the numbers given."""
        self._give(body.inputs, given)
        self._block(body, depth)
        return [self._atom(a) for a in body.outputs]

    def _aside(self, body: Block, given: Sequence[int], depth: int) -> list[int]:
        """The same, without a trace of it."""
        kept = self.of, self.holders
        self.of, self.holders = {}, {}
        results = self._called(body, given, depth)
        self.of, self.holders = kept
        return results

    def _carried(self, initial: Sequence[int], depth: int) -> list[int]:
        """The numbers of what a trip begins with, for as long as it is not known what a trip does. By `depth` they differ from those of the
        loops around."""
        return [self._number(("carried", depth, i, first)) for i, first in enumerate(initial)]

    def _scan(self, node: Node, given: list[int], depth: int) -> None:
        consts, first = scan_counts(node.params)[0], sum(scan_counts(node.params))
        body, initial, length = node.blocks[0], given[consts:first], node.params["length"]
        entries = [self._entry(number, depth + 1) for number in given[first:]]
        results = self._aside(body, [*given[:consts], *self._carried(initial, depth), *entries], depth + 1)
        loop = self._number(("scan", depth, length, node.params["reverse"], *initial, None, *results[: first - consts]))
        carried = [self._number(("in the trip", loop, i)) for i in range(len(initial))]
        inside = self._called(body, [*given[:consts], *carried, *entries], depth + 1)[len(initial) :]
        stacks = [self._number(("stacked", depth + 1, number, length)) for number in inside]
        self._stacked.update((stack, (depth + 1, number)) for stack, number in zip(stacks, inside, strict=True))
        self._give(node.outputs, [*(self._number(("at the end", loop, i)) for i in range(len(initial))), *stacks])

    def _while(self, node: Node, given: list[int], depth: int) -> None:
        of_cond, of_body = node.params["cond_nconsts"], node.params["body_nconsts"]
        cond, body = node.blocks
        initial = given[of_cond + of_body :]
        carried = self._carried(initial, depth)
        goes_on = self._aside(cond, [*given[:of_cond], *carried], depth + 1)
        results = self._aside(body, [*given[of_cond : of_cond + of_body], *carried], depth + 1)
        loop = self._number(("while", depth, *initial, None, *goes_on, *results))
        self._inside(node, depth + 1)
        self._give(node.outputs, [self._number(("at the end", loop, i)) for i in range(len(initial))])

    def _entry(self, array: int, depth: int) -> int:
        """The number of one entry of an array, the one of the trip of the scan at that depth."""
        at, number = self._stacked.get(array, (None, 0))
        return number if at == depth else self._number(("entry", depth, array))


def _is_plain(literal: Literal) -> bool:
    return isinstance(literal.dtype, np.dtype)


def _is_alone(node: Node) -> bool:
    """Whether the results of a node are equal to nothing. The signature of its parameters leaves programs out."""
    if node.primitive in _SCATTERS:
        return False
    programs = bool(node.blocks) or any(map(holds_jaxpr, node.params.values()))
    return programs or node.primitive not in _FUNCTIONS or has_side_effects(node.eqn)
