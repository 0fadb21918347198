"""Progress of a long piece of work: stages with a clock, for a person to watch or for a function of the caller's.

Work is a row of stages, each named as it begins ("tracing", "compiling before, call 1/4", "timing call"), its steps counted where it
has some. The worker holds `Stages`; the observer is a `Watch`: a line in a terminal or a notebook's cell here, the bar of an
explorer there. Each keeps a `Clock`, which knows since when a stage runs and how long it may yet take.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from .errors import ArgumentError
from .processes import speaks

Progress = bool | Callable[[str, int, int], Any]
Cancel = Callable[[], bool]

WAIT_S = 1.0  # what takes no longer shows nothing
TICK_S = 1.0


class Stopped(Exception):  # noqa: N818 - the way out of work that was cancelled, not an error
    """Work was cancelled before the stage that the message names."""


class Watch:
    """Called like any progress function, with the budget of a stage as well."""

    def __call__(
        self, task: str, done: int = 0, total: int = 0, budget_s: float = math.inf, expected_s: float = math.inf
    ) -> None:
        """
        Args:
          task: what is being done.
          done, total: its steps; 0 of 0 where it has none.
          budget_s: seconds after which it ends, whatever is done.
          expected_s: seconds that all of it may take, as estimated before it began; infinite where that is not known.
        """
        raise NotImplementedError


@dataclass
class Clock:
    """The stage that runs, since when, and how long it may yet take.

    Attributes:
      task, done, total, budget_s, expected_s: as a `Watch` receives them.
      began: when, by `time.perf_counter`.
      seen: task -> seconds that it took when last done, in whatever part: "trial 1: compiling" predicts "trial 2: compiling".
    """

    task: str = ""
    done: int = 0
    total: int = 0
    budget_s: float = math.inf
    expected_s: float = math.inf
    began: float = 0.0
    seen: dict[str, float] = field(default_factory=dict)

    def tell(
        self, task: str, done: int = 0, total: int = 0, budget_s: float = math.inf, expected_s: float = math.inf
    ) -> bool:
        """Takes a step down; whether it begins another stage."""
        new = task != self.task or done < self.done
        if new:
            self.end()
            self.began = time.perf_counter()
        self.task, self.done, self.total, self.budget_s, self.expected_s = task, done, total, budget_s, expected_s
        return new

    def end(self) -> None:
        """The stage is over: what it took is kept for the next of its name."""
        if self.task:
            self.seen[_own(self.task)] = self.seconds
        self.drop()

    def drop(self) -> None:
        """The stage is over before its end."""
        self.task, self.done, self.total, self.budget_s, self.expected_s = "", 0, 0, math.inf, math.inf

    @property
    def seconds(self) -> float:
        """Since the stage began."""
        return time.perf_counter() - self.began

    @property
    def left_s(self) -> float | None:
        """Seconds that it may yet take: by its steps so far and its budget, else as estimated before, else by what it took before; None
        where nothing is known."""
        spent, known = self.seconds, []
        if 0 < self.done < self.total:
            known.append(spent / self.done * (self.total - self.done))
        elif math.isfinite(self.expected_s):
            known.append(self.expected_s - spent)
        elif (before := self.seen.get(_own(self.task))) is not None:
            known.append(before - spent)
        if math.isfinite(self.budget_s):
            known.append(self.budget_s - spent)
        return max(0.0, min(known)) if known else None

    @property
    def step(self) -> str:
        """The stage and its step: "timing call 14/40"."""
        return f"{self.task} {self.done}/{self.total}" if self.total else self.task

    def __str__(self) -> str:
        left = self.left_s
        rest = f", about {clock_text(left)} left" if left is not None and left >= 1 else ""
        return f"{self.step} · {clock_text(self.seconds)}{rest}"


def _own(task: str) -> str:
    """A task without what it is a part of."""
    return task.rpartition(": ")[2]


def clock_text(seconds: float) -> str:
    """ "7 s", "2 min 05 s"."""
    whole = int(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02d} s"


class Reporter:
    """One stage: reported as it begins, and at each of its steps.

    Args:
      progress: False (silence), True (a line, for as long as the stage lasts), or a function called with (task, done, total).
      cancel: asked as it begins.

    Raises:
      Stopped: `cancel` returned True.
    """

    def __init__(
        self,
        progress: Progress,
        task: str,
        total: int = 0,
        budget_s: float = math.inf,
        cancel: Cancel | None = None,
        expected_s: float = math.inf,
    ) -> None:
        if cancel is not None and cancel():
            raise Stopped(task)
        self.task, self.total, self.budget_s, self.expected_s, self.done = task, total, budget_s, expected_s, 0
        self._own = Line() if progress is True and speaks() else None
        self._told = self._own or (progress if callable(progress) else None)
        self._tell()

    def step(self, n: int = 1) -> None:
        self.done += min(n, self.total - self.done)
        self._tell()

    def _tell(self) -> None:
        pass_on(self._told, self.task, self.done, self.total, self.budget_s, self.expected_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._own is not None:
            self._own.close()


def pass_on(
    told: Any, task: str, done: int, total: int, budget_s: float = math.inf, expected_s: float = math.inf
) -> None:
    """Reports to a watch, to a function, or to nobody."""
    if isinstance(told, Watch):
        told(task, done, total, budget_s, expected_s)
    elif told is not None:
        told(task, done, total)


@dataclass(frozen=True)
class Stages:
    """The receiver of a piece of work's stages, and what may stop the work between them.

    Attributes:
      progress: as for `Reporter`.
      cancel: asked before each stage; None where it cannot be stopped.
    """

    progress: Progress = False
    cancel: Cancel | None = None

    def __call__(self, task: str, total: int = 0, budget_s: float = math.inf, expected_s: float = math.inf) -> Reporter:
        """Begins a stage.

        Raises:
          Stopped: it was cancelled.
        """
        return Reporter(self.progress, task, total, budget_s, self.cancel, expected_s)

    def check(self, task: str) -> None:
        """Raises Stopped where it was cancelled."""
        if self.cancel is not None and self.cancel():
            raise Stopped(task)

    def inside(self, words: str) -> Stages:
        """The same for a part of the work, whose name precedes each stage: "trial 3: timing forward"."""
        return replace(self, progress=_Named(self.progress, words)) if callable(self.progress) else self


SILENT = Stages()


class _Named(Watch):
    def __init__(self, progress: Any, words: str) -> None:
        self.progress, self.words = progress, words

    def __call__(
        self, task: str, done: int = 0, total: int = 0, budget_s: float = math.inf, expected_s: float = math.inf
    ) -> None:
        pass_on(self.progress, f"{self.words}: {task}", done, total, budget_s, expected_s)


@contextlib.contextmanager
def watched(progress: Progress | None) -> Iterator[Progress]:
    """Around a whole piece of work: with True one line shows all of its stages, and is gone at the end; with None where somebody looks."""
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise ArgumentError(f"progress: got {progress!r:.80}, needed False, True or a function of (task, done, total)")
    if progress is None:
        progress = somebody_looks()
    if progress is not True or not speaks():
        yield progress if callable(progress) else False
        return
    with Line() as line:
        yield line


@contextlib.contextmanager
def noticed(task: str) -> Iterator[None]:
    """Around one stage, which is shown where somebody looks and it takes longer than a second."""
    with watched(None) as told, Reporter(told, task):
        yield


# A line for a person -------------------------------------------------------------------------------------------------


def somebody_looks() -> bool:
    """Whether what is shown while work goes on is seen: in a notebook's cell, or on a terminal."""
    try:
        return in_notebook() or sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, it is closed, or something else stands for it
        return False


def in_notebook() -> bool:
    """Whether a kernel of a notebook runs this."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return shell is not None and "IPKernelApp" in shell.config


class _Shown(Protocol):
    def draw(self, clock: Clock) -> None: ...
    def close(self) -> None: ...


class _Bar:
    """One line of a terminal, redrawn."""

    def __init__(self) -> None:
        from tqdm.auto import tqdm

        self._bar = tqdm(bar_format="{desc}", leave=False, file=sys.stderr)

    def draw(self, clock: Clock) -> None:
        self._bar.set_description_str(str(clock)[: shutil.get_terminal_size().columns - 1])

    def close(self) -> None:
        self._bar.close()


class _Cell:
    """A line in the output of a notebook's cell. What is left of it is empty: no widget that a saved notebook would look for."""

    def __init__(self) -> None:
        from IPython.display import display

        self._handle: Any = display({"text/plain": ""}, raw=True, display_id=True)

    def draw(self, clock: Clock) -> None:
        self._handle.update({"text/plain": str(clock)}, raw=True)

    def close(self) -> None:
        self._handle.update({"text/plain": ""}, raw=True)


class _Log:
    """A line for each stage as it begins, in a file or a pipe: nothing is written over."""

    def __init__(self) -> None:
        self._last = ""

    def draw(self, clock: Clock) -> None:
        if clock.task and clock.task != self._last:
            print(clock.task, file=sys.stderr, flush=True)
        self._last = clock.task

    def close(self) -> None:
        pass


class Line(Watch):
    """The stage that runs, with its clock, in a line that a thread redraws every second; after the first second, and gone at the end.

    Where standard error is no terminal, each stage from then on is written once, as it begins.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._shown: _Shown | None = None
        self._thread = threading.Thread(target=self._tick, name="fusionlab-progress", daemon=True)
        self._thread.start()

    def __call__(
        self, task: str, done: int = 0, total: int = 0, budget_s: float = math.inf, expected_s: float = math.inf
    ) -> None:
        with self._lock:
            self.clock.tell(task, done, total, budget_s, expected_s)
            self._draw()

    def _tick(self) -> None:
        if self._closed.wait(WAIT_S):
            return
        with self._lock:
            if not self._closed.is_set():
                with self._safely():
                    self._shown = _Log() if not somebody_looks() else _Cell() if in_notebook() else _Bar()
                self._draw()
        while not self._closed.wait(TICK_S):
            with self._lock:
                self._draw()

    def _draw(self) -> None:
        if self._shown is not None and self.clock.task and not self._closed.is_set():
            with self._safely():
                self._shown.draw(self.clock)

    @contextlib.contextmanager
    def _safely(self) -> Iterator[None]:
        """Where nothing can be shown any more (a pipe whose reader has left), the work goes on unseen."""
        try:
            yield
        except (OSError, ValueError, AttributeError):
            self._shown = None

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            if self._shown is not None:
                with self._safely():
                    self._shown.close()
                self._shown = None
        self._thread.join(TICK_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
