"""The original of a comparison: compiled at most once, its float64 reference computed at most once, for any number of versions of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import numpy as jnp

from fusionlab.errors import TraceError
from fusionlab.graph.calls.binding import Bound, as_tuple
from fusionlab.graph.interpret.promote import Promoted
from fusionlab.graph.program.scopes import jaxpr_in_backward
from fusionlab.graph.program.trace import error_text
from fusionlab.progress import SILENT, Stages

from .errors.gradients import random_cotangents, value_and_gradients
from .errors.numerics import LeafNumerics, explained_by_rounding, leaf_numerics
from .errors.outputs import check_same_outputs, named_outputs
from .errors.reduction_sizes import ReductionSizes, coarsest_of, sums_of
from .errors.reference import Plan, planned
from .errors.rounding import moved
from .instruments.out_of_memory import out_of_memory
from .instruments.program import Program, compile_program, compiling
from .instruments.timing import names_of

# Of a comparison, in this order.
_COMPILED = (("before", 0), ("after", 0), ("before", 1), ("after", 1))
_GRAD_ADVICE = "a function jax.grad accepts; or pass grad=False to compare the forward call alone."


@dataclass(frozen=True, eq=False)
class Reference:
    """The results of the original in float64.

    Attributes:
      promoted: the program; plan: how it ran.
      outputs: leaves; gradients: those of the leaves asked for, in order; None without `grad`.
    """

    promoted: Promoted
    plan: Plan
    outputs: list[Any]
    gradients: list[Any] | None


class Original:
    """A function with its arguments: its compiled programs, and its float64 reference.

    Attributes:
      call: the function of its dynamic arguments.
      donated: positions in its arguments that each run consumes; if none are named, those that the jit around it donates.
      grad: whether gradients are compared as well; given as None, where the function is not differentiated already and has some.
      why_no_gradient: a sentence on why there is no gradient, if the caller left that open; else "".
      stages: called as each stage begins, and may stop the work.
      numbered: whether compiled programs are numbered as those of a comparison: "before, call 1/4".
      chosen: leaves of (args, kwargs) to differentiate by; left_out: names of the others.
    """

    def __init__(
        self,
        call: Bound,
        donated: Sequence[int],
        argnums: Any,
        grad: bool | None,
        stages: Stages = SILENT,
        numbered: bool = False,
    ) -> None:
        self.call, self._grad, self.why_no_gradient = call, grad, ""
        self.stages, self.numbered = stages, numbered
        self.donated = call.dynamic(donated, "donate_argnums") or call.donated
        asked = range(len(call.args)) if argnums is None else call.dynamic(as_tuple(argnums), "argnums")
        leaves = jax.tree.leaves((call.args, call.kwargs))
        wanted = range(len(leaves)) if argnums is None else call.leaves_of(asked)
        self.chosen = tuple(i for i in wanted if jnp.issubdtype(jnp.result_type(leaves[i]), jnp.floating))
        self.left_out = tuple(n for i, n in enumerate(call.leaf_names) if i not in self.chosen)

    @functools.cached_property
    def grad(self) -> bool:
        if self._grad is not None:
            return self._grad
        if self.differentiated or not self.chosen:
            return False
        try:
            _ = self.backward
        except TraceError as error:
            cause = error.__cause__
            self.why_no_gradient = error_text(cause) if isinstance(cause, Exception) else str(error)
        return not self.why_no_gradient

    @functools.cached_property
    def differentiated(self) -> bool:
        """Whether it contains a backward pass: a train step, whose gradient is not compared by default."""
        return jaxpr_in_backward(self.forward.jaxpr)

    @property
    def names(self) -> tuple[str, str]:
        """The names of the call and its gradient."""
        return names_of(self.differentiated)

    @functools.cached_property
    def forward(self) -> Program:
        return self._forward_of(self.call, "before")

    @functools.cached_property
    def backward(self) -> Program:
        return self.backward_of(self.call, "before")

    @functools.cached_property
    def cotangents(self) -> list[Any]:
        """One fixed random array per output leaf."""
        return random_cotangents(self.forward.jaxpr.out_avals)

    @functools.cached_property
    def sums(self) -> ReductionSizes:
        """The sums of the program, which pick tolerances."""
        return sums_of(self.forward.jaxpr, jax.default_backend())

    def forward_of(self, version: Bound, name: str = "after", options: Mapping[str, Any] | None = None) -> Program:
        """Another version of it, compiled, with further options of the compiler.

        Raises:
          ArgumentError: its outputs differ in structure, shape or dtype.
        """
        program = self._forward_of(version, name, options)
        check_same_outputs(self.forward.outputs, program.outputs)
        return program

    def _forward_of(self, version: Bound, name: str, more: Mapping[str, Any] | None = None) -> Program:
        given = dict(compiling(self.call))
        if more:
            given["compiler_options"] = {**(given.get("compiler_options") or {}), **more}
        options = {"name": name, "donate_argnums": self.donated, "compiling": given, "assigned": True}
        return compile_program(version.fn, version.args, version.kwargs, said=self._said(name, 0), **options)

    def backward_of(self, version: Bound, name: str = "after") -> Program:
        """The value and the gradients of a version, compiled."""
        args = (self.cotangents, version.args, version.kwargs)
        options = {"name": name, "advice": _GRAD_ADVICE, "compiling": compiling(self.call)}
        options |= {"said": self._said(name, 1), "assigned": True}
        return compile_program(value_and_gradients(version.fn, self.chosen), args, {}, **options)

    def _said(self, version: str, call: int) -> Callable[[str, Any], Any]:
        """Reports the making of a program: "compiling before, call 1/4"; "tracing before" while its kind is unknown."""

        def said(verb: str, jaxpr: Any) -> None:
            first = self.forward.jaxpr if "forward" in self.__dict__ else jaxpr
            if first is None:
                self.stages(f"{verb} {version}")
                return
            differentiated = jaxpr_in_backward(first)
            which = f"{verb} {version}, {names_of(differentiated)[call]}"
            if self.numbered and (version, call) in _COMPILED:
                may_have_gradient = bool(self.chosen) and not differentiated if self._grad is None else self._grad
                which += f" {_COMPILED.index((version, call)) + 1}/{4 if may_have_gradient else 2}"
            self.stages(which)

        return said

    @functools.cached_property
    def reference(self) -> Reference:
        """Its float64 reference.

        Raises:
          TraceError: it has no float64 form. OutOfMemoryError: the device has too little memory for it.
        """
        with out_of_memory("the float64 reference"):
            return self._reference()

    def forget_reference(self) -> None:
        """Frees the reference; it is computed again when next needed."""
        self.__dict__.pop("reference", None)

    def _reference(self) -> Reference:
        self.stages("planning the float64 reference")
        # The program's own arguments: copies on the device, of which donated ones are copied again for each run.
        args, kwargs = self.forward.args, self.forward.kwargs
        promoted, plan = planned(self.call.fn, args, kwargs, self.grad, (self.forward.jaxpr, self.forward.outputs))
        cotangents = self.backward.args[0] if self.grad else None
        if plan.threads > 1:
            self.stages("compiling the float64 reference")
            promoted.compile_ahead(plan.threads, cotangents, self.chosen)
        self._count(promoted, plan)
        if cotangents is None:
            return Reference(promoted, plan, jax.tree.leaves(promoted.values(*args, **kwargs)), None)
        outputs, found = promoted.values_and_gradients(cotangents, *args, wrt=self.chosen, **kwargs)
        flat = jax.tree_util.tree_leaves(found, is_leaf=lambda x: x is None)
        return Reference(promoted, plan, jax.tree.leaves(outputs), [flat[i] for i in self.chosen])

    def _count(self, promoted: Promoted, plan: Plan) -> None:
        """Each piece that runs is a step of the stage, before which it may be cancelled."""
        stages = self.stages
        reporter = stages(plan.stage, plan.runs if plan.runs > 1 else 0)

        def step() -> None:
            stages.check(plan.stage)
            reporter.step()

        promoted.told = step

    def errors(self, forward: Program, backward: Program | None = None) -> list[LeafNumerics]:
        """Errors of the original and of a version, both against float64: outputs, and with `backward` gradients.

        Raises:
          TraceError: it has no float64 form. OutOfMemoryError: the device has too little memory for a run or for the reference.
        """
        with out_of_memory("comparing with the float64 reference"):
            return self._errors(forward, backward)

    def _errors(self, forward: Program, backward: Program | None) -> list[LeafNumerics]:
        want = self.reference
        self.stages("errors of outputs and gradients" if backward is not None else "errors of outputs")
        first, second = self.forward.run(), forward.run()
        names, leaves = named_outputs(first), jax.tree.leaves
        found = leaf_numerics("output", names, leaves(first), leaves(second), want.outputs, self.sums)
        found = explained_by_rounding(found, want.outputs, lambda k: leaves(self._moved(self.forward, k)))
        if backward is not None and want.gradients is not None:
            (_, before), (_, after) = self.backward.run(), backward.run()
            names = [self.call.leaf_names[i] for i in self.chosen]
            of = leaf_numerics("gradient", names, before, after, want.gradients, self.sums)
            found += explained_by_rounding(of, want.gradients, lambda k: self._moved(self.backward, k)[1])
        return found

    def _moved(self, program: Program, run: int) -> Any:
        """The results of a program of the original on arguments moved by one rounding."""
        self.stages(f"rounding errors of the original, run {run}")
        # A gradient is rounded to the dtype of its argument, so that of the call counts.
        args, kwargs = moved((program.args, program.kwargs), run, self.sums, coarsest_of(self.forward.jaxpr))
        return replace(program, args=args, kwargs=kwargs).run()
