"""The primitives whose parameters are positions along an axis, in numpy: slices, concatenations, and updates.

An axis may be reduced to fewer entries (see `evaluate.py`). If it consists of parts of one size, it must be reduced to as many reduced
parts: 3 x 768 features to 3 x 4, if 768 is reduced to 4. If entries are cut off its ends, as many, or a few, are cut off the reduced
axis: 1024 positions are reduced to 5, if the 1023 that are left are reduced to 4. Otherwise `SizesDifferError` gives the size that fits.
Positions without such a meaning raise `CannotEvaluate`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .limits import (
    KEPT_SIZES,
    CannotEvaluate,
    CutError,
    PositionsError,
    SizesDifferError,
    kept_ends,
    no_positions,
    unreduced,
)
from .numpy_rules import Array, NumpyRule, bound

_PARTS = 64  # an axis of more parts than that would hardly be reduced


def _axis(v: Any, axis: int) -> int:
    return int(v.aval.shape[axis])


def _meets(real: int, reduced: int, wanted: int, split: Sequence[int] = ()) -> None:
    """Raises SizesDifferError if an axis of size `real`, of parts `split`, is not reduced to `wanted`."""
    if reduced != wanted:
        raise SizesDifferError(real, reduced, wanted, split)


def _part(run: Any, real: int, reduced: int, start: int, stop: int, step: int) -> tuple[int, int, int]:
    """(start, stop, step) of a slice of an axis of size `real`, in its reduced axis.

    The slice is all of it, or all but some entries at its ends, or one of several parts of one size, or every `step`-th entry.
    """
    if (start, stop, step) == (0, real, 1):
        return 0, reduced, 1
    count = len(range(start, stop, step))
    if reduced == real == run.sizes(real) and run.sizes(count) == count:
        return start, stop, step
    if real not in run.sizes.cut and _is_part(real, start, count, step):
        small = run.sizes(count)
        _meets(real, reduced, real // count * small, unreduced(run.sizes, (count,)))
        if step == 1:
            return start // count * small, (start // count + 1) * small, 1
        return start, reduced, step
    if step == 1 and count > KEPT_SIZES and real not in run.sizes.parts:
        return _cut(run, real, reduced, start, count)
    if real in run.sizes.parts:
        raise PositionsError(real, "slice")
    raise CannotEvaluate(f"entries {start}:{stop}:{step} of {real} at reduced sizes")


def _is_part(real: int, start: int, count: int, step: int) -> bool:
    """Whether a slice of an axis is one of several parts of one size, or every `step`-th entry."""
    if count == 0 or real % count or real > _PARTS * count:
        return False
    return start % count == 0 if step == 1 else step * count == real and start < step


def _cut(run: Any, real: int, reduced: int, start: int, count: int) -> tuple[int, int, int]:
    """(start, stop, step) of a slice that leaves out entries at the ends of an axis: as many of the reduced one, but no more than
    `KEPT_SIZES` at each end."""
    ends = (start, real - start - count)
    if real not in run.sizes.cut:
        raise CutError(real, ends)
    if run.sizes.cut[real] != ends:
        raise CannotEvaluate(f"entries {start}:{start + count}:1 of {real} at reduced sizes")
    low, high = kept_ends(ends)
    if count not in run.sizes.table and real in run.sizes.table:  # no operand has as many
        _meets(real, reduced, max(reduced, low + high + 2))
        run.sizes.learn(count, reduced - low - high)
    small = run.sizes(count)
    _meets(real, reduced, small + low + high, unreduced(run.sizes, (count,)))
    return low, low + small, 1


def _slice(run: Any, eqn: Any, ins: list[Array]) -> Array:
    p, (x,) = eqn.params, ins
    steps = p["strides"] or (1,) * x.ndim
    cuts = zip(p["start_indices"], p["limit_indices"], steps, strict=True)
    parts = [_part(run, _axis(eqn.invars[0], d), x.shape[d], *map(int, cut)) for d, cut in enumerate(cuts)]
    return x[tuple(slice(*part) for part in parts)]


def _pad(run: Any, eqn: Any, ins: list[Array]) -> Array:
    x, value = ins
    shape, into, source = [], [], []
    for d, config in enumerate(eqn.params["padding_config"]):
        real = (_axis(eqn.invars[0], d), _axis(eqn.outvars[0], d))
        size, places, kept = _spread(run, real, x.shape[d], *map(int, config))
        shape.append(size)
        into.append(places)
        source.append(kept)
    out = np.full(shape, value)
    out[np.ix_(*into)] = x[np.ix_(*source)]
    return out


def _spread(
    run: Any, real: tuple[int, int], reduced: int, low: int, high: int, inner: int
) -> tuple[int, Sequence[int], Sequence[int]]:
    """(size of a padded axis, the positions of the entries in it, the entries kept).

    `real` is its size before and after, `reduced` its reduced size before. If that is reduced, it becomes a slice of the result.
    """
    before, after = real
    if reduced == before and run.sizes(after) == after:
        kept = [i for i in range(before) if 0 <= low + i * (inner + 1) < after]  # a negative padding cuts entries off
        return after, [low + i * (inner + 1) for i in kept], kept
    if min(low, high) < 0:
        raise CannotEvaluate("primitive pad at reduced sizes")
    small = reduced if before == after else run.sizes(after)
    places = range(*_part(run, after, small, low, low + (before - 1) * (inner + 1) + 1, inner + 1))
    _meets(before, reduced, len(places))
    return small, places, range(reduced)


def _concatenate(run: Any, eqn: Any, ins: list[Array]) -> Array:
    axis = int(eqn.params["dimension"])
    real = _axis(eqn.outvars[0], axis)
    _meets(real, run.sizes(real), sum(x.shape[axis] for x in ins))
    return np.concatenate(ins, axis)


def _split(run: Any, eqn: Any, ins: list[Array]) -> list[Array]:
    axis = int(eqn.params["axis"])
    parts = [run.sizes(s) for s in eqn.params["sizes"]]
    _meets(_axis(eqn.invars[0], axis), ins[0].shape[axis], sum(parts))
    return np.split(ins[0], list(itertools.accumulate(parts))[:-1], axis)


def _tile(run: Any, eqn: Any, ins: list[Array]) -> Array:
    """Copies side by side, like a broadcast over new axes that a reshape merges: the reduced axis consists of copies of the reduced one."""
    (x,) = ins
    times = []
    for axis, count in enumerate(map(int, eqn.params["reps"])):
        real, tiled = _axis(eqn.invars[0], axis), _axis(eqn.outvars[0], axis)
        if real == 1 or count == 1:
            times.append(run.sizes(tiled) if real == 1 else 1)
            continue
        times.append(run.sizes(count))
        run.sizes.learn(tiled, times[-1] * x.shape[axis])
    return np.tile(x, times)


def _stack(run: Any, eqn: Any, ins: list[Array]) -> Array:
    _meets(len(ins), run.sizes(len(ins)), len(ins))
    return np.stack(ins, int(eqn.params["axis"]))


def _unstack(run: Any, eqn: Any, ins: list[Array]) -> list[Array]:
    axis = int(eqn.params["axis"])
    real = _axis(eqn.invars[0], axis)
    _meets(real, ins[0].shape[axis], real)
    return list(np.moveaxis(ins[0], axis, 0))


def _window(eqn: Any, starts: list[Array], real: Sequence[int], size: Sequence[int], shape: Sequence[int]) -> Any:
    """The position of a dynamic slice of the sizes `size` in an array of `shape`, clamped as in XLA.

    At reduced sizes, a start that would be clamped, but is not clamped in the array of `real` sizes, is a different position.
    """
    window = []
    for start, s, n, whole in zip(starts, size, shape, real, strict=True):
        at = min(max(int(start), 0), n - s)
        if n != whole and at != int(start):
            raise CannotEvaluate(f"primitive {eqn.primitive.name} at entry {int(start)} of {n} at reduced sizes")
        window.append(slice(at, at + s))
    return tuple(window)


def _dynamic_slice(run: Any, eqn: Any, ins: list[Array]) -> Array:
    x, *starts = ins
    real = eqn.invars[0].aval.shape
    for axis, (n, whole) in enumerate(zip(eqn.params["slice_sizes"], real, strict=True)):
        if n != whole:
            no_positions(run.sizes, eqn, axis)
    size = [n if s == r else run.sizes(s) for s, r, n in zip(eqn.params["slice_sizes"], real, x.shape, strict=True)]
    return x[_window(eqn, starts, real, size, x.shape)]


def _dynamic_update_slice(run: Any, eqn: Any, ins: list[Array]) -> Array:
    x, update, *starts = ins
    for axis, (old, new) in enumerate(zip(*(v.aval.shape for v in eqn.invars[:2]), strict=True)):
        if old != new:
            no_positions(run.sizes, eqn, axis)
    out = np.array(x)
    out[_window(eqn, starts, eqn.invars[0].aval.shape, update.shape, x.shape)] = update
    return out


def _indexed(run: Any, eqn: Any, ins: list[Array]) -> list[Array]:
    """A gather, a scatter or a scatter-add, run by JAX. Indices along a reduced axis must be entries of it, and each entry of a scatter's
    updates must represent as many as the entry that it is added to.
    """
    dims, (x, indices), params = eqn.params["dimension_numbers"], ins[:2], dict(eqn.params)
    real = [int(s) for s in eqn.invars[0].aval.shape]
    gathers = eqn.primitive.name == "gather"
    if gathers:
        given = zip(params["slice_sizes"], real, x.shape, strict=True)
        params["slice_sizes"] = tuple(n if size == whole else size for size, whole, n in given)
    window = params["slice_sizes"] if gathers else _window_of_updates(dims, x.shape, ins[2].shape)
    indexed = dims.start_index_map if gathers else dims.scatter_dims_to_operand_dims
    for column, d in enumerate(indexed):
        last = x.shape[d] - window[d]
        if x.shape[d] != real[d] and not (np.all(indices[..., column] >= 0) and np.all(indices[..., column] <= last)):
            raise CannotEvaluate(f"primitive {eqn.primitive.name} beyond the entries of an axis at reduced sizes")
    if eqn.primitive.name == "scatter" and any(x.shape[d] != real[d] for d in indexed):
        raise CannotEvaluate("primitive scatter along an axis at reduced sizes")  # an entry may represent several
    over = (*indexed, *dims.operand_batching_dims)
    if not gathers and not _alike(eqn, x.shape, indices.size, over):
        raise CannotEvaluate(f"primitive {eqn.primitive.name} of entries that repeat at reduced sizes")
    return bound(eqn, ins, params)


def _alike(eqn: Any, shape: Sequence[int], indices: int, over: Sequence[int]) -> bool:
    """Whether an entry of a scatter's updates represents as many as one of the axes `over` of its operand, of this reduced shape, does."""
    real, whole = (v.aval.shape for v in eqn.invars[:2])
    entries, reduced = math.prod(real[d] for d in over), math.prod(shape[d] for d in over)
    return entries * indices == reduced * math.prod(whole)


def _window_of_updates(dims: Any, shape: Sequence[int], updates: Sequence[int]) -> list[int]:
    """The size of a scatter's window along each axis of its operand."""
    sizes = iter([updates[d] for d in dims.update_window_dims])
    alone = {*dims.inserted_window_dims, *dims.operand_batching_dims}
    return [1 if d in alone else next(sizes) for d in range(len(shape))]


def _rev(run: Any, eqn: Any, ins: list[Array]) -> Array:
    axes = tuple(int(d) for d in eqn.params["dimensions"])
    if any(ins[0].shape[d] != _axis(eqn.invars[0], d) for d in axes):  # other axes may be reduced
        raise CannotEvaluate("primitive rev at reduced sizes")
    return np.flip(ins[0], axes)


PLACED: dict[str, NumpyRule] = {
    "slice": _slice,
    "pad": _pad,
    "concatenate": _concatenate,
    "tile": _tile,
    "stack": _stack,
    "rev": _rev,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "split": _split,
    "unstack": _unstack,
    "gather": _indexed,
    "scatter": _indexed,
    "scatter-add": _indexed,
}
