"""`layer_norm`: a residual addition, the statistics of LayerNorm or RMSNorm, the normalisation, a scale and a bias as one op."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from ....errors import ArgumentError
from ....graph.canonical.fused_nodes import FusedForm
from ....graph.dtypes import arithmetic_dtype
from ....tracebacks import own_lines_hidden
from ...choose.choices import CHOICES
from ...op.arrays import FLOATS, Named, axis_number, check_given, check_name, check_vectors
from ...op.implementation import Call, ChoiceKind, Implementation, ImplementationChoice
from ...op.labels import result_rank
from ..norm_checks import check_norm_dtypes, checked_epsilon
from ..norms import NormOp
from . import choosing, cuda, pallas, reference
from .plan import MOST_ADDENDS

Array = Any

KINDS = ("layer", "rms")
_VECTORS = ("scale", "bias", "shift")
XLA = Implementation.of_reference("statistics, normalisation, scale and bias as jnp code", reference)


class LayerNorm(NormOp):
    """LayerNorm and RMSNorm; see `layer_norm` below for shapes and attributes."""

    name = "layer_norm"
    slots = ("x", "scale", "bias", "shift", "residual")
    traits, numbers = ("kind",), ("epsilon",)
    whole = frozenset("n")  # the statistics run over n
    rows, behind_rows = ("x", "residual", "sum", "mean", "rstd"), "axis"
    at_site = (("call", {"residuals": True}), ("cotangent", {}))
    on_a_cpu = ChoiceKind.SLOWER, choosing.AS_FAST_ON_A_CPU
    faster = choosing.FASTER
    addends: ClassVar[Mapping[str, int]] = {"out": MOST_ADDENDS}
    defaults: ClassVar[Mapping[str, Any]] = {"kind": "layer", "epsilon": 1e-5, "axis": -1, "gives_sum": False}
    implementations: ClassVar[Mapping[str, Implementation]] = {
        "xla": XLA,
        "cuda": XLA.by_kernels(
            "cuda",
            "FusionLab's own kernels: one pass over memory forward, and one backward with every gradient and sum",
            cuda,
            adds=True,
        ),
        "pallas": XLA.by_kernels(
            "pallas",
            "one Pallas kernel, by Mosaic GPU: one pass over memory, forward only",
            pallas,
            roles=("call",),
        ),
    }

    def prepare(self, given: Mapping[str, Any], attrs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        full = self.with_defaults(attrs)
        check_name("layer_norm kind", full["kind"], KINDS)
        full["axis"] = _check_shapes(given, full["axis"])
        full["epsilon"] = checked_epsilon(self.name, full["epsilon"])
        full["gives_sum"] = bool(full["gives_sum"])
        if full["gives_sum"] and not {"shift", "residual"} & set(given):
            raise ArgumentError("layer_norm: the sum of x alone is asked for, needed a shift or a residual")
        check_norm_dtypes(self.name, given)
        full["dtypes"] = tuple(np.dtype(a.dtype).name for a in given.values())
        return dict(given), full

    def results(self, *, gives_sum: bool, **attrs: Any) -> tuple[str, ...]:
        return ("out", "sum") if gives_sum else ("out",)

    def residual_names(self, *, kind: str, present: tuple[str, ...], gives_sum: bool, **attrs: Any) -> tuple[str, ...]:
        sums = () if gives_sum or "residual" not in present else ("sum",)
        return (*sums, *(("mean", "rstd") if kind == "layer" else ("rstd",)))

    def reads(self, wanted: tuple[str, ...], **attrs: Any) -> frozenset[str]:
        """The sum in place of what was added up, where it is there: one array, and as many bytes as x and residual again."""
        if set(wanted) <= {"bias"}:
            return frozenset()
        present, saved = attrs["present"], self.residual_names(**attrs)
        scale = ("scale",) if "scale" in present and set(reference.SUMMANDS) & set(wanted) else ()
        summed = ("sum",) if attrs["gives_sum"] or "sum" in saved else ("x", *(s for s in ("shift",) if s in present))
        return frozenset((*summed, *scale, *saved))

    def again(self, params: Mapping[str, Any]) -> Callable[[Named], Array] | None:
        return functools.partial(reference.of_statistics, axis=params["axis"])

    def summing(self, slot: str, params: Mapping[str, Any], dtype: str) -> tuple[dict[str, Any], str] | None:
        """As the gradient of a shift, of which nothing is read where the sum was saved."""
        present, last = params["present"], len(params["shape"]) - 1
        if slot not in ("x", "residual") or "shift" in present or params["axis"] != last or dtype not in FLOATS:
            return None
        wide = np.dtype(arithmetic_dtype(params["dtypes"][0]))
        if np.dtype(dtype).itemsize > wide.itemsize:
            return None
        place = sum(present.count(s) for s in self.slots[: self.slots.index("shift")])
        more = {"present": "shift", "live": True, "dtypes": dtype, "shardings": None}
        return {**params, **{k: (*params[k][:place], v, *params[k][place:]) for k, v in more.items()}}, "shift"

    def rule(self, call: Call, unable: str) -> ImplementationChoice:
        """The kernel in Pallas, where it was measured faster than the other, or that cannot run."""
        found = super().rule(call, unable)
        why = "" if call.role != "call" or self.refusal("pallas", call) else pallas.why_taken(call, found)
        return ImplementationChoice("pallas", ChoiceKind.CHOSEN, why) if why else found

    def rows_of(self, shape: tuple[int, ...], attrs: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        return shape[attrs["axis"]], {"kind": attrs["kind"], "last": attrs["axis"] in (-1, len(shape) - 1)}

    def why_xla(self, call: Call) -> tuple[ChoiceKind, str] | None:
        return choosing.why_xla(call)

    def left(self, call: Call, decisions: Sequence[ImplementationChoice]) -> ImplementationChoice | None:
        """It is to gain both ways: one that it loses takes what the other gains."""
        found = super().left(call, decisions)
        if found is None or call.device.platform != "cuda":
            return found
        as_xla = "XLA's code as a separate op was measured to take longer (benchmarks attention, encoder)"
        if not CHOICES.measured_on(call.device, choosing.MEASURED):
            as_xla = "XLA's code as a separate op was not measured there either"
        return replace(found, reason=f"{found.reason}; and {as_xla}")

    def form(self, shapes: Mapping[str, tuple[int, ...]], /, **attrs: Any) -> FusedForm | None:
        """The search does not look into a call of two results."""
        return None if attrs["gives_sum"] else super().form(shapes, **attrs)

    def labels(self, shapes: Mapping[str, tuple[int, ...]], /, **attrs: Any) -> Mapping[str, tuple[str, ...]]:
        """Rows "m0", "m1", ..., features "n"."""
        rows, axis = tuple(f"m{i}" for i in range(result_rank(shapes) - 1)), attrs["axis"]
        x = dict.fromkeys(("x", "residual", "sum", "out"), (*rows[:axis], "n", *rows[axis:]))
        return {**x, **dict.fromkeys(_VECTORS, ("n",)), "mean": rows, "rstd": rows}

    def formula(
        self,
        *,
        kind: str = "layer",
        scale: bool = True,
        bias: bool = True,
        shift: bool = False,
        residual: bool = False,
        gives_sum: bool = False,
        **_: Any,
    ) -> str:
        """ "layer_norm(x) * scale + bias"; the operands that are False are left out."""
        summed = f"x{' + shift' if shift else ''}{' + residual' if residual else ''}"
        norm = f"{kind}_norm({summed}){' * scale' if scale else ''}{' + bias' if bias else ''}"
        return f"{norm}, and {summed}" if gives_sum else norm


def _check_shapes(given: Mapping[str, Any], axis: Any) -> int:
    """The axis, counted from the front."""
    check_given("layer_norm", given, ("x",))
    shape = tuple(given["x"].shape)
    if not shape:
        raise ArgumentError("layer_norm: x is a scalar, needed rank 1 or more: features to normalise over")
    number = axis_number("layer_norm", "axis", axis, len(shape), "one axis number: merge several by a reshape")
    features = shape[number]
    if features < 1:
        raise ArgumentError(f"layer_norm: x has shape {shape}, nothing along axis {axis}; needed at least one feature")
    check_vectors("layer_norm", given, _VECTORS, features, f"each feature of x {shape} along axis {axis}")
    if "residual" in given and (found := tuple(given["residual"].shape)) != shape:
        raise ArgumentError(
            f"layer_norm: residual has shape {found}, needed {shape}, that of x; broadcast it, or add it outside"
        )
    return number


LAYER_NORM = LayerNorm()


@own_lines_hidden
def layer_norm(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    shift: Array | None = None,
    residual: Array | None = None,
    kind: str = "layer",
    epsilon: float = 1e-5,
    axis: int = -1,
    implementation: str | None = None,
) -> Array:
    """LayerNorm or RMSNorm over one axis as one op, differentiable to any order, of x or of a sum that it computes itself.

        s = round(x + shift + residual), or x where there are neither
        kind "layer": (s - mean(s)) / sqrt(mean((s - mean(s))^2) + epsilon) * scale + bias
        kind "rms":   s / sqrt(mean(s^2) + epsilon) * scale + bias

    Args:
      x: rank 1 or more; N features at `axis`.
      scale, bias: N, or None.
      shift: N, added to x before the norm (for example the bias of a product); or None.
      residual: of x's shape and dtype, added to x before the norm; or None.
      kind: "layer" or "rms".
      epsilon: added to the mean square, inside the root; a number, 0 or more.
      axis: the axis to normalise over.
      implementation: None lets the op choose; "xla" is the plain jnp code, "cuda" FusionLab's own kernels (the last axis, up to
        65,536 features, no float64), "pallas" a kernel by Mosaic GPU (only x, up to 8,192 features; forward).

    Returns:
      As x, in x's shape and dtype (float32, bfloat16, float16 or float64). Statistics and arithmetic are float32 (float64 for
      float64 x) and the result is rounded once; s is rounded once as well, to x's dtype, before its statistics are taken: the result is
      the norm of the s that `layer_norm_and_sum` gives. `scale`, `bias` and `shift` may have another dtype than x (float32 parameters of a
      bfloat16 model), but none wider than the arithmetic. When differentiated, it keeps x (with a residual: s) and one or two
      statistics per row.

    Raises:
      ArgumentError: a wrong rank, size, dtype, axis or epsilon; the message names the argument.
      UnknownNameError: no kind or implementation has that name.
      BackendError: the named implementation cannot run this call here.

    Sources: Ba et al. 2016, arXiv:1607.06450 (LayerNorm); Zhang and Sennrich 2019, arXiv:1910.07467 (RMSNorm).

    >>> import jax.numpy as jnp
    >>> layer_norm(jnp.asarray([1.0, 3.0]), bias=jnp.ones(2), epsilon=0.0).tolist()
    [0.0, 2.0]
    """
    return LAYER_NORM.call_by_name(**locals())


@own_lines_hidden
def layer_norm_and_sum(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    shift: Array | None = None,
    residual: Array | None = None,
    kind: str = "layer",
    epsilon: float = 1e-5,
    axis: int = -1,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """`layer_norm` that gives the sum as well, where something else reads it too (the residual stream of a pre-LN transformer).

    Args: as of `layer_norm`; a shift or a residual, or both.

    Returns:
      (out, s): both of x's shape and dtype, out the norm of s = round(x + shift + residual). Differentiated, it keeps s and one or two
      statistics a row; the cotangent of s is added to that of the norm where they are computed.

    Raises:
      ArgumentError: as `layer_norm`; or neither a shift nor a residual.
      UnknownNameError, BackendError: as `layer_norm`.

    >>> import jax.numpy as jnp
    >>> out, total = layer_norm_and_sum(jnp.asarray([1.0, 2.0]), residual=jnp.asarray([0.0, 1.0]), epsilon=0.0)
    >>> out.tolist(), total.tolist()
    ([-1.0, 1.0], [1.0, 3.0])
    """
    return LAYER_NORM.call_by_name(gives_sum=True, **locals())
