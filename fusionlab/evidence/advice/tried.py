"""Lints tried: the program with the edit of a lint made, timed in turns with the program as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from fusionlab.errors import OutOfMemoryError, TraceError
from fusionlab.fusers.lints.compiler_options import LEAST_BY_OPTION, together
from fusionlab.fusers.lints.lint import LEAST, Lint
from fusionlab.graph.calls.binding import Bound
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.settings import as_function
from fusionlab.progress import Stages, Stopped
from fusionlab.showing import Shown, plural

from ..check import error_of
from ..errors.outputs import named_outputs
from ..instruments.memory import Memory, memory_of
from ..instruments.program import Program
from ..instruments.record import hardware
from ..instruments.timing import Timing, Verdict, seconds, time_programs
from ..original import Original
from ..units import binary_bytes

_UNKNOWN = "No such compile option"  # XLA's message
_IN_WORDS = {LEAST: "a tenth", LEAST_BY_OPTION: "a hundredth"}


@dataclass(frozen=True, repr=False)
class TriedLint(Shown):
    """A lint, and the program with its edit made, "after", against the program as it is, "before".

    Attributes:
      lint: what was tried.
      timing: of both, in turns.
      memory: compiled memory of both; None where the backend does not report it.
      differing: the names of the outputs that differ by more than rounding.
    """

    lint: Lint
    timing: Timing
    memory: Memory | None = None
    differing: tuple[str, ...] = ()

    @property
    def saves(self) -> tuple[float, float]:
        """The 95 % interval of the share of the time that the edit saves; negative where it adds to it."""
        low, high = self.timing.interval
        return 1 - 1 / low, 1 - 1 / high

    @property
    def helps(self) -> bool:
        """Whether it is advised: the results are the same, and the whole interval lies above what it has to save."""
        return not self.differing and self.timing.verdict == Verdict.FASTER and self.saves[0] > self.lint.least

    @property
    def cost(self) -> str:
        """What the edit costs, in words: compile time, and memory where it is known."""
        b, a = self.timing.before, self.timing.after
        text = f"compile time {seconds(b.compile_s)} -> {seconds(a.compile_s)}"
        if self.memory is None:
            return text
        return f"{text}, compiled peak memory {binary_bytes(self.memory.before.peak)} -> {binary_bytes(self.memory.after.peak)}"

    def __str__(self) -> str:
        where = f" ({self.lint.source})" if self.lint.source else ""
        if self.helps:
            low, high = self.saves
            share = f"{1 - 1 / self.timing.ratio:.0%} of the {self.timing.what} [{low:.0%}, {high:.0%}]"
            verb = "saves" if self.lint.options else "costs"
            lines = [f"{self.lint.id}{where} {verb} {share}", f"edit: {self.lint.edit}", self.timing.text, self.cost]
            return "\n  ".join(lines)
        least = self.lint.least
        why = (
            str(self.timing.verdict)
            if self.saves[0] > least
            else f"it does not clearly save {_IN_WORDS.get(least, f'{least:.0%}')}"
        )
        why = f"{', '.join(self.differing)} differ" if self.differing else why
        return f"{self.lint.id}{where}: no advice, {why}; {self.timing.text}; {self.cost}"

    def _row(self) -> dict[str, Any]:
        low, high = self.saves
        told = {"lint": self.lint.id, "advised": self.helps, "saves, low": low, "saves, high": high}
        return told | {
            "edit": self.lint.edit,
            "cost": self.cost,
            "source": self.lint.source,
            "timing": self.timing.text,
        }


@dataclass(frozen=True, repr=False)
class Advice(Shown):
    """The lints of a program, each tried.

    Attributes:
      name: of the function.
      tried: each lint with its measurement; fewer than there are where it was cancelled.
      hardware: where they were measured.
    """

    _listed = "tried"

    name: str
    tried: tuple[TriedLint, ...]
    hardware: str

    @property
    def given(self) -> tuple[TriedLint, ...]:
        """Those that save more of the time than their rule asks for: a tenth, 3 % of `recomputed_products`, a hundredth of an option."""
        return tuple(t for t in self.tried if t.helps)

    @staticmethod
    def _kind(lint: Lint) -> str:
        """What has to save that much, in words."""
        if lint.options:
            return "an option of the compiler"
        return "an edit" if lint.least == LEAST else f"the edit of {lint.rule}"

    def __str__(self) -> str:
        if not self.tried:
            return f"{self.name}: no lint, so nothing was tried"
        n = len(self.tried)
        leasts = {self._kind(t.lint): f"{t.lint.least:.0%}" for t in sorted(self.tried, key=lambda t: -t.lint.least)}
        (first, least), *others = leasts.items()
        rules = ", ".join([f"{first} has to save more than {least} of the time", *(" ".join(each) for each in others)])
        head = f"{self.name}: {n} {plural('lint', n)} tried, {len(self.given)} advised ({rules})"
        ordered = sorted(self.tried, key=lambda t: not t.helps)
        return "\n".join([head, *("  " + str(t).replace("\n", "\n  ") for t in ordered), f"  on {self.hardware}"])


def try_lints(
    graph: Graph, call: Bound, lints: Sequence[Lint], samples: int, budget_s: float, stages: Stages
) -> Advice:
    """Measures each lint of a program by itself, then the options that help together.

    Args:
      graph: the program, in which the lints were found; call: its function, with the arrays to run on.
      samples: of each program in each timing; budget_s: for all timings together.

    Raises:
      ArgumentError: shapes where arrays are needed. SideEffectError: it prints or calls back into Python. OutOfMemoryError: the device has
        too little memory for the original.
    """
    original, tried = Original(call, (), None, False, stages), []

    def try_one(lint: Lint, which: str) -> None:
        stages.check(lint.id)
        original.stages = stages.inside(which)
        with contextlib.suppress(_UnknownOptionError):
            tried.append(_tried(original, graph, lint, samples, budget_s / len(lints)))

    with contextlib.suppress(Stopped):
        for k, lint in enumerate(lints, 1):
            try_one(lint, f"lint {k} of {len(lints)}")
        if len(helping := [t.lint for t in tried if t.lint.options and t.helps]) > 1:
            try_one(together(helping), "options together")
    return Advice(graph.name, tuple(tried), hardware())


class _UnknownOptionError(Exception):
    """The compiler does not know an option, which belongs to another version of it."""


def _tried(original: Original, graph: Graph, lint: Lint, samples: int, budget_s: float) -> TriedLint:
    before, after = original.forward, _with_edit(original, graph, lint)
    memory = memory_of(before, after)
    original.stages("comparing results")
    differing = _differing(original, after)
    told = original.stages
    effort = {"samples": samples, "budget_s": budget_s, "progress": told.progress, "cancel": told.cancel}
    return TriedLint(lint, time_programs(original.names[0], before, after, **effort), memory, differing)


def _with_edit(original: Original, graph: Graph, lint: Lint) -> Program:
    version = replace(original.call, fn=_called_like(graph, lint.edited()))
    try:
        return original.forward_of(version, options=lint.options)
    except jax.errors.JaxRuntimeError as error:
        if lint.options and _UNKNOWN in str(error):
            raise _UnknownOptionError from error
        raise


def _called_like(graph: Graph, closed: Any) -> Callable[..., Any]:
    """A program as a function with the arguments and results of a graph's."""

    def edited(*args: Any, **kwargs: Any) -> Any:
        return jax.tree.unflatten(graph.out_tree, as_function(closed)(*jax.tree.leaves((args, kwargs))))

    return edited


def _differing(original: Original, after: Program) -> tuple[str, ...]:
    """The outputs that differ by more than rounding: beyond a tolerance, and then further from float64 than the original's are."""
    first, second = original.forward.run(), after.run()
    pairs = zip(named_outputs(first), jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    found = [name for name, b, a in pairs if error_of(np.asarray(b), np.asarray(a)).over_tolerance]
    if found:
        with contextlib.suppress(TraceError, OutOfMemoryError):  # then the tolerance alone decides
            return tuple(leaf.name for leaf in original.errors(after) if not leaf.ok)
    return tuple(found)
