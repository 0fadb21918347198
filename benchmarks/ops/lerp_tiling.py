"""Other ways to tile the backward of lerp, timed: is the one that the model of its traffic chooses the quickest? (`lerp --tune`)

For each case two kinds of other ways: those chosen with another value of one of the model's constants, and those that the model, as it is,
holds for next best and for somewhat worse. Equal ones are timed once. Without a CUDA device the ways are listed without times.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusionlab.kernels.ops.lerp import plan, tiling
from fusionlab.kernels.ops.lerp.axes import SLOTS
from fusionlab.kernels.ops.passes import KernelPass

from ..measuring import compiled_at_once, measured

GRADS = ("x", "y")
SHIPPED = "as shipped"
SWEEP = {
    "TAIL_BLOCKS": (33, 66, 264, 528),
    "MIN_LANES": (1, 4, 16, 32),
    "STAGE_BYTES": (8 << 10, 16 << 10, 48 << 10),
    "IN_FLIGHT": (2, 4, 16),
    "FLAT_ITEMS": (1, 4, 8),
    "FLAT_BYTES": (0, 1 << 40),
}
NEXT, WORSE = 6, 6  # of those that the model ranks: the next best, and as many more up to WORSE_THAN times the cost
WORSE_THAN = 1.3
SHOWN = 10  # the quickest of each case


@dataclass
class Way:
    """One way to do a case's backward; `labels` are what chose it, `us` what it took."""

    passes: tuple[KernelPass, ...]
    labels: list[str] = field(default_factory=list)
    us: float = math.nan

    def __str__(self) -> str:
        return " + ".join(_geometry(one) for one in self.passes)


def _geometry(one: KernelPass) -> str:
    told = dict(o.removeprefix("-DFL_").split("=", 1) for o in one.plan.options)
    first = one.plan.launches[0]
    if first.entry == "lerp_backward_flat":
        return f"flat, {told['ITEMS']} items, {first.grid[0]} blocks"
    scratch = sum(math.prod(s) for s in one.scratch) * 4 / 2**20
    return (
        f"d{'d'.join(one.gives)}: {told['TX']}x{told['TY']} threads, {'p' if told['SPLITS_P'] == '1' else 'q'} along y, "
        f"{told['ROWS_P']}x{told['ROWS_Q']} rows, stage {told['STAGE']}, q {told['Q_SPAN']} of {told['Q_SIZE']}, "
        f"{first.grid[0]} blocks, {scratch:.1f} MiB of parts"
    )


@contextlib.contextmanager
def constants(**changes: int) -> Iterator[None]:
    """The model with other constants."""
    home = {name: plan if name.startswith("FLAT") else tiling for name in changes}
    before = {name: getattr(home[name], name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(home[name], name, value)
        plan._passes.cache_clear()
        yield
    finally:
        for name, value in before.items():
            setattr(home[name], name, value)
        plan._passes.cache_clear()


def ways(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> list[Way]:
    """The one shipped first."""
    found: dict[Any, Way] = {}

    def note(passes: tuple[KernelPass, ...], label: str) -> None:
        found.setdefault(tuple(one.plan for one in passes), Way(passes)).labels.append(label)

    note(plan.backward_passes(shapes, GRADS, dtype), SHIPPED)
    for name, values in SWEEP.items():
        for value in values:
            with constants(**{name: value}):
                note(plan.backward_passes(shapes, GRADS, dtype), f"{name}={value}")
    call = plan.call_of(shapes, GRADS, dtype)
    if all(slot in axis.slots for axis in call.axes for slot in GRADS):
        return list(found.values())
    ranked = sorted(((tiling.cost(t), i, t) for i, t in enumerate(plan.all_tilings(call))), key=lambda one: one[:2])
    least = ranked[0][0]
    worse = [one for one in ranked[NEXT:] if one[0] <= WORSE_THAN * least]
    for cost, _, tile in (*ranked[:NEXT], *worse[:: max(1, len(worse) // WORSE)]):
        note((plan.tiled_pass(tile),), f"model {cost / least:.3f}")
    return list(found.values())


def tune(cases: Sequence[Any], copy_bytes_per_s: float | None, samples: int) -> None:
    """Prints the quickest ways of each case, then what each constant would do to all of them."""
    taken: dict[str, list[Way]] = {}
    for case in cases:
        made = ways(shapes_of(case), case.dtype)
        if copy_bytes_per_s:
            time_ways(case, made, samples)
        taken[case.name] = made
        floor_us = case.backward_bytes / copy_bytes_per_s * 1e6 if copy_bytes_per_s else math.nan
        floor = f"; bytes at the copy rate {floor_us:.1f} us" if copy_bytes_per_s else ""
        print(f"{case.name}: {len(made)} ways{floor}", flush=True)
        for way in shown(made):
            times = f"{way.us:8.1f} us, {way.us / floor_us:5.3f} of the bytes" if copy_bytes_per_s else "not timed"
            print(f"  {times}: {way} <- {SHIPPED if SHIPPED in way.labels else ', '.join(way.labels)}")
    if copy_bytes_per_s:
        print("each constant, times over those as shipped: geometric mean, worst case")
        for label, mean, worst in summary(taken):
            print(f"  {label:20} {mean:.3f}  {worst:.3f}")


def shown(made: Sequence[Way]) -> list[Way]:
    """The quickest and the one shipped, where times are known; all where they are not."""
    if math.isnan(made[0].us):
        return list(made)
    best = sorted(made, key=lambda way: way.us)
    return best[:SHOWN] + [way for way in best[SHOWN:] if SHIPPED in way.labels]


def summary(taken: Mapping[str, Sequence[Way]]) -> list[tuple[str, float, float]]:
    """Of each constant's other values: what they make of the times of all cases."""
    found = []
    for label in (f"{name}={value}" for name, values in SWEEP.items() for value in values):
        ratios = [_us(made, label) / _us(made, SHIPPED) for made in taken.values()]
        found.append((label, math.exp(sum(map(math.log, ratios)) / len(ratios)), max(ratios)))
    return found


def _us(made: Sequence[Way], label: str) -> float:
    return next(way.us for way in made if label in way.labels)


def shapes_of(case: Any) -> dict[str, tuple[int, ...]]:
    rank = len(case.out)
    return {s: (1,) * (rank - len(shape)) + shape for s, shape in zip(SLOTS, (case.x, case.y, case.w), strict=True)}


def program_of(case: Any, passes: tuple[KernelPass, ...]) -> Callable[..., list[Any]]:
    """(dx, dy) of the cotangent, x, y and w, by these passes."""
    from fusionlab.kernels.ops.lerp import cuda

    shapes = shapes_of(case)

    def of(ct: Any, x: Any, y: Any, w: Any) -> list[Any]:
        made = cuda.run_passes(passes, {"w": w.reshape(shapes["w"])}, ct, shapes)
        return [made["x"].reshape(x.shape), made["y"].reshape(y.shape)]

    return of


def time_ways(case: Any, made: Sequence[Way], samples: int) -> None:
    import jax

    from .lerp import operands, repeated

    with jax.enable_x64(case.dtype == "float64"):
        args = operands(case)
        of = {str(i): repeated("backward", program_of(case, way.passes), case.repeats) for i, way in enumerate(made)}
        programs = compiled_at_once({name: (fn, args) for name, fn in of.items()})
        found = measured(programs, "0", samples, case.calls, case.repeats)
    for i, way in enumerate(made):
        way.us = found[str(i)]["median_s"] * 1e6
