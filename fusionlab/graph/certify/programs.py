"""Two programs of the same arguments on the same drawn inputs, for comparison by certification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.extend import core as jex_core

from ..dtypes import is_float
from ..interpret.evaluate import Inline, ReducedSizes, evaluate
from ..interpret.on_devices import COUNT, evaluate_together
from ..jax_compat import rebuild, split_closed, varies, varying_axes
from ..primitives import having
from ..program.equations import live
from .inputs import Reduction, inputs_of, summed_with
from .reduced_sizes import elements
from .special import Special, at_edge, compared, near_edge, overflows, specials
from .verdict import ProofOutcome, ResultPair, Results

FEW = 256  # elements: such a site is looked at with several draws, as one may miss a whole branch
_NUDGE = 1e-9  # relative: by how much inputs are moved to see what is noise
_REDRAWS, _SEEDS = 30, 1000
# The share of booleans that are True, draw by draw: a mask may hide where they are, or where not.
_TRUE = (0.5, 0.7, 0.85, 0.3, 0.15)

DrawnInputs = tuple[ReducedSizes, list[list[Any]]]  # drawn inputs, of each device


@dataclass(frozen=True, eq=False)
class Programs:
    """Two jaxprs of (arguments, cotangent).

    Attributes:
      old, new: the original and the replacement.
      avals, out: the types of the arguments and of the cotangent.
      inline: the plain meaning of primitives that JAX does not know.
      axes: the mesh axes that they sum over; such programs are evaluated on several devices.
      classes: the sizes of axes whose entries are classes and no keys: what is added along one hides nothing.
    """

    old: Any
    new: Any
    avals: Sequence[Any]
    out: Any
    inline: Inline
    axes: frozenset[str] = frozenset()
    classes: frozenset[int] = frozenset()

    def results(self, seed: int, reduction: Reduction) -> Results:
        """The results of both on the same random inputs: the first draw for which the old one returns no NaN or infinity, if any. Those
        prove little (one row of NaN makes a gradient full of them); `beyond` checks what a fused op does with them.
        """
        weights = summed_with(self.old)

        def drawn(number: int) -> tuple[DrawnInputs, list[np.ndarray]]:
            given = self._drawn(seed + _SEEDS * number, reduction, _TRUE[number % len(_TRUE)], weights)
            return given, self._run(self.old, *given)

        first = drawn(0)
        again = (drawn(n) for n in range(1, _REDRAWS)) if not all(map(_finite, first[1])) else ()
        (sizes, args), want = next((d for d in again if all(map(_finite, d[1]))), first)
        pair = want, self._run(self.new, sizes, args)
        return Results(pair, lambda number: self._nudged(number, sizes, args), (sizes, args))

    def beyond(
        self,
        given: DrawnInputs,
        names: Sequence[str],
        tolerance: float,
        of: Callable[[ResultPair], ResultPair] = lambda pair: pair,
    ) -> ProofOutcome:
        """The results of both on inputs that are not ordinary numbers; see special.py. `given` are ordinary ones; `of` converts outputs to
        results of these names.
        """
        sizes, args = given
        lost: dict[str, None] = {}
        values = replace(self, old=_value_of(self.old), new=_value_of(self.new)) if "value" in names else None
        added = [i for i in _added(self.old, len(self.avals)) if self.classes.isdisjoint(self.avals[i].shape[-1:])]
        for special in specials(self.avals, added):
            if special.exact:
                verdict = self._on_special(special, given, names, tolerance, of)
            elif values is not None:
                verdict = values._on_special(special, given, names[:1], tolerance)
            else:
                continue
            if not verdict.ok:
                return verdict
            lost.update(dict.fromkeys(verdict.lost))
        edge = values is not None and values._overflows(sizes, args[0])
        return ProofOutcome(
            None, lost=tuple(lost), edge=edge, regained=values is not None and self._regains(sizes, args[0])
        )

    def _on_special(
        self,
        special: Special,
        given: DrawnInputs,
        names: Sequence[str],
        tolerance: float,
        of: Callable[[ResultPair], ResultPair] = lambda pair: pair,
    ) -> ProofOutcome:
        """The results of both on changed inputs."""
        sizes, args = given
        moved = [special.of(own) for own in args]
        with np.errstate(all="ignore"):
            pair = of((self._run(self.old, sizes, moved), self._run(self.new, sizes, moved)))
            return compared(special, names, Results(pair, lambda n: of(self._nudged(n, sizes, moved))), tolerance)

    def _overflows(self, sizes: ReducedSizes, args: Sequence[Any]) -> bool:
        """Whether the new value is infinite or NaN near the dtypes' edge, computed in them, where the old is not.

        Values of several devices and gradients are not checked: a softmax's gradients overflow in many orders of evaluation.
        """
        if self.axes:
            return False
        few = elements(self.avals) <= FEW
        return any(
            overflows(*(evaluate(p, moved, sizes, self.inline, rounded=True)[0] for p in (self.old, self.new)))
            for moved in at_edge(args, self.avals, few)
        )

    def _regains(self, sizes: ReducedSizes, args: Sequence[Any]) -> bool:
        """Whether a gradient is a number where the old one is not, for finite numbers whose squares overflow.

        Checked only if something is divided by a root of a sum of squares: the derivative of the root is 0 there, and 0 times an infinity
        is NaN.
        """
        jaxpr, _ = split_closed(self.old)
        names = {eqn.primitive.name for eqn in jaxpr.eqns}
        if self.axes or not names & _ROOTS or "reduce_sum" not in names or "exp" in names:
            return False
        for moved in near_edge(args, self.avals):
            old, new = (evaluate(p, moved, sizes, self.inline, rounded=True)[1:] for p in (self.old, self.new))
            if any((~np.isfinite(a) & np.isfinite(b)).any() for a, b in zip(old, new, strict=True)):
                return True
        return False

    def _nudged(self, number: int, sizes: ReducedSizes, args: list[list[Any]]) -> ResultPair:
        """The results of both on slightly moved inputs."""
        rng = np.random.default_rng(number)
        moved = [[a * (1 + _NUDGE * rng.normal(size=a.shape)) if _is_float64(a) else a for a in own] for own in args]
        return self._run(self.old, sizes, moved), self._run(self.new, sizes, moved)

    def _run(self, program: Any, sizes: ReducedSizes, args: list[list[Any]]) -> list[np.ndarray]:
        if self.axes:
            return evaluate_together(program, args, self.axes, sizes, self.inline)
        return evaluate(program, args[0], sizes, self.inline)

    def _drawn(self, first: int, reduction: Reduction, true: float, weights: Any) -> DrawnInputs:
        sizes, args = inputs_of(self.avals, self.out, reduction, first, true, weights)
        every = [args]
        if self.axes:
            others = (
                inputs_of(self.avals, self.out, reduction, first + _SEEDS // 2 + n, true, weights)[1]
                for n in range(1, COUNT)
            )
            own = _differing([*self.avals, self.out], self.axes)
            every += [[b if differs else a for differs, a, b in zip(own, args, other, strict=True)] for other in others]
        return sizes, every


def _differing(avals: Sequence[Any], axes: frozenset[str]) -> list[bool]:
    """The values that may differ between devices along some mesh axes: every float, if types do not tell."""
    typed = any(map(varies, avals))
    return [bool(varying_axes(a) & axes) if typed else is_float(a.dtype) for a in avals]


_ROOTS = having("root") | {"pow"}
_PASS = having("layout", "cast") | {"mul", "copy"}
_MOVES = _PASS | {"add", "sub", "select_n"}


def _added(closed: Any, count: int) -> list[int]:
    """The numbers of those of the first `count` floats that are terms of exponentiated sums, as of scores."""
    jaxpr, _ = split_closed(closed)
    if not {"exp", "reduce_sum"} <= {eqn.primitive.name for eqn in jaxpr.eqns}:
        return []
    floats = [i for i, v in enumerate(jaxpr.invars[:count]) if is_float(v.aval.dtype)]
    return [i for i in floats if _is_term(jaxpr.eqns, jaxpr.invars[i])]


def _is_term(eqns: Sequence[Any], var: Any) -> bool:
    """Whether a value is added to another, views and factors aside, and the sum is exponentiated, whatever else reads it."""

    def by(eqn: Any) -> bool:
        if eqn.primitive.name in ("add", "sub"):
            return _is_exponent(eqns, eqn.outvars[0])
        if eqn.primitive.name == "mul" and any(v is not var and _of_a_product(eqns, v) for v in eqn.invars):
            return False  # it is a factor of the scores
        return eqn.primitive.name in _PASS and _is_term(eqns, eqn.outvars[0])

    return any(by(eqn) for eqn in eqns if any(v is var for v in eqn.invars))


def _is_exponent(eqns: Sequence[Any], var: Any) -> bool:
    """Whether a value is exponentiated, apart from views, factors, and further additions or masks."""
    moved = {var}
    for eqn in eqns:
        if any(v in moved for v in eqn.invars if not isinstance(v, jex_core.Literal)):
            if eqn.primitive.name == "exp":
                return True
            if eqn.primitive.name in _MOVES:
                moved.update(eqn.outvars)
    return False


def _of_a_product(eqns: Sequence[Any], var: Any) -> bool:
    """Whether a value is a contraction, views and factors aside."""
    maker = next((eqn for eqn in eqns if any(v is var for v in eqn.outvars)), None)
    if maker is None or maker.primitive.name == "dot_general":
        return maker is not None
    return maker.primitive.name in _PASS and any(_of_a_product(eqns, v) for v in maker.invars)


def _value_of(closed: Any) -> Any:
    """A jaxpr with only the first result."""
    jaxpr, consts = split_closed(closed)
    value = list(jaxpr.outvars[:1])
    return rebuild(
        closed, list(jaxpr.constvars), list(jaxpr.invars), value, live(list(jaxpr.eqns), value), list(consts)
    )


def _is_float64(a: Any) -> bool:
    return isinstance(a, np.ndarray) and a.dtype == np.float64


def _finite(a: np.ndarray) -> bool:
    return not is_float(a.dtype) or bool(np.isfinite(a).all())
