"""What a program cannot be evaluated at: sizes to which its axes may be reduced, and those that would be wrong or too large."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

KEPT_SIZES = 4  # axes of so few entries are not reduced
_SMALL = 1 << 12  # entries of operands and results which no reduction makes too many of


class CannotEvaluate(Exception):  # noqa: N818 - it is an answer, not an error of the user's
    """The program contains something that the interpreter does not know; the message names it.

    It does not decline a place (`Declined` does): the caller tries other sizes, or gives up the proof as `uncertified`.
    """


class SizesDifferError(CannotEvaluate):
    """An axis of size `real` would be reduced to two sizes: 64 to 4, and, as 2 heads of 32, to 2 times the reduced size of 32.

    Attributes:
      real, other: the axis, and the size that fits.
      split: if it is split, the sizes of its unreduced parts that might be reduced.
    """

    def __init__(self, real: int, size: int, other: int, split: Sequence[int] = ()) -> None:
        super().__init__(f"axis size {real} would reduce to {size} and to {other}")
        self.real, self.other, self.split = real, other, tuple(split)


class PositionsError(CannotEvaluate):
    """Positions are used along an axis of `size`, which is reduced although only the program's own split makes such axes."""

    def __init__(self, size: int, primitive: str) -> None:
        super().__init__(f"primitive {primitive} along an axis of {size} at reduced sizes")
        self.size = size


class CutError(CannotEvaluate):
    """A slice leaves out entries at the ends of a reduced axis: in a sum over the axis they count apart from those between.

    Attributes: `real` is the size of the axis, `ends` how many are left out at its start and at its end.
    """

    def __init__(self, real: int, ends: tuple[int, int]) -> None:
        super().__init__(f"all but {ends} entries of {real} at reduced sizes")
        self.real, self.ends = real, ends


def kept_ends(ends: tuple[int, int]) -> tuple[int, int]:
    """How many entries stand for those that are cut off an axis at its start and at its end."""
    return min(ends[0], KEPT_SIZES), min(ends[1], KEPT_SIZES)


class TooLargeError(CannotEvaluate):
    """An array, or a sum over one, would take too much memory or time, as with an unreduced axis squared."""


def at_real_sizes(sizes: Any, eqn: Any) -> None:
    """Raises CannotEvaluate if an operand or a result of an equation has reduced axes."""
    for v in (*eqn.invars, *eqn.outvars):
        shape = tuple(getattr(v.aval, "shape", ()))
        if sizes.shape(shape) != shape:
            raise CannotEvaluate(f"primitive {eqn.primitive.name} at reduced sizes")


def no_more_than(most: tuple[int, int], sizes: Any, eqn: Any) -> None:
    """Raises TooLargeError if a result of an equation would have more entries, or sum more terms, than `most`."""
    if all(math.prod(v.aval.shape) <= _SMALL for v in (*eqn.outvars, *eqn.invars[:1]) if hasattr(v.aval, "shape")):
        return
    # A slice has no more than its operand, which may be reduced where the size of the slice is not known yet.
    if eqn.primitive.name == "slice":
        return
    entries = max((math.prod(sizes.shape(getattr(v.aval, "shape", ()))) for v in eqn.outvars), default=0)
    each = 1
    if eqn.primitive.name == "dot_general":
        each = math.prod(sizes(eqn.invars[0].aval.shape[int(d)]) for d in eqn.params["dimension_numbers"][0][0])
    if entries > most[0] or entries * each > most[1]:
        raise TooLargeError(
            f"primitive {eqn.primitive.name} with {entries:,} entries of {each:,} terms at reduced sizes"
        )


def unreduced(sizes: Any, parts: Iterable[int]) -> list[int]:
    """The unreduced parts of an axis that might be reduced."""
    return [n for n in parts if n > KEPT_SIZES and n not in sizes.table]


def no_positions(sizes: Any, eqn: Any, axis: int) -> None:
    """Raises PositionsError if an axis of the first operand, or of the result if there is no operand, is a reduced part."""
    shape = eqn.invars[0].aval.shape if eqn.invars else eqn.outvars[0].aval.shape
    if int(shape[axis]) in sizes.parts:
        raise PositionsError(int(shape[axis]), eqn.primitive.name)
