"""Readings of the hardware's clocks during a measurement, where possible, and whether it was throttled."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fusionlab.showing import Shown

# What `nvidia-smi --help-query-gpu` calls them. The newer name of the last one is not known to drivers before 535.
_QUERY = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "clocks_throttle_reasons.active")
# NVML's bits of why clocks are lowered (nvml.h, nvmlClocksEventReasons); 0x1 (idle) and 0x2 (as the user set them) are no throttling.
_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
_CPU_CLOCK = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq")


@dataclass(frozen=True, repr=False)
class Clocks(Shown):
    """One reading; None for values that could not be read.

    Attributes:
      processor_mhz, memory_mhz: clocks of the GPU's multiprocessors and memory, or of the CPU's first core.
      temperature_c, power_w: of the GPU.
      throttled: why the GPU's clocks are lowered, in words; () if they are not.
      load: processes that run or want to, over the last minute (the system's load average).
    """

    processor_mhz: float | None = None
    memory_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    throttled: tuple[str, ...] = ()
    load: float | None = None

    def __str__(self) -> str:
        readings = (
            (self.processor_mhz, "{:.0f} MHz"),
            (self.memory_mhz, "memory {:.0f} MHz"),
            (self.temperature_c, "{:.0f} C"),
            (self.power_w, "{:.0f} W"),
            (self.load, "load {:.1f}"),
        )
        parts = [form.format(value) for value, form in readings if value is not None]
        return ", ".join([*parts, *(f"throttled: {why}" for why in self.throttled)]) or "not readable"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_clocks(platform: str, device: int = 0) -> Clocks:
    """The clocks now: of a CUDA device by `nvidia-smi` (some 50 ms), else of the CPU; values that cannot be read are None."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    if platform in ("gpu", "cuda"):
        return _gpu(device, load)
    try:
        mhz = int(_CPU_CLOCK.read_text()) / 1e3
    except (OSError, ValueError):
        mhz = None
    return Clocks(processor_mhz=mhz, load=load)


def _gpu(device: int, load: float | None) -> Clocks:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Clocks(load=load)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[device : device + 1]
    which = visible[0].strip() if visible and visible[0].strip() else str(device)
    command = [tool, f"--id={which}", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return Clocks(load=load)
    return parse_smi(done.stdout, load)


def parse_smi(line: str, load: float | None = None) -> Clocks:
    """A reading from a line of `nvidia-smi`; "[N/A]" and the like are None."""
    values = [v.strip() for v in line.strip().split(",")]
    *numbers, reasons = [*values, *[""] * len(_QUERY)][: len(_QUERY)]
    try:
        bits = int(reasons, 0)
    except ValueError:
        bits = 0
    processor, memory, temperature, power = map(_number, numbers)
    throttled = tuple(why for bit, why in _REASONS.items() if bits & bit)
    return Clocks(processor, memory, temperature, power, throttled, load)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
