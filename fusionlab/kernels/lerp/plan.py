"""How the kernels of `lerp.cu` are compiled and launched for a call: plain arithmetic, no GPU.

All are bound by memory: every element of the result's size is read once, and as few others as possible. What several tiles have a part in
is first left in scratch memory, one part from each tile, so that the sums are the same bits every time; a model of the traffic
(`_cost`) chooses between tilings.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...errors import ArgumentError, unknown_name
from ..compile import Source
from ..kernel_plan import KernelPlan, Launch

SOURCE = Source("lerp/lerp.cu", ("lerp_forward", "lerp_backward_flat", "lerp_backward", "lerp_sum"))
SLOTS = ("x", "y", "w")
MAX_RANK = 8
_CODES = {"float32": 0, "bfloat16": 1, "float16": 2, "float64": 3}
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
_PLACES = ("ct", "w", "x", "y", "dx", "dy", "dw", "column", "first p", "first q")  # the kernel's enum
_WARP = 32
_THREADS = 256  # at most, of a block: a few blocks a multiprocessor, so that one works while another waits at a barrier
_GRID_X = 2**31 - 1  # CUDA's limit
_NARROW = 2**31 - 1  # elements that 32-bit numbers are used for

# To be tuned on a GPU. Vectors that a thread loads before it uses the first: 8 of 16 bytes in 1,024 threads of a multiprocessor
# are 128 KiB on their way, several times what the latency of memory needs.
IN_FLIGHT = 8
FLAT_ITEMS = 4  # at most, of those kernels that go element by element: they run with 2,048 threads a multiprocessor
MAX_LANES = 32  # along the last axis: a warp, whose sums need no shared memory
MIN_LANES = 8  # of those that are tried where the axis has more; with fewer lanes a tile has more rows, and leaves fewer partial sums
SUM_REGISTERS = 64  # words of running sums that a thread may hold
STAGE_BYTES = 32 << 10  # shared memory in which sums over p wait for the next barrier: four blocks fit a multiprocessor
PARTS_OF_A_THREAD = 8  # in lerp_sum, before more threads share a column
# The model, in bytes of traffic.
BLOCK_BYTES = 2 << 10  # a block's beginning and end
TAIL_BLOCKS = (
    132  # with n blocks, time is lost at the end as if this many more were to be done: one a multiprocessor of an H200
)
SUM_BYTES = 8 << 20  # the launch of lerp_sum: 2 microseconds
SUM_ROUND_BYTES = 3 << 20  # and the latency of memory each time that a thread of it waits for PARTS_OF_A_THREAD parts
PASS_BYTES = 12 << 20  # another pass
LANE_SUM_SHARE = 0.1  # more time, of sums over lanes for each row
PASSED_ON_SHARE = 0.02  # of sums through shared memory
RUN_BYTES = 8  # a run of bytes side by side takes the time of this many more
BUSY = 0.5  # share of threads with work below which time is lost


@dataclass(frozen=True)
class Axis:
    """Neighbouring axes of the result along which each array goes on as one, or stays.

    Attributes:
      size: elements along it.
      slots: those that go on.
    """

    size: int
    slots: frozenset[str]


@dataclass(frozen=True)
class Pass:
    """One pass over the cotangent.

    Attributes:
      plan: its operands are ct and `reads`; its results the gradients of `grads`, then scratch.
      reads: slots that are read, in the order w, x, y.
      grads: slots whose gradients it makes.
      scratch: shapes of partial sums, of `accumulator(dtype)`.
    """

    plan: KernelPlan
    reads: tuple[str, ...]
    grads: tuple[str, ...]
    scratch: tuple[tuple[int, int], ...]


def accumulator(dtype: str) -> str:
    """The dtype of arithmetic and of partial sums: float32, for float64 itself."""
    return "float64" if dtype == "float64" else "float32"


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


def collapse(shapes: Mapping[str, Sequence[int]], slots: Sequence[str]) -> tuple[Axis, ...]:
    """The axes of the result, without those of size 1, neighbours that look alike to all of `slots` taken together.

    One axis of size 1 where there is no other.
    """
    found: list[Axis] = []
    for i, size in enumerate(result_shape(shapes)):
        if size == 1:
            continue
        axis = Axis(size, frozenset(slot for slot in slots if shapes[slot][i] != 1))
        if found and found[-1].slots == axis.slots:
            axis = Axis(found.pop().size * size, axis.slots)
        found.append(axis)
    return tuple(found) or (Axis(1, frozenset(slots)),)


def forward_plan(shapes: Mapping[str, Sequence[int]], dtype: str) -> KernelPlan:
    """out = x + w (y - x).

    Args:
      shapes: of x, y and w, of one rank up to `MAX_RANK`.
      dtype: numpy's name, of all of them and of out.

    Returns:
      A plan with operands x, y, w and result out. No launches where out is empty.

    Raises:
      ArgumentError, UnknownNameError: what is asked for does not exist.
    """
    _check(dtype)
    params = (("operand", 0), ("operand", 1), ("operand", 2), ("result", 0))
    return _flat(0, "lerp_forward", collapse(shapes, SLOTS), SLOTS, dtype, params, math.prod(result_shape(shapes)))


def backward_passes(shapes: Mapping[str, Sequence[int]], wanted: tuple[str, ...], dtype: str) -> tuple[Pass, ...]:
    """dx = sum of (1 - w) ct, dy = sum of w ct, dw = sum of (y - x) ct, over the axes along which each was broadcast.

    Args:
      shapes: of x, y and w, of one rank up to `MAX_RANK`; the result must not be empty.
      wanted: slots whose gradients are asked for.
      dtype: numpy's name, of all arrays.

    Returns:
      One pass, or several where ct read again costs less than the partial sums of one pass would.

    Raises:
      ArgumentError, UnknownNameError: what is asked for does not exist.
    """
    _check(dtype)
    if not math.prod(result_shape(shapes)):
        raise ArgumentError(f"lerp: got shapes {dict(shapes)} of an empty result, needed one with elements")
    given = tuple((slot, tuple(shapes[slot])) for slot in SLOTS)
    return _passes(given, tuple(slot for slot in SLOTS if slot in wanted), dtype)


@functools.lru_cache(maxsize=256)
def _passes(given: tuple[tuple[str, tuple[int, ...]], ...], wanted: tuple[str, ...], dtype: str) -> tuple[Pass, ...]:
    shapes = dict(given)

    @functools.cache
    def one(grads: tuple[str, ...]) -> tuple[float, Pass]:
        return _one_pass(shapes, grads, dtype)

    choices = [[one(group) for group in groups] for groups in _groupings(wanted)]
    best = min(choices, key=lambda c: sum(cost for cost, _ in c) + PASS_BYTES * len(c))
    return tuple(made for _, made in best)


def _groupings(items: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """All ways to split items into groups."""
    if not items:
        yield ()
        return
    first, rest = items[0], items[1:]
    for others in itertools.chain.from_iterable(itertools.combinations(rest, n) for n in range(len(rest), -1, -1)):
        left = tuple(i for i in rest if i not in others)
        for groups in _groupings(left):
            yield ((first, *others), *groups)


def _one_pass(shapes: Mapping[str, Sequence[int]], grads: tuple[str, ...], dtype: str) -> tuple[float, Pass]:
    reads = (("w",) if "x" in grads or "y" in grads else ()) + (("x", "y") if "w" in grads else ())
    axes = collapse(shapes, tuple(slot for slot in SLOTS if slot in grads or slot in reads))
    lanes = _power_of_2(axes[-1].size // _vector(axes[-1].size, dtype))
    call = _Call(axes, grads, reads, dtype, min(MAX_LANES, lanes))
    if all(slot in axis.slots for axis in axes for slot in grads):
        addresses = tuple(("result", grads.index(s)) if s in grads else ("null", 0) for s in SLOTS)
        total = math.prod(a.size for a in axes)
        plan = _flat(1, "lerp_backward_flat", axes, reads, dtype, (*call.operands, *addresses), total, grads)
        return call.base_bytes, Pass(plan, reads, grads, ())
    calls = [replace(call, lanes=n) for n in _powers_of_2(call.lanes) if n == call.lanes or n >= MIN_LANES]
    cost, tiling = min(((_cost(t), t) for c in calls for t in _tilings(c)), key=lambda pair: pair[0])
    return cost, _tiled_pass(tiling)


@dataclass(frozen=True)
class _Call:
    """One pass, and how many lanes along the last axis it is done with."""

    axes: tuple[Axis, ...]
    grads: tuple[str, ...]
    reads: tuple[str, ...]
    dtype: str
    lanes: int

    @functools.cached_property
    def columns(self) -> int:
        return self.axes[-1].size

    @functools.cached_property
    def vec(self) -> int:
        return _vector(self.columns, self.dtype)

    @functools.cached_property
    def elements(self) -> int:
        return math.prod(a.size for a in self.axes)

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Elements of each array of a slot."""
        return {s: math.prod(a.size for a in self.axes if s in a.slots) for s in SLOTS}

    @property
    def operands(self) -> tuple[tuple[str, int], ...]:
        names = ("ct", *self.reads)
        return tuple(("operand", names.index(n)) if n in names else ("null", 0) for n in ("ct", "w", "x", "y"))

    @functools.cached_property
    def base_bytes(self) -> int:
        """What every way to do it reads and writes."""
        return _BYTES[self.dtype] * (self.elements + sum(self.sizes[s] for s in (*self.reads, *self.grads)))

    @functools.cached_property
    def rows(self) -> tuple[tuple[Axis, int], ...]:
        """The axes beside the lanes, each with its number: what is left of the last one is one of them."""
        last = len(self.axes) - 1
        rows = [(Axis(self.row_size(i), axis.slots), i) for i, axis in enumerate(self.axes)]
        return tuple(rows if rows[last][0].size > 1 else rows[:last])

    def row_size(self, number: int) -> int:
        """Of an axis as one of the rows'."""
        size = self.axes[number].size
        return _parts(size, self.vec * self.lanes) if number == len(self.axes) - 1 else size

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


_Rows = tuple[tuple[Axis, int], ...]


@dataclass(frozen=True)
class _Tiling:
    """One way to do a pass: see FL_KIND 2 in lerp.cu."""

    call: _Call
    grid: _Rows
    p: _Rows
    q: _Rows
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
        return _size(self.p)

    @functools.cached_property
    def q_size(self) -> int:
        return _size(self.q)

    @functools.cached_property
    def p_span(self) -> int:
        return self.threads_y * self.rows_p if self.splits_p else 1

    @functools.cached_property
    def p_tiles(self) -> int:
        return _parts(self.p_size, self.p_span)

    @functools.cached_property
    def q_step(self) -> int:
        return self.rows_q * (1 if self.splits_p else self.threads_y)

    @functools.cached_property
    def q_span(self) -> int:
        return _round_up(_parts(self.q_size, self.q_tiles_asked), self.q_step)

    @functools.cached_property
    def q_tiles(self) -> int:
        return _parts(self.q_size, self.q_span)

    @functools.cached_property
    def blocks(self) -> int:
        return _size(self.grid) * self.p_tiles * self.q_tiles

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

    def stage(self) -> int:
        """Steps along q between two barriers: as many as the shared memory for sums over p takes, in two halves."""
        words = [1 if self.sums_over[s][2] else self.call.vec for s in self.call.grads if self.passed_on(s)]
        if not words:
            return 1
        one = 2 * sum(words) * self.threads * self.rows_q * _BYTES[accumulator(self.call.dtype)]
        return max(1, min(STAGE_BYTES // one, _parts(self.q_span, self.rows_q)))


def _tilings(call: _Call) -> Iterator[_Tiling]:
    """What is tried: rows that look alike to all gradients go together, as p, as q or over the grid."""
    classes: dict[frozenset[str], list[tuple[Axis, int]]] = {}
    for axis, number in call.rows:
        classes.setdefault(axis.slots.intersection(call.grads), []).append((axis, number))
    groups = [tuple(rows) for rows in classes.values()]
    streams = 1 + (2 if "w" in call.grads else 0)
    streams += 1 if "w" in call.reads and 2 * call.sizes["w"] > call.elements else 0
    # Shorter vectors: more of them.
    vectors = max(1, IN_FLIGHT // _power_of_2(streams)) * (2 if call.vec * _BYTES[call.dtype] <= 8 else 1)
    for p, q in dict.fromkeys(itertools.permutations([(), (), *groups], 2)):
        grid = tuple(row for rows in groups if rows not in (p, q) for row in rows)
        for rows_p in _powers_of_2(vectors) if p else (1,):
            ty = _threads_y(call.lanes, _size(p or q))
            if rows_p > 1 and rows_p * ty >= 2 * _size(p):
                break
            rows_q = min(vectors // rows_p, _power_of_2(_size(q) if p else _parts(_size(q), ty)))
            splits = 1
            while True:
                tiling = _Tiling(call, grid, p, q, rows_p, rows_q, splits)
                if splits == 1 and _sum_words(tiling) > SUM_REGISTERS:
                    break
                if tiling.blocks <= _GRID_X:
                    yield tiling
                splits *= 2
                if splits * tiling.q_step > tiling.q_size or tiling.blocks > 64 * TAIL_BLOCKS:
                    break


def _threads_y(lanes: int, rows: int) -> int:
    """Threads of a block along y: as many as there are rows for, but of a whole warp."""
    return min(_THREADS, max(_WARP, lanes * _power_of_2(rows))) // lanes


def _sum_words(tiling: _Tiling) -> int:
    """Registers of a thread's running sums."""
    total = 0
    for slot in tiling.call.grads:
        p, q, lanes = tiling.sums_over[slot]
        total += (tiling.rows_p if q and not p else 1) * (1 if lanes else tiling.call.vec) * (p or q)
    return total * (2 if tiling.call.dtype == "float64" else 1)


def _cost(tiling: _Tiling) -> float:
    """Traffic, and what else takes time, in bytes of traffic."""
    call = tiling.call
    base = call.base_bytes
    blocks = tiling.blocks * tiling.threads / _THREADS  # smaller ones take less, and more run at once
    busy = call.columns / _round_up(call.columns, call.vec * call.lanes)
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
            one = _Sum(parts, call.sizes[slot])
            rounds.append(_parts(parts * one.width, _THREADS * PARTS_OF_A_THREAD))
            time += 2 * _BYTES[accumulator(call.dtype)] * parts * call.sizes[slot]
    return time + SUM_BYTES * (len(rounds) > 1) + SUM_ROUND_BYTES * max(rounds)


def _run_bytes(tiling: _Tiling) -> int:
    """Bytes side by side that a warp reads at once, if the next axis is not too short to be of use."""
    call = tiling.call
    run = min(call.columns, call.lanes * call.vec)
    across = tiling.p or tiling.q  # where threads along y are
    if run == call.columns and across and across[-1][1] == len(call.axes) - 2:
        run *= across[-1][0].size
    return run * _BYTES[call.dtype]


def _tiled_pass(tiling: _Tiling) -> Pass:
    call = tiling.call
    partial = tuple(slot for slot in call.grads if tiling.parts(slot) > 1)
    scratch = tuple((tiling.parts(slot), call.sizes[slot]) for slot in partial)
    results = {slot: call.grads.index(slot) for slot in call.grads}
    results |= {slot: len(call.grads) + i for i, slot in enumerate(partial)}
    addresses = tuple(("result", results[s]) if s in results else ("null", 0) for s in SLOTS)
    block = (call.lanes, tiling.threads_y, 1)
    launches = [Launch("lerp_backward", (tiling.blocks, 1, 1), block, 0, (*call.operands, *addresses), early=True)]
    options = _tile_options(tiling, partial, max(call.elements, *(math.prod(s) for s in scratch), 0))
    if partial:
        sums = [_Sum(*shape) for shape in scratch]
        params: list[tuple[str, int]] = []
        for slot in partial:
            params += [("result", results[slot]), ("result", call.grads.index(slot))]
        params += [("null", 0)] * (6 - len(params))
        grid = (max(_parts(s.size, s.width) for s in sums), len(sums), 1)
        launches.append(Launch("lerp_sum", grid, (_THREADS, 1, 1), 0, tuple(params), early=True))
        options = (*options, "-DFL_SUMS=" + ",".join(f"{{{s.parts},{s.size},{s.width}}}" for s in sums))
    return Pass(KernelPlan(SOURCE.path, options, tuple(launches)), call.reads, call.grads, scratch)


@dataclass(frozen=True)
class _Sum:
    """The sum of partial[parts][size] over parts in lerp_sum."""

    parts: int
    size: int

    @property
    def width(self) -> int:
        """Threads of a block along a row of parts: as many of its threads as parts or columns leave idle otherwise serve the other."""
        height = min(_THREADS, _power_of_2(_parts(self.parts, PARTS_OF_A_THREAD)))
        return min(_THREADS // height, _power_of_2(self.size))


def _tile_options(tiling: _Tiling, partial: Sequence[str], most: int) -> tuple[str, ...]:
    call = tiling.call
    # Parts are numbered by the places along those axes of the grid that are summed over.
    parts = dict.fromkeys(call.grads, 1)
    grid = [_axis(axis.size, _steps(call, number, partial, parts)) for axis, number in tiling.grid]
    tiles = ((tiling.p_tiles, "first p", tiling.p_span), (tiling.q_tiles, "first q", tiling.q_span))
    for which, (size, place, span) in enumerate(tiles):
        steps = {place: span}
        for slot in partial:
            if tiling.sums_over[slot][which]:
                steps["d" + slot] = parts[slot] * call.sizes[slot]
                parts[slot] *= size
        grid.insert(0, _axis(size, steps))
    values = {
        **_common(2, call.dtype, most, call.vec, [s for s in call.reads if s in call.axes[-1].slots], call.grads),
        "TX": call.lanes,
        "TY": tiling.threads_y,
        "GRID": ",".join(grid),
        "P": _axes_text(call, tiling.p),
        "Q": _axes_text(call, tiling.q),
        "P_SIZE": tiling.p_size,
        "Q_SIZE": tiling.q_size,
        "COLUMNS": call.columns,
        "Q_SPAN": tiling.q_span,
        "SPLITS_P": int(tiling.splits_p),
        "ROWS_P": tiling.rows_p,
        "ROWS_Q": tiling.rows_q,
        "STAGE": tiling.stage(),
        "W_STAYS": int(not any("w" in axis.slots for axis, _ in (*tiling.p, *tiling.q))),
    }
    for slot in SLOTS:
        bits = 0
        if slot in call.grads:
            flags = (True, *tiling.sums_over[slot], slot in partial)
            bits = sum(1 << i for i, flag in enumerate(flags) if flag)
        values["D" + slot.upper()] = bits
    return _options(values)


def _steps(call: _Call, number: int, partial: Sequence[str], parts: dict[str, int]) -> dict[str, int]:
    """Of an axis; those that a gradient of `partial` is summed over number its parts, of which `parts` counts those so far."""
    steps = {place: call.step(place, number) for place in ("ct", *call.reads, *("d" + s for s in call.grads), "column")}
    for slot in partial:
        if slot not in call.axes[number].slots:
            steps["d" + slot] = parts[slot] * call.sizes[slot]
            parts[slot] *= call.row_size(number)
    return steps


def _axes_text(call: _Call, rows: _Rows) -> str:
    found = [_axis(axis.size, _steps(call, number, (), {})) for axis, number in rows]
    return ",".join(found) or _axis(1, {})


def _flat(
    kind: int,
    entry: str,
    axes: tuple[Axis, ...],
    reads: Sequence[str],
    dtype: str,
    params: tuple[tuple[str, int], ...],
    elements: int,
    grads: tuple[str, ...] = (),
) -> KernelPlan:
    """A kernel that goes element by element."""
    columns = axes[-1].size
    vec = _vector(columns, dtype) if elements else 1
    units = elements // vec
    w_one = not any("w" in axis.slots for axis in axes)
    loads = len(reads) + bool(grads) - (w_one and "w" in reads)
    items = max(1, min(FLAT_ITEMS, IN_FLIGHT // _power_of_2(loads)))
    texts = []
    for i, axis in enumerate(axes):
        inner = axes[i + 1 :]
        unit = vec if i == len(axes) - 1 else 1
        steps = {s: unit * math.prod(a.size for a in inner if s in a.slots) for s in reads if s in axis.slots}
        steps["ct"] = unit * math.prod(a.size for a in inner)
        texts.append(_axis(axis.size // unit, steps))
    values = {
        **_common(kind, dtype, elements, vec, [s for s in reads if s in axes[-1].slots], grads),
        "AXES": ",".join(texts),
        "UNITS": units,
        "ITEMS": items,
        "W_ONE": int(w_one),
    }
    blocks = _parts(units, _THREADS * items)
    if blocks > _GRID_X:
        raise ArgumentError(f"lerp: got {elements} elements, more than a grid of {_GRID_X} blocks takes")
    launch = Launch(entry, (blocks, 1, 1), (_THREADS, 1, 1), 0, params, early=True)
    return KernelPlan(SOURCE.path, _options(values), (launch,) if elements else ())


def _common(
    kind: int, dtype: str, most: int, vec: int, lanes: Sequence[str], grads: Sequence[str]
) -> dict[str, object]:
    """What every kernel is told; `most`: elements of the largest array."""
    on = ("ct", *lanes)
    return {
        "KIND": kind,
        "T": _CODES[dtype],
        "WIDE": int(most > _NARROW),
        "VEC": vec,
        "LANES": sum(1 << _PLACES.index(place) for place in on),
        "WANT": sum(1 << SLOTS.index(slot) for slot in grads),
    }


def _axis(size: int, steps: Mapping[str, int]) -> str:
    return f"{{{size},{{{','.join(str(steps.get(place, 0)) for place in _PLACES)}}}}}"


def _options(values: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(f"-DFL_{name}={value}" for name, value in values.items())


def _vector(columns: int, dtype: str) -> int:
    """Neighbours that a thread takes: a power of 2, up to 16 bytes, of which rows hold a whole number and so start on one."""
    return math.gcd(columns, 16 // _BYTES[dtype])


def _size(rows: _Rows) -> int:
    return math.prod(axis.size for axis, _ in rows)


def _parts(total: int, size: int) -> int:
    return -(-total // size)


def _round_up(value: int, step: int) -> int:
    return _parts(value, step) * step


def _power_of_2(value: int) -> int:
    """The least that is not below `value`."""
    return 1 << (max(1, value) - 1).bit_length()


def _powers_of_2(most: int) -> Iterator[int]:
    return (1 << i for i in range(most.bit_length()))


def _check(dtype: str) -> None:
    if dtype not in _CODES:
        raise unknown_name("dtype", dtype, _CODES)
