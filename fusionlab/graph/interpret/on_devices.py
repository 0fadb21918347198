"""The numpy interpreter on several devices at once: programs inside a shard_map, including their sums over devices.

Each device runs the program on inputs of its own, in a thread; at a sum they wait for each other. Two devices represent any number, and
one axis represents all mesh axes that are summed over: a program that sums over different axes in different places is not supported.

Along other mesh axes there is one device. If types record what varies, JAX sums over those axes only in gradients, wherever the types
require it, so one device is enough to distinguish two programs of the same types.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ..primitives import SUMS_OVER_DEVICES
from .evaluate import Inline, ReducedSizes, evaluate
from .limits import CannotEvaluate
from .numpy_rules import Array

COUNT = 2


class _Team:
    """Devices that sum. The last one to arrive adds, in the devices' order."""

    def __init__(self, axes: frozenset[str]) -> None:
        self.axes = axes
        self.given: list[Any] = [None] * COUNT
        self.totals: Any = None
        self.all_here = threading.Barrier(COUNT, action=self._add)

    def _add(self) -> None:
        kinds = {kind for kind, _ in self.given}
        # Both run one program: they can only be at different sums where it branches on what differs.
        self.totals = (
            [sum(arrays) for arrays in zip(*(a for _, a in self.given), strict=True)] if len(kinds) == 1 else None
        )

    def of(self, device: int) -> Callable[[Any, list[Array]], list[Array]]:
        return functools.partial(self.sum, device)

    def sum(self, device: int, eqn: Any, ins: list[Array]) -> list[Array]:
        over = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        named = frozenset(over if isinstance(over, tuple | list) else (over,))
        # So JAX names a sum in a shard_map whose types tell what varies (check_vma).
        typed = eqn.primitive.name == "psum_invariant"
        here = named & self.axes if typed else named
        if typed and not here:
            return ins
        # With groups each of them sums for itself.
        if eqn.params.get("axis_index_groups") is not None or eqn.primitive.name not in _KNOWN or here != self.axes:
            raise CannotEvaluate(f"primitive {eqn.primitive.name} over {', '.join(map(str, over))}")
        self.given[device] = tuple(str(v.aval) for v in eqn.invars), ins
        self.all_here.wait()
        sums = self.totals
        self.all_here.wait()  # nobody overwrites what another has not read
        if sums is None:
            raise CannotEvaluate("devices that sum at different places")
        return [np.array(a) for a in sums]


_KNOWN = SUMS_OVER_DEVICES - {"reduce_scatter"}


def evaluate_together(
    closed: Any, args: Sequence[Sequence[Array]], axes: frozenset[str], sizes: ReducedSizes, inline: Inline
) -> list[Array]:
    """As `evaluate`, on devices along the mesh axes `axes`, one sequence of `args` for each: every result with an axis of devices before
    its own.

    Raises:
      CannotEvaluate: as there; or a collective that is not a sum over all of `axes`.
    """
    team = _Team(axes)

    def run(device: int) -> list[Array]:
        ended = False
        try:
            outs = evaluate(closed, args[device], sizes, inline, sums=team.of(device))
            ended = True
        finally:
            if not ended:
                team.all_here.abort()  # nobody waits for this one any more
        return outs

    with ThreadPoolExecutor(COUNT) as pool:
        runs = [pool.submit(run, device) for device in range(COUNT)]
    errors = [e for future in runs if (e := future.exception()) is not None]
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return [np.stack(arrays) for arrays in zip(*(future.result() for future in runs), strict=True)]
