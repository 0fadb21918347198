"""Several simulated devices. How many there are is fixed when JAX starts, so that what needs them runs in another process.

`environment` is that of any such process. `on_devices` runs a trial in the one that stays for all trials of a session: importing JAX and
building models takes longer than most trials. What a module of trials is, resident.py says, the other end.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
DEVICES = 8  # of the process that stays; a trial of fewer takes the first
TAIL = 3000  # bytes: the end of what a process printed, where it is told


def environment(devices: int) -> dict[str, str]:
    """The variables of a process of so many CPU devices, which finds the package and the tests' own modules."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip()
    paths = [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}


class Resident:
    """A process that runs one trial after another. It starts with the first, and again after one that it did not survive.

    Attributes:
      limit_s: how long a trial may take; then the process is killed.
    """

    def __init__(self, limit_s: float = 600.0) -> None:
        self.limit_s = limit_s
        self._process: Any = None
        self._printed: Any = None  # the file that has all that trials print

    def problem(self, module: str, trial: str) -> str | None:
        """What is wrong with a trial, None where nothing is. That the process died or was too slow is a problem of the trial it ran."""
        self._start()
        begun = self._size()
        answer, late = self._answer(json.dumps({"module": module, "trial": trial}))
        if answer:
            problem = json.loads(answer)[1]
        else:
            ended = f"had no answer after {self.limit_s:g} s" if late else f"ended its process ({self._process.poll()})"
            problem = f"{module}: {trial!r} {ended}"
        said = self._since(begun) if problem else ""
        if not answer:
            self.close()
        return f"{problem}\nIt printed:\n{said}" if said else problem

    def close(self) -> None:
        """Ends the process, which ends by itself where nothing is asked any more."""
        if self._process is None:
            return
        with contextlib.suppress(OSError):  # a request that a dead process did not read
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._printed.close()
        self._process = None

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.resident"],
                cwd=TESTS.parent,
                env=environment(DEVICES),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._printed,
                text=True,
            )

    def _answer(self, request: str) -> tuple[str, bool]:
        """A line, or "" of a process that is no more; and whether it was killed since it took too long."""
        process, late, answer = self._process, threading.Event(), ""

        def kill() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(self.limit_s, kill)
        timer.start()
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            answer = line if line.endswith("\n") else ""
        except BrokenPipeError:  # it was dead before it was asked
            pass
        finally:
            timer.cancel()
            if late.is_set() or not answer:  # or interrupted: the answer would come to the next request
                process.kill()
                process.wait()
        return answer, late.is_set()

    def _size(self) -> int:
        return os.fstat(self._printed.fileno()).st_size

    def _since(self, begun: int) -> str:
        """The end of what was printed since the file was that long, read without moving the place where the process writes."""
        start = max(begun, self._size() - TAIL)
        return os.pread(self._printed.fileno(), TAIL, start).decode(errors="replace").strip()


@pytest.fixture(scope="session")
def on_devices() -> Iterator[Callable[[str, str], None]]:
    """`on_devices(module, trial)`: runs a trial of a module on simulated devices; what is wrong with it fails the test."""
    resident = Resident()

    def check(module: str, trial: str) -> None:
        problem = resident.problem(module, trial)
        if problem is not None:
            pytest.fail(problem, pytrace=False)

    yield check
    resident.close()
