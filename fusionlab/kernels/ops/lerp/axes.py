"""The axes of arrays that broadcast against each other, as the kernels of `lerp.cu` see them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ....errors import ArgumentError

SLOTS: tuple[str, ...] = ("x", "y", "w")
MAX_RANK = 8


@dataclass(frozen=True)
class BroadcastAxes:
    """Neighbouring axes of the result along which each array goes on as one, or stays.

    Attributes:
      size: elements along it.
      slots: those that go on.
    """

    size: int
    slots: frozenset[str]


def result_shape(shapes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """The shape that shapes of one rank broadcast to.

    Raises:
      ArgumentError: ranks or sizes do not fit, or the rank is above `MAX_RANK`.
    """
    ranks = {len(shape) for shape in shapes.values()}
    if len(ranks) != 1 or max(ranks) > MAX_RANK:
        raise ArgumentError(f"lerp: got shapes {dict(shapes)}, needed one rank of at most {MAX_RANK}")
    sizes = []
    for along in zip(*shapes.values(), strict=True):
        wide = set(along) - {1}
        if len(wide) > 1:
            raise ArgumentError(f"lerp: got shapes {dict(shapes)}, which do not broadcast against each other")
        sizes.append(max(wide, default=1))
    return tuple(sizes)


def collapse(shapes: Mapping[str, Sequence[int]], slots: Sequence[str]) -> tuple[BroadcastAxes, ...]:
    """The axes of the result, without those of size 1, neighbours that look alike to all of `slots` taken together.

    One axis of size 1 where there is no other.
    """
    found: list[BroadcastAxes] = []
    for i, size in enumerate(result_shape(shapes)):
        if size == 1:
            continue
        axis = BroadcastAxes(size, frozenset(slot for slot in slots if shapes[slot][i] != 1))
        if found and found[-1].slots == axis.slots:
            axis = BroadcastAxes(found.pop().size * size, axis.slots)
        found.append(axis)
    return tuple(found) or (BroadcastAxes(1, frozenset(slots)),)


def powers_of_2(most: int) -> Iterator[int]:
    return (1 << i for i in range(most.bit_length()))
