"""Trains a function and its fused version from one state, and the original several times more with other roundings of its sums."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax import numpy as jnp

from fusionlab.errors import ArgumentError, OutOfMemoryError, TraceError
from fusionlab.progress import Cancel, Progress, Reporter, Stages, Stopped, watched
from fusionlab.tracebacks import own_lines_hidden

from ..instruments.out_of_memory import out_of_memory
from ..instruments.record import environment
from ..instruments.timing import check_budget
from .arithmetic import arithmetic_for, is_narrow
from .curve import Curve
from .judging import judged, measured
from .kept import Kept, on_host
from .lanes import FUSED, ORIGINAL, WIDE, Batches, Ended, Group, Lane, Programs, Series, floats, room_for
from .result import Loss
from .step import Call, Picks, Step

RUNS = 6
_COMPILING = {
    ORIGINAL: "compiling the original",
    FUSED: "compiling the fused version",
    WIDE: "compiling the original in float32",
}
_ENDED, _BUDGET, _CANCELLED = "no more batches", "budget", "cancelled"


@own_lines_hidden
def train(
    fn: Callable,
    fused: Callable,
    *state: Any,
    data: Any,
    steps: int | None = None,
    loss: Loss = None,
    next_state: Picks = None,
    data_argnum: int | None = None,
    runs: int = RUNS,
    resume: Any = None,
    budget_s: float | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    progress: Progress = False,
    cancel: Cancel | None = None,
    **kwargs: Any,
) -> Curve:
    """Trains both from one state on the same batches, and decides whether they differ by more than rounding.

    The original is run `runs` times more with other roundings of its sums (`fusionlab.graph.interpret.resummed`); the fused version's
    losses and states are judged by how far these runs are from the original (`judging`).

    Args:
      fn, fused: a train step and its fused version. A step takes its state and a batch, and returns its next state and the loss in any
        order and with other results; or it changes objects of nnx and returns the loss.
      *state: the step's arguments but for the batch; those without a next value in the result are the same at every step.
      data: the batches: a sequence (from its first again where it ends), an iterator, or a function of a step's number, from 0. A tuple
        is one argument of a step that takes one, else several; a dict likewise, by name.
      steps: how many; None: as many as there are batches.
      loss: which number of the result it is: its name ("out[1]['loss']", "loss"), or a function of the result. None: the only one, or
        the only one that is called so.
      next_state: a function of the result that picks the state, in the order of the arguments. None: by structure.
      data_argnum: the position of the batch among the arguments; None: after the state.
      runs: further runs of the original. Their states are on the device with those of both, as far as they fit.
      resume: an earlier result that was stopped, or the .npz file of one; `data` begins with the first batch, as before.
      budget_s: seconds after which it stops; None: none.
      static_argnums, static_argnames, **kwargs: as of `measure`, for the step.
      progress, cancel: as of `measure`; it stops between steps, and keeps what was measured until then.

    Raises:
      ArgumentError: the state or the loss is not found, or two parts of the result may be it; both functions differ in their state; `data`
        has no batches; `resume` is of another training. SideEffectError: a step prints or calls back into Python. TraceError: one does
        not trace. OutOfMemoryError: the device has too little memory for two states and a third.
    """
    earlier = _earlier(resume)
    batches = Batches(data)
    count = _steps(steps, batches)
    static = {"static_argnums": static_argnums, "static_argnames": static_argnames}
    with watched(progress) as told:
        stages = Stages(told, cancel)
        Stages(told)("tracing")
        first = _first(batches)
        made = [
            Step(Call.of(f, state, kwargs, first, data_argnum, **static), first, loss, next_state) for f in (fn, fused)
        ]
        _check_alike(*made)
        training = _Training(made[0], made[1], batches, count, runs, stages, budget_s)
        if earlier is not None and (earlier.reached or earlier.kept):
            training.take_up(earlier)
        return training.run()


def _steps(steps: int | None, batches: Batches) -> int:
    if steps is None and batches.count is None:
        raise ArgumentError(
            "steps: got None, needed how many steps: the data is an iterator or a function, and has no length"
        )
    count = batches.count if steps is None else steps
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ArgumentError(f"steps: got {steps!r}, needed a whole number from 1")
    return count


def _first(batches: Batches) -> Any:
    try:
        return batches(0)
    except Ended:
        raise ArgumentError("data: got no batches, needed at least one") from None


def _earlier(resume: Any) -> Curve | None:
    if resume is None or isinstance(resume, Curve):
        return resume
    if isinstance(resume, str | Path):
        return Curve.load(resume)
    raise ArgumentError(f"resume: got {type(resume).__name__}, needed an earlier result or the .npz file of one")


def _check_alike(step: Step, fused: Step) -> None:
    """Raises where the two do not replace the same arrays, by the same result."""
    mine, theirs = ([(leaf.name, leaf.shape, leaf.dtype) for leaf in s.state] for s in (step, fused))
    if mine != theirs:
        (a, b) = next(((a, b) for a, b in zip(mine, theirs, strict=False) if a != b), (len(mine), len(theirs)))
        raise ArgumentError(f"fused: got a step that replaces {b}, needed the original's {a}")


class _Training:
    """One comparison: the runs done, and the group that runs."""

    def __init__(
        self, step: Step, fused: Step, batches: Batches, steps: int, runs: int, stages: Stages, budget_s: float | None
    ) -> None:
        if isinstance(runs, bool) or not isinstance(runs, int) or runs < 1:
            raise ArgumentError(f"runs: got {runs!r}, needed a whole number from 1")
        if budget_s is not None:
            check_budget(budget_s)
        self.step, self.fused, self.batches, self.steps, self.runs = step, fused, batches, steps, runs
        self.stages, self.budget_s, self.start = stages, budget_s, time.perf_counter()
        self.loss_eps = float(jnp.finfo(jnp.float32).eps)
        self.programs = Programs(arithmetic_for(step.traced))
        self.done: dict[str, Series] = {}
        self.group: Group | None = None
        self.seconds: dict[str, float] = {}
        self.ended = steps
        self.stopped = ""
        self.remarks: list[str] = []

    # The runs.

    def _lane(self, name: str) -> Lane:
        if name in (ORIGINAL, FUSED, WIDE):
            return Lane(name, self.fused if name == FUSED else self.step, self.programs)
        return Lane(name, self.step, self.programs, seed=int(name))

    def take_up(self, earlier: Curve) -> None:
        """Goes on where an earlier one was stopped.

        Raises:
          ArgumentError: it was not stopped, or is of another step.
        """
        kept = earlier.kept
        if kept is None:
            why = "has made all its steps" if not earlier.stopped else "was saved without its states"
            raise ArgumentError(f"resume: got a loss curve that {why}, needed one that was stopped, or its .npz file")
        names = tuple(leaf.name for leaf in self.step.state)
        if (earlier.name, earlier.state, earlier.steps) != (self.step.name, names, self.steps):
            raise ArgumentError(
                f"resume: got a training of {earlier.name} over {earlier.steps} steps with a state of {len(earlier.state)} arrays, needed "
                f"one of {self.step.name} over {self.steps} steps with {len(names)} arrays"
            )
        self.done, self.seconds = dict(kept.done), dict(earlier.seconds)
        if not kept.runs:
            return
        for state in kept.states:
            self._check_kept(state)
        lanes = [self._lane(name) for name in kept.runs]
        for lane, state in zip(lanes, kept.states, strict=True):
            lane.begin(state)
        self.group = Group(lanes, self.batches, kept.at)
        self.group.series = [s.copy() for s in kept.series]
        self.batches.keeps = len(self._left()) > 0

    def _check_kept(self, state: Sequence[Any]) -> None:
        for leaf, x in zip(self.step.state, state, strict=False):
            if (x.shape, x.dtype) != (leaf.shape, leaf.dtype):
                raise ArgumentError(
                    f"resume: got a training with {leaf.name}: {x.dtype}[{','.join(map(str, x.shape))}], needed one of this state: "
                    f"{leaf.text}"
                )
        if len(state) != len(self.step.state):
            raise ArgumentError(f"resume: got a state of {len(state)} arrays, needed {len(self.step.state)}")

    def _left(self) -> list[str]:
        """The runs that no group has had yet."""
        here = [lane.name for lane in self.group.lanes] if self.group is not None else []
        return [str(k) for k in range(1, self.runs + 1) if str(k) not in self.done and str(k) not in here]

    def run(self) -> Curve:
        try:
            if self.group is None and not self.done:
                self._begin([ORIGINAL, FUSED])
            if self.group is not None:
                self._to_the_end()
            while self._left():
                self._begin([ORIGINAL])
                self._to_the_end()
        except Stopped:
            self.stopped = _CANCELLED
        except _Enough as why:
            self.stopped = str(why)
        if self.group is not None:
            self.group.finish()
        return self._curve()

    def _begin(self, names: Sequence[str]) -> None:
        """A group of these runs, and of as many of the further ones as there is room for; its first step."""
        group = Group([], self.batches)
        batch = group.batch
        for name in names:
            self._first_step(group, name, batch)
        if FUSED in names and is_narrow(self.step.traced):
            self._try_wide(group, batch)
        left = self._left()
        room = max(1, room_for(group.lanes[0].state))
        self.batches.keeps = len(left) > room
        for name in left[:room]:
            self._first_step(group, name, batch)
        group.measure()
        self.group = group

    def _try_wide(self, group: Group, batch: Any) -> None:
        """The original in float32 as well, where that is possible."""
        try:
            self._first_step(group, WIDE, batch)
        except (OutOfMemoryError, TraceError) as error:
            self.remarks.append(f"the original was not run in float32: {error}")

    def _first_step(self, group: Group, name: str, batch: Any) -> None:
        what = _COMPILING.get(name, "compiling the original, resummed")
        known = what in self.seconds
        if not known:
            self.stages(what)
        start = time.perf_counter()
        lane = self._lane(name)
        with out_of_memory(f"{self.step.name}: {name}"):
            lane.begin()
            lane.advance(batch, 0)
            if not known:
                jax.block_until_ready(lane.loss)
                self.seconds[what] = time.perf_counter() - start
        group.add(lane)

    def _to_the_end(self) -> None:
        """The rest of the group's steps; then its states are let go."""
        group = self.group
        assert group is not None
        start = time.perf_counter()
        words = "training" if FUSED in [lane.name for lane in group.lanes] else "running the original again"
        with (
            self.stages(words, self.ended, self.budget_s or float("inf")) as told,
            out_of_memory(f"{self.step.name}: training"),
        ):
            told.step(group.at)
            try:
                self._steps_of(group, told)
            finally:
                group.finish()
                self.seconds[words] = self.seconds.get(words, 0.0) + time.perf_counter() - start
        self.done |= {
            lane.name: s for lane, s in zip(group.lanes, group.series, strict=True) if lane.name not in self.done
        }
        self.group = None

    def _steps_of(self, group: Group, told: Reporter) -> None:
        while group.at < self.ended:
            self.stages.check(told.task)
            if self.budget_s is not None and time.perf_counter() - self.start > self.budget_s:
                raise _Enough(_BUDGET)
            try:
                batch = group.batch
            except Ended:
                self.ended, self.stopped = group.at, _ENDED
                return
            group.advance(batch)
            told.step()

    # The result.

    def _series(self) -> dict[str, Series]:
        here = (
            {}
            if self.group is None
            else dict(zip([lane.name for lane in self.group.lanes], self.group.series, strict=True))
        )
        return here | self.done

    def _curve(self) -> Curve:
        series = self._series()
        original, fused = series.pop(ORIGINAL, Series()), series.pop(FUSED, Series())
        wide = series.pop(WIDE, None)
        others = [series[k] for k in sorted(series, key=int)]
        arrays = [self.step.state[i] for i in floats(self.step.state)]
        found = judged(measured(arrays, original, self.loss_eps), fused, others, wide)
        return Curve(
            name=self.step.name,
            environment=environment(),
            steps=self.steps,
            loss_name=self.step.loss,
            state=tuple(leaf.name for leaf in self.step.state),
            fixed=tuple(self.step.fixed_names),
            losses=tuple(original.losses),
            fused_losses=tuple(fused.losses),
            loss_differences=tuple(tuple(s.loss_differences) for s in others),
            distances=_relative(fused, original),
            band_distances=tuple(_relative(s, original) for s in others),
            stretches=found.stretches,
            wide_losses=tuple(wide.losses) if wide is not None else (),
            parted=found.parted,
            seconds=self.seconds,
            stopped=self.stopped,
            notes=tuple(self._notes(original, fused, others)),
            kept=self._kept(),
        )

    def _kept(self) -> Kept | None:
        group = self.group
        if self.stopped not in (_BUDGET, _CANCELLED) or not (group or self.done):
            return None
        if group is None:  # stopped between two groups
            return Kept(0, (), (), (), dict(self.done))
        runs = tuple(lane.name for lane in group.lanes)
        return Kept(
            group.at, runs, tuple(on_host(lane.state) for lane in group.lanes), tuple(group.series), dict(self.done)
        )

    def _notes(self, original: Series, fused: Series, others: Sequence[Series]) -> list[str]:
        notes = list(self.remarks)
        if self.batches.count is not None and self.batches.count < self.steps and not self.stopped:
            notes.append(
                f"there are {self.batches.count} batches, which were taken again from the first where they ended"
            )
        if not all(map(_is_finite, original.losses)):
            notes.append(
                "the original's loss is not finite at every step; from the block of the first such step on nothing is judged"
            )
        if any(not any(s.squares) for s in others):
            notes.append("a run of the original with other roundings has the very same state: none of them reaches it")
        return notes


class _Enough(Exception):  # noqa: N818 - the way out of the steps, not an error
    """No further step is made; the message is the reason."""


def _relative(series: Series, original: Series) -> tuple[float, ...]:
    """The distance at each step over the norm of the original's state."""
    pairs = zip(series.squares, original.squares, strict=False)
    return tuple((own / norm) ** 0.5 if norm else own**0.5 for own, norm in pairs)


def _is_finite(x: float) -> bool:
    return x - x == 0
