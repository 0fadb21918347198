"""Whether a value of a block is computed exactly as a program computes its result: equation by equation, with dtypes and constants.

The canonical view decides equality as real numbers. If bits matter, as for a random draw, the equations themselves must agree; the
program to compare with is traced by the installed JAX, so that nothing here depends on JAX's spellings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..jax_compat import draws_by_entry, has_side_effects
from .captured import number
from .equations import Made
from .ir import Atom, Block, Literal, Node, Value
from .literals import scalar_result
from .signature import params_signature

_STEPS = 8  # of arithmetic on literals


def computed_as(block: Block, value: Value, program: Block, known: Mapping[int, Any]) -> dict[int, Value] | None:
    """For each input of `program` on which its one result depends, by number, the corresponding value of `block`, if `value` is computed
    like that result; otherwise None.

    Args:
      block: the block that computes `value`.
      program: the program to compare with, with one result.
      known: values of block inputs that are literals at the call, by value id.
    """
    inputs = {v.id: i for i, v in enumerate(program.inputs)}
    ours, theirs = _Numbers(block, known), _Numbers(program, {})
    bound: dict[int, Value] = {}
    same: dict[int, int] = {}  # value id of the program -> value id of the block
    stack: list[tuple[Atom, Atom]] = [(value, program.outputs[0])]
    while stack:
        mine, other = stack.pop()
        if (mine.shape, mine.dtype) != (other.shape, other.dtype):
            return None
        number = theirs.of(other)
        if number is not None:
            if not _same_bits(ours.of(mine), number):
                return None
            continue
        if not isinstance(mine, Value) or not isinstance(other, Value) or same.setdefault(other.id, mine.id) != mine.id:
            return None
        if other.id in inputs:
            bound[inputs[other.id]] = mine
            continue
        operands = _paired_inputs(block, mine, program, other)
        if operands is None:
            return None
        stack += operands
    return bound


def computed_alike(block: Block, first: Atom, second: Atom, twins: Mapping[int, int] | None = None) -> bool:
    """Whether two values of a block are computed from the same values by the same equations, and so are bitwise equal.

    `twins` are inputs of the block that receive the same value as other inputs, by id.
    """
    given = twins or {}
    stack: list[tuple[Atom, Atom]] = [(first, second)]
    known: set[tuple[int, int]] = set()
    while stack:
        mine, other = stack.pop()
        if isinstance(mine, Literal) or isinstance(other, Literal):
            if not _same_literal(mine, other):
                return False
            continue
        if given.get(mine.id, mine.id) == given.get(other.id, other.id) or (mine.id, other.id) in known:
            continue
        known.add((mine.id, other.id))
        operands = _paired_inputs(block, mine, block, other)
        if operands is None:
            return False
        stack += operands
    return True


def _same_literal(first: Atom, second: Atom) -> bool:
    if not isinstance(first, Literal) or not isinstance(second, Literal):
        return False
    return _same_bits(np.asarray(first.val).astype(first.dtype), np.asarray(second.val).astype(second.dtype))


def _same_bits(first: np.ndarray | None, second: np.ndarray) -> bool:
    if first is None or (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return first.tobytes() == second.tobytes()


def _paired_inputs(block: Block, mine: Value, program: Block, other: Value) -> list[tuple[Atom, Atom]] | None:
    """The operands of two values, in pairs, if these are the same result of the same equation; otherwise None."""
    maker, wanted = block.producer.get(mine.id), program.producer.get(other.id)
    if maker is None or wanted is None or not _alike(maker, wanted):
        return None
    if maker.outputs.index(mine) != wanted.outputs.index(other):
        return None
    return list(zip(maker.inputs, wanted.inputs, strict=True))


class _Numbers:
    """Values equal to one number everywhere, computed from literals in the program's own arithmetic: differentiation moves them out of
    loops, whose bodies then receive them as inputs.
    """

    def __init__(self, block: Block, known: Mapping[int, Any]) -> None:
        self.block, self.known = block, known
        self.consts = {v.id: n for v, c in block.consts if not v.shape and (n := number(c)) is not None}
        self.found: dict[int, np.ndarray | None] = {}

    def of(self, atom: Atom, steps: int = _STEPS) -> np.ndarray | None:
        """The number in the atom's dtype, computed in so many steps; None for any other atom."""
        if jnp.issubdtype(atom.dtype, jax.dtypes.extended) or not steps:
            return None
        if isinstance(atom, Literal):
            return None if atom.shape else np.asarray(atom.val, atom.dtype)
        if atom.id not in self.found:
            self.found[atom.id] = self._computed(atom, steps - 1)
        return self.found[atom.id]

    def _computed(self, value: Value, steps: int) -> np.ndarray | None:
        given = self.known.get(value.id, self.consts.get(value.id))
        if given is not None and not isinstance(given, Made):
            return np.asarray(given, value.dtype)
        node = self.block.producer.get(value.id)
        if node is None or node.blocks or len(node.outputs) != 1 or not node.inputs:
            return None
        operands = []
        for atom in node.inputs:
            number = self.of(atom, steps)
            if number is None:
                return None
            operands.append((number, atom.dtype))
        return scalar_result(node.primitive, node.params, operands, value.dtype)


def _alike(mine: Node, theirs: Node) -> bool:
    """Whether two equations are equal apart from their operands."""
    if mine.primitive != theirs.primitive or mine.blocks or theirs.blocks or has_side_effects(mine.eqn):
        return False
    if len(mine.inputs) != len(theirs.inputs) or params_signature(mine) != params_signature(theirs):
        return False
    return draws_by_entry(mine.eqn) == draws_by_entry(theirs.eqn)
