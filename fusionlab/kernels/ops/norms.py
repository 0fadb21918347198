"""Common parts of the norms: when their kernels are chosen, and the ends of their derivatives."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..choose.choices import case_text
from ..op.arrays import Named
from ..op.chooser import wanted_or_all
from ..op.implementation import Call, ChoiceKind, ImplementationChoice
from ..op.op import Op

Array = Any


class NormOp(Op):
    """A norm that has kernels of its own for its call and its cotangent ("cuda").

    Attributes:
      on_a_cpu: why a site is left to XLA there.
      faster: why the kernels are taken where they are.
    """

    sizes = ("rows", "columns")
    on_a_cpu: ClassVar[tuple[ChoiceKind, str]]
    faster: ClassVar[str]

    @abc.abstractmethod
    def why_xla(self, call: Call) -> tuple[ChoiceKind, str] | None:
        """Why XLA's code is taken on a GPU although the kernels can run a "call" or a "cotangent"; None where they are taken."""

    @abc.abstractmethod
    def rows_of(self, shape: tuple[int, ...], attrs: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """The entries of x that share their statistics, and the settings on which the time depends, of x of this shape."""

    def case(self, role: str, shapes: Mapping[str, Any], **attrs: Any) -> str | None:
        """By sizes, dtype, operands and what is written: alike for a site and for the calls that become of it."""
        if role == "tangent":
            return None
        whole = next(shapes[name] for name in ("x", "sum", "ct", "ct_sum") if name in shapes)
        columns, content = self.rows_of(whole.shape, attrs)
        content |= {"dtype": attrs["dtypes"][0], "operands": sorted(attrs["present"]), "columns": columns}
        content |= {"rows": math.prod(whole.shape) // max(1, columns)}
        if role == "call":
            content["sum"] = "sum" in self.results(**attrs) + self.residual_names(**attrs) * bool(
                attrs.get("residuals")
            )
        else:
            content["whole"] = bool({"x", "residual", "shift"} & set(wanted_or_all(attrs)))
        return case_text(self.name, role, **content)

    def rule(self, call: Call, unable: str) -> ImplementationChoice:
        if call.device.platform != "cuda" or call.role == "tangent":
            return ImplementationChoice("xla", ChoiceKind.SAME_CODE, "")
        if refusal := self.refusal("cuda", call):
            return ImplementationChoice("xla", ChoiceKind.DEVICE, refusal)
        why = self.why_xla(call)
        return (
            ImplementationChoice("xla", *why) if why else ImplementationChoice("cuda", ChoiceKind.CHOSEN, self.faster)
        )

    def left(self, call: Call, decisions: Sequence[ImplementationChoice]) -> ImplementationChoice | None:
        if call.device.platform != "cuda":
            return ImplementationChoice("xla", *self.on_a_cpu)
        return super().left(call, decisions)


def means(u: Array, axes: tuple[int, ...]) -> Array:
    """Over axes that are kept."""
    return jnp.mean(u, axis=axes, keepdims=True)


def through_statistics(u: Array, xhat: Array, axes: tuple[int, ...], centred: bool = True) -> Array:
    """P(u): what of a change of x (or of the cotangent of xhat) the statistics over these axes leave; `centred` by a mean or not.

    xhat is rounded, and its mean no zero: what that leaves of P(u) would be summed up where a norm feeds another.
    """
    share = means(xhat * u, axes)
    if not centred:
        return u - xhat * share
    return u - means(u, axes) - (xhat - means(xhat, axes)) * share


def gradients(
    grads: dict[str, Array],
    wanted: tuple[str, ...],
    shardings: Named,
    present: tuple[str, ...],
    dtypes: tuple[str, ...],
) -> list[Array]:
    """Those wanted, sharded and rounded as their operands are."""
    for slot in wanted:
        if slot in shardings:  # one of x, scale and bias may be sharded along the features while another is not
            grads[slot] = jax.sharding.reshard(grads[slot], shardings[slot])
    as_given: dict[str, str] = dict(zip(present, dtypes, strict=True))
    return [grads[slot].astype(as_given[slot]) for slot in wanted]
