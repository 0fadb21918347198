"""`gated_matmul`: the gated pair of a feed-forward, act(x @ w) * (x @ v), as one op."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from ....device import Device
from ....errors import ArgumentError
from ....tracebacks import own_lines_hidden
from ...choose.choices import NEAR_GAIN, case_text
from ...op.arrays import canonical_precision, check_dtypes, check_given, check_name, check_product_ranks, wide
from ...op.implementation import Call, ChoiceKind, Implementation, ImplementationChoice
from ...op.labels import SummedCall, result_rank
from ...op.op import Op
from ..gemm_epilogue.activations import ACTIVATIONS
from ..gemm_epilogue.cublaslt import compute_of
from . import cuda, reference

Array = Any

SIZES = ("rows", "columns", "inner")
XLA = Implementation.of_reference("two products and the gate as jnp code", reference)


class GatedMatmul(Op):
    """act(x . w) * (x . v); see `gated_matmul` below for shapes and attributes.

    Further attributes: `prefer`, the implementation to take wherever it can run (where it cannot, "xla" does; `implementation` names
    the one that has to run).
    """

    name = "gated_matmul"
    slots = ("x", "w", "v")
    sizes = SIZES
    traits = ("activation",)
    rows = ("x", "gate", "up")
    least_gain = NEAR_GAIN
    defaults: ClassVar[Mapping[str, Any]] = {"activation": "silu", "w_contract": 0, "precision": None, "prefer": None}
    implementations: ClassVar[Mapping[str, Implementation]] = {
        "xla": XLA,
        "concatenated": replace(
            XLA,
            name="concatenated",
            summary="one product with both weights side by side, and the gate as jnp code",
            forward=reference.forward_concatenated,
        ),
        "cuda": XLA.by_kernels(
            "cuda",
            "one of FusionLab's own kernels: both products in one pass over x, with the gate",
            cuda,
            roles=("call",),
        ),
    }

    def prepare(self, given: Mapping[str, Any], attrs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        full = self.with_defaults(attrs)
        check_name("activation", full["activation"], ACTIVATIONS)
        if full["w_contract"] not in (0, 1) or isinstance(full["w_contract"], bool):
            raise ArgumentError(f"gated_matmul: w_contract is {full['w_contract']!r}, needed 0 (K x N) or 1 (N x K)")
        if full["prefer"] is not None:
            check_name("gated_matmul implementation", full["prefer"], self.implementations)
        full["w_contract"] = int(full["w_contract"])
        _check(given, full["w_contract"])
        full["precision"] = canonical_precision(full["precision"])
        return dict(given), full

    def residual_names(self, **attrs: Any) -> tuple[str, ...]:
        return ("gate", "up")

    def reads(self, wanted: tuple[str, ...], **attrs: Any) -> frozenset[str]:
        of = {"x": ("w", "v", "gate", "up"), "w": ("x", "gate", "up"), "v": ("x", "gate")}
        return frozenset(name for slot in wanted for name in of[slot])

    def decide(self, role: str, shapes: Mapping[str, Any], device: Device, **attrs: Any) -> ImplementationChoice:
        wanted = attrs["prefer"] if role == "call" else None
        if wanted is None:
            return super().decide(role, shapes, device, **attrs)
        if unable := self.implementations[wanted].refuses(shapes, device, role=role, **attrs):
            return ImplementationChoice("xla", ChoiceKind.SAME_CODE, f"not {wanted}: {unable}")
        return ImplementationChoice(wanted, ChoiceKind.CHOSEN, "named by `prefer`, and it can run")

    def rule(self, call: Call, unable: str) -> ImplementationChoice:
        if call.role != "call":
            return ImplementationChoice("xla", ChoiceKind.SAME_CODE, "the products of a backward, and forward mode")
        on_gpu = call.device.platform == "cuda" and not unable
        unmeasured = f"no such pair was measured for {call.device.arch or 'this architecture'}; fusionlab.tune measures"
        why = unmeasured if on_gpu else unable or "nothing was measured faster"
        return ImplementationChoice("xla", ChoiceKind.SAME_CODE, why, on_gpu)

    def case(self, role: str, shapes: Mapping[str, Any], **attrs: Any) -> str | None:
        """By sizes, dtype, activation, and how the weights lie."""
        if role != "call":
            return None
        inner, dtype = shapes["x"].shape[-1], np.dtype(shapes["x"].dtype).name
        sizes = math.prod(shapes["x"].shape[:-1]), shapes["w"].shape[1 - attrs["w_contract"]], inner
        content = {
            "activation": attrs["activation"],
            "dtype": dtype,
            "compute": compute_of(dtype, attrs["precision"]),
            "w": "NK" if attrs["w_contract"] else "KN",
            "residuals": bool(attrs.get("residuals", False)),
        }
        return case_text(self.name, role, **content, **dict(zip(SIZES, sizes, strict=True)))

    def labels(self, shapes: Mapping[str, tuple[int, ...]], /, **attrs: Any) -> Mapping[str, tuple[str, ...]]:
        """Rows "m0", "m1", ..., contracted "k", columns "n"."""
        rows = tuple(f"m{i}" for i in range(result_rank(shapes) - 1))
        weights = dict.fromkeys(("w", "v"), ("n", "k") if attrs["w_contract"] else ("k", "n"))
        return {"x": (*rows, "k"), **weights, **dict.fromkeys(("out", "gate", "up"), (*rows, "n"))}

    def summed_call(self, params: Mapping[str, Any]) -> SummedCall:
        """Both bare products of the parts, by XLA, and summed as a program sums them, in the operands' dtype; then the gate."""
        how = {name: params[name] for name in ("w_contract", "precision")}

        def part(operands: Mapping[str, Array]) -> Array:
            x = operands["x"]
            return jnp.stack([reference.wide_product(x, operands[slot], **how).astype(x.dtype) for slot in ("w", "v")])

        def finish(both: Array, operands: Mapping[str, Array]) -> list[Array]:
            gate, up = map(wide, both)
            return reference.gated(gate, up, operands["x"].dtype, params["activation"], params["residuals"])

        return SummedCall(params, finish, part)

    def anchor_dimensions(self, params: Mapping[str, Any]) -> Any:
        return ((-1,), (params["w_contract"],)), ((), ())

    def formula(self, *, activation: str = "silu", w_contract: int = 0, **_: Any) -> str:
        """ "silu(x @ w) * (x @ v)"."""
        w, v = ("w.T", "v.T") if w_contract else ("w", "v")
        gate = f"(x @ {w})" if activation == "none" else f"{activation}(x @ {w})"
        return f"{gate} * (x @ {v})"


def _check(given: Mapping[str, Any], w_contract: int) -> None:
    check_given("gated_matmul", given, GatedMatmul.slots)
    check_product_ranks("gated_matmul", **given)
    x, w, v = (tuple(given[slot].shape) for slot in GatedMatmul.slots)
    if w != v:
        raise ArgumentError(f"gated_matmul: w has shape {w} and v {v}; needed the same")
    if x[-1] != w[w_contract]:
        raise ArgumentError(
            f"gated_matmul: x {x} has {x[-1]} entries along its last axis, but w {w} has {w[w_contract]} along axis {w_contract}; "
            f"needed the same K: set w_contract"
        )
    check_dtypes("gated_matmul", given)


GATED_MATMUL = GatedMatmul()


@own_lines_hidden
def gated_matmul(
    x: Array,
    w: Array,
    v: Array,
    *,
    activation: str = "silu",
    w_contract: int = 0,
    precision: Any = None,
    implementation: str | None = None,
) -> Array:
    """act(x @ w) * (x @ v) as one op, differentiable to any order: the gated pair of a feed-forward (SwiGLU, GEGLU, ReGLU).

    Args:
      x: *M x K, rank 2 or more.
      w, v: K x N, or both N x K with `w_contract=1`.
      activation: a key of `ACTIVATIONS`, as for `gemm_epilogue`; "none" for a bilinear pair.
      w_contract: the contracted axis of both weights, 0 or 1.
      precision: as for `jax.lax.dot_general`; None takes the default in force at the call.
      implementation: None lets the op choose; "xla" is two products and the gate as jnp code, "concatenated" one product with both
        weights side by side (which are copied for it at each call), "cuda" one of FusionLab's own kernels, for bfloat16 and float16.

    Returns:
      *M x N in the operands' dtype (float32, bfloat16, float16 or float64; they must agree). Both products are summed in float32
      (float64 for float64), activation and product computed in that, and rounded once: `jax.nn.silu(x @ w) * (x @ v)` in 16 bits rounds
      four times. When differentiated, it keeps x @ w and x @ v in the operands' dtype.

    Raises:
      ArgumentError: a wrong rank, size or dtype; names the argument.
      UnknownNameError: no activation or implementation has that name.
      BackendError: the named implementation cannot run this call here.

    Source: N. Shazeer 2020, GLU Variants Improve Transformer, arXiv:2002.05202.

    >>> import jax.numpy as jnp
    >>> gated_matmul(jnp.ones((1, 3)), jnp.ones((3, 2)), jnp.ones((3, 2)), activation="relu").tolist()
    [[9.0, 9.0]]
    """
    return GATED_MATMUL.call_by_name(**locals())
