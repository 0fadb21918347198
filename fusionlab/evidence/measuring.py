"""The programs of one comparison and their measurements, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fusionlab.errors import OutOfMemoryError, TraceError
from fusionlab.graph.calls.binding import Bound
from fusionlab.graph.settings import no_full_collections
from fusionlab.processes import several
from fusionlab.progress import Stages

from .errors.numerics import Numerics, filled_notes, rounding_notes, tolerance_notes
from .errors.outputs import named_outputs
from .instruments.instructions import Code, code_of
from .instruments.kernel_counts import KernelCounts, kernels_of
from .instruments.memory import memory_of
from .instruments.program import Program
from .instruments.timing import time_programs
from .original import Original
from .over_devices import OverDevices, over_devices


class Measuring:
    """The programs of one comparison, each compiled at most once, when first needed."""

    def __init__(
        self, before: Bound, after: Bound, donated: Sequence[int], argnums: Any, grad: bool | None, stages: Stages
    ) -> None:
        self.original = Original(before, donated, argnums, grad, stages, numbered=True)
        self.after, self.stages = after, stages
        self._forward: tuple[Program, Program] | None = None
        self._backward: tuple[Program, Program] | None = None
        self._codes: dict[str, tuple[Code, Code]] = {}

    @property
    def grad(self) -> bool:
        return self.original.grad

    @property
    def forward(self) -> tuple[Program, Program]:
        if self._forward is None:
            self._forward = self.original.forward, self.original.forward_of(self.after)
        return self._forward

    @property
    def backward(self) -> tuple[Program, Program]:
        if self._backward is None:
            self._backward = self.original.backward, self.original.backward_of(self.after)
        return self._backward

    def steps(
        self,
        numerics: bool,
        memory: bool,
        timing: bool,
        same_code: bool,
        notes: list[str],
        effort: dict[str, Any],
    ) -> Iterator[tuple[str, Callable[[], Any]]]:
        """The steps, in order: (part of the Evidence, how to get it)."""
        if memory:  # first: a device's peak never falls again, and the float64 reference needs more than either
            yield "memory", lambda: self._memory_of(0, self.forward)
            if self.grad:
                yield "memory_grad", lambda: self._memory_of(1, self.backward)
        if numerics:
            yield "numerics", lambda: self.numerics(notes)
        if same_code:
            yield "same_code", self.is_same_code
            timing = timing and self.differs
        if timing:
            call, gradient = self.original.names
            began, left = time.perf_counter(), effort["budget_s"]
            share = {"budget_s": left / 2} if self.grad else {}
            yield "timing", lambda: time_programs(call, *self.forward, **(effort | share))
            if self.grad:
                left = max(left / 4, left - (time.perf_counter() - began))
                yield "timing_grad", lambda: time_programs(gradient, *self.backward, **(effort | {"budget_s": left}))

    def _memory_of(self, which: int, pair: tuple[Program, Program]) -> Any:
        self.stages(f"memory, {self.original.names[which]}")
        names = self.original.call.leaf_names
        gradients = ["value", *(f"gradient of {names[i]}" for i in self.original.chosen)]
        with no_full_collections():
            return memory_of(*pair, names, gradients if which else named_outputs(pair[0].outputs))

    def is_same_code(self) -> bool:
        """Whether both compile to the same instructions (`code_of`), forward and (with `grad`) backward."""
        _ = self.forward, self.grad and self.backward
        self.stages("comparing the compiled programs")
        return not self.differs

    @property
    def differs(self) -> bool:
        """Whether a pair compiled so far differs in its instructions."""
        return not all(self._equal().values())

    @property
    def differing(self) -> str:
        """How many kernels of each program that differs are not the original's: "call: 2 of 240; gradient of the call: 9 of 410"."""
        codes = [(call, before, after) for call, (before, after) in self._both_codes().items() if before != after]
        return "; ".join(f"{c}: {a.kernels.total() - a.shared(b)} of {a.kernels.total()}" for c, b, a in codes)

    def _equal(self) -> dict[str, bool]:
        return {call: before == after for call, (before, after) in self._both_codes().items()}

    def _both_codes(self) -> dict[str, tuple[Code, Code]]:
        for call, (before, after) in self._pairs().items():
            if call not in self._codes:
                self._codes[call] = code_of(before.hlo), code_of(after.hlo)
        return self._codes

    def _pairs(self) -> dict[str, tuple[Program, Program]]:
        """The programs compiled so far, by name of the call; none is compiled for this."""
        if self._forward is None and self._backward is None:
            return {}
        named = zip(self.original.names, (self._forward, self._backward), strict=True)
        return {call: pair for call, pair in named if pair is not None}

    def devices(self, timed: bool) -> OverDevices | None:
        """The work of several devices in the programs compiled so far; None for one device."""
        return over_devices(self._pairs(), timed)

    def notes(self) -> list[str]:
        """Observations on the compiled programs, in sentences."""
        equal = [call for call, same in self._equal().items() if same]
        notes = [f"both compile to the same instructions ({', '.join(equal)})"] if equal else []
        why = self.original.why_no_gradient
        return notes + ([f"no gradient was measured: {why}"] if why else [])

    @property
    def kernels(self) -> KernelCounts | None:
        """How many kernels each version's call was compiled to, if it was."""
        return kernels_of(self._forward)

    def hlo(self) -> dict[str, str]:
        return {p.name: p.hlo for p in self._forward} if self._forward else {}

    def numerics(self, notes: list[str]) -> Numerics | None:
        """Errors of outputs and gradients; None, with a note, if the program has no float64 form or that does not fit.

        Raises:
          OutOfMemoryError: a program does not fit by itself.
        """
        if several(self.forward[0].devices):
            notes.append(
                "no errors were measured: the arguments lie on devices of other processes as well, and the float64 reference is "
                "computed by one; compare the same program on the devices of one process"
            )
            return None
        original, after = self.original, self.forward[1]
        backward = self.backward[1] if self.grad else None  # what cannot be differentiated is an error, not a note
        try:
            reference = original.reference
            leaves = original.errors(after, backward)
        except TraceError as error:
            reason = str(error)
        except OutOfMemoryError as error:
            reason = f"{error}; fl.errors_by_site(..., local=True) takes one site at a time to float64"
        else:
            reason = ""
        if reason:  # outside of the handler, which holds on to what the failed run held
            original.forget_reference()
            for program in (*self.forward, *(self.backward if self.grad else ())):
                program.run()  # what has too little memory without the reference as well is no matter of a note
            notes.append(f"no errors were measured: {reason}")
            return None
        sums = original.sums
        left_out = original.left_out if self.grad else ()
        remarks = (
            *reference.promoted.notes,
            *((str(reference.plan),) if reference.plan.runs > 1 + self.grad else ()),
            *filled_notes(leaves),
            *rounding_notes(leaves),
            *tolerance_notes(leaves, sums),
        )
        return Numerics(tuple(leaves), left_out, sums.reduction_size, remarks, sums.tf32)
