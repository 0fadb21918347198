"""What a GPU and the CUDA driver did while programs ran, from the trace of JAX's profiler. Not a test module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

# What makes the host wait, or may: of the driver, and of the runtime above it.
WAITS = ("StreamSynchronize", "CtxSynchronize", "DeviceSynchronize", "EventSynchronize")


@dataclass(frozen=True)
class Activity:
    """Names with how often each came.

    Attributes:
      kernels: that ran on the device.
      copies: memory copied or set on the device, by kind: "MemcpyD2D".
      waits: calls of the driver that wait for the device, from all threads of the host.
    """

    kernels: Counter[str]
    copies: Counter[str]
    waits: Counter[str]


def activity(run: Callable[[], Any], folder: Path, times: int) -> Activity:
    """Of some runs of a program that is warm, queued behind one another and waited for once."""
    jax.block_until_ready(run())
    with jax.profiler.trace(str(folder)):
        last = [run() for _ in range(times)]
        jax.block_until_ready(last)
    (file,) = folder.rglob("*.xplane.pb")
    return read(ProfileData.from_file(str(file)))


def read(trace: Any) -> Activity:
    """Devices have a line for each stream, and others that tell the same again by the program's own names."""
    kernels, copies, waits = Counter(), Counter(), Counter()
    for plane in trace.planes:
        on_device = plane.name.startswith("/device:GPU")
        for line in plane.lines:
            if on_device and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                if on_device:
                    (copies if event.name.startswith("Mem") else kernels)[event.name] += 1
                elif event.name.startswith("cu") and any(w in event.name for w in WAITS):
                    waits[event.name] += 1
    return Activity(kernels, copies, waits)
