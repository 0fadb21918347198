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

from .compat import draws_by_entry, has_side_effects
from .ir import Atom, Block, Literal, Node, Value
from .signature import params_signature


def made_as(block: Block, value: Value, program: Block, known: Mapping[int, Any]) -> dict[int, Value] | None:
    """For each input of `program` that its one result hangs on, by number, the value of `block` that stands for it where `value` is made
    as that result is; None where it is not.

    Args:
      block: where `value` is made.
      program: another one, with one result.
      known: values of block inputs that are literals at the call, by value id.
    """
    numbers = {v.id: i for i, v in enumerate(program.inputs)}
    constants = {v.id: c for v, c in block.consts}
    bound: dict[int, Value] = {}
    same: dict[int, int] = {}  # value id of the program -> value id of the block
    stack: list[tuple[Atom, Atom]] = [(value, program.outputs[0])]
    while stack:
        mine, theirs = stack.pop()
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return None
        if isinstance(theirs, Literal):
            scalar = _scalar(mine, known, constants)
            if scalar is None or not _equal(scalar, theirs.val, theirs.dtype):
                return None
            continue
        if not isinstance(mine, Value) or same.setdefault(theirs.id, mine.id) != mine.id:
            return None
        if theirs.id in numbers:
            bound[numbers[theirs.id]] = mine
            continue
        ours, other = block.producer.get(mine.id), program.producer.get(theirs.id)
        if ours is None or other is None or not _alike(ours, other):
            return None
        if ours.outputs.index(mine) != other.outputs.index(theirs):
            return None
        stack += zip(ours.inputs, other.inputs, strict=True)
    return bound


def _alike(mine: Node, theirs: Node) -> bool:
    """Whether two equations are the same, but for their operands."""
    if mine.primitive != theirs.primitive or mine.blocks or theirs.blocks or has_side_effects(mine.eqn):
        return False
    if len(mine.inputs) != len(theirs.inputs) or params_signature(mine) != params_signature(theirs):
        return False
    return mine.primitive != "random_bits" or draws_by_entry(mine.eqn) == draws_by_entry(theirs.eqn)


def _scalar(atom: Atom, known: Mapping[int, Any], constants: Mapping[int, Any]) -> Any:
    """The number an atom is known to be when tracing; None where it is none."""
    if atom.shape or jnp.issubdtype(atom.dtype, jax.dtypes.extended):
        return None
    if isinstance(atom, Literal):
        return atom.val
    found = known.get(atom.id, constants.get(atom.id))
    return found if isinstance(found, bool | int | float | np.ndarray | np.generic) else None


def _equal(one: Any, other: Any, dtype: Any) -> bool:
    return np.asarray(one, dtype).tobytes() == np.asarray(other, dtype).tobytes()
