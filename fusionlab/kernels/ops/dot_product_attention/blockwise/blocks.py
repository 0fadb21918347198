"""Cutting attention's operands into blocks of heads and query rows, and putting blocks of results together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ....op.arrays import summed_to

Array = Any


class Corner(NamedTuple):
    """The numbers of the first row and the first key of a block of scores, int32."""

    row: Array
    key: Array


@dataclass(frozen=True)
class Broadcast:
    """An operand of the scores' rank, or its gradient, whose axes of size 1 broadcast; it is cut as the scores are.

    Attributes:
      shape: (entries, T or 1, S or 1): one entry for each head that has its own.
      per_head: whether neighbouring heads have entries of their own, one after the other.
      entry: for each head, its entry; int32.
    """

    shape: tuple[int, ...]
    per_head: bool
    entry: np.ndarray

    @classmethod
    def of(cls, shape: tuple[int, ...], leading: tuple[int, ...]) -> Broadcast:
        """For an operand of this shape, and scores whose axes before T and S are `leading`: *B and N."""
        own = shape[:-2]
        entries = np.arange(np.prod(own, dtype=np.int64), dtype=np.int32).reshape(own)
        return cls((entries.size, *shape[-2:]), own[-1] > 1, np.broadcast_to(entries, leading).reshape(-1))

    def part(self, entry: Array, corner: Corner, scores: tuple[int, ...]) -> tuple[list[Any], list[int]]:
        """Starts and sizes of the part that a block of scores of this shape sees; `entry` is that of the block's first head."""
        heads, rows, keys = scores
        _, t, s = self.shape
        zero = np.int32(0)
        sizes = [heads if self.per_head else 1, rows if t > 1 else 1, keys if s > 1 else 1]
        return [entry, corner.row if t > 1 else zero, corner.key if s > 1 else zero], sizes

    def take(self, whole: Array, entry: Array, corner: Corner, scores: tuple[int, ...]) -> Array:
        return lax.dynamic_slice(whole, *self.part(entry, corner, scores))

    def add(self, whole: Array, block: Array, entry: Array, corner: Corner) -> Array:
        """Adds a block of the scores' cotangent, summed over the axes that broadcast, to the gradient."""
        starts, sizes = self.part(entry, corner, block.shape)
        part = lax.dynamic_slice(whole, starts, sizes) + summed_to(block, tuple(sizes))
        return lax.dynamic_update_slice(whole, part, starts)


@dataclass(frozen=True)
class GroupOperands:
    """Those operands of a call that broadcast; `entry` is that of each head, or, seen from one group of heads, that of its first.

    The gradient of one is "d_<slot>": where a batch shares the operand, it has entries for each of the batch.
    """

    kinds: Mapping[str, Broadcast]
    wholes: Mapping[str, Array]
    entry: Mapping[str, Array]

    def of_group(self, entry: Mapping[str, Array]) -> GroupOperands:
        """Seen from a group whose heads have these entries."""
        return replace(self, entry={slot: own[0] for slot, own in entry.items()})

    def __call__(self, slot: str, corner: Corner, scores: tuple[int, ...]) -> Array | None:
        """The part that a block of scores of this shape sees; None for an absent operand."""
        if slot not in self.wholes:
            return None
        return self.kinds[slot].take(self.wholes[slot], self.entry[slot], corner, scores)

    def add(self, slot: str, whole: Array, block: Array, corner: Corner) -> Array:
        """`whole`, the sum of the slot's gradient, with this block of scores' cotangents added."""
        return self.kinds["d_" + slot].add(whole, block, self.entry["d_" + slot], corner)


def power_of_two(n: int) -> int:
    """The largest power of two up to n."""
    return 1 << (n.bit_length() - 1)


def divisor(n: int, most: int) -> int:
    """The largest divisor of n up to `most`."""
    return max((d for d in range(1, min(n, most) + 1) if n % d == 0), default=1)


def put_rows(whole: Array, block: Array, first: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(whole, block, first, axis=1)


def keys_from(whole: Array, at: Array, keys: int) -> Array:
    """So many keys (axis 1) from number `at` on."""
    return whole if keys == whole.shape[1] else lax.dynamic_slice_in_dim(whole, at, keys, axis=1)


def add_keys(whole: Array, part: Array, at: Array) -> Array:
    """Adds to the keys (last axis) from number `at` on."""
    keys = part.shape[-1]
    if keys == whole.shape[-1]:
        return whole + part
    there = lax.dynamic_slice_in_dim(whole, at, keys, axis=-1)
    return lax.dynamic_update_slice_in_dim(whole, there + part, at, axis=-1)


def scan_heads(function: Callable, size: int, arrays: Any, carry: Any) -> tuple[Any, Any]:
    """`(carry, results) = function(carry, arrays)` over groups of `size` heads of the first array; `size` divides their number.

    Arrays of fewer heads, which several of those share, and results are cut into as many parts.
    """
    count = jax.tree.leaves(arrays)[0].shape[0]
    if count == size:
        return function(carry, arrays)
    parts = count // size
    grouped = jax.tree.map(lambda a: a.reshape(parts, a.shape[0] // parts, *a.shape[1:]), arrays)
    carry, results = lax.scan(function, carry, grouped)
    return carry, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), results)


def scan_rows(step: Callable, start: int, rows: int, arrays: Any, carry: Any) -> Any:
    """Runs `carry = step(carry, first row, block)` over blocks of the arrays' rows (axis 1); the last may be shorter."""
    count = jax.tree.leaves(arrays)[0].shape[1]
    whole, rest = divmod(count, rows)
    if whole > 1:
        blocks = jax.tree.map(lambda a: _split_rows(a, whole, rows), arrays)
        firsts = jnp.asarray(start + rows * np.arange(whole), jnp.int32)
        carry, _ = lax.scan(lambda c, x: (step(c, *x), None), carry, (firsts, blocks))
    elif whole:
        carry = step(carry, jnp.int32(start), jax.tree.map(lambda a: a[:, :rows], arrays))
    if rest:
        tail = jax.tree.map(lambda a: a[:, whole * rows :], arrays)
        carry = step(carry, jnp.int32(start + whole * rows), tail)
    return carry


def _split_rows(a: Array, count: int, rows: int) -> Array:
    return jnp.moveaxis(a[:, : count * rows].reshape(a.shape[0], count, rows, *a.shape[2:]), 1, 0)


def heads(a: Array, dtype: Any) -> Array:
    """*B L N D -> (B N) L D in `dtype`."""
    return jnp.swapaxes(a, -2, -3).reshape(-1, a.shape[-3], a.shape[-1]).astype(dtype)


def unheads(a: Array, like: Array) -> Array:
    """(B N) L D -> *B L N D, with *B and N as `like` has them."""
    return jnp.swapaxes(a.reshape(*like.shape[:-3], like.shape[-2], *a.shape[1:]), -2, -3)
