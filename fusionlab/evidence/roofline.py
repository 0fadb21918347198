"""The best possible time of a program on a device, kernel by kernel, and the predicted gain of each candidate beyond XLA.

At best a kernel takes the longer of two times: its operations at the rate of a large product, its bytes at the rate of a large copy, both
measured on the device (`peaks.measure_peaks`). It may take longer: transcendentals and elementwise code never run at the rate of a
product, and starting a kernel takes time of its own. It may take less if its operands are still in a cache.

The gain of a candidate is predicted beyond XLA: the kernels XLA is expected to make of the program as it is (`graph/cost`), against
those of the program with the candidate fused, where the fused op reads its operands once and writes its results once.

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for multicore architectures", 2009.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusionlab.device import Device
from fusionlab.errors import ArgumentError
from fusionlab.fusers import Findings
from fusionlab.fusers.engine.outcomes import Candidate
from fusionlab.graph.cost.cost import Cost, Costs, cost_of, quantity, total_of
from fusionlab.graph.cost.kernel_model import ModelKernel, kernels_of
from fusionlab.graph.program.graph import Graph
from fusionlab.showing import Shown
from fusionlab.tracebacks import own_lines_hidden

from .instruments.timing import Runs, seconds
from .reconcile import Reconciliation

UNMODELLED = "dispatch, and effects outside the model (caches, elementwise code below the peak rate)"
FASTER = "bytes that came from a cache rather than from memory, or operations that were not done"


@dataclass(frozen=True, repr=False)
class Point(Shown):
    """One kernel, part or program under the roof.

    Attributes:
      name: its operation ("dot_general attention %25").
      operations, bytes_moved: of all its trips.
      attainable_s: seconds at best.
      bound: "compute" or "memory": which of the two rates limits it; "nothing" if it neither computes nor moves anything.
      measured_s: seconds it took, where known.
    """

    name: str
    operations: int
    bytes_moved: int
    attainable_s: float
    bound: str
    measured_s: float | None = None

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.operations / self.bytes_moved if self.bytes_moved else float("inf")

    @property
    def attainable(self) -> float:
        """Operations per second at best."""
        return self.operations / self.attainable_s if self.attainable_s else 0.0

    @property
    def attained(self) -> float | None:
        """Operations per second as measured."""
        return None if self.measured_s is None else self.operations / self.measured_s

    def __str__(self) -> str:
        text = f"{self.name}: at best {seconds(self.attainable_s)} ({self.bound}), {self.intensity:.3g} flop/byte"
        if self.measured_s is None:
            return text
        return f"{text}, measured {seconds(self.measured_s)}, {self.attainable_s / self.measured_s:.0%} of the roof"

    def _row(self) -> dict[str, Any]:
        names = ("name", "attainable_s", "bound", "intensity", "measured_s")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, repr=False)
class Prediction(Shown):
    """The expected gain of fusing one candidate, beyond XLA.

    Attributes:
      site, pass_name: of the candidate.
      before, after: operations and bytes of the program as XLA is expected to run it, and with the candidate fused.
      kernels: the number of kernels before and after.
      saved_s: seconds of attainable time; 0 if the fused op is what XLA runs anyway.
      why: in words.
      measured_saved_s: seconds it saved, where measured.
    """

    _told = ("site", "saved_s", "measured_saved_s", "why")

    site: str
    pass_name: str
    before: Cost
    after: Cost
    kernels: tuple[int, int]
    saved_s: float
    why: str
    measured_saved_s: float | None = None

    def __str__(self) -> str:
        text = f"{self.site}: saves {_signed(self.saved_s)} at best; {self.why}"
        return text if self.measured_saved_s is None else f"{text}; measured {_signed(self.measured_saved_s)}"


@dataclass(frozen=True, repr=False)
class Roofline(Shown):
    """A program under the roof of a device.

    Attributes:
      name: of the function.
      device: with its measured rates.
      points: one for each kernel of the model, in program order.
      unfused_s: at best, every node a kernel of its own.
      predictions: one for each candidate, in their order.
      measured_s: seconds of the whole, where given.
      unknown: how many nodes have an unknown number of operations.
      notes: assumptions behind the numbers.
    """

    _listed = "points"

    name: str
    device: Device
    points: tuple[Point, ...]
    unfused_s: float
    predictions: tuple[Prediction, ...] = ()
    measured_s: float | None = None
    unknown: int = 0
    notes: tuple[str, ...] = ()

    @property
    def attainable_s(self) -> float:
        """At best, as XLA is expected to fuse it: the sum over the kernels."""
        return sum(p.attainable_s for p in self.points)

    @property
    def whole(self) -> Point:
        """The program as one point: the sums of its kernels."""
        operations, moved = sum(p.operations for p in self.points), sum(p.bytes_moved for p in self.points)
        compute, memory = _times(operations, moved, self.device)
        bound = "compute" if compute > memory else "memory"
        return Point(self.name, operations, moved, self.attainable_s, bound, self.measured_s)

    def reconcile(self, depth: int = 1) -> Reconciliation:
        """The attainable times of the scopes against the measured whole, and the remainder with its name.

        Raises:
          ArgumentError: the whole was not measured.
        """
        if self.measured_s is None:
            raise ArgumentError(
                "measured: none was given, needed the measured seconds of the whole: roofline(..., measured=)"
            )
        parts: dict[str, float] = {}
        for p in self.points:
            scope = "/".join(p.name.partition(" ")[2].rpartition(" ")[0].split("/")[:depth]) or "(top)"
            parts[scope] = parts.get(scope, 0.0) + p.attainable_s
        return Reconciliation(tuple(parts.items()), self.measured_s, UNMODELLED, FASTER)

    def with_measured(self, saved_s: Mapping[str, float]) -> Roofline:
        """With the seconds that sites (by id) saved where measured."""
        predictions = (dataclasses.replace(p, measured_saved_s=saved_s.get(p.site)) for p in self.predictions)
        return dataclasses.replace(self, predictions=tuple(predictions))

    def __str__(self) -> str:
        d = self.device
        rates = f"{quantity(d.gemm_flop_per_s or 0)}flop/s, {quantity(d.copy_bytes_per_s or 0)}B/s"
        lines = [f"{self.name} on {d} ({rates})"]
        lines += [f"  {p}" for p in sorted(self.points, key=lambda p: -p.attainable_s)[:12]]
        more = len(self.points) - 12
        lines += [f"  ... and {more} more: .points"] if more > 0 else []
        total = f"at best {seconds(self.attainable_s)} in {len(self.points)} kernels as XLA is expected to fuse it"
        lines += [f"{total}, {seconds(self.unfused_s)} with no fusion at all"]
        lines += ["predicted gains beyond XLA:", *(f"  {p}" for p in self.predictions)] if self.predictions else []
        lines += [str(self.reconcile())] if self.measured_s is not None else []
        return "\n".join([*lines, *(f"note: {n}" for n in self.notes)])


def attainable(cost: Cost, device: Device) -> tuple[float, str]:
    """Seconds at best, and which rate limits it: "compute", "memory" or "nothing".

    Raises:
      ArgumentError: the device's rates were not measured.
    """
    compute, memory = _times(cost.operations, cost.bytes_moved, device)
    if not compute and not memory:
        return 0.0, "nothing"
    return (compute, "compute") if compute > memory else (memory, "memory")


def _times(operations: int, moved: int, device: Device) -> tuple[float, float]:
    if not device.gemm_flop_per_s or not device.copy_bytes_per_s:
        raise ArgumentError(
            f"device: the rates of {device} are not known, needed fusionlab.evidence.instruments.peaks.measure_peaks(), or a Device with "
            "copy_bytes_per_s and gemm_flop_per_s"
        )
    return operations / device.gemm_flop_per_s, moved / device.copy_bytes_per_s


@own_lines_hidden
def roofline(
    program: Findings | Graph,
    device: Device,
    *,
    measured: Runs | float | None = None,
    trips: Mapping[int, int] | None = None,
) -> Roofline:
    """A program under the roof of a device, and the predicted gain of each candidate.

    Args:
      program: its findings, or only its graph (then nothing is predicted).
      device: with measured rates: `measure_peaks()`.
      measured: the time of the whole: samples, or seconds.
      trips: node id of a while loop -> how often its body runs.

    Raises:
      ArgumentError: the device's rates were not measured, or `trips` names a node that is not a while loop.
    """
    graph = program.graph if isinstance(program, Findings) else program
    costs = cost_of(graph, trips=trips)
    kernels = kernels_of(costs)
    points = tuple(_point(k, costs, device) for k in kernels)
    predictions: tuple[Prediction, ...] = ()
    if isinstance(program, Findings):
        predictions = tuple(_predicted(program, c, kernels, device) for c in program.candidates)
    notes = (
        [f"{len(costs.unknown)} nodes compute an unknown amount: only their bytes are counted"] if costs.unknown else []
    )
    if any(k.cost.trips is None for k in kernels):
        notes.append("the body of a while loop counts for one trip: give the number of trips as trips={node id: n}")
    return Roofline(
        graph.name,
        device,
        points,
        sum(attainable(c, device)[0] for c in costs.nodes.values()),
        predictions,
        measured.median_s if isinstance(measured, Runs) else measured,
        len(costs.unknown),
        tuple(notes),
    )


def _point(kernel: ModelKernel, costs: Costs, device: Device) -> Point:
    value = next((v.name for v in costs.graph.node_by_id[kernel.root].outputs), f"n{kernel.root}")
    name = f"{kernel.primitive} {kernel.scope} {value}"
    return Point(name, kernel.cost.operations, kernel.cost.bytes_moved, *attainable(kernel.cost, device))


def _predicted(found: Findings, candidate: Candidate, kernels: tuple[ModelKernel, ...], device: Device) -> Prediction:
    before = total_of(k.cost for k in kernels)
    if candidate.same_code:
        why = "it is what XLA runs anyway"
        return Prediction(candidate.id, candidate.pass_name, before, before, (len(kernels), len(kernels)), 0.0, why)
    changed = kernels_of(cost_of(found.apply([candidate.id])))
    after = total_of(k.cost for k in changed)
    times = (sum(attainable(k.cost, device)[0] for k in ks) for ks in (kernels, changed))
    saved = next(times) - next(times)
    counts = len(kernels), len(changed)
    return Prediction(candidate.id, candidate.pass_name, before, after, counts, saved, _why(before, after, counts))


def _why(before: Cost, after: Cost, kernels: tuple[int, int]) -> str:
    parts = []
    for unit, was, now in (("B", before.bytes_moved, after.bytes_moved), ("flop", before.operations, after.operations)):
        if was != now:
            parts.append(f"{quantity(abs(was - now))}{unit} {'less' if now < was else 'more'}")
    parts.append(f"{kernels[0]} kernels -> {kernels[1]}" if kernels[0] != kernels[1] else "as many kernels")
    return ", ".join(parts)


def _signed(value: float) -> str:
    return f"{'-' if value < 0 else ''}{seconds(abs(value))}" if value else "nothing"
