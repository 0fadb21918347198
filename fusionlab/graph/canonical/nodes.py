"""The parts of a canonical view: nodes, the edges between them, and the relation of raw values to nodes.

A Ref's `dims` has one entry per non-unit axis of the raw value: the node's axis (>= 0), or `~size` for an axis the value is
broadcast along. A node's own axis order is induced by its sorted operands, so x and x.T are the same node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..program.ir import Block, Literal, Value

Coef = float | int | bool


class Ref(NamedTuple):
    """`coef` times node `nid`, its axes placed by `dims`."""

    coef: Coef
    nid: int
    dims: tuple[int, ...]


class Operand(NamedTuple):
    """An edge: `coef` times node `nid`; `axes[i]` is the consumer's axis for the node's axis i (-1: reduced away)."""

    coef: Coef
    nid: int
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CNode:
    """A canonical node. `params` must tell apart everything the operands do not. `shape` has no unit axes."""

    id: int
    op: str
    params: Any
    operands: tuple[Operand, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class FoldedNodes:
    """Nodes of a block that a view folds: it shows the program that could replace them.

    Attributes: `root` (the value they compute), `leaves` (the values `program` takes), `node_ids`, `program`, and `of` (its source).
    """

    root: Value
    leaves: tuple[Value, ...]
    node_ids: frozenset[int]
    program: Block
    of: Any = None


ONE = 0  # the node every literal is a multiple of


def nonunit(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(s) for s in shape if s != 1)


def node_axes(ref: Ref) -> tuple[int | None, ...]:
    """For each non-unit axis of a raw value the node's axis; None where the value is broadcast along it."""
    return tuple(d if d >= 0 else None for d in ref.dims)


def tidy(coef: Coef) -> Coef:
    """Removes float64 noise of different orders of folding, so that equal coefficients hash equal."""
    if isinstance(coef, bool | int):
        return coef
    return coef if coef in (1.0, -1.0) else float(f"{coef:.12g}")


def as_scalar(literal: Literal) -> Coef | None:
    """A scalar literal as a Python number, rounded to the literal's dtype; None for arrays and extended dtypes."""
    return None if literal.shape else as_number(literal.val, literal.dtype)


def as_number(scalar: Any, dtype: Any) -> Coef | None:
    """A scalar as a Python number, rounded to a dtype; None for extended ones and complex numbers."""
    try:
        kind = np.dtype(dtype).kind
        array = np.asarray(scalar).astype(dtype)  # a weakly typed one holds the Python float it came from
    except TypeError:
        return None
    if kind == "b":
        return bool(array)
    if kind in "iu":
        return int(array)
    return float(array) if jnp.issubdtype(dtype, jnp.floating) else None
