"""Programs on several devices: their mesh, the bytes the devices send before and after, and the time of each device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from fusionlab.graph.jax_compat import child_jaxprs, split_closed
from fusionlab.graph.xla.collectives import Traffic, bytes_text, traffic
from fusionlab.processes import from_process_0, several
from fusionlab.showing import Shown

from .instruments.program import Program
from .instruments.timing import OLDER_NAMES, seconds

RUNS = 5
Sent = Mapping[str, Traffic]


@dataclass(frozen=True, repr=False)
class Collectives(Shown):
    """The collectives of one call, by its name `what` ("call"): for each kind the count and the bytes of one device, before and after."""

    what: str
    before: Sent
    after: Sent

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of either version, in alphabetical order."""
        return tuple(sorted({*self.before, *self.after}))

    def of(self, kind: str) -> tuple[Traffic, Traffic]:
        """Before and after; zeros for a kind that does not occur."""
        none = Traffic(0, 0)
        return self.before.get(kind, none), self.after.get(kind, none)

    def __str__(self) -> str:
        """ "collectives per device, call: all-reduce 4 (131 kB) -> 4 (131 kB)"."""
        pairs = ((kind, *self.of(kind)) for kind in self.kinds)
        counts = ", ".join(
            f"{kind} {b.count} ({bytes_text(b.bytes)}) -> {a.count} ({bytes_text(a.bytes)})" for kind, b, a in pairs
        )
        return f"collectives per device, {self.what}: {counts or 'none'}"


@dataclass(frozen=True, repr=False)
class OverDevices(Shown):
    """The devices on which a program was measured, and their shares.

    Attributes:
      mesh: axis -> size; empty where neither arguments nor program name one.
      devices, processes: how many of each run it.
      collectives: of each call that was compiled: the call, then its gradient.
      device_s: version -> device ("0") -> the median of the seconds from the start of a call until that device's results are there; of
        this process's devices, and empty where nothing was timed.
    """

    _listed = "collectives"

    mesh: Mapping[str, int]
    devices: int
    processes: int
    collectives: tuple[Collectives, ...] = ()
    device_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """ "8 devices, mesh data=2 x tensor=4"; the number of processes if there is more than one."""
        axes = " x ".join(f"{name}={size}" for name, size in self.mesh.items())
        many = f" of {self.processes} processes" if self.processes > 1 else ""
        return f"{self.devices} devices{many}{f', mesh {axes}' if axes else ''}"

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines of a report."""
        return (f"on {self.place}", *map(str, self.collectives), *filter(None, [self._times]))

    @property
    def _times(self) -> str:
        spans = [
            f"{name} {seconds(min(times.values()))} to {seconds(max(times.values()))}"
            for name, times in self.device_s.items()
            if times
        ]
        return f"time until a device is done (first to last): {', '.join(spans)}" if spans else ""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> OverDevices:
        """Reads back the dict of `dataclasses.asdict`."""

        def sent(kinds: Mapping[str, Any]) -> dict[str, Traffic]:
            return {kind: Traffic(**counts) for kind, counts in kinds.items()}

        calls = (
            Collectives(str(OLDER_NAMES.get(c["what"], c["what"])), sent(c["before"]), sent(c["after"]))
            for c in data["collectives"]
        )
        return cls(data["mesh"], data["devices"], data["processes"], tuple(calls), data["device_s"])

    def __str__(self) -> str:
        return "\n".join(self.lines)


def over_devices(pairs: Mapping[str, tuple[Program, Program]], timed: bool) -> OverDevices | None:
    """The record of programs (call -> before and after) that run on several devices; None for one device.

    Args:
      pairs: the call and its gradient, in this order, as far as they were compiled.
      timed: also run the first, to see how long each device takes.
    """
    devices = frozenset().union(*(p.devices for pair in pairs.values() for p in pair))
    if len(devices) < 2:
        return None
    sent = tuple(Collectives(call, *(traffic(p.module) for p in pair)) for call, pair in pairs.items())
    times = {p.name: device_seconds(p) for p in next(iter(pairs.values()))} if timed else {}
    mesh = next((m for pair in pairs.values() for p in pair if (m := mesh_sizes(p))), {})
    return OverDevices(mesh, len(devices), len({d.process_index for d in devices}), sent, times)


def mesh_sizes(program: Program) -> dict[str, int]:
    """Axis -> size of the mesh that its arguments lie on, or else of its first shard_map; empty without a mesh."""
    placed = (
        getattr(a.sharding, "mesh", None) for a in jax.tree.leaves((program.args, program.kwargs)) if _is_array(a)
    )
    mesh = next((m for m in placed if m is not None and m.size > 1), None) or _mapped(program.jaxpr)
    return {str(name): int(size) for name, size in mesh.shape.items()} if mesh is not None else {}


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array)


def _mapped(jaxpr: Any) -> Any:
    for eqn in split_closed(jaxpr)[0].eqns:
        if eqn.primitive.name == "shard_map":
            return eqn.params["mesh"]
        for _, _, child in child_jaxprs(eqn):
            if (found := _mapped(child)) is not None:
                return found
    return None


def device_seconds(program: Program, runs: int = RUNS) -> dict[str, float]:
    """Device -> median seconds from the start of a call until its part of all results is there; of this process's devices."""
    taken: dict[str, list[float]] = {}
    if several(program.devices):
        from_process_0(np.int32(0), "timing each device")  # they start together
    for _ in range(runs):
        args = program.fresh_args()
        start = time.perf_counter()
        parts = _by_device(program.compiled(*args, **program.kwargs))
        with ThreadPoolExecutor(max(len(parts), 1)) as pool:
            waits = {name: pool.submit(_waited(shards, start)) for name, shards in parts.items()}
        for name, wait in waits.items():
            taken.setdefault(name, []).append(wait.result())
    return {name: statistics.median(times) for name, times in sorted(taken.items(), key=lambda item: int(item[0]))}


def _by_device(out: Any) -> dict[str, list[Any]]:
    parts: dict[str, list[Any]] = {}
    for leaf in jax.tree.leaves(out):
        for shard in leaf.addressable_shards:
            parts.setdefault(str(shard.device.id), []).append(shard.data)
    return parts


def _waited(shards: list[Any], start: float) -> Callable[[], float]:
    def wait() -> float:
        jax.block_until_ready(shards)
        return time.perf_counter() - start

    return wait
