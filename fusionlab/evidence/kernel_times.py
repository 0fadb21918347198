"""Times of the kernels of a compiled program, from the trace of JAX's profiler: CUPTI's durations on a GPU, XLA's marks on a CPU.

On a GPU the program is compiled once more without command buffers (CUDA graphs), inside of which the profiler sees no kernels: each
kernel takes as long as it does inside one, but the gaps between kernels, which are not reported, are longer. On a CPU a kernel is
an instruction of the optimised HLO, and tracing takes time of its own, so that small ones look longer than they are.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fusionlab.errors import ArgumentError
from fusionlab.graph.program.trace import bind_users
from fusionlab.showing import Shown, counted
from fusionlab.tracebacks import own_lines_hidden

from .instruments.program import Program, compile_program, compiling
from .instruments.record import hardware
from .instruments.timeline import RUN, Timeline, timelines_of
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
        return f"{self.label}: {seconds(self.median_s)} per run, {counted(float(self.launches), 'launch')}"


@dataclass(frozen=True, repr=False)
class KernelTimes(Shown):
    """The kernels of a program, the most expensive first.

    Attributes:
      name: of the function.
      kernels: one for each name and HLO instruction.
      runs: traced runs of the program.
      source: the profiler.
      hardware: where.
      timelines: every run.
    """

    _listed = "kernels"

    name: str
    kernels: tuple[KernelTime, ...]
    runs: int
    source: str
    hardware: str
    timelines: tuple[Timeline, ...] = field(default=(), repr=False)

    @property
    def sum_s(self) -> float:
        """Sum of the medians, without the gaps between kernels."""
        return sum(k.median_s for k in self.kernels)

    def __str__(self) -> str:
        total = self.sum_s or 1.0
        rows = [
            f"  {seconds(k.median_s):>8}  {k.median_s / total:6.1%}  {k.launches:g}x  {k.label}" for k in self.kernels
        ]
        head = f"{self.name}: {counted(len(self.kernels), 'kernel')}, {seconds(self.sum_s)} in all"
        return "\n".join([head, *rows, f"  median of {counted(self.runs, 'run')}; {self.source}, on {self.hardware}"])


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
        with jax.profiler.trace(folder, profiler_options=_no_python()):
            for _ in range(runs):
                with jax.profiler.TraceAnnotation(RUN):
                    program.run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        found = timelines_of(_trace(file), _on_gpu())
    source = "CUPTI durations, command buffers off" if _on_gpu() else "XLA's marks on the host"
    return KernelTimes(program.name, kernels_in(found), runs, source, hardware(), found)


def _no_python() -> Any:
    """The calls of Python are not traced: they would lengthen what is between the kernels."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    return options


def _trace(file: Path) -> Any:
    from jax.profiler import ProfileData

    return ProfileData.from_file(str(file))


def kernels_in(timelines: Sequence[Timeline]) -> tuple[KernelTime, ...]:
    """The kernels of these runs, the most expensive first."""
    runs: dict[tuple[str, str], dict[int, float]] = {}
    launches: Counter[tuple[str, str]] = Counter()
    for number, run in enumerate(timelines):
        for launch in run.launches:
            key = launch.name, launch.hlo
            taken = runs.setdefault(key, {})
            taken[number] = taken.get(number, 0.0) + launch.own_s
            launches[key] += 1
    kernels = (KernelTime(*key, tuple(s.values()), launches[key] / len(timelines)) for key, s in runs.items())
    return tuple(sorted(kernels, key=lambda k: -k.median_s))
