"""Peak memory: the compiler's plan, and the measured growth of a fresh process."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from fusionlab.errors import ArgumentError, BackendError
from fusionlab.showing import Shown, Table, table_of
from fusionlab.tracebacks import own_lines_hidden

from ..units import binary_bytes
from .out_of_memory import out_of_memory
from .peak_buffers import PeakBuffers, peak_buffers
from .program import Program
from .record import hardware


@dataclass(frozen=True, repr=False)
class CompiledMemory(Shown):
    """The compiler's plan for one program, in bytes.

    `name` is the version, "before" or "after"; `argument`, `output`, `temp`, `alias` (arguments that outputs share) and `code` (the
    machine code) are XLA's. `peak` is what the executable allocates: arguments, outputs and temporaries, less what they share. XLA's own
    `peak_memory_in_bytes` is not used: on the CPU of jax 0.10 it is smaller than the temporaries alone. A library called by
    XLA may take scratch memory beyond it, and XLA's CPU backend may hold a product inside a fusion unlisted:
    `resident_growth` measures both. `buffers` has the buffers that live at the peak, with their source lines; None where the backend
    does not show its buffer assignment, and in older records.
    """

    _told = ("name", "argument", "output", "temp", "alias", "code", "peak")

    name: str
    argument: int
    output: int
    temp: int
    alias: int
    code: int
    peak: int
    buffers: PeakBuffers | None = None

    def __str__(self) -> str:
        return f"{self.name}: compiled peak {binary_bytes(self.peak)}, temporaries {binary_bytes(self.temp)}"


@dataclass(frozen=True, repr=False)
class Memory(Shown):
    """Compiled memory of both versions, `before` and `after`; `hardware` is the device they were compiled for.

    `device_peak` has the bytes in use at most, beyond those in use before, around one run of each on a GPU (see `device_peak`);
    None if the device keeps no such count (a CPU), and in older records.
    """

    before: CompiledMemory
    after: CompiledMemory
    hardware: str
    device_peak: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"{self.text}, on {self.hardware}"

    @property
    def text(self) -> str:
        """The line without the hardware, for reports that name it once for all."""
        b, a = self.before, self.after
        ratio = b.peak / a.peak if a.peak else 1.0
        change = f", {ratio:.2f}x less" if ratio > 1.01 else f", {1 / ratio:.2f}x more" if ratio < 0.99 else ""
        return (
            f"compiled peak memory: {binary_bytes(b.peak)} -> {binary_bytes(a.peak)}{change} "
            f"(temporaries {binary_bytes(b.temp)} -> {binary_bytes(a.temp)}){self._peak}"
        )

    @property
    def lines(self) -> tuple[str, ...]:
        """For each version the source lines that most bytes of its temporaries come from, at the peak."""
        return tuple(v.buffers.sentence for v in (self.before, self.after) if v.buffers is not None and v.buffers.lines)

    @property
    def _peak(self) -> str:
        return (
            ""
            if self.device_peak is None
            else f", device peak {binary_bytes(self.device_peak[0])} -> {binary_bytes(self.device_peak[1])}"
        )

    def _table(self) -> Table:
        return table_of((self.before, self.after))


def compiled_memory(
    program: Program, arguments: Sequence[str] = (), results: Sequence[str] = ()
) -> CompiledMemory | None:
    """The compiler's plan for it; None if the backend does not report it. The names are as for `peak_buffers`."""
    stats = program.memory
    if stats is None:
        return None
    parts = {k: int(getattr(stats, f"{k}_size_in_bytes", 0)) for k in ("argument", "output", "temp", "alias")}
    peak = parts["argument"] + parts["output"] + parts["temp"] - parts["alias"]
    code = int(getattr(stats, "generated_code_size_in_bytes", 0))
    return CompiledMemory(
        program.name, **parts, code=code, peak=peak, buffers=peak_buffers(program, arguments, results)
    )


def memory_of(
    before: Program, after: Program, arguments: Sequence[str] = (), results: Sequence[str] = ()
) -> Memory | None:
    """Compiled memory of both, or None if the backend does not report it; on a GPU the device's peak around a run of each as well.

    The names are as for `peak_buffers`.
    """
    first, second = (compiled_memory(program, arguments, results) for program in (before, after))
    if first is None or second is None:
        return None
    # The count of a process only grows: of two runs the one that needs less has to come first to be seen.
    second_first = second.peak < first.peak
    peaks = [device_peak(p) for p in ((after, before) if second_first else (before, after))]
    found = peaks[::-1] if second_first else peaks
    both = None if found[0] is None or found[1] is None else (found[0], found[1])
    return Memory(first, second, hardware(), both)


def device_peak(program: Program) -> int | None:
    """Bytes in use at most during one run beyond those in use before it, arguments among the latter.

    None where the device keeps no count (a CPU), where the program runs on several devices, and where the process has had more in use
    before: the count is of the whole process and never falls, so that a smaller peak cannot be seen.
    """
    devices = tuple(program.devices)
    if len(devices) != 1 or (stats := devices[0].memory_stats()) is None or "peak_bytes_in_use" not in stats:
        return None
    with out_of_memory(f"{program.name}: measuring its peak memory"):
        return _peak_of_a_run(program, devices[0])


def _peak_of_a_run(program: Program, device: Any) -> int | None:
    args = program.fresh_args()
    in_use, highest = (device.memory_stats()[k] for k in ("bytes_in_use", "peak_bytes_in_use"))
    jax.block_until_ready(program.compiled(*args, **program.kwargs))
    peak = device.memory_stats()["peak_bytes_in_use"]
    return int(peak - in_use) if peak > highest else None


@dataclass(frozen=True, repr=False)
class ResidentGrowth(Shown):
    """Resident memory of a fresh process around one run, in bytes.

    Attributes:
      target: what was run.
      before: resident set with the arguments made and the function compiled.
      peak: highest resident set during the run; `growth` is the difference.
      method: how the peak was read: "VmHWM" (reset just before the run) or "ru_maxrss" (of the whole process:
        `before` then includes the peak of compiling, and `growth` is a lower bound).
    """

    target: str
    before: int
    peak: int
    method: str

    @property
    def growth(self) -> int:
        """Bytes by which resident memory grew at its peak, 0 or more."""
        return max(0, self.peak - self.before)

    def __str__(self) -> str:
        return f"{self.target}: resident memory grew by {binary_bytes(self.growth)} at most ({self.method})"


_CHILD = """
import importlib, json, sys
import jax
target, arguments = sys.argv[1], json.loads(sys.argv[2])
module, _, name = target.partition(":")
made = getattr(importlib.import_module(module), name)(*arguments)
fn, args = made
compiled = jax.jit(fn).lower(*args).compile()
jax.block_until_ready(args)

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

try:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before, method = status("VmRSS"), "VmHWM"
except OSError:
    import resource
    unit = 1 if sys.platform == "darwin" else 1024
    before, method = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "ru_maxrss"
jax.block_until_ready(compiled(*args))
peak = status("VmHWM") if method == "VmHWM" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
print("fusionlab-resident", json.dumps([before, peak, method]))
"""


@own_lines_hidden
def resident_growth(target: str, arguments: Sequence[Any] = (), *, timeout_s: float = 600.0) -> ResidentGrowth:
    """Runs a function once in a fresh Python process and reports by how much its resident set grew at most.

    Args:
      target: "module:function"; the function takes `arguments` and returns (fn, args): what to compile and run.
      arguments: JSON-able values.
      timeout_s: seconds after which the process is ended.

    Raises:
      ArgumentError: `target` is not "module:function".
      BackendError: the process failed or took too long; its last line is in the message.
    """
    if ":" not in target:
        raise ArgumentError(f"target: got {target!r}, needed 'module:function'")
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    command = [sys.executable, "-c", _CHILD, target, json.dumps(list(arguments))]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env={**os.environ, "PYTHONPATH": path}
        )
    except subprocess.TimeoutExpired as error:
        raise BackendError(f"{target} did not finish in {timeout_s} s in its own process") from error
    lines = [line for line in done.stdout.splitlines() if line.startswith("fusionlab-resident ")]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise BackendError(f"{target} failed in its own process (exit {done.returncode}): {last}")
    before, peak, method = json.loads(lines[-1].partition(" ")[2])
    return ResidentGrowth(target, before, peak, method)


def free_bytes() -> float:
    """What is free on the default device, or of the host's memory where that counts nothing; infinite where nobody says."""
    counts = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in counts:
        return float(counts["bytes_limit"] - counts.get("bytes_in_use", 0))
    try:
        counts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return float(counts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux
        return math.inf
