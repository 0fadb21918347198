"""Times of the kernels of a compiled program, from the trace of JAX's profiler: CUPTI's durations on a GPU, XLA's marks on a CPU.

On a GPU the program is compiled once more without command buffers (CUDA graphs), inside of which the profiler sees no kernels: each
kernel takes as long as it does inside one, but the gaps between kernels, which are not reported, are longer. On a CPU a kernel is
an instruction of the optimised HLO, and tracing takes time of its own, so that small ones look longer than they are.
"""

from __future__ import annotations

import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fusionlab.errors import ArgumentError
from fusionlab.graph.program.trace import bind_users
from fusionlab.showing import Shown
from fusionlab.tracebacks import own_lines_hidden

from .instruments.program import Program, compile_program, compiling
from .instruments.record import hardware
from .instruments.timing import seconds

WITHOUT_COMMAND_BUFFERS = {"xla_gpu_enable_command_buffer": ""}


@dataclass(frozen=True, repr=False)
class KernelTime(Shown):
    """All runs of one kernel.

    Attributes:
      name: of the kernel on a GPU, of the HLO instruction on a CPU.
      hlo: the HLO instruction it belongs to ("fusion.3"); "" if the trace does not name it.
      samples_s: seconds of each run of the program, over all its launches there.
      launches: of one run of the program.
    """

    _told = ("name", "hlo", "median_s", "launches")

    name: str
    hlo: str
    samples_s: tuple[float, ...]
    launches: float

    @property
    def median_s(self) -> float:
        """The median of the samples, in seconds."""
        return float(np.median(self.samples_s))

    @property
    def label(self) -> str:
        """Its name, shortened, and the instruction if its name differs."""
        return self.name[:90] + (f" ({self.hlo})" if self.hlo not in ("", self.name) else "")

    def __str__(self) -> str:
        return f"{self.label}: {seconds(self.median_s)} per run, {self.launches:g} launches"


@dataclass(frozen=True, repr=False)
class KernelTimes(Shown):
    """The kernels of a program, the most expensive first.

    Attributes:
      name: of the function.
      kernels: one for each name and HLO instruction.
      runs: traced runs of the program.
      source: the profiler.
      hardware: where.
    """

    _listed = "kernels"

    name: str
    kernels: tuple[KernelTime, ...]
    runs: int
    source: str
    hardware: str

    @property
    def sum_s(self) -> float:
        """Sum of the medians, without the gaps between kernels."""
        return sum(k.median_s for k in self.kernels)

    def __str__(self) -> str:
        total = self.sum_s or 1.0
        rows = [
            f"  {seconds(k.median_s):>8}  {k.median_s / total:6.1%}  {k.launches:g}x  {k.label}" for k in self.kernels
        ]
        head = f"{self.name}: {len(self.kernels)} kernels, {seconds(self.sum_s)} in all"
        return "\n".join([head, *rows, f"  median of {self.runs} runs; {self.source}, on {self.hardware}"])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able."""
        return asdict(self)


@own_lines_hidden
def kernel_times(
    fn: Callable,
    *args: Any,
    runs: int = 10,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    **kwargs: Any,
) -> KernelTimes:
    """Times every kernel of `fn` under `jax.jit`.

    Args:
      fn: the function, fused or not.
      *args, **kwargs: arrays.
      runs: traced runs of the program, after one that is not traced.
      static_argnums, static_argnames: as in `jax.jit`.

    Raises:
      ArgumentError: a shape instead of an array, or no runs. SideEffectError: the function prints or calls back into Python.
      TraceError: it does not trace.
    """
    if runs < 1:
        raise ArgumentError(f"runs: got {runs}, needed at least 1")
    call = bind_users(fn, args, kwargs, static_argnums, static_argnames)
    name = getattr(fn, "__name__", type(fn).__name__)
    program = compile_program(call.fn, call.args, call.kwargs, name=name, compiling={**compiling(call), **traceable()})
    return traced(program, runs)


def traceable() -> dict[str, Any]:
    """Compiler options with which the profiler sees a program's kernels."""
    return {"compiler_options": WITHOUT_COMMAND_BUFFERS} if _on_gpu() else {}


def _on_gpu() -> bool:
    return jax.default_backend() in ("gpu", "cuda")


def traced(program: Program, runs: int) -> KernelTimes:
    """Times every kernel of a compiled program (see `traceable`), in `runs` runs after one that is not traced."""
    program.run()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(runs):
                program.run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        found = _kernels(_trace(file), runs, _on_gpu())
    source = "CUPTI durations, command buffers off" if _on_gpu() else "XLA's marks on the host"
    return KernelTimes(program.name, found, runs, source, hardware())


def _trace(file: Path) -> Any:
    from jax.profiler import ProfileData

    return ProfileData.from_file(str(file))


def _kernels(trace: Any, runs: int, on_gpu: bool) -> tuple[KernelTime, ...]:
    taken: dict[tuple[str, str], list[tuple[Any, float]]] = defaultdict(list)
    for line in _lines(trace, on_gpu):
        # Kernels of a stream stand beside one another, and may overlap where one starts before the one ahead has ended.
        for event, own_s in ((e, e.seconds) for e in line) if on_gpu else _own_times(line):
            taken[event.name, event.hlo].append((event.run, own_s))
    kernels = (KernelTime(*key, _by_run(launches, runs), len(launches) / runs) for key, launches in taken.items())
    return tuple(sorted(kernels, key=lambda k: -k.median_s))


def _by_run(launches: Sequence[tuple[Any, float]], runs: int) -> tuple[float, ...]:
    """Seconds of each run: by the trace's number of the run, or where it has none by sharing launches out in order."""
    if all(run is not None for run, _ in launches):
        sums: dict[Any, float] = defaultdict(float)
        for run, own_s in launches:
            sums[run] += own_s
        return tuple(sums.values())
    each = -(-len(launches) // runs)
    return tuple(sum(s for _, s in launches[i : i + each]) for i in range(0, len(launches), each))


@dataclass(frozen=True)
class _Event:
    name: str
    hlo: str
    run: Any
    start_ns: float
    end_ns: float

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) * 1e-9


def _lines(trace: Any, on_gpu: bool) -> Iterator[list[_Event]]:
    """The events of each stream of a GPU, or of each thread that runs HLO instructions, in order."""
    for plane in trace.planes:
        if plane.name.startswith("/device:GPU") != on_gpu:
            continue
        for line in plane.lines:
            if on_gpu and not line.name.startswith("Stream"):
                continue  # the others tell the same again
            events = [_event(e, on_gpu) for e in line.events]
            yield sorted((e for e in events if e is not None), key=lambda e: (e.start_ns, -e.end_ns))


def _event(event: Any, on_gpu: bool) -> _Event | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the binding's own making
        stats = dict(event.stats)
    if not on_gpu and "hlo_op" not in stats:
        return None
    hlo = str(stats.get("hlo_op", ""))
    run = stats.get("run_id", stats.get("group_id"))
    return _Event(event.name, hlo, run, event.start_ns, event.start_ns + event.duration_ns)


def _own_times(events: Iterable[_Event]) -> Iterator[tuple[_Event, float]]:
    """Each event of a line with its seconds less those of the events inside it: a loop's are its body's."""
    open_: list[tuple[_Event, list[float]]] = []
    for event in events:
        while open_ and open_[-1][0].end_ns <= event.start_ns:
            yield _closed(open_.pop())
        if open_:
            open_[-1][1].append(event.end_ns - event.start_ns)
        open_.append((event, []))
    while open_:
        yield _closed(open_.pop())


def _closed(frame: tuple[_Event, list[float]]) -> tuple[_Event, float]:
    event, inside = frame
    return event, max(0.0, event.end_ns - event.start_ns - sum(inside)) * 1e-9
