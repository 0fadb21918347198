"""Composite ops: one named node that is made of other fused ops, its *pieces*.

A composite op stays one equation in a trace and in a program that runs forward. When differentiated, it dissolves into its pieces,
which have fused backward passes of their own; so it keeps nothing for backward, and has no tangent or cotangent primitive. When
batched, it stays itself if the batch only extends its batch axis, and dissolves otherwise.

Its operands are many and mostly optional, so a call names those it has: `call(*operands, present=names)`. A name with a number behind it
("up.1") is that of one of a row of layers. It always gives a tuple.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.interpreters import ad

from ...device import Device
from ...errors import ArgumentError
from ...graph.cost.cost import arithmetic_of
from ...graph.jax_compat import child_jaxprs
from ...graph.program.trace import block_of_jaxpr
from .arrays import batch_size, explicit_sharding
from .implementation import Implementation, Residual
from .op import Op, jvp_of_moving, rule
from .primitive import FusedPrimitive, Marker, Meaning

Array = Any

_NO_LINEAR = "a composite op has no tangent or cotangent of its own: its pieces are differentiated instead"


def _no_linear(*_: Any, **__: Any) -> Any:
    raise TypeError(_NO_LINEAR)


def composite_implementation(
    name: str, summary: str, forward: Callable[..., list[Array]], *how: Any, **more: Any
) -> Implementation:
    """One way to run a composite op. `forward`: `(**operands by name, residuals=False, **attrs) -> results`; the rest as `Implementation`
    has it behind the tangent and the cotangent."""
    return Implementation(name, summary, forward, _no_linear, _no_linear, *how, **more)


class CompositePrimitive(FusedPrimitive):
    """The primitive of a composite op: a call, with `residuals` False."""

    op: CompositeOp

    def __init__(self, name: str, op: CompositeOp):
        super().__init__(name, op, "call")

    def pieces(self, params: Mapping[str, Any], avals: Sequence[Any]) -> Any:
        """The jaxpr of what a call of operands with these types dissolves into."""
        return jax.make_jaxpr(self.function(params, self.op.dissolved(params)))(*avals)

    def arithmetic(self, params: Mapping[str, Any], avals: Sequence[Any]) -> tuple[int, int]:
        """Operations and transcendentals of a call: those of its pieces."""
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        return arithmetic_of(block_of_jaxpr(self.pieces(params, shapes)))


class CompositeOp(Op):
    """An op made of others. A subclass defines what `Op` asks for, and `fold` and `unfold`: how a batch becomes more of its batch axis."""

    def __init__(self) -> None:
        self._call = CompositePrimitive(self.name, self)
        self._register(self._call)
        ad.primitive_jvps[self._call] = rule(self._jvp_of_call)

    @abc.abstractmethod
    def fold(
        self, values: list[Array], dims: list[int | None], params: dict[str, Any]
    ) -> tuple[list[Array], dict[str, Any]] | None:
        """The call that computes a whole batch, the batch in front of (and one with) the op's own; None if there is no such call."""

    def dissolved(self, attrs: Mapping[str, Any]) -> str:
        """The implementation whose pieces are differentiated."""
        return attrs["implementation"] or self.composed

    @property
    @abc.abstractmethod
    def composed(self) -> str:
        """The implementation that is made of the project's own ops."""

    # What `Op` asks for and a composite op has no need of.

    @property
    def primitives(self) -> dict[str, FusedPrimitive]:
        return {self.name: self._call}

    def residuals(self, *operands: Any, **attrs: Any) -> tuple[Residual, ...]:
        """Nothing: its pieces save what they need."""
        return ()

    def call_with_residuals(self, *operands: Any, **attrs: Any) -> tuple[Array, ...]:
        """As `call`, without residuals."""
        return self.call(*operands, **attrs)

    # What a call names and gives.

    def _prepared(
        self, operands: Sequence[Any], attrs: Mapping[str, Any], device: Device | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        names = self._names(operands, attrs)
        given = {name: a for name, a in zip(names, operands, strict=True) if a is not None}
        present, full = self.prepare(given, {k: v for k, v in attrs.items() if k != "present"})
        return present, full | {"present": tuple(present)}

    def _names(self, operands: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[str, ...]:
        names = tuple(attrs.get("present", ()))
        if len(names) != len(operands):
            raise ArgumentError(
                f"{self.name}: {len(operands)} operands and present={names!r}, needed a name for each operand, in order"
            )
        if twice := [n for n in names if names.count(n) > 1]:
            raise ArgumentError(f"{self.name}: {twice[0]} is given twice, needed each operand once")
        return names

    def _given(self, results: Sequence[Array]) -> tuple[Array, ...]:
        return tuple(results)

    def _marks(self, present: Mapping[str, Array], device: Device, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """Where a piece needs it."""
        if jax.device_count() == 1:
            return {}
        pieces = self._call.pieces({**attrs, "residuals": False}, list(present.values()))
        return {"partitioned": Marker()} if _marked(pieces.jaxpr) else {}

    # Transformations.

    def _jvp_of_call(
        self, primals: Sequence[Array], tangents: Sequence[Any], **params: Any
    ) -> tuple[list[Array], list[Any]]:
        by_reference = params["gradient"] == "reference"
        pieces = self._call.function(params, "xla" if by_reference else self.dissolved(params))
        outs, moved = jvp_of_moving(pieces, primals, tangents)
        return (self._call.bind(*primals, **params) if by_reference else outs), moved

    def _batching_rule(
        self, primitive: FusedPrimitive, operands: Sequence[Array], dims: Sequence[Any], **params: Any
    ) -> tuple[list[Array], list[int]]:
        axes = [d if isinstance(d, int) else None for d in dims]
        folded = None
        if not any(explicit_sharding(a) is not None for a in operands):
            folded = self.fold(list(operands), axes, dict(params))
        if folded is None:
            meaning: Meaning = primitive.function(params, self.dissolved(params))
            outs = jax.vmap(meaning, in_axes=tuple(axes))(*operands)
        else:
            size, (values, params) = batch_size(list(operands), axes), folded
            outs = [a.reshape(size, a.shape[0] // size, *a.shape[1:]) for a in primitive.bind(*values, **params)]
        return outs, [0] * len(outs)


def _marked(jaxpr: Any) -> bool:
    """Whether an equation in it, or in what it holds, has to know the devices."""
    inner = (child for eqn in jaxpr.eqns for _, _, child in child_jaxprs(eqn))
    return any("partitioned" in eqn.params for eqn in jaxpr.eqns) or any(_marked(getattr(j, "jaxpr", j)) for j in inner)
