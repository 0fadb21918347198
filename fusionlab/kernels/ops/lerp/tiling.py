"""The ways to do one pass over a cotangent whose sums are gradients (`lerp_backward` in `lerp.cu`), and what each costs.

What several tiles have a part in is first left in scratch memory, one part from each, so that the sums are the same bits every time.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..geometry import GRID_X, ITEM_BYTES, WARP, accumulator, ceil_div, power_of_2, round_up, vector
from ..passes import places
from .axes import SLOTS, BroadcastAxes, powers_of_2

THREADS = 256  # at most, of a block: a few blocks a multiprocessor, so that one works while another waits at a barrier

# Tuned on an H200 by `python -m benchmarks lerp --tune`.
# Vectors that a thread loads before it uses the first: 8 of 16 bytes in 1,024 threads of a multiprocessor
# are 128 KiB on their way, several times what the latency of memory needs.
IN_FLIGHT = 8
MAX_LANES = 16  # along the last axis, of one warp: their sums need no shared memory; 32 took 1 to 2% longer
MIN_LANES = 8  # of those that are tried where the axis has more; with fewer lanes a tile has more rows, and leaves fewer partial sums
SUM_REGISTERS = 64  # words of running sums that a thread may hold
STAGE_BYTES = 32 << 10  # shared memory in which sums over p wait for the next barrier: four blocks fit a multiprocessor
# Bytes of shared memory that a kernel may declare (CUDA C++ Programming Guide, technical specifications).
STATIC_SHARED = 48 << 10
PARTS_OF_A_THREAD = 8  # in lerp_sum, before more threads share a column
# The model, in bytes of traffic.
BLOCK_BYTES = 4 << 10  # a block's beginning and end
TAIL_BLOCKS = 132  # the end of n blocks costs as if there were this many more: one for each multiprocessor
SUM_BYTES = 8 << 20  # the launch of lerp_sum: 2 microseconds
SUM_ROUND_BYTES = 3 << 20  # and the latency of memory each time that a thread of it waits for PARTS_OF_A_THREAD parts
LANE_SUM_SHARE = 0.1  # more time, of sums over lanes for each row
PASSED_ON_SHARE = 0.02  # of sums through shared memory
RUN_BYTES = 8  # a run of bytes side by side takes the time of this many more
BUSY = 0.5  # share of threads with work below which time is lost


@dataclass(frozen=True)
class LanedPass:
    """One pass, and how many lanes along the last axis it is done with."""

    axes: tuple[BroadcastAxes, ...]
    grads: tuple[str, ...]
    reads: tuple[str, ...]
    dtype: str
    lanes: int

    @functools.cached_property
    def columns(self) -> int:
        return self.axes[-1].size

    @functools.cached_property
    def vec(self) -> int:
        return vector(self.columns, self.dtype)

    @functools.cached_property
    def elements(self) -> int:
        return math.prod(a.size for a in self.axes)

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Elements of each array of a slot."""
        return {s: math.prod(a.size for a in self.axes if s in a.slots) for s in SLOTS}

    @property
    def operand_names(self) -> tuple[str, ...]:
        return "ct", *self.reads

    @property
    def operands(self) -> tuple[tuple[str, int], ...]:
        return places("operand", ("ct", "w", "x", "y"), self.operand_names)

    @functools.cached_property
    def base_bytes(self) -> int:
        """The bytes that every tiling reads and writes."""
        return ITEM_BYTES[self.dtype] * (self.elements + sum(self.sizes[s] for s in (*self.reads, *self.grads)))

    @functools.cached_property
    def rows(self) -> tuple[tuple[BroadcastAxes, int], ...]:
        """The axes other than the lanes, each with its number: the rest of the last one is one of them."""
        last = len(self.axes) - 1
        rows = [(BroadcastAxes(self.row_size(i), axis.slots), i) for i, axis in enumerate(self.axes)]
        return tuple(rows if rows[last][0].size > 1 else rows[:last])

    def row_size(self, number: int) -> int:
        """Of an axis as one of the rows'."""
        size = self.axes[number].size
        return ceil_div(size, self.vec * self.lanes) if number == len(self.axes) - 1 else size

    def step(self, place: str, number: int) -> int:
        """What one step along a row's axis adds to the place in an array that is not partial."""
        last = number == len(self.axes) - 1
        chunk = self.vec * self.lanes if last else 1
        if place == "column":
            return chunk if last else 0
        slot = place.removeprefix("d")
        if place != "ct" and slot not in self.axes[number].slots:
            return 0
        inner = (a.size for a in self.axes[number + 1 :] if place == "ct" or slot in a.slots)
        return chunk * math.prod(inner)


Rows = tuple[tuple[BroadcastAxes, int], ...]


@dataclass(frozen=True)
class Tiling:
    """One way to do a pass: see FL_KIND 2 in lerp.cu."""

    call: LanedPass
    grid: Rows
    p: Rows
    q: Rows
    rows_p: int
    rows_q: int
    q_tiles_asked: int

    @functools.cached_property
    def splits_p(self) -> bool:
        return bool(self.p)

    @functools.cached_property
    def threads_y(self) -> int:
        return _threads_y(self.call.lanes, self.p_size if self.splits_p else self.q_size)

    @property
    def threads(self) -> int:
        return self.call.lanes * self.threads_y

    @functools.cached_property
    def p_size(self) -> int:
        return size_of(self.p)

    @functools.cached_property
    def q_size(self) -> int:
        return size_of(self.q)

    @functools.cached_property
    def p_span(self) -> int:
        return self.threads_y * self.rows_p if self.splits_p else 1

    @functools.cached_property
    def p_tiles(self) -> int:
        return ceil_div(self.p_size, self.p_span)

    @functools.cached_property
    def q_step(self) -> int:
        return self.rows_q * (1 if self.splits_p else self.threads_y)

    @functools.cached_property
    def q_span(self) -> int:
        return round_up(ceil_div(self.q_size, self.q_tiles_asked), self.q_step)

    @functools.cached_property
    def q_tiles(self) -> int:
        return ceil_div(self.q_size, self.q_span)

    @functools.cached_property
    def blocks(self) -> int:
        return size_of(self.grid) * self.p_tiles * self.q_tiles

    @functools.cached_property
    def sums_over(self) -> dict[str, tuple[bool, bool, bool]]:
        """Of each gradient: p, q, the lanes."""
        of = {}
        for slot in self.call.grads:
            p, q = (any(slot not in axis.slots for axis, _ in rows) for rows in (self.p, self.q))
            of[slot] = p, q, slot not in self.call.axes[-1].slots
        return of

    def parts(self, slot: str) -> int:
        """How many tiles have a part in each element of a gradient."""
        p, q, _ = self.sums_over[slot]
        over = (axis.size for axis, _ in self.grid if slot not in axis.slots)
        return math.prod(over) * (self.p_tiles if p else 1) * (self.q_tiles if q else 1)

    def passed_on(self, slot: str) -> bool:
        p, q, _ = self.sums_over[slot]
        return p and not q

    @functools.cached_property
    def step_bytes(self) -> int:
        """Shared memory that one step along q takes for sums over p, in two halves; 0 without sums."""
        words = [1 if self.sums_over[s][2] else self.call.vec for s in self.call.grads if self.passed_on(s)]
        return 2 * sum(words) * self.threads * self.rows_q * ITEM_BYTES[accumulator(self.call.dtype)]

    def stage(self) -> int:
        """Steps along q between two barriers: as many as the shared memory takes, and one at least."""
        if not self.step_bytes:
            return 1
        return max(1, min(STAGE_BYTES // self.step_bytes, ceil_div(self.q_span, self.rows_q)))


def tilings(call: LanedPass) -> Iterator[Tiling]:
    """What is tried: rows that look alike to all gradients go together, as p, as q or over the grid."""
    classes: dict[frozenset[str], list[tuple[BroadcastAxes, int]]] = {}
    for axis, number in call.rows:
        classes.setdefault(axis.slots.intersection(call.grads), []).append((axis, number))
    groups = [tuple(rows) for rows in classes.values()]
    for p, q in dict.fromkeys(itertools.permutations([(), (), *groups], 2)):
        grid = tuple(row for rows in groups if rows not in (p, q) for row in rows)
        for rows_p, rows_q in _rows_of_thread(call, p, q):
            yield from _with_splits(Tiling(call, grid, p, q, rows_p, rows_q, 1))


def _vectors(call: LanedPass) -> int:
    """Rows, along p and q together, of which a thread loads a vector before it uses the first."""
    streams = 1 + (2 if "w" in call.grads else 0)
    streams += 1 if "w" in call.reads and 2 * call.sizes["w"] > call.elements else 0
    # Shorter vectors: more of them.
    return max(1, IN_FLIGHT // power_of_2(streams)) * (2 if call.vec * ITEM_BYTES[call.dtype] <= 8 else 1)


def _rows_of_thread(call: LanedPass, p: Rows, q: Rows) -> Iterator[tuple[int, int]]:
    """How many rows along p and along q a thread may take at once."""
    vectors = _vectors(call)
    for rows_p in powers_of_2(vectors) if p else (1,):
        ty = _threads_y(call.lanes, size_of(p or q))
        if rows_p > 1 and rows_p * ty >= 2 * size_of(p):
            break
        yield rows_p, min(vectors // rows_p, power_of_2(size_of(q) if p else ceil_div(size_of(q), ty)))


def _with_splits(whole: Tiling) -> Iterator[Tiling]:
    """A tiling with q in one part, and in 2, 4, ... of them; none where a thread cannot hold its sums."""
    if _sum_words(whole) > SUM_REGISTERS:
        return
    splits = 1
    while True:
        tiling = replace(whole, q_tiles_asked=splits)
        if tiling.blocks <= GRID_X and tiling.step_bytes <= STATIC_SHARED:
            yield tiling
        splits *= 2
        if splits * tiling.q_step > tiling.q_size or tiling.blocks > 64 * TAIL_BLOCKS:
            return


def _threads_y(lanes: int, rows: int) -> int:
    """Threads of a block along y: as many as there are rows for, but of a whole warp."""
    return min(THREADS, max(WARP, lanes * power_of_2(rows))) // lanes


def _sum_words(tiling: Tiling) -> int:
    """Registers of a thread's running sums."""
    total = 0
    for slot in tiling.call.grads:
        p, q, lanes = tiling.sums_over[slot]
        total += (tiling.rows_p if q and not p else 1) * (1 if lanes else tiling.call.vec) * (p or q)
    return total * (2 if tiling.call.dtype == "float64" else 1)


def cost(tiling: Tiling) -> float:
    """Traffic, and what else takes time, in bytes of traffic."""
    call = tiling.call
    base = call.base_bytes
    blocks = tiling.blocks * tiling.threads / THREADS  # smaller ones take less, and more run at once
    busy = call.columns / round_up(call.columns, call.vec * call.lanes)
    busy *= tiling.p_size / (tiling.p_tiles * tiling.p_span)
    busy *= tiling.q_size / (tiling.q_tiles * tiling.q_span)
    time = base * max(1.0, BUSY / busy) * (1 + RUN_BYTES / _run_bytes(tiling)) * (1 + TAIL_BLOCKS / blocks)
    time += BLOCK_BYTES * blocks
    rounds = [0]
    for slot in call.grads:
        p, q, lanes = tiling.sums_over[slot]
        if lanes and not (p or q):
            time += LANE_SUM_SHARE * base
        if tiling.passed_on(slot):
            time += PASSED_ON_SHARE * base
        if (parts := tiling.parts(slot)) > 1:
            part_sum = PartSum(parts, call.sizes[slot])
            rounds.append(ceil_div(parts * part_sum.width, THREADS * PARTS_OF_A_THREAD))
            time += 2 * ITEM_BYTES[accumulator(call.dtype)] * parts * call.sizes[slot]
    return time + SUM_BYTES * (len(rounds) > 1) + SUM_ROUND_BYTES * max(rounds)


def _run_bytes(tiling: Tiling) -> int:
    """Bytes side by side that a warp reads at once, if the next axis is not too short to be of use."""
    call = tiling.call
    run = min(call.columns, call.lanes * call.vec)
    across = tiling.p or tiling.q  # where threads along y are
    if run == call.columns and across and across[-1][1] == len(call.axes) - 2:
        run *= across[-1][0].size
    return run * ITEM_BYTES[call.dtype]


def size_of(rows: Rows) -> int:
    return math.prod(axis.size for axis, _ in rows)


@dataclass(frozen=True)
class PartSum:
    """The sum of partial[parts][size] over parts in lerp_sum."""

    parts: int
    size: int

    def __str__(self) -> str:
        """As the kernel's parameters."""
        return f"{{{self.parts},{self.size},{self.width}}}"

    @property
    def width(self) -> int:
        """Threads of a block along a row of parts: as many of its threads as parts or columns leave idle otherwise serve the other."""
        height = min(THREADS, power_of_2(ceil_div(self.parts, PARTS_OF_A_THREAD)))
        return min(THREADS // height, power_of_2(self.size))
