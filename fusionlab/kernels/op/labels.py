"""Axes by label: an op's labels for the axes of all it reads and gives, and what follows for each of its primitives."""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ...showing import Shown
from .primitive import FusedPrimitive, attributes_in, wanted_of

Array = Any


@dataclass(frozen=True, repr=False)
class Axes(Shown):
    """A label for each axis of what an op reads and gives.

    Attributes:
      labels: slot, residual or "out" -> the labels of its axes; a tangent and a gradient have their slot's. "n/8" is an axis with one
        entry for every eight along "n" (packed bits). A name that is missing has axes that nothing may split.
      whole: labels along which no device may hold a part, in no role.

    A label that is in what a gradient reads but not in the gradient itself is summed over, and a part of the range is to give a part
    of the sum: where it does not (an axis that a softmax or a norm runs over), the label belongs into `whole`.
    """

    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()


@dataclass(frozen=True, repr=False)
class SummedCall(Shown):
    """A call whose contracted axes are split: the call that gives one part of a sum, and the rest.

    Attributes:
      params: of the call that computes a part; it takes the slots in `params["present"]` and its first result is the part.
      finish: (sum of the parts, operands by slot) -> [out, *residuals], in plain jnp.
      part: operands by slot -> the part, in plain jnp, where no call of the op gives it; `params` are not used then.
    """

    params: Mapping[str, Any]
    finish: Callable[[Array, Mapping[str, Array]], list[Array]]
    part: Callable[[Mapping[str, Array]], Array] | None = None


def result_rank(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The rank of "out", or of the first operand of a call, for an op whose result has the same."""
    return len(shapes.get("out", next(iter(shapes.values()))))


class LabelledAxis(NamedTuple):
    """One axis of one tensor: an entry for every `per` indices along a label."""

    label: str
    per: int

    def fits(self, size: int, length: int) -> bool:
        """Whether an axis of this size has all entries along a label of this length; a packed one of size 1 broadcasts."""
        return self.per * size == length and (self.per == 1 or size > 1)


Tensor = tuple[LabelledAxis | None, ...]  # None: an axis nothing may split


@dataclass(frozen=True)
class Labels:
    """The axes of one equation of a fused op.

    Attributes:
      operands, results: for each, its axes.
      by_name: slot, residual or "out" -> its axes.
      sizes: label -> its length.
      summed: slot wanted -> the labels its gradient, or the term of its tangent, is summed over; empty for a call.
      contracted: labels a call sums over.
      whole: labels that are not split.
    """

    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    by_name: Mapping[str, Tensor]
    sizes: Mapping[str, int]
    summed: Mapping[str, tuple[str, ...]]
    contracted: frozenset[str]
    whole: frozenset[str]

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.operands + self.results

    @cached_property
    def _per(self) -> dict[str, int]:
        """Label -> how many indices its coarsest axis takes together."""
        per: dict[str, int] = {}
        for axis in (a for axes in self.tensors for a in axes if a is not None):
            per[axis.label] = max(per.get(axis.label, 1), axis.per)
        return per

    def splits(self, label: str, parts: int) -> bool:
        """Whether a label can be cut into so many equal parts: with unequal ones XLA pads, and padding would be summed."""
        return label not in self.whole and self.sizes[label] % (parts * self._per[label]) == 0

    def rule(self) -> tuple[str, tuple[str, ...], dict[str, int]]:
        """Shardy's rule, as `custom_partitioning` takes it: the text, factors that are not to be split, sizes of inner factors.

        A packed label is two factors: "m (n n_8), ... -> m n". Where a mesh axis is longer than its coarse axis, or no divisor of it,
        Shardy gives that a part of a mesh axis, for which there is no name: nobody is to read it as one (`decode_shardings`).
        """
        alone = iter(range(sum(map(len, self.tensors))))
        packed = self._per
        sizes = {f"{label}_{per}": per for label, per in packed.items() if per > 1}
        unsplit: dict[str, None] = {}

        def factor(axis: LabelledAxis | None) -> str:
            if axis is None:
                name = f"whole{next(alone)}"
                unsplit[name] = None
                return name
            if axis.label in self.whole:
                unsplit[axis.label] = None
            if axis.per == packed[axis.label]:
                return axis.label
            return f"({axis.label} {axis.label}_{packed[axis.label]})"

        sides = [", ".join(" ".join(map(factor, axes)) for axes in side) for side in (self.operands, self.results)]
        return " -> ".join(sides), tuple(unsplit), sizes


def labels_of(
    primitive: FusedPrimitive, params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]
) -> Labels:
    """The axes of an equation with these operands and results (anything with a shape)."""
    op, attrs, role = primitive.op, attributes_in(params), primitive.role
    wanted = () if role == "call" else wanted_of(params)
    reads = [origin(n) for n in primitive.operand_names(params)]
    gives = _results_of(primitive, params)
    named = [*zip(reads, operands, strict=True), *zip(gives, results, strict=False)]
    shapes = {name: tuple(value.shape) for name, value in named}
    shapes.setdefault("out", tuple(params.get("shape", ())))
    axes = op.axes(shapes, **attrs)
    by_name, sizes, broken = _normal(shapes, axes)
    summed = {slot: _summed_for(primitive, slot, by_name, attrs) for slot in wanted}
    contracted = frozenset(_labels(by_name, *reads)) - set(_labels(by_name, "out")) if role == "call" else frozenset()
    unsplit = frozenset(x for x in contracted if x.rstrip(string.digits) not in op.across)
    unsplit = unsplit if unsplit and op.summed_call(params) is None else frozenset()
    return Labels(
        tuple(by_name[n] for n in reads),
        tuple(by_name[n] for n, _ in zip(gives, results, strict=False)),
        by_name,
        sizes,
        summed,
        contracted,
        axes.whole | unsplit | broken,
    )


def _results_of(primitive: FusedPrimitive, params: Mapping[str, Any]) -> Sequence[str]:
    """What each result of an equation is: a result or residual of the op, or the slot whose gradient it is."""
    if primitive.role == "call":
        op, attrs = primitive.op, attributes_in(params)
        return (*op.results(**attrs), *op.residual_names(**attrs))
    return primitive.results_given(params) if primitive.role == "tangent" else wanted_of(params)


def _summed_for(
    primitive: FusedPrimitive, slot: str, by_name: Mapping[str, Tensor], attrs: Mapping[str, Any]
) -> tuple[str, ...]:
    """The labels that a slot's gradient, or the term of its tangent, is summed over."""
    moved, given = ("out", slot) if primitive.role == "cotangent" else (slot, "out")
    read = _labels(by_name, moved, *primitive.op.saved_names((slot,), attrs))
    return tuple(label for label in read if label not in _labels(by_name, given))


def origin(name: str) -> str:
    """The slot, residual or result that an operand is, or is the tangent or cotangent of."""
    return "out" if name == "ct" else name.removeprefix("d_").removeprefix("ct_")


def _labels(by_name: Mapping[str, Tensor], *names: str) -> dict[str, None]:
    return {axis.label: None for name in names for axis in by_name[name] if axis is not None}


def _normal(
    shapes: Mapping[str, tuple[int, ...]], named: Axes
) -> tuple[dict[str, Tensor], dict[str, int], frozenset[str]]:
    """Axes of everything named, the length of each label, and the labels that no split of a packed axis can follow.

    An axis of another length than its label's (1 where it broadcasts) is not split.
    """
    found = {
        name: list(zip(map(_axis, named.labels[name]), shape, strict=True))
        for name, shape in shapes.items()
        if name in named.labels
    }
    pairs = list(itertools.chain(*found.values()))
    sizes = _lengths(pairs)
    # A factor of a sharding rule has one size on all arrays: an axis of another size is None, which `Labels.rule` lets nobody split.
    by_name: dict[str, Tensor] = {name: (None,) * len(shape) for name, shape in shapes.items()}
    for name, axes in found.items():
        by_name[name] = tuple(a if a.fits(size, sizes[a.label]) else None for a, size in axes)
    return by_name, sizes, frozenset(a.label for a, size in pairs if a.per > 1 and not a.fits(size, sizes[a.label]))


def _lengths(pairs: Sequence[tuple[LabelledAxis, int]]) -> dict[str, int]:
    """Each label is as long as its longest axis with an entry for each index; a packed axis counts only if there is no such axis."""
    sizes: dict[str, int] = {}
    for axis, size in sorted(pairs, key=lambda pair: pair[0].per):
        known = sizes.get(axis.label, 0 if axis.per == 1 else axis.per * size)
        sizes[axis.label] = max(known, size) if axis.per == 1 else known
    return sizes


def _axis(text: str) -> LabelledAxis:
    label, _, per = text.partition("/")
    return LabelledAxis(label, int(per or 1))
