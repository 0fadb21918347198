"""`gemm_epilogue`: a product with a matrix, a bias and an activation as one op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from ....device import Device
from ....errors import ArgumentError
from ....tracebacks import own_lines_hidden
from ...op.arrays import (
    Named,
    axis_number,
    canonical_precision,
    check_dtypes,
    check_given,
    check_name,
    check_product_ranks,
)
from ...op.implementation import Call, Implementation, ImplementationChoice
from ...op.labels import SummedCall, result_rank
from ...op.op import Op
from . import choosing, cublaslt, cuda, reference
from .activations import ACTIVATIONS, call_of_activation

Array = Any

XLA = Implementation.of_reference("the same product, add and activation as jnp code", reference)


class GemmEpilogue(Op):
    """act(x @ w + bias); see `gemm_epilogue` below for shapes and attributes.

    Where x is itself an activation of the layer before, the gradient may be asked for beyond it (cuBLASLt's DRELU and DGELU
    epilogues): with `x_activation` the name of that activation and `x_saved` its residual, in the shape of x, the gradient "of x" is
    that of the layer's pre-activation. Forward, neither is read.

    Of operands of 16 bits a program may compute in float32 from the "product" or from its "epilogue" on: `wide` names which, and `out` is
    "float32" where it does not round the result either. Kernels of a product's epilogue compute so anyway.
    """

    name = "gemm_epilogue"
    slots = ("x", "w", "bias", "x_saved")
    sizes = choosing.SIZES
    traits = ("activation",)
    rows, behind_rows = ("x", "x_saved", "mask", "preactivation"), "x_contract"
    defaults: ClassVar[Mapping[str, Any]] = {
        "activation": "none",
        "x_contract": -1,
        "w_contract": 0,
        "precision": None,
        "x_activation": None,
        "packed": False,
        "wide": None,
        "out": None,
    }
    implementations: ClassVar[Mapping[str, Implementation]] = {
        "xla": XLA,
        "cublaslt": XLA.by_kernels(
            "cublaslt", "one cuBLASLt call per product, bias and activation in its epilogue", cublaslt
        ),
        "cuda": XLA.by_kernels(
            "cuda",
            "XLA's product and one of FusionLab's own kernels for bias, activation, derivative and bias gradient",
            cuda,
        ),
    }

    def prepare(self, given: Mapping[str, Any], attrs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        check_given(self.name, given, ("x", "w"))
        x, w, bias = given["x"], given["w"], given.get("bias")
        _check_ranks(x, w, bias)
        full = self.with_defaults(attrs)
        _check_saved(x, given.get("x_saved"), full["x_activation"])
        check_name("activation", full["activation"], ACTIVATIONS)
        full["x_contract"] = axis_number(self.name, "x_contract", full["x_contract"], len(x.shape))
        full["w_contract"] = axis_number(self.name, "w_contract", full["w_contract"], 2)
        _check_sizes(x, w, bias, full["x_contract"], full["w_contract"])
        check_dtypes(self.name, {slot: a for slot, a in given.items() if slot != "x_saved"})
        _check_wide(x, full["wide"], full["out"])
        full["precision"] = canonical_precision(full["precision"])
        return dict(given), full

    def residual_names(self, *, activation: str, **_: Any) -> tuple[str, ...]:
        kind = ACTIVATIONS[activation].residual
        return () if kind == "none" else (kind,)

    def reads(self, wanted: tuple[str, ...], **attrs: Any) -> frozenset[str]:
        other = {"x": ("w", "x_saved") if attrs.get("x_activation") else ("w",), "w": ("x",), "bias": ()}
        operands = {name for slot in wanted for name in other[slot]}
        if attrs.get("out") is not None and not operands & {"x", "w"}:
            operands.add("w")  # which says the dtype that the gradients have
        return frozenset(operands.union(self.residual_names(**attrs)) if wanted else ())

    def rule(self, call: Call, unable: str) -> ImplementationChoice:
        return choosing.rule(call, unable, self.implementations)

    def case(self, role: str, shapes: Mapping[str, Any], **attrs: Any) -> str | None:
        return None if role == "tangent" else choosing.case(role, shapes, attrs)

    def variants(self, role: str, **attrs: Any) -> tuple[dict[str, Any], ...]:
        both = attrs["activation"] in choosing.PACKABLE and (role == "cotangent" or attrs["residuals"])
        return ({"packed": False}, {"packed": True}) if both and jax.device_count() == 1 else ({},)

    def operand_shapes(self, shapes: dict[str, Any], **attrs: Any) -> dict[str, Any]:
        if "mask" not in shapes or attrs["activation"] not in choosing.PACKABLE:
            return shapes
        *rows, columns = shapes["ct"].shape
        packed, plain = ((*rows, reference.mask_pitch(columns)), np.uint8), ((*rows, columns), np.bool_)
        return shapes | {"mask": jax.ShapeDtypeStruct(*(packed if attrs["packed"] else plain))}

    def plain(self, params: Mapping[str, Any], shapes: dict[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
        plain = {**params, "packed": False} if params["packed"] else params
        shapes = self.operand_shapes(shapes, **plain)
        saved = shapes.get("x_saved")
        if saved is None or saved.dtype != np.uint8:
            return plain, shapes
        rows, inner = list(shapes["ct"].shape[:-1]), shapes["w"].shape[params["w_contract"]]
        rows.insert(params["x_contract"], inner)
        return plain, shapes | {"x_saved": jax.ShapeDtypeStruct(tuple(rows), np.bool_)}

    def for_device(self, shapes: Mapping[str, Any], attrs: dict[str, Any], device: Device) -> dict[str, Any]:
        packable = attrs["activation"] in choosing.PACKABLE
        return attrs | {"packed": packable and (attrs["packed"] or self._packs(shapes, device, attrs))}

    def _packs(self, shapes: Mapping[str, Any], device: Device, attrs: Mapping[str, Any]) -> bool:
        """Whether a mask is kept in bits: where another implementation than XLA's is named, or where that was measured best."""
        # A row of bits is padded, so that columns of it cannot be split among devices.
        if device.platform != "cuda" or jax.device_count() > 1:
            return False
        if attrs["implementation"] is not None:
            return attrs["implementation"] != "xla"
        found = self.measured(Call("call", shapes, device, {**attrs, "residuals": True, "packed": True}))
        return found is not None and bool(found.settings.get("packed"))

    def labels(self, shapes: Mapping[str, tuple[int, ...]], /, **attrs: Any) -> Mapping[str, tuple[str, ...]]:
        """Rows "m0", "m1", ..., contracted "k", features "n"."""
        rows, axis = tuple(f"m{i}" for i in range(result_rank(shapes) - 1)), attrs["x_contract"]
        x = dict.fromkeys(("x", "x_saved"), (*rows[:axis], "k", *rows[axis:]))
        out = dict.fromkeys(("out", "mask", "preactivation"), (*rows, "n"))
        return {**x, "w": ("n", "k") if attrs["w_contract"] else ("k", "n"), "bias": ("n",), **out}

    def summed_call(self, params: Mapping[str, Any]) -> SummedCall:
        """The bare product of the parts; bias and activation follow once it is summed."""
        unrounded = params["wide"] == "product"
        wide = {"wide": "product", "out": "float32"} if unrounded else {"wide": None, "out": None}
        bare = {"activation": "none", "x_activation": None, "present": ("x", "w"), "residuals": False, **wide}
        if params["implementation"] == "cuda" or unrounded:  # its kernel is what follows the product
            bare["implementation"] = None

        def finish(product: Array, operands: Mapping[str, Array]) -> list[Array]:
            return reference.epilogue(product, operands.get("bias"), operands["x"].dtype, **params)

        return SummedCall({**params, **bare}, finish)

    def again(self, params: Mapping[str, Any]) -> Callable[[Named], Array] | None:
        """The activation, where nothing is computed wider than it is kept."""
        act = ACTIVATIONS[params["activation"]]
        if act.residual != "preactivation" or params["wide"] is not None:
            return None
        return lambda kept: act.fn(kept[act.residual])

    def row_sum(self, params: Mapping[str, Any]) -> str | None:
        live = dict(zip(params["present"], params["live"], strict=True))
        plain = params["activation"] == "none" and params["wide"] is None
        return "bias" if plain and live.get("bias") else None

    def anchor_dimensions(self, params: Mapping[str, Any]) -> Any:
        return ((params["x_contract"],), (params["w_contract"],)), ((), ())

    def formula(
        self, *, activation: str = "none", bias: bool = True, w_contract: int = 0, x_contract: int = -1, **_: Any
    ) -> str:
        """ "gelu_tanh(x @ w + b)"; `bias=False` leaves the bias out."""
        product = "x @ w" if w_contract in (0, -2) else "x @ w.T"
        linear = f"{product} + b" if bias else product
        return linear if activation == "none" else f"{activation}({linear})"


def _check_saved(x: Any, saved: Any, activation: Any) -> None:
    """The activation that made x, and its residual: both or neither."""
    if (saved is None) != (activation is None):
        raise ArgumentError(
            f"gemm_epilogue: got x_activation={activation!r} and {'no ' if saved is None else ''}x_saved, needed both or neither"
        )
    if activation is None:
        return
    check_name("x_activation", activation, [a for a in ACTIVATIONS if a != "none"])
    needed = tuple(x.shape)
    # relu's mask packed, one bit a column.
    if saved.dtype == np.uint8:
        needed = (*needed[:-1], reference.mask_pitch(needed[-1]))
    if tuple(saved.shape) != needed:
        raise ArgumentError(f"gemm_epilogue: x_saved has shape {tuple(saved.shape)}, needed that of x, {needed}")


def _check_wide(x: Any, wide: Any, out: Any) -> None:
    """What is computed in float32 of 16 bits."""
    if wide not in (None, "product", "epilogue") or out not in (None, "float32"):
        raise ArgumentError(
            f"gemm_epilogue: wide is {wide!r} and out {out!r}, needed None, 'product' or 'epilogue', and None or 'float32'"
        )
    narrow = np.dtype(x.dtype).name in ("bfloat16", "float16")
    if (wide is None and out is not None) or (wide is not None and not narrow):
        raise ArgumentError(
            f"gemm_epilogue: wide is {wide!r} and out {out!r} with operands of {x.dtype}; needed operands of 16 bits, and "
            f"an epilogue in float32 for a result in it"
        )


def _check_ranks(x: Any, w: Any, bias: Any) -> None:
    check_product_ranks("gemm_epilogue", x, w=w)
    if bias is not None and len(bias.shape) != 1:
        raise ArgumentError(
            f"gemm_epilogue: bias has shape {tuple(bias.shape)}, rank {len(bias.shape)}; needed rank 1, one entry for "
            f"each output feature"
        )


def _check_sizes(x: Any, w: Any, bias: Any, x_contract: int, w_contract: int) -> None:
    k, n = w.shape[w_contract], w.shape[1 - w_contract]
    if x.shape[x_contract] != k:
        raise ArgumentError(
            f"gemm_epilogue: x {tuple(x.shape)} has {x.shape[x_contract]} entries along its contracted axis {x_contract}, "
            f"but w {tuple(w.shape)} has {k} along axis {w_contract}; needed the same K: set x_contract or w_contract"
        )
    if bias is not None and bias.shape[0] != n:
        raise ArgumentError(
            f"gemm_epilogue: bias has length {bias.shape[0]}, needed N = {n}, the output features of w {tuple(w.shape)}"
        )


GEMM_EPILOGUE = GemmEpilogue()


@own_lines_hidden
def gemm_epilogue(
    x: Array,
    w: Array,
    bias: Array | None = None,
    *,
    activation: str = "none",
    x_contract: int = -1,
    w_contract: int = 0,
    precision: Any = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """act(x @ w + bias) as one op, differentiable to any order.

    Args:
      x: rank 2 or more; K at axis `x_contract`, the other axes are rows *M, kept in order.
      w: K x N, or N x K with `w_contract=1`.
      bias: N, or None.
      activation: a key of `ACTIVATIONS`: none, relu (derivative 0 at 0), relu_tie (as jnp.maximum(h, 0): 1/2 at 0),
        relu_where (as jnp.where(h > 0, h, 0)), gelu_tanh, gelu_erf, silu, sigmoid, tanh.
      x_contract, w_contract: the contracted axes.
      precision: as for `jax.lax.dot_general`; None takes the default in force at the call.
      implementation: None lets the op choose; "xla" is the plain jnp code.
      return_residual: also return the saved residual: relu's mask (bool, h > 0), or the pre-activation h.

    Returns:
      *M x N in the operands' dtype (float32, bfloat16, float16 or float64; they must agree), computed as jnp computes `act(x @ w +
      bias)`, with no wider accumulation than `@` has. With `return_residual`, `(out, residual)`.

    Raises:
      ArgumentError: a wrong rank, size or dtype, or a residual asked for that does not exist; names the argument.
      UnknownNameError: no activation or implementation has that name.
      BackendError: the named implementation cannot run this call here.

    >>> import jax.numpy as jnp
    >>> gemm_epilogue(jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.full(4, -2.5), activation="relu")[0, 0].item()
    0.5
    """
    return call_of_activation(GEMM_EPILOGUE, **locals())
