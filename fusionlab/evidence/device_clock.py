"""Device time of jitted programs: CUDA events on XLA's own stream around several calls queued behind one another.

Before each sample the stream is kept busy while the host queues the sample's calls, so that what is timed is the device alone: the host's
dispatch, some 45 us a call and more where a call is not captured, hides behind the wait. Calls follow each other on the device as the
steps of a training loop do. A GPU under load lowers its clocks to keep within its power limit, so a program's time hangs on what ran
before: programs are timed in turns, and two are only ever compared within one such run.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fusionlab.kernels import clock

CALLS = 8  # in a sample; XLA queues no more than some dozens of programs ahead
MARGIN = 3.0  # the wait is so many times what queueing the calls took when it was measured
LONGEST_WAIT_S = 0.02


@dataclass(frozen=True)
class DeviceTimes:
    """Device seconds a call, one a sample, in the order taken; `calls` is how many a sample averages over."""

    name: str
    samples_s: tuple[float, ...]
    calls: int

    @property
    def median_s(self) -> float:
        return float(np.median(self.samples_s))

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "calls": self.calls, "samples_s": list(self.samples_s), "median_s": self.median_s}


def time_on_device(
    programs: Mapping[str, Callable[[], Any]], samples: int = 20, calls: int = CALLS
) -> dict[str, DeviceTimes]:
    """Times several programs in turns, forwards and backwards (A B C, C B A), so that drift of the clocks falls on all.

    Args:
      programs: name -> a function that dispatches the compiled program on arguments of its own and returns its arrays.
      samples: of each.
      calls: calls in a sample.
    """
    taken: dict[str, list[float]] = {name: [] for name in programs}
    waits = {name: _wait_for(run, calls) for name, run in programs.items()}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection while calls are queued would let the device run dry
    try:
        for i in range(samples):
            for name in list(programs) if i % 2 == 0 else reversed(list(programs)):
                taken[name].append(_sample(programs[name], calls, waits[name]))
    finally:
        if collecting:
            gc.enable()
    return {name: DeviceTimes(name, tuple(times), calls) for name, times in taken.items()}


def _wait_for(run: Callable[[], Any], calls: int) -> int:
    """Nanoseconds that the device is kept busy while the host queues a sample; runs the program, so that it is warm."""
    jax.block_until_ready(run())
    longest = 0.0
    for _ in range(2):
        clock.wait(int(LONGEST_WAIT_S * 1e9))()
        start = time.perf_counter()
        last = [run() for _ in range(calls)][-1]
        longest = time.perf_counter() - start  # of the second: the first may still have loaded something
        jax.block_until_ready(last)
    # Rounded up to a power of two: each length is a program of its own.
    return 1 << math.ceil(math.log2(min(LONGEST_WAIT_S, MARGIN * longest) * 1e9))


def _sample(run: Callable[[], Any], calls: int, wait_ns: int) -> float:
    """Device seconds of one call, over `calls` of them queued behind one another."""
    clock.wait(wait_ns)()
    first = run()  # what is timed follows a call of its own kind
    clock.mark(0)()
    last: Any = first
    for _ in range(calls):
        last = run()
    clock.mark(1)()
    jax.block_until_ready(last)
    return clock.elapsed_s(0, 1) / calls
