"""Whether a value of a block is made exactly as a program makes its result: equation by equation, dtypes and constants included.

The canonical view tells what is equal as real numbers. Where bits count, as those of a random draw do, only the equations themselves
tell; what is compared with is traced by the JAX that is installed, so that nothing here knows how it spells a thing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..jax_compat import draws_by_entry, has_side_effects
from .captured import number
from .ir import Atom, Block, Literal, Node, Value
from .literals import scalar_result
from .signature import params_signature

_STEPS = 8  # of arithmetic on literals


def computed_as(block: Block, value: Value, program: Block, known: Mapping[int, Any]) -> dict[int, Value] | None:
    """For each input of `program` that its one result hangs on, by number, the value of `block` that stands for it where `value` is made
    as that result is; None where it is not.

    Args:
      block: where `value` is made.
      program: another one, with one result.
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
    """Whether two values of a block are made of the same values by the same equations, and so are equal to the bit.

    `twins` are inputs of the block that are given what other inputs are, by their ids.
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
    """What two values are made of, in pairs, where they are the same result of the same equation; None where they are not."""
    maker, wanted = block.producer.get(mine.id), program.producer.get(other.id)
    if maker is None or wanted is None or not _alike(maker, wanted):
        return None
    if maker.outputs.index(mine) != wanted.outputs.index(other):
        return None
    return list(zip(maker.inputs, wanted.inputs, strict=True))


class _Numbers:
    """What is one number everywhere, made of literals alone, in the program's own arithmetic: differentiation moves that out of loops,
    whose bodies are then given it.
    """

    def __init__(self, block: Block, known: Mapping[int, Any]) -> None:
        self.block, self.known = block, known
        self.consts = {v.id: n for v, c in block.consts if not v.shape and (n := number(c)) is not None}
        self.found: dict[int, np.ndarray | None] = {}

    def of(self, atom: Atom, steps: int = _STEPS) -> np.ndarray | None:
        """The number, in the atom's dtype, made in so many steps; None for anything else."""
        if jnp.issubdtype(atom.dtype, jax.dtypes.extended) or not steps:
            return None
        if isinstance(atom, Literal):
            return None if atom.shape else np.asarray(atom.val, atom.dtype)
        if atom.id not in self.found:
            self.found[atom.id] = self._computed(atom, steps - 1)
        return self.found[atom.id]

    def _computed(self, value: Value, steps: int) -> np.ndarray | None:
        given = self.known.get(value.id, self.consts.get(value.id))
        if given is not None:
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
    """Whether two equations are the same, but for their operands."""
    if mine.primitive != theirs.primitive or mine.blocks or theirs.blocks or has_side_effects(mine.eqn):
        return False
    if len(mine.inputs) != len(theirs.inputs) or params_signature(mine) != params_signature(theirs):
        return False
    return mine.primitive != "random_bits" or draws_by_entry(mine.eqn) == draws_by_entry(theirs.eqn)
