"""What a label outside of the vocabulary picks: the op's treatments are tried on such labels, values and gradients compared."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from ....graph.certify.certify import with_gradients, without_device_sums
from ....graph.certify.inputs import Reduction, inputs_of, summed_with
from ....graph.certify.reduced_sizes import at_sizes
from ....graph.certify.verdict import relative_error, tolerance_of
from ....graph.declined import Declined
from ....graph.interpret.evaluate import evaluate, traced_once
from ....graph.interpret.limits import CannotEvaluate
from ....graph.matching.region import Region
from ....graph.program.in_shard_map import make_jaxpr
from ....kernels import plain_meaning_of
from ....kernels.ops.linear_cross_entropy.settings import OUT_OF_RANGE
from ...engine.base import Substitution
from .heads import Head
from .numbers import unevaluated
from .rows import Cut

ODD = "treats labels outside of the vocabulary in a way that the fused op does not have"
ODD_EDIT = "subtract the maximum by jax.nn.log_softmax or jax.nn.logsumexp, or pick the logit by jnp.take_along_axis"
_FAR = 100  # as of labels that are ignored


@dataclass(frozen=True)
class Treatment:
    """What a label outside of the vocabulary picks.

    Attributes:
      name: the op's `out_of_range`.
      nan: whether the loss is NaN there, although it has that gradient.
      lse: whether the loss lacks its lse there, although it has that gradient: that of MaxText, whose rule takes the targets to sum to 1.
    """

    name: str = "nan"
    nan: bool = False
    lse: bool = False

    @property
    def differs(self) -> bool:
        """Whether the loss is another there than the op's."""
        return self.nan or self.lse


# `take_along_axis` of a log_softmax is NaN for such a label, and passes no cotangent on.
_PROMISED = Treatment("promise_in_bounds")
_TREATMENTS = (*map(Treatment, OUT_OF_RANGE), Treatment("drop", nan=True), Treatment("zero", lse=True))


def treatment(
    cut: Cut, head: Head, plan: Callable[[Treatment], Substitution], others: Sequence[int] = ()
) -> Treatment | None:
    """The op's treatment of labels out of range that agrees with a region's; None if none does. `others` are the numbers of its further
    roots in which labels count.

    Raises:
      Declined: the region cannot be evaluated, or has another gradient whatever the labels are.
    """
    region = cut.region.of(cut.region.root)
    avals, out = [v.aval for v in region.inputs], region.root.aval
    fn = jex_core.jaxpr_as_fun(region.jaxpr())
    old = with_gradients(lambda *a: fn(*a)[0], avals, out)
    inline = traced_once(without_device_sums(plain_meaning_of, region.sums.axes))
    weights, tolerance = summed_with(old), tolerance_of((*region.inputs, region.root))

    last = list[Reduction]()  # the sizes at which the program before was evaluated, which is compared with the next

    def results(program: Any, labels: Sequence[int]) -> list[list[np.ndarray]]:
        def attempt(reduction: Reduction) -> list[list[np.ndarray]]:
            drawn = _drawn(region, cut, reduction, labels, weights)
            found = [evaluate(program, args, sizes, inline) for sizes, args in drawn]
            last[:] = [reduction]
            return found

        with contextlib.suppress(CannotEvaluate):
            if last:
                return attempt(last[0])
        return at_sizes(attempt, avals, region.positions)

    def replacement(found: Treatment) -> Any:
        call = plan(found).call
        return with_gradients(lambda *a: call(*a)[0] if cut.region.others else call(*a), avals, out)

    wanted = functools.cache(functools.partial(results, old))

    def beside(found: Treatment, labels: tuple[int, ...]) -> Iterator[tuple[Any, Any]]:
        call = plan(found).call
        for i in others:
            was = replace(cut.region, others=cut.region.roots).of(cut.region.roots[i]).jaxpr()
            now = make_jaxpr(lambda *a, i=i: [call(*a)[i]], avals)
            old, new = (results(_with_cotangent(p, avals, out), labels) for p in (was, now))
            yield from zip(itertools.chain(*old), itertools.chain(*new), strict=True)

    def alike(found: Treatment, labels: tuple[int, ...], values: bool = False) -> bool:
        first = slice(0, 1 if values else None)
        if any(relative_error(a, b) > tolerance for a, b in beside(found, labels)):
            return False
        pairs = zip(wanted(labels), results(replacement(found), labels), strict=True)
        each = ((a, b) for old, new in pairs for a, b in zip(old[first], new[first], strict=True))
        return all(relative_error(a, b) <= tolerance for a, b in each)

    inside, odd = (0, (head.counted or head.classes) - 1), tuple(_odd(head, cut))
    filled = () if head.counted is None else (head.counted, head.classes - 1)
    try:
        if not alike(_TREATMENTS[0], inside):
            stops = [n for n in region.nodes if n.primitive == "stop_gradient"]
            code = "stop_gradient" if stops else "gradient"
            raise Declined(f"{region.root!r} has another gradient than the fused op", code, stops[-1:])
        if filled and not alike(_TREATMENTS[0], filled):
            raise Declined(f"{region.root!r} has another value for labels of classes that are masked", "value")
        found = next((found for found in _TREATMENTS if alike(found, odd)), None)
        # Of a broken promise only the value is defined by what XLA does; what gradient JAX makes of it depends on the spelling.
        promised = _PROMISED if found is None and _promises(region, head) else None
        return found or (promised if promised is not None and alike(promised, odd, values=True) else None)
    except CannotEvaluate as error:
        raise unevaluated(region, error) from error


def _with_cotangent(closed: Any, avals: Sequence[Any], out: Any) -> Any:
    """A jaxpr that takes a cotangent as well."""
    fn = jex_core.jaxpr_as_fun(closed)
    return make_jaxpr(lambda *args: fn(*args[:-1]), [*avals, out])


def _promises(region: Region, head: Head) -> bool:
    """Whether a program promises that all labels are in the vocabulary, as indexing does in JAX."""
    reads = (n for n in region.nodes if n.primitive == "gather" and head.classes in n.inputs[0].shape)
    return any(n.params["mode"] == jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS for n in reads)


def _odd(head: Head, cut: Cut) -> Iterator[int]:
    """Labels inside and outside of the vocabulary."""
    n, kind = head.classes, np.iinfo(cut.labels.dtype)
    for label in (0, n, -1, (head.counted or n) - 1, -n - 1, n + 7, -_FAR, -n, kind.max, kind.min):
        if kind.min <= label <= kind.max:
            yield label


def _drawn(
    region: Region, cut: Cut, reduction: Reduction, odd: Sequence[int], weights: Any
) -> Iterator[tuple[Any, list[Any]]]:
    """Drawn operands, with each of the odd labels in one of the draws."""
    avals, left = [v.aval for v in region.inputs], list(odd)
    at = next(i for i, v in enumerate(region.inputs) if v.id == cut.labels.id)
    seed = 0
    while left:
        sizes, args = inputs_of(avals, region.root.aval, reduction, seed, weights=weights)
        count = args[at].size
        taken, left, seed = left[:count], left[count:], seed + 1
        args[at] = np.resize(np.asarray(taken, args[at].dtype), args[at].shape)
        yield sizes, args
