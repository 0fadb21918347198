"""The float64 reference of a program: cut into pieces that fit, planned before it runs."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from fusionlab.errors import OutOfMemoryError
from fusionlab.graph.interpret.by_operation import seconds_by_operation
from fusionlab.graph.interpret.pieces import well_cut
from fusionlab.graph.interpret.promote import Cut, Promoted, promote
from fusionlab.graph.jax_compat import enable_x64
from fusionlab.graph.settings import jax_defaults
from fusionlab.kernels.op.op import meaning_of
from fusionlab.progress import clock_text

from ..instruments.memory import free_bytes
from ..units import binary_bytes

# Into what is free: a piece is planned as if it freed nothing, and backwards needs about twice that.
_PIECES_THAT_FIT = 6
_LEFT_TO_PIECES = 0.6  # of what is free: the rest may hold values between them
_SMALLEST_PIECE = 2**26  # bytes: what makes no more in float64 is not cut
_COMPILING_S = 0.02  # for an equation, forward; backwards takes twice that (measured on a CPU and a GPU)
_CLEARLY_LESS = 0.1  # of two estimates
_MOST_THREADS = 8
_TOLD_S = 5.0  # an estimate below is not worth a word
_PROBE = 768  # rows of the matrices whose product is timed


@dataclass(frozen=True)
class Plan:
    """What a reference will take.

    Attributes:
      runs: how many pieces run.
      piece_bytes: what the largest of them makes, were nothing freed; held_bytes: of values that wait between pieces.
      free_bytes: on the device, or on the host where its memory is the device's.
      seconds: to compile and run it; a rough estimate.
      threads: in which its pieces are compiled side by side.
    """

    runs: int
    piece_bytes: int
    held_bytes: int
    free_bytes: float
    seconds: float
    threads: int

    @property
    def stage(self) -> str:
        """The name of the stage: "float64 reference, about 30 s"."""
        about = f", about {clock_text(round(self.seconds, -1))}" if self.seconds > _TOLD_S else ""
        return f"float64 reference{about}"

    def __str__(self) -> str:
        return (
            f"the float64 reference ran in {self.runs} pieces of at most {binary_bytes(self.piece_bytes)}, with "
            f"{binary_bytes(self.held_bytes)} of values between them; {binary_bytes(int(self.free_bytes))} were free"
        )

    def refuse_if_too_large(self) -> None:
        """Raises OutOfMemoryError where not even one piece fits."""
        if self.piece_bytes > self.free_bytes:
            raise OutOfMemoryError(
                f"the float64 reference: its largest piece takes {binary_bytes(self.piece_bytes)}, and "
                f"{binary_bytes(int(self.free_bytes))} are free"
            )


def planned(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    grad: bool,
    traced: tuple[Any, Any] | None = None,
) -> tuple[Promoted, Plan]:
    """A function in float64, ready to run in pieces that fit, and the plan for it.

    Args:
      args, kwargs: arrays.
      grad: whether its gradients are wanted as well.
      traced: as of `promote`.

    Raises:
      TraceError: it has no float64 form. OutOfMemoryError: not even a piece of it fits.
    """
    free = free_bytes()
    promoted = promote(fn, *args, inline=meaning_of, cut=_cut(free), room=_room(free), traced=traced, **kwargs)
    program = promoted.program
    threads = min(_MOST_THREADS, (os.cpu_count() or 1) // 2)
    seconds = _COMPILING_S * (3 if grad else 1) * program.work / max(1, threads)
    # Backwards each piece runs again, and two products for each of its products.
    seconds += (4 if grad else 1) * program.flop / _flop_per_s()
    by_operation = math.inf if grad else seconds_by_operation(program)
    if by_operation < _CLEARLY_LESS * seconds:
        promoted.run_by_operation()
        seconds, threads = by_operation, 1
    runs = promoted.runs_of_gradients if grad else promoted.runs
    plan = Plan(runs, program.bytes, program.held(taped=grad), free, seconds, threads)
    plan.refuse_if_too_large()
    return promoted, plan


def _cut(free: float) -> Cut:
    most = max(_SMALLEST_PIECE, free / _PIECES_THAT_FIT)
    return lambda jaxpr, consts: well_cut(jaxpr, most, _SMALLEST_PIECE, (1 - _LEFT_TO_PIECES) * free, consts)


def _room(free: float) -> Callable[[int], bool]:
    """Which values stay on the device between pieces: all, as long as most of what was free before is left to the pieces.

    None on a CPU, whose memory is the host's.
    """
    if jax.local_devices()[0].platform == "cpu":
        return lambda size: False
    return lambda size: free_bytes() - size > _LEFT_TO_PIECES * free


@functools.cache
def _flop_per_s() -> float:
    """Of a float64 product on the default device."""
    with jax_defaults(), enable_x64(True):
        x = jnp.ones((_PROBE, _PROBE), np.float64)
        product = jax.jit(jnp.matmul).lower(x, x).compile()
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            jax.block_until_ready(product(x, x))
            seconds.append(time.perf_counter() - start)
    return 2.0 * _PROBE**3 / min(seconds)
