"""Whether other processes kept the machine busy during a measurement: what they took of its cores, and how long this one waited.

The Linux scheduler counts both: `/proc/stat` has the time that the cores were at work, `/proc/self/task/*/schedstat` how long each thread
of this process ran, and how long it was ready to run and had no core (Documentation/scheduler/sched-stats.rst in the kernel's source).
Threads of one process wait for each other as well, so waiting alone is no sign of others; and others that leave cores free do not disturb.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from fusionlab.showing import Shown

OTHERS, WAITED = 0.2, 0.02  # cores, and seconds waited for each second run: above both, the machine is busy
TOO_MUCH = 1.0  # seconds waited for each second run: from there on a time measures the others more than the program
_PROC = Path("/proc")
# /proc/stat counts in ticks of mostly 10 ms: nothing shorter is known, and so many may be counted wrongly.
_LEAST_S, _TICKS = 0.05, 2
_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # of /proc/stat: user, nice, system, irq, softirq, steal


@dataclass(frozen=True, repr=False)
class Contention(Shown):
    """What else ran on the machine over an interval of time.

    Attributes:
      others: cores that other processes (and other guests of the same host) had, on average.
      waited: seconds that threads of this process were ready to run and had no core, for each second that they ran.
      cores: of the machine.
    """

    others: float
    waited: float
    cores: int

    @property
    def is_busy(self) -> bool:
        """Whether others took so much that this process had to wait for them."""
        return self.others > OTHERS and self.waited > WAITED

    @property
    def is_too_much(self) -> bool:
        """Whether it is busy and this process waited longer than it ran: no time taken then is enough for a verdict."""
        return self.is_busy and self.waited > TOO_MUCH

    def __str__(self) -> str:
        return (
            f"other processes had {self.others:.1f} of {self.cores} cores; this one waited {self.waited:.2f} s for a core for each second "
            "that it ran"
        )


class Watching:
    """Counts from its making on."""

    def __init__(self, proc: Path = _PROC) -> None:
        self.proc, self.since = proc, time.perf_counter()
        self.start = _counted(proc)

    def seen(self) -> Contention | None:
        """What ran since; None where the system does not count it, or nothing ran long enough to tell."""
        now, past = _counted(self.proc), time.perf_counter() - self.since
        if self.start is None or now is None:
            return None
        machine, own, ran, waited = (n - s for n, s in zip(now, self.start, strict=True))
        if ran <= 0 or past < _LEAST_S:
            return None
        others = max(0.0, machine - own - _TICKS / os.sysconf("SC_CLK_TCK"))
        return Contention(others / past, max(0.0, waited) / ran, os.cpu_count() or 1)


def _counted(proc: Path) -> tuple[float, float, float, float] | None:
    """Seconds: of all cores at work, of this process on the same clock, of its threads running, and of them waiting."""
    try:
        fields = (proc / "stat").read_text().split("\n", 1)[0].split()[1:]
        machine = sum(int(fields[i]) for i in _BUSY_FIELDS) / os.sysconf("SC_CLK_TCK")
        ran = waited = 0
        for thread in (proc / "self" / "task").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it has ended
                of = (thread / "schedstat").read_text().split()
                ran, waited = ran + int(of[0]), waited + int(of[1])
    except (OSError, ValueError, IndexError):
        return None
    return machine, time.process_time(), ran * 1e-9, waited * 1e-9
