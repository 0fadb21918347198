"""What random programs are made of: pieces, functions of one array and of parameters of their own.

A piece is chosen whole before anything is traced: `fn(params, x)` makes no choice, so that every trace of it is the same program.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax

Array = Any
T = TypeVar("T")
Shape = tuple[int, ...]
LARGE = 1e4


def wider() -> Any:
    """The dtype that a program takes on purpose for what must not lose precision: float64 where there is one (x64)."""
    return jax.dtypes.canonicalize_dtype("float64")


@dataclass(frozen=True)
class Param:
    """An argument of a program: its shape, its dtype and its role ("data", "weight", "bias", "scale", "mask", "index")."""

    shape: Shape
    dtype: str
    role: str = "weight"


@dataclass(frozen=True)
class Piece:
    """A function of parameters and one array that gives one array, and values that escape from inside.

    Attributes:
      fn: (params, x) -> (y, escaping values).
      params: what `fn` takes.
      shape, dtype: of y.
      text: what it does, in words a reader can find in this folder.
      largest: the largest magnitude of inputs at which the fused ops promise to follow (a mask's finite fill must stay low).
      differentiable: whether reverse mode goes through.
    """

    fn: Callable[[Sequence[Array], Array], tuple[Array, tuple[Array, ...]]]
    params: tuple[Param, ...]
    shape: Shape
    dtype: str
    text: str
    largest: float = LARGE
    differentiable: bool = True


@dataclass
class Draft:
    """A piece while it is being chosen: the random numbers, the parameters so far, and the words for what was chosen."""

    rng: random.Random
    shape: Shape
    dtype: str
    param_dtype: str
    params: list[Param] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    largest: float = LARGE

    def param(self, *shape: int, role: str = "weight", dtype: str | None = None) -> Callable[[Sequence[Array]], Array]:
        """Adds a parameter; returns what reads it."""
        self.params.append(Param(tuple(shape), dtype or self.param_dtype, role))
        index = len(self.params) - 1
        return lambda p: p[index]

    def pick(self, table: Mapping[str, T]) -> T:
        """One entry of a table; its name is noted."""
        name = self.rng.choice(list(table))
        if name:
            self.words.append(name)
        return table[name]

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def done(self, fn: Any, shape: Sequence[int], what: str, differentiable: bool = True) -> Piece:
        text = f"{what}({', '.join(self.words)})"
        return Piece(fn, tuple(self.params), tuple(shape), self.dtype, text, self.largest, differentiable)


def alone(fn: Callable[[Sequence[Array], Array], Array]) -> Callable[[Sequence[Array], Array], tuple[Array, tuple]]:
    """A piece's `fn` from which nothing escapes."""
    return lambda p, x: (fn(p, x), ())


def chain(pieces: Sequence[Piece]) -> Piece:
    """One piece after another."""
    starts = [sum(len(p.params) for p in pieces[:i]) for i in range(len(pieces))]

    def fn(params: Sequence[Array], x: Array) -> tuple[Array, tuple[Array, ...]]:
        escaped: tuple[Array, ...] = ()
        for start, piece in zip(starts, pieces, strict=True):
            x, more = piece.fn(params[start : start + len(piece.params)], x)
            escaped += more
        return x, escaped

    return joined(pieces, fn, " > ".join(p.text for p in pieces))


def joined(pieces: Sequence[Piece], fn: Any, text: str, shape: Shape | None = None) -> Piece:
    """A piece made of others: all their parameters in turn, the result of the last."""
    last = pieces[-1]
    return Piece(
        fn,
        tuple(q for p in pieces for q in p.params),
        last.shape if shape is None else shape,
        last.dtype,
        text,
        min(p.largest for p in pieces),
        all(p.differentiable for p in pieces),
    )


def elements(shape: Sequence[int]) -> int:
    return math.prod(shape)
