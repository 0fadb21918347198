"""The axes of a product: those of a batch, contracted ones, free ones; and how an operand's matrices stand in memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# ((contracted axes of a, of b), (batch axes of a, of b)), as `jax.lax.dot_general` has it.
Dimensions = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


def canonical(dimensions: Any) -> Dimensions:
    """As tuples of ints.

    Raises:
      TypeError, ValueError: they are not dimension numbers.
    """
    (lc, rc), (lb, rb) = (tuple(tuple(int(i) for i in axes) for axes in pair) for pair in dimensions)
    return ((lc, rc), (lb, rb))


def free(rank: int, contracted: Sequence[int], batch: Sequence[int]) -> tuple[int, ...]:
    """The axes that are neither, in order."""
    return tuple(i for i in range(rank) if i not in contracted and i not in batch)


@dataclass(frozen=True)
class ProductAxes:
    """The sizes of a product. The result has the axes of the batch, then `rows`, then `columns`.

    Attributes: `batch`, `rows` (free in a), `columns` (free in b), `inner` (contracted), each the sizes of its axes.
    """

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    inner: tuple[int, ...]

    @classmethod
    def of(cls, a: Sequence[int], b: Sequence[int], dimensions: Dimensions) -> ProductAxes:
        """From the shapes of both operands."""
        (lc, rc), (lb, rb) = dimensions
        rows, columns = free(len(a), lc, lb), free(len(b), rc, rb)
        return cls(*(tuple(s[i] for i in axes) for s, axes in ((a, lb), (a, rows), (b, columns), (a, lc))))

    @property
    def result(self) -> tuple[int, ...]:
        return self.batch + self.rows + self.columns

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """How many matrices, rows, columns, and terms of a sum."""
        b, m, n, k = map(math.prod, (self.batch, self.rows, self.columns, self.inner))
        return b, m, n, k

    def bias(self, shape: Sequence[int]) -> str:
        """Along what a bias of the result's rank runs: "columns", "rows", "nothing", "all" (rows and columns), or "batch".

        Determined by its axes, so that it is right where there are as many rows as columns.
        """
        parts, at = [], 0
        for name, sizes in (("batch", self.batch), ("rows", self.rows), ("columns", self.columns)):
            own = tuple(shape[at : at + len(sizes)])
            at += len(sizes)
            if own == sizes and math.prod(sizes) > 1:
                parts.append(name)
            elif math.prod(own) > 1:
                return "batch" if "batch" in parts or name == "batch" else "all"  # along some of the axes only
        if "batch" in parts:
            return "batch"
        return {(): "nothing", ("rows",): "rows", ("columns",): "columns"}.get(tuple(parts), "all")


@dataclass(frozen=True)
class Stored:
    """Matrices of free x contracted entries in memory, row by row.

    Attributes:
      transposed: each is stored as its transpose, contracted x free.
      leading: entries from one row (as stored) to the next.
      stride: entries from one matrix of a batch to the next; 0 where there is one.
    """

    transposed: bool
    leading: int
    stride: int


def stored(
    shape: Sequence[int], outer: Sequence[int], contracted: Sequence[int], batch: Sequence[int]
) -> Stored | None:
    """How a row-major array holds its matrices, `outer` being its free axes; None where it does not hold them as strided matrices:
    axes that belong together stand apart, or one matrix lies between the entries of another.
    """
    step: dict[str, int] = {}
    count: dict[str, int] = {}
    for name, axes in (("free", outer), ("contracted", contracted), ("batch", batch)):
        found = _step(shape, axes)
        if found is None:
            return None
        step[name], count[name] = found, math.prod(shape[i] for i in axes)
    real = (name for name in ("free", "contracted") if count[name] > 1)
    inner = min(real, key=step.__getitem__, default="contracted")
    # A layout of cuBLASLt has a leading dimension, and no step within a row (cuBLAS documentation, cublasLtMatrixLayoutAttribute_t).
    if step[inner] != 1:
        return None  # entries of one row stand apart
    other = "free" if inner == "contracted" else "contracted"
    # Where there is one row, nothing says how far rows stand apart: its own length is taken.
    leading = step[other] if count[other] > 1 else count[inner]
    return Stored(inner == "free", leading, step["batch"] if count["batch"] > 1 else 0)


def _step(shape: Sequence[int], axes: Sequence[int]) -> int | None:
    """Entries from one index along some axes, taken as one, to the next; None where they are not one axis in memory."""
    real = [i for i in axes if shape[i] != 1]
    if not real:
        return 1
    for first, second in itertools.pairwise(real):
        if first > second or any(shape[i] != 1 for i in range(first + 1, second)):
            return None
    return math.prod(shape[real[-1] + 1 :])
