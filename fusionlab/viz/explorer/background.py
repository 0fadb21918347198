"""Background work next to the notebook: one job at a time, the latest wins, and callers follow its progress."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


class Cancel(threading.Event):
    """Set to ask a running job to stop; calling it asks whether it was set."""

    def __call__(self) -> bool:
        return self.is_set()


Job = Callable[[Cancel], Any]
_INSIDE = threading.local()  # set in a thread whose turn it is: what a job's observers measure in turn is part of it
_TURN = threading.Lock()  # of the whole process: two explorers of a notebook would measure each other too
_ASIDE = threading.Lock()  # held by who computes something short beside the jobs, and while a job runs


def aside() -> AbstractContextManager[Any]:
    """To be held for a second at most, for a computation that must not run during any measurement of this process."""
    return _ASIDE


class Background:
    """Runs jobs one at a time, across all explorers of this process.

    A new job asks the previous one to stop, and starts once it has. A job that cannot stop (a running compilation) is abandoned: it runs
    to its end, and only the next job waits for it, since two simultaneous measurements would disturb each other.
    """

    def __init__(self) -> None:
        self._state = threading.Lock()
        self._working = False
        self._current: Cancel | None = None

    @property
    def running(self) -> bool:
        """Whether a job was begun and has neither ended nor been cancelled."""
        return self._current is not None

    @property
    def abandoned(self) -> bool:
        """Whether a cancelled job has not come to its end yet."""
        return self._working and self._current is None

    @property
    def awaited(self) -> str:
        """The job that a new one has to wait for, in words; "" if nothing runs."""
        if self._working:
            return "the abandoned job"
        return "another explorer" if _TURN.locked() else ""

    def begin(self) -> Cancel:
        """Cancels the current job and makes the next one current; hand what it gives to `run` or `start`."""
        with self._state:
            if self._current is not None:
                self._current.set()
            self._current = Cancel()
            return self._current

    def follow(self) -> Cancel | None:
        """Makes what a job does after its end current; None where another one is, which comes first."""
        with self._state:
            if self._current is not None:
                return None
            self._current = Cancel()
            return self._current

    def run(self, job: Job, token: Cancel) -> Any:
        """Runs the job here, after the one before has come to its end; None without running it if it was cancelled meanwhile."""
        if getattr(_INSIDE, "turn", False):
            return None if token.is_set() else job(token)
        with _TURN, _ASIDE:
            self._working = _INSIDE.turn = True
            try:
                return None if token.is_set() else job(token)
            finally:
                self._working = _INSIDE.turn = False

    def start(self, job: Job, token: Cancel) -> threading.Thread:
        """Runs the job in a thread of its own; what it raises is the job's to tell."""
        thread = threading.Thread(target=self.run, args=(job, token), name="fusionlab-explorer", daemon=True)
        thread.start()
        return thread

    def cancel(self) -> bool:
        """Asks the current job to stop; whether there was one."""
        with self._state:
            current, self._current = self._current, None
        if current is not None:
            current.set()
        return current is not None

    def end(self, token: Cancel) -> bool:
        """To be called by a job that has ended: whether it was still the current one, so that its result counts."""
        with self._state:
            if self._current is not token or token.is_set():
                return False
            self._current = None
            return True
