"""Faults that a program and its fused version may show: an error, an exception, a slowdown, or what a function of the user's looks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from fusionlab.errors import FusionLabError
from fusionlab.graph.calls.binding import Bound
from fusionlab.graph.program.trace import error_text
from fusionlab.progress import Stopped

from ..errors.numerics import leaf_numerics
from ..errors.outputs import named_outputs
from ..instruments.program import compile_program
from ..instruments.timing import Verdict, time_programs
from ..original import Original
from ..subsets import worst_of
from .program import Small

Fuse = Callable[[Callable[..., Any]], Callable[..., Any]]
Shows = Callable[..., Any]  # (program, *arrays) -> whether it shows the fault, or what it shows in words

KINDS = ("error", "raises", "time")


@dataclass(frozen=True)
class Fault:
    """Asks of a program what it shows; "" if it does not show the fault.

    Attributes:
      kind: "error", "raises", "time", or "shows" for a user's own function.
      fuse: makes the fused version of a function.
      shows: the user's function.
      samples, budget_s: of each timing.
    """

    kind: str
    fuse: Fuse
    shows: Shows | None = None
    samples: int = 40
    budget_s: float = 20.0

    def __call__(self, program: Small) -> str:
        return self.of(program.fn, program.arrays)

    def of(self, fn: Callable[..., Any], arrays: Sequence[Any]) -> str:
        """What a function shows on these arrays."""
        ask = {"error": self._error, "raises": self._raises, "time": self._time, "shows": self._asked}[self.kind]
        try:
            return ask(fn, arrays)
        except Stopped:
            raise
        except FusionLabError:  # a program that cannot be judged shows nothing
            return ""
        # A program cut out of another one may be refused by anything in JAX; the fault that is looked for is another.
        except Exception:
            return ""

    def _error(self, fn: Callable[..., Any], arrays: Sequence[Any]) -> str:
        names = tuple(f"x{i}" for i in range(len(arrays)))
        call = Bound(fn, tuple(arrays), {}, tuple(range(len(arrays))), len(arrays), names)
        original = Original(call, (), None, False)
        fused = original.forward_of(replace(call, fn=self.fuse(fn)))
        first, second = jax.tree.leaves(original.forward.run()), jax.tree.leaves(fused.run())
        # Where the two are alike nothing is worse, and the reference need not run.
        alike = leaf_numerics("output", named_outputs(first), first, second, first, original.sums)
        if not any(leaf.after.over_tolerance for leaf in alike):
            return ""
        worst = worst_of(original.errors(fused))
        return "" if worst.ok else str(worst)

    def _raises(self, fn: Callable[..., Any], arrays: Sequence[Any]) -> str:
        jax.block_until_ready(jax.jit(lambda *xs: fn(*xs))(*arrays))
        try:
            jax.block_until_ready(jax.jit(self.fuse(lambda *xs: fn(*xs)))(*arrays))
        # Any error counts: the text names it.
        except Exception as error:
            return error_text(error)
        return ""

    def _time(self, fn: Callable[..., Any], arrays: Sequence[Any]) -> str:
        before = compile_program(fn, tuple(arrays), {}, name="before")
        after = compile_program(self.fuse(fn), tuple(arrays), {}, name="after")
        timing = time_programs("call", before, after, samples=self.samples, budget_s=self.budget_s)
        return timing.text if timing.verdict == Verdict.SLOWER else ""

    def _asked(self, fn: Callable[..., Any], arrays: Sequence[Any]) -> str:
        assert self.shows is not None
        shown = self.shows(fn, *arrays)
        return shown if isinstance(shown, str) else "shows() is true" if shown else ""
