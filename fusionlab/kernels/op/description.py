"""An op's description of itself: what its primitives take, keep and give, and the names of their axes. `Op` asks, a subclass answers."""

from __future__ import annotations

import abc
import itertools
import string
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from ...device import Device
from ...graph.canonical.fused_nodes import FusedForm
from .arrays import Named, batch_to_front, canonical_precision
from .chooser import Chooser
from .labels import Axes, SummedCall, origin
from .primitive import wanted_of

Array = Any


class Description(Chooser):
    """The questions, with the answers of an op that has nothing to say to them."""

    slots: ClassVar[tuple[str, ...]]
    defaults: ClassVar[Mapping[str, Any]]
    # Result -> of how many arrays its cotangent may be the sum, that an implementation adds up itself; one, where it is not named.
    addends: ClassVar[Mapping[str, int]] = {}
    is_users: ClassVar[bool] = False  # whether its meaning is a user's code
    # The attributes that make another function, and those that are numbers, by which the search tells calls apart; without traits it does
    # not see the op.
    traits: ClassVar[tuple[str, ...] | None] = None
    numbers: ClassVar[tuple[str, ...]] = ()
    # Labels, without their numbers, of axes that no device may hold a part of.
    whole: ClassVar[frozenset[str]] = frozenset()
    # Likewise, of axes that a call sums over and whose parts its implementations put together themselves: they are given `across`, for each
    # such label that is split the mesh axes that it is split over.
    across: ClassVar[frozenset[str]] = frozenset()
    # Of an op whose batch is more rows: what has entries of its own for each row, beside the result, and the attribute that numbers an axis
    # behind the rows, or counts them, if one does.
    rows: ClassVar[tuple[str, ...]] = ()
    behind_rows: ClassVar[str | None] = None

    @abc.abstractmethod
    def prepare(self, given: Mapping[str, Any], attrs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Checks the operands given (slot -> anything with shape and dtype) and the attributes.

        Returns the operands as the primitives take them, and all attributes but `present` in canonical, hashable form.
        """

    def results(self, **attrs: Any) -> tuple[str, ...]:
        """The names of what a call gives; the cotangent of one that is not "out" is named "ct_<result>"."""
        return ("out",)

    def residual_names(self, **attrs: Any) -> tuple[str, ...]:
        """The residuals that the forward saves, apart from its operands and its results."""
        return ()

    def reads(self, wanted: tuple[str, ...], **attrs: Any) -> frozenset[str]:
        """The slots, residuals and results that the gradients of the slots in `wanted` read."""
        return frozenset(self.slots)

    def batch(
        self, role: str, names: tuple[str, ...], values: list[Array], dims: list[int | None], params: dict[str, Any]
    ) -> tuple[list[Array], dict[str, Any]] | None:
        """The same primitive over a batch: operands and parameters with the batch as axis 0 of every result.

        `names` are slots and residuals; tangents are named "d_<slot>", the cotangent "ct". None: it cannot take the batch. By default a
        batch of `rows` is more of them; one of anything else (weights, say), or of its gradients, is not the same op.
        """
        has_rows = [origin(name) in ("out", *self.rows) for name in names]
        if any(d is not None and not own for d, own in zip(dims, has_rows, strict=True)):
            return None
        # Other gradients are sums over rows: each of the batch has its own, more rows would have one together.
        if role == "cotangent" and not set(wanted_of(params)) <= set(self.rows):
            return None
        at, batched, along = (list(itertools.compress(a, has_rows)) for a in (range(len(names)), values, dims))
        moved = dict(zip(at, batch_to_front(batched, along), strict=True))
        axis = {} if self.behind_rows is None else {self.behind_rows: params[self.behind_rows] + 1}
        return [moved.get(i, v) for i, v in enumerate(values)], params | axis

    def for_device(self, shapes: Mapping[str, Any], attrs: dict[str, Any], device: Device) -> dict[str, Any]:
        """The attributes `prepare` gave, completed by those that depend on the device as well."""
        return attrs

    def operand_shapes(self, shapes: dict[str, Any], **attrs: Any) -> dict[str, Any]:
        """The operands of a call of these shapes once settings among the attributes have changed."""
        return shapes

    def plain(self, params: Mapping[str, Any], shapes: dict[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """A primitive's parameters and operands (by name) with residuals laid out as the reference has them."""
        return params, shapes

    def share(self, shapes: Mapping[str, Any], /, **attrs: Any) -> float:
        """The part of its meaning's arithmetic that the op has to do, for a meaning that computes what it then throws away."""
        return 1.0

    @abc.abstractmethod
    def formula(self, **attrs: Any) -> str:
        """Its computation, for a reader."""

    def labels(self, shapes: Mapping[str, tuple[int, ...]], /, **attrs: Any) -> Mapping[str, tuple[str, ...]]:
        """Slot, residual or "out" -> a label for each of its axes, as `Axes` has them; without any, each device computes everything.

        `shapes` has those of the slots of a call, in order, or of the slots, residuals and "out" that one primitive takes and gives: "out"
        always, others maybe.
        """
        return {}

    def form(self, shapes: Mapping[str, tuple[int, ...]], /, **attrs: Any) -> FusedForm | None:
        """A label for each axis of the operands (slot -> shape) and of the result; None for a call the search is not to see."""
        if self.traits is None:
            return None
        labels = self.labels(shapes, **attrs)
        traits, numbers = (tuple((name, attrs[name]) for name in names) for names in (self.traits, self.numbers))
        return FusedForm(tuple(shapes), tuple(labels[slot] for slot in shapes), labels["out"], traits, numbers)

    def axes(self, shapes: Mapping[str, tuple[int, ...]], /, **attrs: Any) -> Axes:
        """Labels for the axes of all it reads and gives: how opaque code is split among devices."""
        labels = self.labels(shapes, **attrs)
        return Axes(
            labels, frozenset(x for own in labels.values() for x in own if x.rstrip(string.digits) in self.whole)
        )

    def summed_call(self, params: Mapping[str, Any]) -> SummedCall | None:
        """How a call is computed whose contracted axes are split; None: every device needs them whole."""
        return None

    def anchor_dimensions(self, params: Mapping[str, Any]) -> Any:
        """`dimension_numbers` of the product at the op's heart, or None for an op without one."""
        return None

    def again(self, params: Mapping[str, Any]) -> Callable[[Named], Array] | None:
        """The first result of a call with these parameters, entry by entry, from what is kept of it: a function of its operands and its
        other results, by name. None: it takes more than that."""
        return None

    def row_sum(self, params: Mapping[str, Any]) -> str | None:
        """The slot whose gradient is the sum of the cotangent over all axes but the last, if a cotangent with these parameters gives it."""
        return None

    def summing(self, slot: str, params: Mapping[str, Any], dtype: str) -> tuple[dict[str, Any], str] | None:
        """The parameters of a cotangent with which it also gives the sum of a slot's gradient over all axes but the last, in `dtype`, and
        the slot that this is the gradient of. It reads nothing more. None: it cannot."""
        return None

    def saved_names(self, wanted: tuple[str, ...], attrs: Mapping[str, Any]) -> tuple[str, ...]:
        """The values that the gradients of the slots in `wanted` read, in the order in which the primitives take them."""
        read = self.reads(wanted, **attrs)
        return tuple(n for n in (*self.slots, *self.results(**attrs), *self.residual_names(**attrs)) if n in read)

    def at_precision_set(self, params: dict[str, Any]) -> dict[str, Any]:
        """The parameters of a gradient, at the precision that the user has set where it is pulled back, if the call asked for none: JAX
        makes the products of a gradient as it transposes, and as is set there.
        """
        asks_for_none = params.get("precision", "") is None
        return params | {"precision": canonical_precision(None)} if asks_for_none else params
