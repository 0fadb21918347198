"""Interleaved timing of two functions, and its verdict.

On a CUDA device, device time (device_clock.py): the host's dispatch is the same for both and hides behind other work in a real program.
Elsewhere, and for programs on several devices, wall time of a call, blocked on all its outputs; a sample repeats a short function
until it lasts a millisecond. The two run in turns (A B B A, then B A A B), so that drift of clocks and neighbours falls on both;
compile time is separate.
"""

from __future__ import annotations

import functools
import math
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from fusionlab.errors import ArgumentError
from fusionlab.graph.calls.binding import as_tuple
from fusionlab.graph.program.trace import bind_users
from fusionlab.processes import from_process_0, several
from fusionlab.progress import Progress, Reporter, Stages, watched
from fusionlab.showing import Shown
from fusionlab.showing import seconds_text as seconds
from fusionlab.tracebacks import own_lines_hidden

from . import device_clock
from .clocks import Clocks, read_clocks
from .contention import Contention, Watching
from .out_of_memory import out_of_memory
from .program import Program, compile_program, compiling
from .record import hardware
from .turns import take_turns
from .verdicts import VERDICT_SAMPLES, WIDEST, Verdict, is_far, judge, ratio_interval

WALL = "wall time"
PATIENCE_S = 10.0  # for more samples than were asked for
SAMPLE_S = 1e-3  # what one sample should last, well above the clock's and the dispatch's own noise
MAX_REPEATS = 10_000
PROBING_S = 0.02  # spent on seeing what a dispatch and a call take, in at most five calls


@dataclass(frozen=True, repr=False)
class Runs(Shown):
    """All samples of one function.

    Attributes:
      name: "before" or "after".
      samples_s: seconds per call, one value per sample, in the order taken.
      repeats: calls per sample.
      trace_s, lower_s, compile_s: seconds, once each.
      clock: "wall time" or "device time".
      cold: whether caches were flushed before each call; else a call finds the caches as the previous call left them.
      dispatch_s: seconds until a call returns to the host, before its results are ready; None in older records. On a CPU small
        programs are done by then.
    """

    _told = ("name", "median_s", "min_s", "repeats", "compile_s", "clock")

    name: str
    samples_s: tuple[float, ...]
    repeats: int
    trace_s: float
    lower_s: float
    compile_s: float
    clock: str = WALL
    cold: bool = False
    dispatch_s: float | None = None

    @property
    def median_s(self) -> float:
        """The median of the samples, in seconds."""
        return float(np.median(self.samples_s))

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """The lower and the upper quartile of the samples, in seconds."""
        low, high = np.percentile(self.samples_s, (25, 75))
        return float(low), float(high)

    @property
    def min_s(self) -> float:
        """The shortest sample, in seconds."""
        return min(self.samples_s)

    def __str__(self) -> str:
        return f"{self.name}: median {seconds(self.median_s)} of {len(self.samples_s)} samples, {self.clock}"


@dataclass(frozen=True, repr=False)
class Timing(Shown):
    """Two functions timed in turns.

    Attributes:
      what: which call: "call", "gradient of the call", or "step" (see `names_of`).
      before, after: all samples of each.
      ratio: median of before / median of after; above 1 "after" is faster.
      interval: 95 % bootstrap interval of the ratio.
      verdict: its verdict.
      hardware: where it was measured.
      stopped: "", "time budget" or "cancelled".
      clocks: readings before and after, as far as available.
      contention: what else ran on the machine meanwhile; None of device time, where it was not counted, and in older records.
    """

    what: str
    before: Runs
    after: Runs
    ratio: float
    interval: tuple[float, float]
    verdict: Verdict
    hardware: str
    stopped: str = ""
    clocks: tuple[Clocks, ...] = ()
    contention: Contention | None = None

    def __str__(self) -> str:
        return f"{self.text}, on {self.hardware}"

    @property
    def note(self) -> str:
        """A sentence where the machine was busy; else ""."""
        if self.contention is None or not self.contention.is_busy:
            return ""
        return f"the machine was busy while the {self.what} was timed: {self.contention}; a verdict needs twice the effect then"

    @property
    def clock(self) -> str:
        """The clock: "wall time" or "device time"."""
        return self.before.clock

    @property
    def text(self) -> str:
        """The line without the hardware, for reports that name it once for all."""
        low, high = self.interval
        n = min(len(self.before.samples_s), len(self.after.samples_s))
        cold = ", cold caches" if self.before.cold else ""
        stopped = f", stopped: {self.stopped}" if self.stopped else ""
        return (
            f"{self.what}: {seconds(self.before.median_s)} -> {seconds(self.after.median_s)}, "
            f"{self.ratio:.2f}x [{low:.2f}, {high:.2f}], {self.verdict} (median of {n} samples each, {self.clock}{cold}{stopped})"
        )

    def _row(self) -> dict[str, Any]:
        low, high = self.interval
        times = {"before_s": self.before.median_s, "after_s": self.after.median_s, "ratio": self.ratio}
        told = {"low": low, "high": high, "verdict": str(self.verdict), "clock": self.clock, "hardware": self.hardware}
        return {"what": self.what, **times, **told}


# What records from before it called them.
OLDER_NAMES = {"forward": "call", "forward + backward": "gradient of the call"}


def names_of(differentiated: bool) -> tuple[str, str]:
    """The names of a program and its gradient in measurements: a program that is already differentiated is a training "step"."""
    call = "step" if differentiated else "call"
    return call, f"gradient of the {call}"


def timing_of(
    call: str,
    before: Runs,
    after: Runs,
    stopped: str = "",
    clocks: Sequence[Clocks] = (),
    contention: Contention | None = None,
) -> Timing:
    """Statistics and verdict over samples taken."""
    ratio = before.median_s / after.median_s
    busy = contention is not None and contention.is_busy
    interval = ratio_interval(before.samples_s, after.samples_s, busy=busy)
    pairs = list(zip(before.samples_s, after.samples_s, strict=False))
    agreeing = all(b > a for b, a in pairs) or all(b < a for b, a in pairs)
    verdict = judge(ratio, interval, len(pairs), agreeing, contention)
    return Timing(call, before, after, ratio, interval, verdict, hardware(), stopped, tuple(clocks), contention)


@own_lines_hidden
def time_pair(
    before: Callable,
    after: Callable,
    *args: Any,
    samples: int = 40,
    budget_s: float = 60.0,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    cold: bool = False,
    progress: Progress = False,
    cancel: Callable[[], bool] | None = None,
    **kwargs: Any,
) -> Timing:
    """Times two functions in turns on the same arguments, both under `jax.jit`.

    Args:
      before, after: what to compare; "before" is the baseline.
      *args, **kwargs: arrays, used as given; donated ones are copied for each run, outside the timed region.
      samples: of each; at least 40 for a verdict, and then up to ten times as many, for some seconds, where these
        leave the ratio open by more than 6 % and it may be within 20 % of 1.
      budget_s: seconds for all runs (compiling comes on top), kept to within a call of each function; fewer samples are kept when it
        ends. Each runs four times at least: two runs before the samples, and two samples.
      donate_argnums: arguments each run consumes; those that a `before` under `jax.jit` donates are found automatically.
      static_argnums, static_argnames: as in `jax.jit`.
      cold: flush caches before each call, outside the timed region; else calls follow each other as in a loop.
      progress: False, True (a line) or a function of (task, done, total).
      cancel: called before each round; once it returns True, the samples so far are returned.

    Raises:
      ArgumentError: a shape instead of an array, `samples` < 2 or no time.
      SideEffectError: a function prints or calls back into Python; named with its source line.
      TraceError: a function does not trace.
    """
    check_effort(samples, budget_s)
    calls = [bind_users(fn, args, kwargs, static_argnums, static_argnames) for fn in (before, after)]
    donated = calls[0].dynamic(as_tuple(donate_argnums), "donate_argnums") or calls[0].donated
    options = {"donate_argnums": donated, "compiling": compiling(calls[0])}
    with watched(progress) as told:
        stages, programs = Stages(told), []
        for k, (name, c) in enumerate(zip(("before", "after"), calls, strict=True), 1):
            said = functools.partial(_said, stages, f"{name} {k}/2")
            programs.append(compile_program(c.fn, c.args, c.kwargs, name=name, said=said, **options))
        effort = {"samples": samples, "budget_s": budget_s, "cold": cold, "progress": told, "cancel": cancel}
        return time_programs(names_of(differentiated=False)[0], programs[0], programs[1], **effort)


def _said(stages: Stages, which: str, verb: str, _jaxpr: object) -> None:
    stages(f"{verb} {which}")


def check_effort(samples: int, budget_s: float) -> None:
    """Raises ArgumentError for fewer than two samples, or a budget of no time."""
    if samples < 2:
        raise ArgumentError(f"samples: got {samples}, needed at least 2, and {VERDICT_SAMPLES} for a verdict")
    check_budget(budget_s)


def check_budget(budget_s: float) -> None:
    """Raises ArgumentError for a budget of no time."""
    if isinstance(budget_s, bool) or not isinstance(budget_s, numbers.Real) or not budget_s > 0:
        raise ArgumentError(f"budget_s: got {budget_s!r}, needed a number of seconds above 0")


def time_programs(
    call: str,
    before: Program,
    after: Program,
    *,
    samples: int = 40,
    budget_s: float = 60.0,
    cold: bool = False,
    progress: Progress = False,
    cancel: Callable[[], bool] | None = None,
) -> Timing:
    """`time_pair` for compiled programs; at least two samples of each are taken, whatever the budget.

    Where so many samples leave the ratio open by more than `WIDEST`, up to ten times as many are taken, as far as they are done within
    `PATIENCE_S` and the budget. That depends on the interval's width, and not on where it lies unless it is so far from 1 that it is a
    verdict however wide it is (`is_far`): so it makes no verdict likelier than another.
    """
    began = time.perf_counter()

    def narrow(taken: Mapping[str, Sequence[float]]) -> bool:
        both = taken[before.name], taken[after.name]
        if is_far(ratio_interval(*both, busy=True)):
            return True
        low, high = ratio_interval(*both)
        spent = time.perf_counter() - began
        as_many_s = spent * samples / len(taken[before.name])
        return high <= (1 + WIDEST) * low or spent + as_many_s > min(budget_s, PATIENCE_S)

    enough = narrow if samples >= VERDICT_SAMPLES else None
    platform = next(iter(before.devices)).platform
    clocks, watching = [read_clocks(platform)], Watching()
    with Reporter(progress, f"timing {call}", samples, budget_s) as reporter:
        (first, second), stopped = runs_of((before, after), samples, budget_s, reporter.step, cancel, cold, enough)
    contention = watching.seen() if first.clock == WALL else None
    return timing_of(call, first, second, stopped, (*clocks, read_clocks(platform)), contention)


def runs_of(
    programs: Sequence[Program],
    samples: int,
    budget_s: float = math.inf,
    step: Callable[[int], None] | None = None,
    cancel: Callable[[], bool] | None = None,
    cold: bool = False,
    enough: Callable[[Mapping[str, Sequence[float]]], bool] | None = None,
) -> tuple[list[Runs], str]:
    """Samples of programs (whose names differ) taken in turns by one clock, and why there are fewer than asked for (see `take_turns`).

    The budget includes what runs before the first sample.
    """
    ends = time.perf_counter() + budget_s
    devices = frozenset().union(*(p.devices for p in programs))
    clock = device_clock.NAME if device_clock.can_time(devices) else WALL
    samplers = {p.name: _sampler(p, clock, cold) for p in programs}
    taken, stopped = take_turns(
        {name: sampler.sample for name, sampler in samplers.items()},
        samples,
        budget_s=ends - time.perf_counter(),
        step=step,
        cancel=cancel,
        enough=enough,
        agreed=(lambda own: bool(from_process_0(np.int32(own), "timing"))) if several(devices) else bool,
    )
    return [
        Runs(
            p.name,
            tuple(taken[p.name]),
            samplers[p.name].calls,
            p.trace_s,
            p.lower_s,
            p.compile_s,
            clock,
            cold,
            samplers[p.name].dispatch_s,
        )
        for p in programs
    ], stopped


class _Sampler(NamedTuple):
    """Of a warmed-up program: a function that takes one sample, its number of calls, and what a dispatch takes."""

    sample: Callable[[], float]
    calls: int
    dispatch_s: float


def _sampler(program: Program, clock: str, cold: bool) -> _Sampler:
    """
    Raises:
      OutOfMemoryError: the device has too little memory for a run, or for as many as are queued; so does a sample.
    """
    with out_of_memory(f"{program.name}: timing it"):
        found = _warm_sampler(program, clock, cold)

    def guarded() -> float:
        with out_of_memory(f"{program.name}: timing it"):
            return found.sample()

    return found._replace(sample=guarded)


def _warm_sampler(program: Program, clock: str, cold: bool) -> _Sampler:
    if clock == device_clock.NAME:
        # Each call queued holds a copy of what it consumes; and XLA queues only so many programs.
        most = device_clock.CALLS // 2 if cold else device_clock.CALLS
        calls = 1 if program.donated else device_clock.calls_of(program.ready, most)
        return _Sampler(device_clock.sampler(program.ready, calls, flush=cold), calls, _probed(program)[0])
    program.run()
    dispatch_s, call_s = _probed(program)
    if cold:
        return _Sampler(functools.partial(_cold_sample, program), 1, dispatch_s)
    repeats = min(MAX_REPEATS, max(1, math.ceil(SAMPLE_S / call_s)))
    repeats = int(from_process_0(np.int32(repeats), "timing")) if several(program.devices) else repeats
    return _Sampler(functools.partial(_sample, program, repeats), repeats, dispatch_s)


def _probed(program: Program) -> tuple[float, float]:
    """Seconds of a dispatch and of a whole call of a warm program: the minimum over some calls, which excludes other work of the host;
    one call is enough for a long program."""
    dispatch_s = call_s = math.inf
    spent = 0.8 * PROBING_S if several(program.devices) else 0.0  # as many calls in every process
    while spent < PROBING_S:
        args = program.fresh_args()
        start = time.perf_counter()
        out = program.compiled(*args, **program.kwargs)
        dispatch_s = min(dispatch_s, time.perf_counter() - start)
        jax.block_until_ready(out)
        taken = time.perf_counter() - start
        call_s, spent = min(call_s, taken), spent + max(taken, PROBING_S / 5)
    return dispatch_s, call_s


def _cold_sample(program: Program) -> float:
    """Wall seconds of one call after the caches were flushed."""
    args = program.fresh_args()
    np.add(_flushed(), 1, out=_flushed())
    start = time.perf_counter()
    jax.block_until_ready(program.compiled(*args, **program.kwargs))
    return time.perf_counter() - start


@functools.cache
def _flushed() -> np.ndarray:
    return np.zeros(device_clock.FLUSH_BYTES, np.uint8)


def _sample(program: Program, repeats: int) -> float:
    """Wall seconds per call."""
    compiled, args, kwargs = program.compiled, program.args, program.kwargs
    if program.donated:
        return sum(_donated_call(program) for _ in range(repeats)) / repeats
    start = time.perf_counter()
    for _ in range(repeats):
        jax.block_until_ready(compiled(*args, **kwargs))
    return (time.perf_counter() - start) / repeats


def _donated_call(program: Program) -> float:
    args = program.fresh_args()
    start = time.perf_counter()
    jax.block_until_ready(program.compiled(*args, **program.kwargs))
    return time.perf_counter() - start
