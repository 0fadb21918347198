"""The programs of one comparison and what is asked of them, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import numpy as jnp

from fusionlab.errors import TraceError
from fusionlab.graph.promote import Promoted, promote
from fusionlab.kernels.op import meaning_of

from .instructions import instructions
from .memory import memory_of
from .numerics import (
    LeafNumerics,
    Numerics,
    check_same_outputs,
    filled_notes,
    leaf_numerics,
    output_numerics,
    random_cotangents,
    tolerance_notes,
    value_and_gradients,
)
from .program import Call, Program, compile_program
from .progress import Progress, Reporter
from .sums import Sums, sums_of
from .timing import as_tuple, time_programs


class Measuring:
    """The programs of one comparison, each compiled at most once, when first needed."""

    def __init__(self, before: Call, after: Call, donated: Sequence[int], argnums: Any, grad: bool) -> None:
        self.calls, self.grad = {"before": before, "after": after}, grad
        self.donated = before.dynamic(donated, "donate_argnums")
        self._forward: tuple[Program, Program] | None = None
        self._backward: tuple[Program, Program] | None = None
        self._compared: dict[str, bool] = {}
        asked = range(len(before.args)) if argnums is None else before.dynamic(as_tuple(argnums), "argnums")
        leaves = jax.tree.leaves((before.args, before.kwargs))
        wanted = range(len(leaves)) if argnums is None else before.leaves_of(asked)
        self.chosen = tuple(i for i in wanted if jnp.issubdtype(jnp.result_type(leaves[i]), jnp.floating))
        self.left_out = tuple(n for i, n in enumerate(before.leaf_names) if i not in self.chosen)

    @property
    def forward(self) -> tuple[Program, Program]:
        if self._forward is None:
            before, after = (
                compile_program(c.fn, c.args, c.kwargs, name=name, donate_argnums=self.donated)
                for name, c in self.calls.items()
            )
            check_same_outputs(before.outputs, after.outputs)
            self._forward = before, after
        return self._forward

    @property
    def backward(self) -> tuple[Program, Program]:
        if self._backward is None:
            cotangents = random_cotangents(self.forward[0].jaxpr.out_avals)
            before, after = (
                compile_program(
                    value_and_gradients(c.fn, self.chosen),
                    (cotangents, c.args, c.kwargs),
                    {},
                    name=name,
                    advice="a function jax.grad accepts; or pass grad=False to compare the forward call alone.",
                )
                for name, c in self.calls.items()
            )
            self._backward = before, after
        return self._backward

    def steps(
        self,
        numerics: bool,
        memory: bool,
        timing: bool,
        same_code: bool,
        progress: Progress,
        notes: list[str],
        effort: dict[str, Any],
    ) -> Iterator[tuple[str, Callable[[], Any]]]:
        """What is to be done, in order: (part of the Evidence, how to get it)."""
        if memory:  # first: a device's peak never falls again, and the float64 reference needs more than either
            yield "memory", lambda: memory_of(*self.forward)
            if self.grad:
                yield "memory_grad", lambda: memory_of(*self.backward)
        if numerics:
            yield "numerics", lambda: self.numerics(progress, notes)
        if same_code:
            yield "same_code", self.is_same_code
            timing = timing and self.differs
        if timing:
            yield "timing", lambda: time_programs("forward", *self.forward, **effort)
            if self.grad:
                yield "timing_grad", lambda: time_programs("forward + backward", *self.backward, **effort)

    def is_same_code(self) -> bool:
        """Whether both compile to the same instructions, forward and (with `grad`) backward."""
        _ = self.forward, self.grad and self.backward
        return not self.differs

    @property
    def differs(self) -> bool:
        """Whether a pair compiled so far differs in its instructions."""
        return not all(self._equal().values())

    def _equal(self) -> dict[str, bool]:
        for what, pair in (("forward", self._forward), ("forward + backward", self._backward)):
            if pair is not None and what not in self._compared:
                before, after = (instructions(p.compiled.as_text()) for p in pair)
                self._compared[what] = before == after
        return self._compared

    def notes(self) -> list[str]:
        """What was seen of the compiled programs, in sentences."""
        equal = [what for what, same in self._equal().items() if same]
        return [f"both compile to the same instructions ({', '.join(equal)})"] if equal else []

    def hlo(self) -> dict[str, str]:
        return {p.name: p.compiled.as_text() for p in self._forward} if self._forward else {}

    def numerics(self, progress: Progress, notes: list[str]) -> Numerics | None:
        """Errors of outputs and gradients; None, with a note, where the program has no float64 form."""
        before, after = self.forward
        if self.grad:
            _ = self.backward  # a function that cannot be differentiated is an error, not a note
        # The programs' own arguments: copies on the device, of which donated ones are copied again for each run.
        args, kwargs = before.args, before.kwargs
        sums = sums_of(before.jaxpr, jax.default_backend())
        with Reporter(progress, "comparing with float64", 2 if self.grad else 1) as reporter:
            try:
                reference = promote(self.calls["before"].fn, *args, inline=meaning_of, **kwargs)
                leaves = output_numerics(before, after, reference, args, kwargs, sums)
                reporter.step()
                leaves += self._gradients(reference, sums) if self.grad else []
                reporter.step()
            except TraceError as error:
                notes.append(f"no errors were measured: {error}")
                return None
        left_out = self.left_out if self.grad else ()
        remarks = (*reference.notes, *filled_notes(leaves), *tolerance_notes(leaves, sums))
        return Numerics(tuple(leaves), left_out, sums.reduction_size, remarks, sums.tf32)

    def _gradients(self, reference: Promoted, sums: Sums) -> list[LeafNumerics]:
        (_, first), (_, second) = (p.run() for p in self.backward)
        cotangents, args, kwargs = self.backward[0].args
        want = reference.gradients(cotangents, *args, wrt=self.chosen, **kwargs)
        flat = jax.tree_util.tree_leaves(want, is_leaf=lambda x: x is None)
        names = [self.calls["before"].leaf_names[i] for i in self.chosen]
        return leaf_numerics("gradient", names, first, second, [flat[i] for i in self.chosen], sums)
