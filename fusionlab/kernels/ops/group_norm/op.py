"""`group_norm`: GroupNorm, a scale, a bias and SiLU behind them as one op."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ....errors import ArgumentError
from ....tracebacks import own_lines_hidden
from ...op.arrays import check_given, check_name, check_vectors, whole_number
from ...op.implementation import Call, ChoiceKind, Implementation
from ...op.labels import result_rank
from ..norm_checks import check_norm_dtypes, checked_epsilon
from ..norms import NormOp
from . import choosing, cuda, reference

Array = Any

_VECTORS = ("scale", "bias")
XLA = Implementation.of_reference("statistics, normalisation, scale, bias and activation as jnp code", reference)


class GroupNorm(NormOp):
    """GroupNorm; see `group_norm` below for shapes and attributes."""

    name = "group_norm"
    slots = ("x", "scale", "bias")
    whole = frozenset("png")  # the statistics run over all but images
    rows, behind_rows = ("x", "mean", "rstd"), "batch_axes"  # a batch of images is more images
    at_site = (("call", {}), ("cotangent", {}))
    on_a_cpu = ChoiceKind.SAME_CODE, choosing.NOTHING_ON_A_CPU
    faster = choosing.FASTER
    defaults: ClassVar[Mapping[str, Any]] = {"groups": 32, "epsilon": 1e-5, "activation": "none", "batch_axes": 1}
    implementations: ClassVar[Mapping[str, Implementation]] = {
        "xla": XLA,
        "cuda": XLA.by_kernels(
            "cuda",
            "FusionLab's own kernels: x is read twice forward, x and the cotangent twice backward, the second time partly from the cache",
            cuda,
        ),
    }

    def prepare(self, given: Mapping[str, Any], attrs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        full = self.with_defaults(attrs)
        check_name("group_norm activation", full["activation"], reference.GROUP_ACTIVATIONS)
        full["batch_axes"] = whole_number(self.name, "batch_axes", full["batch_axes"])
        full["groups"] = whole_number(self.name, "groups", full["groups"])
        full["epsilon"] = checked_epsilon(self.name, full["epsilon"])
        _check_shapes(given, full["groups"], full["batch_axes"])
        check_norm_dtypes(self.name, given)
        full["dtypes"] = tuple(np.dtype(a.dtype).name for a in given.values())
        return dict(given), full

    def residual_names(self, **attrs: Any) -> tuple[str, ...]:
        return ("mean", "rstd")

    def reads(
        self, wanted: tuple[str, ...], *, activation: str, present: tuple[str, ...], **attrs: Any
    ) -> frozenset[str]:
        """With an activation all that its input is made of."""
        active = activation != "none"
        if not active and set(wanted) <= {"bias"}:
            return frozenset()
        needed = {"x", "mean", "rstd"}
        needed |= {"scale"} if active or "x" in wanted else set()
        needed |= {"bias"} if active else set()
        return frozenset(needed - (set(_VECTORS) - set(present)))

    def rows_of(self, shape: tuple[int, ...], attrs: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        entries = math.prod(shape[attrs["batch_axes"] :]) // attrs["groups"]
        return entries, {"activation": attrs["activation"], "channels": shape[-1] // attrs["groups"]}

    def why_xla(self, call: Call) -> tuple[ChoiceKind, str] | None:
        return choosing.why_xla(call)

    def labels(self, shapes: Mapping[str, tuple[int, ...]], /, **attrs: Any) -> Mapping[str, tuple[str, ...]]:
        """Images "b", positions "p", channels "n", groups "g"."""
        batch = tuple(f"b{i}" for i in range(attrs["batch_axes"]))
        x = (*batch, *(f"p{i}" for i in range(result_rank(shapes) - 1 - len(batch))), "n")
        return {
            **dict.fromkeys(("x", "out"), x),
            **dict.fromkeys(_VECTORS, ("n",)),
            **dict.fromkeys(("mean", "rstd"), (*batch, "g")),
        }

    def formula(self, *, activation: str = "none", scale: bool = True, bias: bool = True, **_: Any) -> str:
        """ "silu(group_norm(x) * scale + bias)"; the operands that are False are left out."""
        norm = f"group_norm(x){' * scale' if scale else ''}{' + bias' if bias else ''}"
        return norm if activation == "none" else f"{activation}({norm})"


def _check_shapes(given: Mapping[str, Any], groups: int, batch_axes: int) -> None:
    check_given("group_norm", given, ("x",))
    shape = tuple(given["x"].shape)
    if not shape:
        raise ArgumentError("group_norm: x is a scalar, needed channels along its last axis")
    if not 0 <= batch_axes < len(shape):
        raise ArgumentError(
            f"group_norm: batch_axes is {batch_axes}, needed 0 to {len(shape) - 1} for x of shape {shape}: its last axis are channels"
        )
    channels = shape[-1]
    if groups < 1 or channels < 1 or channels % groups:
        raise ArgumentError(
            f"group_norm: groups is {groups}, needed a divisor of the channels of x, {channels} along the last axis of {shape}"
        )
    if 0 in shape[batch_axes:]:
        raise ArgumentError(f"group_norm: x has shape {shape}, no positions; needed at least one in each image")
    check_vectors("group_norm", given, _VECTORS, channels, f"each channel of x {shape}")


GROUP_NORM = GroupNorm()


@own_lines_hidden
def group_norm(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    groups: int = 32,
    epsilon: float = 1e-5,
    activation: str = "none",
    batch_axes: int = 1,
    implementation: str | None = None,
) -> Array:
    """GroupNorm over the positions of an image and the channels of a group as one op, optionally followed by SiLU; differentiable
    to any order.

        act((x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon) * scale + bias), means for each image and group of channels

    Args:
      x: the axes of the batch, then any number of positions, then C channels; a group is C / groups neighbours among them.
      scale, bias: C, or None.
      groups: a divisor of C: 1 is a LayerNorm over positions and channels, C an instance norm.
      epsilon: added to the variance, inside the root; a number, 0 or more.
      activation: "none" or "silu".
      batch_axes: how many axes are the batch's; 0 for one image.
      implementation: None lets the op choose; "xla" is the plain jnp code, "cuda" FusionLab's own kernels (up to 4,096 channels and
        65,535 images, no float64).

    Returns:
      As x, in x's shape and dtype (float32, bfloat16, float16 or float64). Statistics and arithmetic are float32 (float64 for float64 x),
      and the result is rounded once. `scale` and `bias` may have another dtype than x (float32 parameters of a bfloat16 model),
      but none wider than the arithmetic. When differentiated, it keeps x and two statistics for each image and group.

    Raises:
      ArgumentError: a wrong rank, size, dtype, number of groups or of axes, or epsilon; the message names the argument.
      UnknownNameError: no activation or implementation has that name.
      BackendError: the named implementation cannot run this call here.

    Source: Wu and He 2018, arXiv:1803.08494, equations 1 to 3.

    >>> import jax.numpy as jnp
    >>> x = jnp.asarray([[[1.0, 5.0], [3.0, 5.0]]])  # one image of two positions, two channels
    >>> group_norm(x, bias=jnp.ones(2), groups=2, epsilon=1e-12).tolist()
    [[[0.0, 1.0], [2.0, 1.0]]]
    """
    return GROUP_NORM.call_by_name(**locals())
