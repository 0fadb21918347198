"""Samples of several programs taken in turns, whatever the clock."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence

MOST = 10


def take_turns(
    samplers: Mapping[str, Callable[[], float]],
    samples: int,
    *,
    budget_s: float = math.inf,
    step: Callable[[int], None] | None = None,
    cancel: Callable[[], bool] | None = None,
    enough: Callable[[Mapping[str, Sequence[float]]], bool] | None = None,
    agreed: Callable[[bool], bool] = bool,
) -> tuple[dict[str, list[float]], str]:
    """Takes samples forwards and backwards (A B, B A, B A, A B), so that drift of clocks and neighbours falls on all.

    Args:
      samplers: name -> what takes one sample, in seconds.
      samples: of each.
      budget_s: seconds; what was taken by then is returned. Two more rounds begin while there is time for one of them, so it ends within
        one sample of each of the budget. At least two samples of each are taken (if so many are asked for).
      step: called after each two rounds with the number of samples that each gained.
      cancel: called after each two rounds; once it returns True, the samples so far are returned.
      enough: called with the samples once there are `samples` of each; while it returns False, as many are taken again, up to `MOST` times
        `samples`.
      agreed: maps this process's decision to the common one: the same in all processes that run the programs.

    Returns:
      The samples in the order taken, by name, and why fewer came than were asked for: "", "time budget" or "cancelled".
    """
    taken: dict[str, list[float]] = {name: [] for name in samplers}
    since = time.perf_counter()
    deadline = since + budget_s
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection is no program's doing; while calls are queued it would let the device run dry
    try:
        for i in range(MOST * samples if enough is not None else samples):
            if i and i % samples == 0 and enough is not None and agreed(enough(taken)):
                break
            for name in list(samplers) if i % 4 in (0, 3) else reversed(list(samplers)):
                taken[name].append(samplers[name]())
            if i % 2 == 0 and (i + 1) % samples:
                continue
            if step is not None:
                step(i % 2 + 1)
            if cancel is not None and agreed(cancel()):
                return taken, "cancelled"
            now = time.perf_counter()
            since, rounds_s = now, now - since  # the next two rounds take as long
            if agreed(now + rounds_s / 2 > deadline):
                return taken, "time budget" if i + 1 < samples else ""
    finally:
        if collecting:
            gc.enable()
    return taken, ""
