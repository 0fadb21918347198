"""How the kernels of `lerp.cu` are compiled and launched for a call: plain arithmetic, no GPU.

All are bound by memory: every element of the result's size is read once, and as few others as possible. A model of the traffic
(`tiling.cost`) chooses between the ways to do that.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ....errors import ArgumentError
from ...launch.compile import CudaSource
from ...launch.kernel_plan import KernelPlan, Launch
from ...op.arrays import check_name
from ..geometry import GRID_X, ITEM_BYTES, ceil_div, power_of_2, vector
from ..passes import CODES, KernelPass, options, places
from . import tiling
from .axes import SLOTS, BroadcastAxes, collapse, powers_of_2, result_shape
from .tiling import THREADS, LanedPass, PartSum, Rows, Tiling

SOURCE = CudaSource("lerp/lerp.cu", ("lerp_forward", "lerp_backward_flat", "lerp_backward", "lerp_sum"))
_PLACES = ("ct", "w", "x", "y", "dx", "dy", "dw", "column", "first p", "first q")  # the kernel's enum
_NARROW = 2**31 - 1  # elements that 32-bit numbers are used for
# Tuned as those of tiling.py.
FLAT_ITEMS = 2  # at most, of those kernels that go element by element: they run with 2,048 threads a multiprocessor
FLAT_BYTES = 64 << 20  # of an array of the result's shape beyond which they take one item each: no cache holds it then
PASS_BYTES = 12 << 20  # another pass


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
    check_name("dtype", dtype, CODES)
    params = (("operand", 0), ("operand", 1), ("operand", 2), ("result", 0))
    return _flat(0, "lerp_forward", collapse(shapes, SLOTS), SLOTS, dtype, params, math.prod(result_shape(shapes)))


def backward_passes(shapes: Mapping[str, Sequence[int]], wanted: tuple[str, ...], dtype: str) -> tuple[KernelPass, ...]:
    """dx = sum of (1 - w) ct, dy = sum of w ct, dw = sum of (y - x) ct, over the axes along which each was broadcast.

    Args:
      shapes: of x, y and w, of one rank up to `MAX_RANK`; the result must not be empty.
      wanted: slots whose gradients are asked for.
      dtype: numpy's name, of all arrays.

    Returns:
      One pass, or several where ct read again costs less than the partial sums of one pass would. They read ct, then slots in the order
      w, x, y; scratch is of `accumulator(dtype)`.

    Raises:
      ArgumentError, UnknownNameError: what is asked for does not exist.
    """
    check_name("dtype", dtype, CODES)
    if not math.prod(result_shape(shapes)):
        raise ArgumentError(f"lerp: got shapes {dict(shapes)} of an empty result, needed one with elements")
    given = tuple((slot, tuple(shapes[slot])) for slot in SLOTS)
    return _passes(given, tuple(slot for slot in SLOTS if slot in wanted), dtype)


@functools.lru_cache(maxsize=256)
def _passes(
    given: tuple[tuple[str, tuple[int, ...]], ...], wanted: tuple[str, ...], dtype: str
) -> tuple[KernelPass, ...]:
    shapes = dict(given)

    @functools.cache
    def pass_of(grads: tuple[str, ...]) -> tuple[float, KernelPass]:
        return _pass_of(shapes, grads, dtype)

    choices = [[pass_of(group) for group in groups] for groups in _groupings(wanted)]
    best = min(choices, key=lambda c: sum(cost for cost, _ in c) + PASS_BYTES * len(c))
    return tuple(cotangent for _, cotangent in best)


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


def call_of(shapes: Mapping[str, Sequence[int]], grads: tuple[str, ...], dtype: str) -> LanedPass:
    """One pass that makes these gradients, with as many lanes as there are neighbours for."""
    reads = (("w",) if "x" in grads or "y" in grads else ()) + (("x", "y") if "w" in grads else ())
    axes = collapse(shapes, tuple(slot for slot in SLOTS if slot in grads or slot in reads))
    lanes = power_of_2(axes[-1].size // vector(axes[-1].size, dtype))
    return LanedPass(axes, grads, reads, dtype, min(tiling.MAX_LANES, lanes))


def all_tilings(call: LanedPass) -> Iterator[Tiling]:
    """Every way that is tried, with those lanes and with fewer."""
    lanes = (n for n in powers_of_2(call.lanes) if n == call.lanes or n >= tiling.MIN_LANES)
    return itertools.chain.from_iterable(tiling.tilings(replace(call, lanes=n)) for n in lanes)


def _pass_of(shapes: Mapping[str, Sequence[int]], grads: tuple[str, ...], dtype: str) -> tuple[float, KernelPass]:
    call = call_of(shapes, grads, dtype)
    if all(slot in axis.slots for axis in call.axes for slot in grads):
        params = (*call.operands, *places("result", SLOTS, grads))
        plan = _flat(1, "lerp_backward_flat", call.axes, call.reads, dtype, params, call.elements, grads)
        return call.base_bytes, KernelPass(plan, call.operand_names, grads, ())
    best = min(((tiling.cost(t), t) for t in all_tilings(call)), key=lambda pair: pair[0])
    return best[0], tiled_pass(best[1])


def tiled_pass(chosen: Tiling) -> KernelPass:
    """The pass done that way."""
    call = chosen.call
    partial = tuple(slot for slot in call.grads if chosen.parts(slot) > 1)
    scratch = tuple((chosen.parts(slot), call.sizes[slot]) for slot in partial)
    # Of a gradient that several tiles have a part in, the kernel writes the parts.
    numbers = dict(zip((*call.grads, *partial), itertools.count(), strict=False))
    addresses = tuple(("result", numbers[s]) if s in numbers else ("null", 0) for s in SLOTS)
    block = (call.lanes, chosen.threads_y, 1)
    launches = [Launch("lerp_backward", (chosen.blocks, 1, 1), block, 0, (*call.operands, *addresses), early=True)]
    told = _tile_options(chosen, partial, max(call.elements, *(math.prod(s) for s in scratch), 0))
    if partial:
        sums = [PartSum(*shape) for shape in scratch]
        pairs = [(numbers[slot], call.grads.index(slot)) for slot in partial]
        launches.append(_sum_launch(sums, pairs))
        told = (*told, *options({"SUMS": ",".join(map(str, sums))}))
    return KernelPass(KernelPlan(SOURCE.path, told, tuple(launches)), call.operand_names, call.grads, scratch)


def _sum_launch(sums: Sequence[PartSum], pairs: Sequence[tuple[int, int]]) -> Launch:
    """Of lerp_sum, `pairs` being the results that hold the parts and the sum of each."""
    params = [("result", number) for pair in pairs for number in pair]
    params += [("null", 0)] * (6 - len(params))
    grid = (max(ceil_div(s.size, s.width) for s in sums), len(sums), 1)
    return Launch("lerp_sum", grid, (THREADS, 1, 1), 0, tuple(params), early=True)


def _gradient_bits(chosen: Tiling, slot: str, partial: bool) -> int:
    """The kernel's flags of a gradient: wanted, summed over p, q and the lanes, in parts."""
    if slot not in chosen.call.grads:
        return 0
    flags = (True, *chosen.sums_over[slot], partial)
    return sum(1 << i for i, flag in enumerate(flags) if flag)


def _tile_options(chosen: Tiling, partial: Sequence[str], most: int) -> tuple[str, ...]:
    call = chosen.call
    # Parts are numbered by the places along those axes of the grid that are summed over.
    parts = dict.fromkeys(call.grads, 1)
    grid = [_axis(axis.size, _steps(call, number, partial, parts)) for axis, number in chosen.grid]
    tiles = ((chosen.p_tiles, "first p", chosen.p_span), (chosen.q_tiles, "first q", chosen.q_span))
    for which, (size, place, span) in enumerate(tiles):
        steps = {place: span}
        for slot in partial:
            if chosen.sums_over[slot][which]:
                steps["d" + slot] = parts[slot] * call.sizes[slot]
                parts[slot] *= size
        grid.insert(0, _axis(size, steps))
    values = {
        **_common(2, call.dtype, most, call.vec, [s for s in call.reads if s in call.axes[-1].slots], call.grads),
        "TX": call.lanes,
        "TY": chosen.threads_y,
        "GRID": ",".join(grid),
        "P": _axes_text(call, chosen.p),
        "Q": _axes_text(call, chosen.q),
        "P_SIZE": chosen.p_size,
        "Q_SIZE": chosen.q_size,
        "COLUMNS": call.columns,
        "Q_SPAN": chosen.q_span,
        "SPLITS_P": int(chosen.splits_p),
        "ROWS_P": chosen.rows_p,
        "ROWS_Q": chosen.rows_q,
        "STAGE": chosen.stage(),
        "W_STAYS": int(not any("w" in axis.slots for axis, _ in (*chosen.p, *chosen.q))),
    }
    for slot in SLOTS:
        values["D" + slot.upper()] = _gradient_bits(chosen, slot, slot in partial)
    return options(values)


def _steps(call: LanedPass, number: int, partial: Sequence[str], parts: dict[str, int]) -> dict[str, int]:
    """Of an axis; those that a gradient of `partial` is summed over number its parts, of which `parts` counts those so far."""
    steps = {place: call.step(place, number) for place in ("ct", *call.reads, *("d" + s for s in call.grads), "column")}
    for slot in partial:
        if slot not in call.axes[number].slots:
            steps["d" + slot] = parts[slot] * call.sizes[slot]
            parts[slot] *= call.row_size(number)
    return steps


def _axes_text(call: LanedPass, rows: Rows) -> str:
    found = [_axis(axis.size, _steps(call, number, (), {})) for axis, number in rows]
    return ",".join(found) or _axis(1, {})


def _axes_of_vectors(axes: tuple[BroadcastAxes, ...], reads: Sequence[str], vec: int) -> str:
    """The axes for a kernel that goes vector by vector: the last one has as many steps as vectors."""
    texts = []
    for i, axis in enumerate(axes):
        inner = axes[i + 1 :]
        unit = vec if i == len(axes) - 1 else 1
        steps = {s: unit * math.prod(a.size for a in inner if s in a.slots) for s in reads if s in axis.slots}
        steps["ct"] = unit * math.prod(a.size for a in inner)
        texts.append(_axis(axis.size // unit, steps))
    return ",".join(texts)


def _flat(
    kind: int,
    entry: str,
    axes: tuple[BroadcastAxes, ...],
    reads: Sequence[str],
    dtype: str,
    params: tuple[tuple[str, int], ...],
    elements: int,
    grads: tuple[str, ...] = (),
) -> KernelPlan:
    """A kernel that goes element by element."""
    columns = axes[-1].size
    vec = vector(columns, dtype) if elements else 1
    units = elements // vec
    w_is_scalar = not any("w" in axis.slots for axis in axes)
    loads = len(reads) + bool(grads) - (w_is_scalar and "w" in reads)
    most = FLAT_ITEMS if elements * ITEM_BYTES[dtype] <= FLAT_BYTES else 1
    items = max(1, min(most, tiling.IN_FLIGHT // power_of_2(loads)))
    values = {
        **_common(kind, dtype, elements, vec, [s for s in reads if s in axes[-1].slots], grads),
        "AXES": _axes_of_vectors(axes, reads, vec),
        "UNITS": units,
        "ITEMS": items,
        "W_ONE": int(w_is_scalar),
    }
    blocks = ceil_div(units, THREADS * items)
    if blocks > GRID_X:
        raise ArgumentError(f"lerp: got {elements} elements, more than a grid of {GRID_X} blocks takes")
    launch = Launch(entry, (blocks, 1, 1), (THREADS, 1, 1), 0, params, early=True)
    return KernelPlan(SOURCE.path, options(values), (launch,) if elements else ())


def _common(
    kind: int, dtype: str, most: int, vec: int, lanes: Sequence[str], grads: Sequence[str]
) -> dict[str, object]:
    """The parameters of every kernel; `most`: elements of the largest array."""
    on = ("ct", *lanes)
    return {
        "KIND": kind,
        "T": CODES[dtype],
        "WIDE": int(most > _NARROW),
        "VEC": vec,
        "LANES": sum(1 << _PLACES.index(place) for place in on),
        "WANT": sum(1 << SLOTS.index(slot) for slot in grads),
    }


def _axis(size: int, steps: Mapping[str, int]) -> str:
    return f"{{{size},{{{','.join(str(steps.get(place, 0)) for place in _PLACES)}}}}}"
