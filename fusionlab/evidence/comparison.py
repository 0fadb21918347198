"""All evidence on one pair of functions: time, memory, errors, and the environment of the measurement."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from fusionlab.errors import ArgumentError
from fusionlab.graph.calls.binding import Bound, as_tuple
from fusionlab.graph.program.trace import bind_users
from fusionlab.progress import Cancel, Progress, Stages, Stopped, watched
from fusionlab.showing import Shown, Table, counted, save_as
from fusionlab.tracebacks import errors_for_users, own_lines_hidden

from .errors.numerics import Numerics
from .instruments.kernel_counts import KernelCounts
from .instruments.memory import Memory
from .instruments.peak_buffers import PeakBuffers
from .instruments.record import Environment, environment, load_json, to_json
from .instruments.timing import Timing, Verdict, check_effort, names_of, seconds
from .instruments.workload import SiteState, Workload, read_sites, workload_of
from .measuring import Measuring
from .over_devices import OverDevices
from .reading import read_memory, read_numerics, read_timing

_PARTS = "environment timing timing_grad numerics memory memory_grad kernels devices workload".split()
_HEADS = ("quantity", "name", "version", "value", "unit", "dtype", "hardware")


@errors_for_users
@dataclass(frozen=True, repr=False)
class Evidence(Shown):
    """Measurements of "before" (the function under `jax.jit`) and "after" (the fused one).

    Attributes:
      name: of the function.
      timing, timing_grad: of the call, and of its gradient with its value; None where not asked for or the same code.
      numerics: errors against float64; None where not asked for or there is no reference (`notes` gives the reason).
      memory, memory_grad: compiled peak memory; None where not asked for or the backend does not report it.
      kernels: how many kernels each version's forward call was compiled to; None where nothing was compiled, or the backend shows no
        HLO.
      differentiated: whether the program contains a backward pass: it is then measured as a step, and its gradient only if asked for.
      devices: mesh, collectives before and after, and the time of each device; None for a program on one device.
      environment: hardware, versions, settings.
      same_code: True when the two compile to the same instructions, so that nothing was timed.
      notes: sentences worth reading.
      workload: fingerprints of the original, by which two records are known to be of the same work; None in older records.
      sites: the program's sites, where it was measured against what `fuse` made of it.
      hlo: optimised HLO text of "before" and "after" (forward); `to_dict` leaves it out.
    """

    name: str
    environment: Environment
    timing: Timing | None = None
    timing_grad: Timing | None = None
    numerics: Numerics | None = None
    memory: Memory | None = None
    memory_grad: Memory | None = None
    same_code: bool = False
    notes: tuple[str, ...] = ()
    kernels: KernelCounts | None = None
    devices: OverDevices | None = None
    differentiated: bool = False
    workload: Workload | None = None
    sites: tuple[SiteState, ...] = ()
    hlo: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def timings(self) -> tuple[Timing, ...]:
        """Timings of the call, then of its gradient, as far as measured."""
        return tuple(t for t in (self.timing, self.timing_grad) if t is not None)

    @property
    def calls(self) -> tuple[str, str]:
        """The names of the call and its gradient: "call" and "gradient of the call"; "step" of a train step."""
        return names_of(self.differentiated)

    @property
    def memories(self) -> tuple[tuple[str, Memory], ...]:
        """Compiled memory of the call and of its gradient, as far as known."""
        named = zip(self.calls, (self.memory, self.memory_grad), strict=True)
        return tuple((call, memory) for call, memory in named if memory is not None)

    @property
    def verdict(self) -> Verdict:
        """The verdict on the call; `timing_grad.verdict` has that on the gradient."""
        if self.same_code:
            return Verdict.SAME_CODE
        return self.timing.verdict if self.timing is not None else Verdict.NOT_TIMED

    @property
    def headline(self) -> str:
        """Every verdict in a line: "call: faster; gradient of the call: no difference"; "same code"."""
        return "; ".join(f"{t.what}: {t.verdict}" for t in self.timings) or str(self.verdict)

    @property
    def all_notes(self) -> tuple[str, ...]:
        """The notes on the comparison, on a machine that was busy, and on the errors."""
        busy = (t.note for t in self.timings if t.note)
        return (*self.notes, *busy, *(self.numerics.notes if self.numerics is not None else ()))

    @property
    def titled(self) -> str:
        """The headline with the function's name, once where the call is called the same: "step" of a function `step`."""
        named = self.headline.startswith(f"{self.name}: ")
        return self.headline if named else f"{self.name}: {self.headline}"

    def __repr__(self) -> str:
        bad = self.numerics.regressions if self.numerics is not None else ()
        worse = f"; {counted(len(bad), 'result')} WORSE" if bad else ""
        return f"<{type(self).__name__} {self.titled}{worse}>"

    def __str__(self) -> str:
        lines = [self.titled]
        lines += [f"  {t.text}" for t in self.timings]
        if self.timing is not None:
            b, a = self.timing.before, self.timing.after
            lines.append(
                f"  compile time: {seconds(b.compile_s)} -> {seconds(a.compile_s)} ({self.calls[0]}, once each)"
            )
            if b.dispatch_s is not None and a.dispatch_s is not None:
                lines.append(f"  dispatch: {seconds(b.dispatch_s)} -> {seconds(a.dispatch_s)} per call, on the host")
        for call, memory in self.memories:
            lines += [f"  {call}: {memory.text}", *(f"    {line}" for line in memory.lines)]
        lines += [f"  {self.kernels}"] if self.kernels is not None else []
        lines += [f"  {line}" for line in self.devices.lines] if self.devices is not None else []
        lines += self._error_lines()
        return "\n".join([*lines, *(f"  note: {n}" for n in self.all_notes), f"  measured on {self.environment}"])

    def _error_lines(self) -> list[str]:
        if self.numerics is None:
            return []
        lines = [f"  {self.numerics.sentence}"] if self.numerics.leaves else []
        worst = [leaf for kind in ("output", "gradient") if (leaf := self.numerics.worst(kind)) is not None]
        lines += [f"    {leaf}" for leaf in worst]
        if bad := self.numerics.regressions:
            lines += [f"  {len(bad)} of {len(self.numerics.leaves)} outputs and gradients are WORSE than before"]
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `from_dict` reads it back. Medians and quartiles are for readers; the samples are the source."""
        data: dict[str, Any] = {"name": self.name, "verdict": self.verdict, "same_code": self.same_code}
        data["differentiated"] = self.differentiated
        for part in _PARTS:
            value = getattr(self, part)
            data[part] = None if value is None else asdict(value)
            if isinstance(value, Timing):
                for runs in (value.before, value.after):
                    data[part][runs.name] |= {"median_s": runs.median_s, "quartiles_s": runs.quartiles_s}
            if isinstance(value, Numerics):
                for leaf, row in zip(value.leaves, data[part]["leaves"], strict=True):
                    row["ok"] = leaf.ok
        data["sites"] = [asdict(site) for site in self.sites]
        return json.loads(to_json({**data, "notes": self.notes}))

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return to_json(self.to_dict())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Reads `to_dict` back (the HLO text is not in it)."""
        return cls(
            name=data["name"],
            environment=Environment.from_dict(data["environment"]),
            timing=read_timing(data["timing"]),
            timing_grad=read_timing(data["timing_grad"]),
            numerics=read_numerics(data["numerics"]),
            memory=read_memory(data["memory"]),
            memory_grad=read_memory(data["memory_grad"]),
            same_code=data["same_code"],
            notes=tuple(data["notes"]),
            # Older records have none of these.
            kernels=KernelCounts(**kernels) if (kernels := data.get("kernels")) else None,
            differentiated=data.get("differentiated", False),
            devices=OverDevices.from_dict(over) if (over := data.get("devices")) else None,
            workload=Workload.from_dict(data.get("workload")),
            sites=read_sites(data.get("sites", ())),
        )

    def _table(self) -> Table:
        return Table(_HEADS, tuple(self.rows()))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes it by suffix: .json (the record, with every sample: `load` reads it back), .csv (every number), .html or .txt.

        Raises:
          ArgumentError: another suffix. OutputError: the file cannot be written; no part of it is left.
        """
        return save_as(path, self._makers(), folders=True, advice="give a path you can write to")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a record that `save`, `fusionlab bench -o` or `fusionlab compare -o` wrote: plain data; nothing in it is run.

        Raises:
          ArgumentError: there is no such file, or it is not a record of a comparison.
        """
        data = load_json(path)
        try:
            return cls.from_dict(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArgumentError(
                f"path: {path} is not a record of a comparison ({type(error).__name__}: {error}); needed one from `fusionlab bench -o`"
            ) from error

    def to_dataframe(self) -> Any:
        """A pandas frame in long form: quantity, name, version, value, unit, dtype, hardware.

        Raises:
          MissingDependencyError: pandas is not installed.
        """
        return self._table().dataframe()

    def rows(self) -> list[tuple[str, str, str, float, str, str, str]]:
        """Every number as (quantity, name, version, value, unit, dtype, hardware); unit and dtype are "" for numbers without."""
        rows: list[tuple[str, str, str, float, str, str, str]] = []
        for timing in self.timings:
            for runs in (timing.before, timing.after):
                rows += [("time", timing.what, runs.name, s, "s", "", timing.hardware) for s in runs.samples_s]
        for call, memory in self.memories:
            plans = (memory.before, memory.after)
            rows += [("compiled peak memory", call, p.name, p.peak, "bytes", "", memory.hardware) for p in plans]
            for plan in plans:
                rows += _rows_at_peak(call, plan.name, plan.buffers, memory.hardware)
        for version, counts in self.kernels.versions if self.kernels else ():
            where = self.environment.hardware
            rows += [("XLA kernels", kind, version, n, "", "", where) for kind, n in counts.items()]
        rows += self._device_rows()
        for leaf in self.numerics.leaves if self.numerics else ():
            for version, error in (("before", leaf.before), ("after", leaf.after)):
                numbers = (
                    ("max abs error", error.max_abs, ""),
                    ("relative L2 error", error.rel_l2, ""),
                    ("max ulp error", error.ulp_max, "ulp"),
                )
                name, where = f"{leaf.kind} {leaf.name}", (leaf.dtype, self.environment.hardware)
                rows += [(quantity, name, version, value, unit, *where) for quantity, value, unit in numbers]
        return rows

    def _device_rows(self) -> list[tuple[str, str, str, float, str, str, str]]:
        if self.devices is None:
            return []
        rows: list[tuple[str, str, str, float, str, str, str]] = []
        where = f"{self.environment.hardware}, {self.devices.place}"
        for call in self.devices.collectives:
            for kind in call.kinds:
                for version, sent in zip(("before", "after"), call.of(kind), strict=True):
                    name = f"{call.what}: {kind}"
                    rows += [("collectives", name, version, sent.count, "", "", where)]
                    rows += [("bytes of collectives", name, version, sent.bytes, "bytes", "", where)]
        for version, times in self.devices.device_s.items():
            rows += [("time of a device", f"device {i}", version, s, "s", "", where) for i, s in times.items()]
        return rows


def _rows_at_peak(call: str, version: str, peak: PeakBuffers | None, where: str) -> list[tuple]:
    """The buffers that live at the peak, the gaps between them, and the temporaries by source line."""
    if peak is None:
        return []
    rows = [
        (f"{b.kind} at the peak", f"{call}: {b.title}", version, b.bytes, "bytes", b.dtype, where) for b in peak.buffers
    ]
    rows.append(("gaps at the peak", call, version, peak.gaps, "bytes", "", where))
    lines = ((f"{call}: {line.line}", line.bytes) for line in peak.lines)
    return rows + [("temporaries of a line at the peak", name, version, n, "bytes", "", where) for name, n in lines]


def _donation_notes(before: Bound, after: Bound) -> list[str]:
    """Notes for the case that only one of the two donates."""
    first, second = (tuple(call.positions[i] for i in call.donated) for call in (before, after))
    if first == second:
        return []
    says = [f"donates {_arguments(nums)}" if nums else "donates nothing" for nums in (first, second)]
    return [f"the original {says[0]}, the fused version {says[1]}; both were run as the original is called"]


def _arguments(nums: tuple[int, ...]) -> str:
    return f"argument{'s' if len(nums) > 1 else ''} {', '.join(map(str, nums))}" if nums else ""


@own_lines_hidden
def measure(
    fn: Callable | Bound,
    fused: Callable,
    *args: Any,
    grad: bool | None = None,
    argnums: int | Sequence[int] | None = None,
    samples: int = 40,
    budget_s: float = 60.0,
    cold: bool = False,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    same_code: bool = False,
    timing: bool = True,
    numerics: bool = True,
    memory: bool = True,
    progress: Progress = False,
    cancel: Callable[[], bool] | None = None,
    **kwargs: Any,
) -> Evidence:
    """Measures a function against its fused version: time, compiled memory, errors of both against float64.

    Args:
      fn: the original; "before" is `jax.jit(fn)`, so write it as a user would. It may be bound to the arguments already.
      fused: the version to compare; same arguments, same outputs.
      *args, **kwargs: arrays, used as given (donated ones are copied).
      grad: also the gradient of a fixed random weighting of all float outputs; None: of a function that has one and is not
        differentiated already, as a train step is.
      argnums: the arguments to differentiate by; None is every float leaf.
      samples: of each function, per timing (of the call, and of its gradient).
      budget_s: seconds for the timings together, of which the call takes at most half where there are two; compiling, and errors
        against float64, come on top.
      cold: flush caches before each call that is timed.
      donate_argnums: arguments each run consumes; those that an `fn` under `jax.jit` donates are found automatically.
      static_argnums, static_argnames: as in `jax.jit`.
      same_code: the fused version may be what XLA runs anyway: where all that would be timed compiles to the same
        instructions, nothing is timed and the verdict is "same code".
      timing, numerics, memory: what to measure.
      progress: False, True (a line) or a function of (task, done, total).
      cancel: called between stages; once it returns True, the results so far are returned, with a note.

    Raises:
      ArgumentError: shapes where arrays are needed, a position of no argument, outputs that differ in structure.
      SideEffectError: a function prints or calls back into Python; named with its source line.
      TraceError: a function does not trace, or (with `grad=True`) cannot be differentiated.
      OutOfMemoryError: the device has too little memory for one of the two; where only the float64 reference does not fit, a note is made.
    """
    check_effort(samples, budget_s)
    calls = [
        f if isinstance(f, Bound) else bind_users(f, args, kwargs, static_argnums, static_argnames) for f in (fn, fused)
    ]
    name = getattr(fn, "__name__", type(fn).__name__)
    notes = _donation_notes(*calls) if not as_tuple(donate_argnums) else []
    with watched(progress) as told:
        measuring = Measuring(calls[0], calls[1], as_tuple(donate_argnums), argnums, grad, Stages(told, cancel))
        effort = {"samples": samples, "budget_s": budget_s, "cold": cold, "progress": told, "cancel": cancel}
        parts = _taken(measuring.steps(numerics, memory, timing, same_code, notes, effort), notes, cancel)
        Stages(told)("reading the compiled programs")
        same = parts.pop("same_code", False)
        notes += measuring.notes()
        if same_code and not same and measuring.differs:
            notes.append(
                "every fused site runs XLA's own code, but XLA compiled part of the fused version differently: any difference "
                f"in time comes from that (kernels that the original lacks: {measuring.differing})"
            )
        hlo = measuring.hlo()
        compiled = {"kernels": measuring.kernels, "devices": measuring.devices(timed="timing" in parts)}
        compiled["workload"] = workload_of(measuring.original.forward.jaxpr) if hlo else None
        compiled["differentiated"] = bool(hlo) and measuring.original.differentiated
    return Evidence(name, environment(), same_code=same, notes=tuple(notes), hlo=hlo, **compiled, **parts)


def _taken(steps: Iterable[tuple[str, Callable[[], Any]]], notes: list[str], cancel: Cancel | None) -> dict[str, Any]:
    """The parts of the evidence measured before a cancel."""
    parts: dict[str, Any] = {}
    key = ""
    try:
        for key, step in steps:  # what comes next may have to be compiled to be known, and be cancelled, too
            if cancel is not None and cancel():
                raise Stopped(key)
            parts[key] = step()
    except Stopped as stopped:
        notes.append(f"cancelled before: {stopped if key in parts or not key else key}")
    return parts
