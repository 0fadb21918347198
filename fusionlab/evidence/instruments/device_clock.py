"""Device time of jitted programs: CUDA events on XLA's own stream around several calls queued behind one another.

Before each sample the stream is kept busy while the host queues the sample's calls, so that only the device is timed: the host's
dispatch, some 45 µs per call and more if the call is not captured, hides behind the wait. Calls follow each other on the device as
the steps of a training loop do. A GPU under load lowers its clocks to keep within its power limit, so a program's time depends on
what ran before: programs are timed in turns, and two are only ever compared within one such run.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fusionlab.device import Device
from fusionlab.kernels.ops import clock
from fusionlab.showing import Shown

from .turns import take_turns

NAME = "device time"
CALLS = 8  # in a sample; XLA queues no more than some dozens of programs ahead
SAMPLE_S = 0.03  # what a sample should last: calls that are longer hide the next one's dispatch by themselves
MARGIN = 3.0  # the wait is so many times what queueing the calls took when it was measured
PROBE_WAIT_S = 0.02  # while queueing is measured
LONGEST_WAIT_S = 0.5
# Written to flush caches: several times a GPU's L2, and more than the last level of a server's socket.
FLUSH_BYTES = 256 << 20


@dataclass(frozen=True, repr=False)
class DeviceTimes(Shown):
    """Device seconds per call, one value per sample, in the order taken; a sample averages over `calls` calls."""

    _told = ("name", "median_s", "calls")

    name: str
    samples_s: tuple[float, ...]
    calls: int

    @property
    def median_s(self) -> float:
        return float(np.median(self.samples_s))

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "calls": self.calls, "samples_s": list(self.samples_s), "median_s": self.median_s}

    def __str__(self) -> str:
        return f"{self.name}: median {self.median_s:.4g} s of {len(self.samples_s)} samples of {self.calls} calls, device time"


def time_on_device(
    programs: Mapping[str, Callable[[], Any]], samples: int = 20, calls: int = CALLS
) -> dict[str, DeviceTimes]:
    """Times several programs in turns, forwards and backwards (A B C, C B A), so that drift of the clocks falls on all.

    Args:
      programs: name -> a function that dispatches the compiled program on arguments of its own and returns its arrays.
      samples: of each.
      calls: calls in a sample.
    """
    samplers = {name: sampler(functools.partial(_repeated, run), calls) for name, run in programs.items()}
    taken, _ = take_turns(samplers, samples)
    return {name: DeviceTimes(name, tuple(times), calls) for name, times in taken.items()}


def can_time(devices: Collection[Any]) -> bool:
    """Whether device time can be measured for programs on these JAX devices: only on the first CUDA device, with CuPy, whose events
    are the clock."""
    here = Device.current()
    return here.platform == "cuda" and "cupy" not in here.missing and set(devices) <= {clock.device()}


def calls_of(ready: Callable[[int], Sequence[Callable[[], Any]]], most: int = CALLS) -> int:
    """How many calls of a program make a sample: fewer than `most` where they take long. It runs the program, so that it is warm."""
    seconds = math.inf
    for run in ready(2):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds = time.perf_counter() - start
    return min(most, max(1, math.ceil(SAMPLE_S / seconds)))


def sampler(
    ready: Callable[[int], Sequence[Callable[[], Any]]], calls: int = CALLS, flush: bool = False
) -> Callable[[], float]:
    """A function that takes one sample of a warmed-up program: device seconds per call, averaged over `calls` calls.

    Args:
      ready: n -> n runs made ready, each a function that dispatches the program and returns its arrays.
      flush: write more than the L2 cache holds before each call, outside the timed region.
    """
    wait_ns = _wait_for(ready, calls)
    if flush:  # four programs are queued for each call
        return functools.partial(_cold_sample, ready, calls, min(4 * wait_ns, int(LONGEST_WAIT_S * 1e9)))
    return functools.partial(_sample, ready, calls, wait_ns)


def _repeated(run: Callable[[], Any], n: int) -> Sequence[Callable[[], Any]]:
    return [run] * n


def _wait_for(ready: Callable[[int], Sequence[Callable[[], Any]]], calls: int) -> int:
    """Nanoseconds that the device is kept busy while the host queues a sample; runs the program, so that it is warm."""
    jax.block_until_ready(ready(1)[0]())
    longest = 0.0
    for _ in range(2):
        runs, last = ready(calls), None
        clock.wait(int(PROBE_WAIT_S * 1e9))()
        start = time.perf_counter()
        for run in runs:
            last = run()
        longest = time.perf_counter() - start  # of the second: the first may still have loaded something
        jax.block_until_ready(last)
    # Rounded up to a power of two: each length is a program of its own.
    return 1 << math.ceil(math.log2(min(LONGEST_WAIT_S, MARGIN * longest) * 1e9))


def _sample(ready: Callable[[int], Sequence[Callable[[], Any]]], calls: int, wait_ns: int) -> float:
    """Device seconds of one call, over `calls` of them queued behind one another."""
    first, *runs = ready(calls + 1)
    clock.wait(wait_ns)()
    last = first()  # what is timed follows a call of its own kind
    marks = [clock.mark(0)()]
    for run in runs:
        last = run()
    marks.append(clock.mark(1)())
    jax.block_until_ready((last, marks))
    return clock.elapsed_s(0, 1) / calls


def _cold_sample(ready: Callable[[int], Sequence[Callable[[], Any]]], calls: int, wait_ns: int) -> float:
    """As `_sample`, each call between marks of its own and behind a flush."""
    flush, runs = _flush(), ready(calls)
    clock.wait(wait_ns)()
    queued: list[Any] = []
    for i, run in enumerate(runs):
        queued += [flush(), clock.mark(2 * i)(), run(), clock.mark(2 * i + 1)()]
    jax.block_until_ready(queued)
    return sum(clock.elapsed_s(2 * i, 2 * i + 1) for i in range(calls)) / calls


@functools.cache
def _flush() -> Callable[[], Any]:
    """A compiled program that writes an array larger than the L2 cache."""
    source = jax.device_put(np.zeros(FLUSH_BYTES // 4, np.float32), clock.device())
    compiled = jax.jit(lambda x: x + 1).lower(source).compile()
    return functools.partial(compiled, source)
