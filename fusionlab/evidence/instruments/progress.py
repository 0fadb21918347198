"""Telling the caller how far a long measurement is: silence, a bar, or a function of the caller's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusionlab.processes import speaks

Progress = bool | Callable[[str, int, int], Any]


class Reporter:
    """Counts steps of one named piece of work.

    `progress` is False (silence), True (a `tqdm.auto` bar; of several processes one shows it), or a function called with (task, done,
    total).
    """

    def __init__(self, progress: Progress, task: str, total: int) -> None:
        self.progress, self.task, self.total, self.done = progress, task, total, 0
        self._bar = None
        if progress is True and speaks():
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, desc=task, leave=False)

    def step(self, n: int = 1) -> None:
        n = min(n, self.total - self.done)
        self.done += n
        if self._bar is not None:
            self._bar.update(n)
        elif callable(self.progress):
            self.progress(self.task, self.done, self.total)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()
