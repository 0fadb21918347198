"""Blocks of steps, each twice as long as the one before: 1, 2-3, 4-7, 8-15, ..."""

from __future__ import annotations


def block_of(step: int) -> int:
    """The block of a step, counted from 0."""
    return (step + 1).bit_length() - 1


def blocks_of(steps: int) -> list[tuple[int, int]]:
    """The blocks of so many steps: (first, last), counted from 1."""
    count = block_of(steps - 1) + 1 if steps else 0
    return [(2**b, min(2 ** (b + 1) - 1, steps)) for b in range(count)]
