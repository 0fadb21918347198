"""`layer_norm`: the statistics of LayerNorm or RMSNorm, the normalisation, a scale and a bias as one op."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ...device import Device
from ...errors import ArgumentError, unknown_name
from ...graph.labelled import Form
from ..arrays import batch_of_rows, check_dtypes
from ..implementation import Implementation
from ..labels import Axes
from ..op import Op
from . import reference

Array = Any

DTYPES = ("float32", "bfloat16", "float16", "float64")
KINDS = ("layer", "rms")
_ROWS = ("x", "d_x", "ct", "mean", "rstd")  # operands with one entry, or N of them, for each row of x


class LayerNorm(Op):
    """LayerNorm and RMSNorm; see `layer_norm` below for shapes and attributes."""

    name = "layer_norm"
    slots = ("x", "scale", "bias")
    defaults: ClassVar[Mapping[str, Any]] = {"kind": "layer", "epsilon": 1e-5, "axis": -1}
    implementations: ClassVar[Mapping[str, Implementation]] = {
        "xla": Implementation(
            "xla",
            "statistics, normalisation, scale and bias as jnp code",
            reference.forward,
            reference.tangent,
            reference.cotangent,
        )
    }

    def prepare(self, given: Mapping[str, Any], attrs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        x, scale, bias = (given.get(slot) for slot in self.slots)
        full = self.with_defaults(attrs)
        if not isinstance(full["kind"], str) or full["kind"] not in KINDS:
            raise unknown_name("layer_norm kind", full["kind"], KINDS)
        full["axis"] = _check_shapes(x, scale, bias, full["axis"])
        full["epsilon"] = _epsilon(full["epsilon"])
        _check_dtypes(given)
        full["dtypes"] = tuple(np.dtype(a.dtype).name for a in given.values())
        return dict(given), full

    def residual_names(self, *, kind: str, **attrs: Any) -> tuple[str, ...]:
        return ("mean", "rstd") if kind == "layer" else ("rstd",)

    def reads(self, wanted: tuple[str, ...], *, present: tuple[str, ...], **attrs: Any) -> frozenset[str]:
        if not {"x", "scale"} & set(wanted):
            return frozenset()
        scale = ("scale",) if "x" in wanted and "scale" in present else ()
        return frozenset(("x", *scale, *self.residual_names(**attrs)))

    def batch(
        self, role: str, names: tuple[str, ...], values: list[Array], dims: list[int | None], params: dict[str, Any]
    ) -> tuple[list[Array], dict[str, Any]] | None:
        """A batch of rows is more rows; a batch of scales or biases, or of their gradients, is not this op."""
        found = batch_of_rows(_ROWS, role, names, values, dims, params.get("live", ()))
        return None if found is None else (found, params | {"axis": params["axis"] + 1})

    def preferred(self, role: str, shapes: Mapping[str, Any], device: Device, **attrs: Any) -> tuple[str, str]:
        return "xla", "what XLA runs anyway: the only implementation there is"

    def idle(self, *operands: Any, device: Device | str | None = None, **attrs: Any) -> str:
        if Device.of(device).platform != "cuda":
            return ""
        return "there is no kernel for it yet, and as an op of its own XLA was measured to take longer (benchmarks attention, encoder)"

    def form(self, shapes: Mapping[str, tuple[int, ...]], /, **attrs: Any) -> Form:
        """Rows "m", features "n"."""
        labels = _labels(len(shapes["x"]), attrs["axis"])
        numbers = (("epsilon", attrs["epsilon"]),)
        slots = tuple(labels[slot] for slot in shapes)
        return Form(tuple(shapes), slots, labels["out"], (("kind", attrs["kind"]),), numbers)

    def axes(self, shapes: Mapping[str, tuple[int, ...]], /, **attrs: Any) -> Axes:
        return Axes(_labels(len(shapes["out"]), attrs["axis"]), whole=frozenset("n"))  # the statistics run over n

    def formula(self, *, kind: str = "layer", scale: bool = True, bias: bool = True, **_: Any) -> str:
        """ "layer_norm(x) * scale + bias"; `scale=False` and `bias=False` leave them out."""
        return f"{kind}_norm(x){' * scale' if scale else ''}{' + bias' if bias else ''}"


def _labels(rank: int, axis: int) -> dict[str, tuple[str, ...]]:
    """Rows "m0", "m1", ..., features "n"."""
    rows = tuple(f"m{i}" for i in range(rank - 1))
    x = (*rows[:axis], "n", *rows[axis:])
    return {"x": x, "scale": ("n",), "bias": ("n",), "out": x, "mean": rows, "rstd": rows}


def _check_shapes(x: Any, scale: Any, bias: Any, axis: Any) -> int:
    """The axis, counted from the front."""
    if x is None:
        raise ArgumentError("layer_norm: x is missing, needed an array")
    shape = tuple(x.shape)
    if not shape:
        raise ArgumentError("layer_norm: x is a scalar, needed rank 1 or more: features to normalise over")
    try:
        number = operator.index(axis)
    except TypeError as e:
        raise ArgumentError(f"layer_norm: axis is {axis!r}, needed one axis number: merge several by a reshape") from e
    if not -len(shape) <= number < len(shape):
        raise ArgumentError(f"layer_norm: axis is {number}, needed an axis between {-len(shape)} and {len(shape) - 1}")
    features = shape[number]
    if features < 1:
        raise ArgumentError(
            f"layer_norm: x has shape {shape}, nothing along axis {number}; needed at least one feature"
        )
    for slot, v in (("scale", scale), ("bias", bias)):
        if v is not None and tuple(v.shape) != (features,):
            raise ArgumentError(
                f"layer_norm: {slot} has shape {tuple(v.shape)}, needed ({features},): one entry for each feature of x "
                f"{shape} along axis {number}; multiply or add any other {slot} outside"
            )
    return number % len(shape)


def _check_dtypes(shapes: Mapping[str, Any]) -> None:
    """Each is a float of DTYPES, and no parameter is wider than the arithmetic."""
    for slot, v in shapes.items():
        check_dtypes("layer_norm", {slot: v}, DTYPES)
    wide = np.dtype(reference.statistics_dtype(shapes["x"].dtype))
    for slot, v in shapes.items():
        if np.dtype(v.dtype).itemsize > wide.itemsize:
            raise ArgumentError(
                f"layer_norm: {slot} has dtype {np.dtype(v.dtype).name}, wider than the {wide.name} that x of dtype "
                f"{np.dtype(shapes['x'].dtype).name} is normalised in; cast {slot} or x with .astype"
            )


def _epsilon(epsilon: Any) -> float:
    try:
        number = float(epsilon)
    except (TypeError, ValueError) as e:  # a traced value, or no number at all
        raise ArgumentError(f"layer_norm: epsilon is {epsilon!r}, needed a number known when tracing") from e
    if not (math.isfinite(number) and number >= 0):
        raise ArgumentError(f"layer_norm: epsilon is {number}, needed a finite number, 0 or more")
    return number


LAYER_NORM = LayerNorm()


def layer_norm(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    kind: str = "layer",
    epsilon: float = 1e-5,
    axis: int = -1,
    implementation: str | None = None,
) -> Array:
    """LayerNorm or RMSNorm over one axis as one op, differentiable to any order.

    kind "layer": (x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon) * scale + bias
    kind "rms":   x / sqrt(mean(x^2) + epsilon) * scale + bias

    Args:
      x: rank 1 or more; N features at `axis`.
      scale, bias: N, or None.
      kind: "layer" or "rms".
      epsilon: added to the mean square, inside the root; a number, 0 or more.
      axis: the axis that is normalised over.
      implementation: None may choose; "xla" is the plain jnp code.

    Returns:
      As x, in x's shape and dtype (float32, bfloat16, float16 or float64). Statistics and arithmetic are float32 (float64 for
      float64 x) and the result is rounded once. `scale` and `bias` may have another dtype than x (float32 parameters of a
      bfloat16 model), but none wider than the arithmetic. Differentiated, it keeps x and one or two statistics a row.

    Raises:
      ArgumentError: a wrong rank, size, dtype, axis or epsilon; the message names the argument.
      UnknownNameError: no kind or implementation has that name.
      BackendError: the named implementation cannot run this call here.

    Sources: Ba et al. 2016, arXiv:1607.06450 (LayerNorm); Zhang and Sennrich 2019, arXiv:1910.07467 (RMSNorm).

    >>> import jax.numpy as jnp
    >>> layer_norm(jnp.asarray([1.0, 3.0]), bias=jnp.ones(2), epsilon=0.0).tolist()
    [0.0, 2.0]
    """
    return LAYER_NORM.call(x, scale, bias, kind=kind, epsilon=epsilon, axis=axis, implementation=implementation)
