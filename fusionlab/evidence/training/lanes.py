"""Runs of train steps side by side: each step of all of them on the same batch, their losses and distances brought to the host behind them.

All runs of a group hold their states on the device at once: the original, and those whose distance to it is measured at each step. What
does not fit follows in further groups, in which the original runs again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from fusionlab.errors import ArgumentError
from fusionlab.graph.interpret.promote import widened
from fusionlab.graph.interpret.resummed import Arithmetic, resummed
from fusionlab.graph.settings import jax_defaults
from fusionlab.kernels.op.op import meaning_of

from .blocks import block_of
from .result import Leaf
from .step import Step

RESUMMED = "resummed"
ORIGINAL, FUSED, WIDE = "original", "fused", "original in float32"
_UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
_BEHIND = 2  # steps that the host may be ahead of the device
_OF_ROOM = 0.8  # of the free memory that further states may take


@dataclass
class Series:
    """What is kept of a run, by step and by block of steps.

    Attributes:
      losses: of each step; loss_differences: less those of the original in the same group.
      squares: of each step, the sum of squares of the distance of all floats to the original's; of the original, of its state itself.
      blocks: of each block (see `blocks`) and array, the sum of these: float64[blocks, arrays].
    """

    losses: list[float] = field(default_factory=list)
    loss_differences: list[float] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)
    blocks: list[np.ndarray] = field(default_factory=list)

    def copy(self) -> Series:
        """The same, to go on with."""
        return Series(
            list(self.losses), list(self.loss_differences), list(self.squares), [block.copy() for block in self.blocks]
        )

    def add(self, loss: float, original: float, squares: np.ndarray) -> None:
        block = block_of(len(self.losses))
        self.losses.append(loss)
        self.loss_differences.append(loss - original)
        self.squares.append(float(np.sum(squares, dtype=np.float64)))
        if block == len(self.blocks):
            self.blocks.append(np.zeros(len(squares)))
        self.blocks[block] = self.blocks[block] + squares


class Batches:
    """The batches by number: of a sequence (again from its first where it ends), of a function of the number, or of an iterator."""

    def __init__(self, data: Any) -> None:
        if isinstance(data, dict | str) or not (
            callable(data) or hasattr(data, "__iter__") or hasattr(data, "__getitem__")
        ):
            raise ArgumentError(
                f"data: got {type(data).__name__}, needed batches: a sequence or an iterator of them, or a function of a step's number"
            )
        self._data: Any = data
        self.keeps = True
        self.count: int | None = len(self._data) if hasattr(data, "__len__") else None
        if self.count == 0:
            raise ArgumentError("data: got no batches, needed at least one")
        is_sequence = self.count is not None and hasattr(data, "__getitem__")
        self._rest: Iterator[Any] | None = None if callable(data) or is_sequence else iter(data)
        self._taken: dict[int, Any] = {}
        self._at = 0

    def __call__(self, step: int) -> Any:
        """The batch of a step, counted from 0; of an iterator that keeps none, the first, and those from the last step asked for on.

        Raises:
          Ended: there are no more.
        """
        if callable(self._data):
            return self._data(step)
        if self._rest is None:
            return self._data[step % len(self._data)]
        while self._at <= step:
            if not self.keeps:
                self._taken = {0: self._taken[0]} if self._taken else {}
            try:
                self._taken[self._at] = next(self._rest)
            except StopIteration:
                raise Ended from None
            self._at += 1
        return self._taken[step]


class Ended(Exception):  # noqa: N818 - an answer, not an error
    """There are no more batches."""


class Lane:
    """One run: a state, and the program that takes it a step further.

    Attributes:
      name: "original", "fused", "original in float32", or the number of a run of the original with other roundings.
      state: its arrays on the device; () before it starts.
      loss: of its last step, on the device.
    """

    def __init__(self, name: str, step: Step, programs: Programs, seed: int | None = None) -> None:
        self.name, self.step, self.programs, self.seed = name, step, programs, seed
        self.state: tuple[Any, ...] = ()
        self.loss: Any = None

    def begin(self, state: Sequence[Any] | None = None) -> None:
        """At the state that was given, copied since each step donates it; or at one that was kept."""
        self.state = tuple(
            map(_fresh, self.step.initial, state if state is not None else self.step.initial, self.step.state)
        )

    def advance(self, batch: Any, number: int) -> None:
        more = () if self.seed is None else (np.uint32((self.seed * 0x85EBCA6B + number * 0xC2B2AE35) & 0xFFFFFFFF),)
        run = self.programs.of(self.step, batch, self._how)
        self.state, self.loss = run(self.state, self.step.rest, self.step.arrays_of(batch), *more)

    @property
    def _how(self) -> str:
        return WIDE if self.name == WIDE else "" if self.seed is None else RESUMMED


def _fresh(given: Any, value: Any, leaf: Leaf) -> Any:
    """A copy on the device, where the given array lies."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return value.copy()
    with jax_defaults():
        copied = jnp.array(value, leaf.dtype)
        # An array that was put nowhere goes where the others are.
        placed = isinstance(given, jax.Array) and given.committed
        return jax.device_put(copied, given.sharding) if placed else copied


class Programs:
    """The jitted steps, each compiled once for each shape of a batch.

    Attributes:
      arithmetic: of the device.
    """

    def __init__(self, arithmetic: Arithmetic) -> None:
        self.arithmetic = arithmetic
        self._made: dict[Any, Callable] = {}

    def of(self, step: Step, batch: Any, how: str) -> Callable:
        key, made = step.program(batch)
        if (step, key, how) not in self._made:
            ways = {
                RESUMMED: lambda closed: resummed(closed, self.arithmetic),
                WIDE: lambda closed: widened(closed, meaning_of),
            }
            fn = made(ways[how]) if how else made()
            compiling = dict(step.compiling) | (_untuned(step.compiling) if how else {})
            self._made[step, key, how] = jax.jit(fn, donate_argnums=(0,), **compiling)
        return self._made[step, key, how]


def _untuned(compiling: Mapping[str, Any]) -> dict[str, Any]:
    """Compiler options of a run that shows what rounding does: any kernel will do, and on a GPU trying them all out takes a minute.

    Untried, XLA's own products are slow and the library's are not.
    """
    if jax.default_backend() not in ("gpu", "cuda"):
        return {}
    return {"compiler_options": _UNTUNED | (compiling.get("compiler_options") or {})}


def floats(leaves: Sequence[Leaf]) -> tuple[int, ...]:
    """Which of some arrays are measured."""
    return tuple(i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, np.inexact))


@jax.jit
def _distances(arrays: tuple, others: tuple) -> Any:
    """The norm of each difference: float32[arrays]. Two infinities of one sign, and two NaN, do not differ."""
    return jnp.stack([_norm(_difference(_wide(a), _wide(b))) for a, b in zip(arrays, others, strict=True)])


@jax.jit
def _norms(arrays: tuple) -> Any:
    """The norm of the finite entries of each: float32[arrays]."""
    return jnp.stack([_norm(jnp.where(jnp.isfinite(x), x, 0)) for x in map(_wide, arrays)])


def _difference(a: Any, b: Any) -> Any:
    return jnp.where((a == b) | (jnp.isnan(a) & jnp.isnan(b)), 0, a - b)


def _norm(x: Any) -> Any:
    """Scaled by the largest entry: the squares of an optimiser's second moments are too small for float32."""
    size = jnp.abs(x)
    most = size.max(initial=0)
    unit = jnp.where((most > 0) & jnp.isfinite(most), most, 1)
    return (unit * jnp.sqrt(jnp.sum(jnp.square(size / unit)))).astype(jnp.float32)


def _wide(x: Any) -> Any:
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


class Group:
    """Runs of one group, the original first.

    Args:
      lanes: the runs.
      batches: by step.
      at: the step that is next.
    """

    def __init__(self, lanes: list[Lane], batches: Batches, at: int = 0) -> None:
        self.lanes, self.batches, self.at = lanes, batches, at
        self.series = [Series() for _ in lanes]
        self._pending: deque[tuple[list[Any], list[Any]]] = deque()

    @property
    def batch(self) -> Any:
        """The batch of the step that is next.

        Raises:
          Ended: there are no more.
        """
        return self.batches(self.at)

    def add(self, lane: Lane) -> None:
        """One run more."""
        self.lanes.append(lane)
        self.series.append(Series())

    def advance(self, batch: Any) -> None:
        """One step of each run, behind which the results of earlier ones are taken down."""
        for lane in self.lanes:
            lane.advance(batch, self.at)
        self.measure()

    def measure(self) -> None:
        """Losses and distances of a step that all runs have made."""
        self._measure()
        self.at += 1

    def _measure(self) -> None:
        with jax_defaults():
            chosen = floats(self.lanes[0].step.state)
            states = [tuple(lane.state[i] for i in chosen) for lane in self.lanes]
            norms = [_norms(states[0]), *(_distances(states[0], other) for other in states[1:])] if chosen else []
        losses = [lane.loss for lane in self.lanes]
        for x in (*losses, *norms):
            x.copy_to_host_async()
        self._pending.append((losses, norms))
        while len(self._pending) > _BEHIND:
            self._take_down()

    def finish(self) -> None:
        """Waits for the steps that are under way."""
        while self._pending:
            self._take_down()

    def _take_down(self) -> None:
        losses, norms = self._pending.popleft()
        found = [float(x) for x in losses]
        for series, loss, own in zip(self.series, found, norms or [np.zeros(0)] * len(found), strict=True):
            series.add(loss, found[0], np.square(np.asarray(own, np.float64)))


def room_for(state: Sequence[Any]) -> int:
    """How many more states of this size the device has room for, by what it has needed so far."""
    from ..instruments.memory import free_bytes

    size = sum(x.nbytes for x in state) or 1
    counts = jax.local_devices()[0].memory_stats() or {}
    free = free_bytes()
    if "peak_bytes_in_use" in counts and "bytes_limit" in counts:
        free = counts["bytes_limit"] - counts["peak_bytes_in_use"]
    return int(min(_OF_ROOM * free / size, 1 << 20))
