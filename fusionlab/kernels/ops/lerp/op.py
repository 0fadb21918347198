"""`lerp`: x + w * (y - x) as one op, of operands that broadcast against each other in any way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from ....errors import ArgumentError
from ....tracebacks import own_lines_hidden
from ...choose.choices import case_text
from ...op.arrays import batch_size, check_dtypes, check_given, with_rank
from ...op.implementation import Call, ChoiceKind, Implementation, ImplementationChoice
from ...op.labels import result_rank
from ...op.op import Op
from ...op.primitive import wanted_of
from . import cuda, reference
from .axes import MAX_RANK, BroadcastAxes, collapse

Array = Any

SIZES = tuple(f"axis {i}" for i in range(MAX_RANK))
XLA = Implementation.of_reference("x + w * (y - x) as jnp code", reference)


class Lerp(Op):
    """Linear interpolation; see `lerp` below. The primitives take operands of one rank, the missing axes of size 1 in front."""

    name = "lerp"
    slots = ("x", "y", "w")
    sizes = SIZES
    traits = ()
    at_site = (
        ("call", {}),
        ("cotangent", {"live": (True, True, False)}),
        ("cotangent", {"live": (True, True, True)}),
    )
    defaults: ClassVar[Mapping[str, Any]] = {}
    implementations: ClassVar[Mapping[str, Implementation]] = {
        "xla": XLA,
        "cuda": XLA.by_kernels(
            "cuda",
            "FusionLab's own kernels: every gradient and sum of the backward in one pass over the cotangent",
            cuda,
        ),
    }

    def prepare(self, given: Mapping[str, Any], attrs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        full = self.with_defaults(attrs)
        check_given(self.name, given, self.slots)
        check_dtypes(self.name, given)
        rank = len(_broadcast_shape(given))
        present = {slot: with_rank(given[slot], rank) for slot in self.slots}
        full["broadcast"] = tuple((slot, tuple(a.shape), np.dtype(a.dtype).name) for slot, a in present.items())
        return present, full

    def reads(self, wanted: tuple[str, ...], **attrs: Any) -> frozenset[str]:
        of_ends = {"w"} if {"x", "y"} & set(wanted) else set()
        return frozenset(of_ends | ({"x", "y"} if "w" in wanted else set()))

    def batch(
        self, role: str, names: tuple[str, ...], values: list[Array], dims: list[int | None], params: dict[str, Any]
    ) -> tuple[list[Array], dict[str, Any]] | None:
        """One more leading axis, of size 1 where neither an operand nor its tangent is batched.

        A gradient has the whole batch, also that of an operand the batch shares. `broadcast` has one shape for an operand, its tangent and
        its gradient: one that is not batched but has one of these that is becomes a batch of the same.
        """
        size = batch_size(values, dims)
        moves = {name.removeprefix("d_") for name, d in zip(names, dims, strict=True) if d is not None}
        if role == "cotangent":
            moves |= {"ct", *wanted_of(params)}
        result = []
        for name, a, d in zip(names, values, dims, strict=True):
            moved = a[None] if d is None else jnp.moveaxis(a, d, 0)
            whole = name.removeprefix("d_") in moves
            result.append(jnp.broadcast_to(moved, (size, *moved.shape[1:])) if whole else moved)
        broadcast = tuple((s, (size if s in moves else 1, *shape), dtype) for s, shape, dtype in params["broadcast"])
        return result, params | {"broadcast": broadcast}

    def labels(self, shapes: Mapping[str, tuple[int, ...]], /, **attrs: Any) -> Mapping[str, tuple[str, ...]]:
        """All operands are labelled as the result is; along an axis of size 1 nothing is split."""
        return dict.fromkeys((*self.slots, "out"), tuple(f"a{i}" for i in range(result_rank(shapes))))

    def rule(self, call: Call, unable: str) -> ImplementationChoice:
        return ImplementationChoice("xla", ChoiceKind.UNMEASURED, "nothing was measured faster")

    def _together(self, axis: BroadcastAxes) -> str:
        """The names of the operands that have an axis: "xw"."""
        return "".join(slot for slot in self.slots if slot in axis.slots)

    def case(self, role: str, shapes: Mapping[str, Any], **attrs: Any) -> str | None:
        """By the axes of the result, those that all operands share taken together, which operands have each, and what is wanted."""
        operands = {slot: shape for slot, shape, _ in attrs["broadcast"]}
        if role == "tangent" or any(0 in shape or len(shape) > MAX_RANK for shape in operands.values()):
            return None
        axes = collapse(operands, self.slots)
        content: dict[str, Any] = {name: axis.size for name, axis in zip(SIZES, axes, strict=False)}
        content["axes"] = [self._together(axis) for axis in axes]
        content["dtype"] = attrs["broadcast"][0][2]
        if role == "cotangent":
            content["wanted"] = list(wanted_of(attrs))
        return case_text(self.name, role, **content)

    def left(self, call: Call, decisions: Sequence[ImplementationChoice]) -> ImplementationChoice | None:
        """A site is left where it gains in no role. A program has one of the backward calls: one that was measured is enough."""
        by_role: dict[str, set[ChoiceKind]] = {}
        for (role, _), decision in zip(self.at_site, decisions, strict=True):
            by_role.setdefault(role, set()).add(decision.kind)
        kinds = set().union(*(found - {ChoiceKind.UNMEASURED} or found for found in by_role.values()))
        if call.device.platform != "cuda" or ChoiceKind.CHOSEN in kinds:
            return None
        if refusal := self.implementations["cuda"].refuses(call.shapes, call.device, **call.attrs):
            why = f"nothing but XLA's code can run it there: {refusal}"
            return ImplementationChoice("xla", ChoiceKind.DEVICE, why)
        where, tune = call.device.arch or "this architecture", "(fusionlab.tune measures)"
        if kinds == {ChoiceKind.UNMEASURED}:
            return ImplementationChoice("xla", ChoiceKind.UNMEASURED, f"nothing near it was measured on {where} {tune}")
        kind, ways = ChoiceKind.SLOWER, "forward and backward"
        if ChoiceKind.UNMEASURED in kinds:
            kind, ways = ChoiceKind.UNMEASURED, "as far as it was measured"
        return ImplementationChoice("xla", kind, f"on {where} XLA's code was measured as fast {ways} {tune}")

    def formula(self, **_: Any) -> str:
        return "x + w * (y - x)"


def _broadcast_shape(given: Mapping[str, Any]) -> tuple[int, ...]:
    shapes = {slot: tuple(a.shape) for slot, a in given.items()}
    try:
        return np.broadcast_shapes(*shapes.values())
    except ValueError as e:
        text = ", ".join(f"{slot} {shape}" for slot, shape in shapes.items())
        raise ArgumentError(
            f"lerp: shapes {text} do not broadcast; needed, aligned right, equal sizes along each axis, or 1"
        ) from e


LERP = Lerp()


@own_lines_hidden
def lerp(x: Array, y: Array, w: Array | float, *, implementation: str | None = None) -> Array:
    """x + w * (y - x) as one op, differentiable to any order: x where w is 0, y (up to rounding) where it is 1.

    Args:
      x, y, w: arrays of any ranks that broadcast against each other as NumPy's do; a Python number for w is taken in x's dtype.
      implementation: None lets the op choose; "xla" is the plain jnp code, "cuda" FusionLab's own kernels.

    Returns:
      Of the shape all three broadcast to, in their dtype (float32, bfloat16, float16 or float64; they must agree). Arithmetic is float32
      (float64 for float64), rounded once. When differentiated, it keeps w, and also x and y if the gradient of w is wanted; only
      the wanted gradients are computed: dx = (1 - w) * ct, dy = w * ct, dw = (y - x) * ct, summed to its operand's shape in the
      arithmetic's dtype.

    Raises:
      ArgumentError: shapes that do not broadcast, dtypes that differ or are not floats; the message names the argument.
      UnknownNameError: no implementation has that name.
      BackendError: the named implementation cannot run this call here.

    Source: `torch.lerp` has the same definition (PyTorch documentation).

    >>> import jax.numpy as jnp
    >>> lerp(jnp.zeros(2), jnp.asarray([2.0, 4.0]), 0.25).tolist()
    [0.5, 1.0]
    """
    if isinstance(w, int | float) and not isinstance(w, bool):
        w = jnp.asarray(w, jnp.result_type(x))
    return LERP.call(x, y, w, implementation=implementation)
