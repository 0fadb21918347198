"""What ran when in each run of a program, from the trace of JAX's profiler, and how the time of the whole run is divided.

Each run is marked on the host by an annotation, from the call until its results are ready. An event belongs to the run in which its
middle lies. Where several kernels run at once, each instant is divided evenly among them, so that shares and gaps add up to the run.
"""

from __future__ import annotations

import itertools
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fusionlab.showing import Shown, counted

from .timing import seconds

RUN = "fusionlab: a run"
_Span = tuple[float, float]  # nanoseconds


@dataclass(frozen=True, repr=False)
class Launch(Shown):
    """One launch of a kernel in one run.

    Attributes:
      name: of the kernel on a GPU, of the HLO instruction on a CPU.
      hlo: the HLO instruction it belongs to ("fusion.3"); "" if the trace does not name it.
      stream: the stream of the GPU, or the thread, that ran it.
      start_s, end_s: since the run's call, in seconds.
      own_s: its seconds less those of the launches inside it: a loop's are its body's.
      share_s: its part of the run's seconds: `own_s`, divided where other kernels ran at the same time.
    """

    _told = ("name", "hlo", "stream", "start_s", "end_s", "share_s")

    name: str
    hlo: str
    stream: str
    start_s: float
    end_s: float
    own_s: float
    share_s: float

    def __str__(self) -> str:
        return f"{self.name}: {seconds(self.end_s - self.start_s)}, from {seconds(self.start_s)} on"


@dataclass(frozen=True, repr=False)
class Timeline(Shown):
    """One run: its launches in order of their start, and its seconds from the call to its results, `whole_s`."""

    _listed = "launches"

    launches: tuple[Launch, ...]
    whole_s: float

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one kernel ran."""
        return sum(launch.share_s for launch in self.launches)

    @property
    def around_s(self) -> float:
        """Seconds before the first kernel and after the last: dispatch, and waiting for the results."""
        if not self.launches:
            return self.whole_s
        first, last = min(x.start_s for x in self.launches), max(x.end_s for x in self.launches)
        return self.whole_s - (last - first)

    @property
    def between_s(self) -> float:
        """Seconds between the first kernel and the last in which none ran."""
        return max(0.0, self.whole_s - self.around_s - self.busy_s)

    def __str__(self) -> str:
        return f"{counted(len(self.launches), 'launch')}, busy for {seconds(self.busy_s)} of {seconds(self.whole_s)}"


@dataclass(frozen=True)
class _Event:
    name: str
    hlo: str
    stream: str
    start: float
    end: float
    own: tuple[_Span, ...]  # without what is nested in it


def timelines_of(trace: Any, on_gpu: bool) -> tuple[Timeline, ...]:
    """The runs of a trace (`jax.profiler.ProfileData`), in order; runs are those that an annotation `RUN` marks."""
    windows = sorted((e.start_ns, e.start_ns + e.duration_ns) for e in _marks(trace))
    starts = [start for start, _ in windows]
    found: list[list[_Event]] = [[] for _ in windows]
    for event in itertools.chain.from_iterable(_lines(trace, on_gpu)):
        run = bisect_right(starts, (event.start + event.end) / 2) - 1
        if run >= 0:
            found[run].append(event)
    return tuple(_timeline(events, window) for events, window in zip(found, windows, strict=True))


def middle(runs: Sequence[Timeline]) -> list[Timeline]:
    """The runs that lie in the middle by their seconds: without the quickest quarter and the slowest."""
    ordered = sorted(runs, key=lambda run: run.whole_s)
    left = (len(ordered) + 2) // 4
    return ordered[left : len(ordered) - left] or ordered


def _timeline(events: Iterable[_Event], window: _Span) -> Timeline:
    low, high = window
    ordered = sorted(events, key=lambda e: (e.start, -e.end))
    owns = [[(_clip(a, low, high), _clip(b, low, high)) for a, b in e.own] for e in ordered]
    shares = _shares(owns)
    launches = (
        Launch(
            e.name,
            e.hlo,
            e.stream,
            (_clip(e.start, low, high) - low) * 1e-9,
            (_clip(e.end, low, high) - low) * 1e-9,
            sum(b - a for a, b in own) * 1e-9,
            share * 1e-9,
        )
        for e, own, share in zip(ordered, owns, shares, strict=True)
    )
    return Timeline(tuple(launches), (high - low) * 1e-9)


def _clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def _shares(owns: Sequence[Sequence[_Span]]) -> list[float]:
    """For each launch, the sum over its spans of each instant divided by the number of spans in which it lies."""
    steps = sorted([(a, 1) for own in owns for a, _ in own] + [(b, -1) for own in owns for _, b in own])
    running, before, passed = 0, 0.0, 0.0
    at: dict[float, float] = {}  # time -> the integral of 1 / (how many run)
    for time, step in steps:
        passed += (time - before) / running if running else 0.0
        at[time], before, running = passed, time, running + step
    return [sum(at[b] - at[a] for a, b in own) for own in owns]


def _marks(trace: Any) -> Iterator[Any]:
    for plane in trace.planes:
        if plane.name.startswith("/host"):
            yield from (e for line in plane.lines for e in line.events if e.name == RUN)


def _lines(trace: Any, on_gpu: bool) -> Iterator[Iterable[_Event]]:
    """The events of each stream of a GPU, or of each thread that runs HLO instructions."""
    devices = sum(plane.name.startswith("/device:GPU") for plane in trace.planes)
    for plane in trace.planes:
        if plane.name.startswith("/device:GPU") != on_gpu:
            continue
        for line in plane.lines:
            if on_gpu and not line.name.startswith("Stream"):
                continue  # the others tell the same again
            stream = f"GPU {plane.name.rpartition(':')[2]} {line.name}" if devices > 1 else line.name
            events = sorted(_events(line, stream, on_gpu), key=lambda e: (e.start, -e.end))
            # Kernels of a stream are not nested, but may overlap where one starts before the one ahead has ended.
            yield events if on_gpu else _nested(events)


def _events(line: Any, stream: str, on_gpu: bool) -> Iterator[_Event]:
    for event in line.events:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the binding's own making
            stats = dict(event.stats)
        if on_gpu or "hlo_op" in stats:
            start, end = event.start_ns, event.start_ns + event.duration_ns
            yield _Event(event.name, str(stats.get("hlo_op", "")), stream, start, end, ((start, end),))


def _nested(events: Iterable[_Event]) -> Iterator[_Event]:
    """Each event of a thread with the spans in which no event nested in it ran."""
    open_: list[tuple[_Event, list[_Span]]] = []
    for event in events:
        while open_ and open_[-1][0].end <= event.start:
            yield _closed(*open_.pop())
        if open_:
            open_[-1][1].append((event.start, event.end))
        open_.append((event, []))
    while open_:
        yield _closed(*open_.pop())


def _closed(event: _Event, inside: Sequence[_Span]) -> _Event:
    edges = [event.start, *(x for span in inside for x in span), event.end]
    own = tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a)
    return _Event(event.name, event.hlo, event.stream, event.start, event.end, own)
