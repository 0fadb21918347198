"""`grouped_matmul`: each row of a matrix times the matrix of its group, as a mixture of experts has it, as one op."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ....errors import ArgumentError
from ....tracebacks import own_lines_hidden
from ...choose.choices import CHOICES
from ...op.arrays import canonical_precision, check_dtypes, check_given, check_name
from ...op.chooser import exact_case
from ...op.implementation import Call, ChoiceKind, Implementation, ImplementationChoice
from ...op.op import Op
from . import mosaic, reference

Array = Any

KINDS = ("rows", "weights")
XLA = Implementation.of_reference("jax.lax.ragged_dot_general", reference)
# From how many rows and groups on the kernels were measured faster, at every size tried.
LEAST_ROWS, LEAST_GROUPS = 1024, 2
_RECORD = "(benchmarks grouped_matmul)"
_WHY = "XLA multiplies every row by the matrix of each group, and the kernels were measured faster"


class GroupedMatmul(Op):
    """Products of groups of rows; see `grouped_matmul` below for shapes and attributes.

    Further attributes: `kind`, "rows", or "weights" for what the gradient of w is made of: w is then rows x N, and the result
    groups x K x N, for each group the product of its rows of x, turned, and of w. `out`, the dtype of the result; None for the
    operands'.
    """

    name = "grouped_matmul"
    slots = ("x", "w", "group_sizes")
    defaults: ClassVar[Mapping[str, Any]] = {
        "kind": "rows",
        "w_contract": 0,
        "precision": None,
        "out": None,
    }
    implementations: ClassVar[Mapping[str, Implementation]] = {
        "xla": XLA,
        "mosaic": XLA.by_kernels(
            "mosaic",
            "Mosaic kernels: each row meets the matrix of its own group alone",
            mosaic,
            roles=("call", "cotangent"),
        ),
    }

    def prepare(self, given: Mapping[str, Any], attrs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        full = self.with_defaults(attrs)
        check_name("grouped_matmul kind", full["kind"], KINDS)
        if full["w_contract"] not in (0, 1) or isinstance(full["w_contract"], bool):
            raise ArgumentError(f"grouped_matmul: w_contract is {full['w_contract']!r}, needed 0 (K x N) or 1 (N x K)")
        full["w_contract"] = int(full["w_contract"])
        _check(given, full["kind"], full["w_contract"])
        full["precision"] = canonical_precision(full["precision"])
        full["out"] = None if full["out"] is None else np.dtype(full["out"]).name
        return dict(given), full

    def reads(self, wanted: tuple[str, ...], **attrs: Any) -> frozenset[str]:
        other = {"x": "w", "w": "x"}
        return frozenset({"group_sizes", *(other[slot] for slot in wanted)} if wanted else ())

    def case(self, role: str, shapes: Mapping[str, Any], **attrs: Any) -> str | None:
        """By everything."""
        return None if role == "tangent" else exact_case(self, self.defaults, role, shapes, attrs)

    def to_time(self, operands: dict[str, Any], **attrs: Any) -> dict[str, Any]:
        """Groups of equal size."""
        sizes, rows = operands["group_sizes"], mosaic.rows_of(operands)
        return {**operands, "group_sizes": (sizes * 0) + rows // max(1, sizes.shape[0])}

    def rule(self, call: Call, unable: str) -> ImplementationChoice:
        refusal = self.refusal("mosaic", call)
        if call.role == "tangent" or refusal is not None:
            return ImplementationChoice("xla", ChoiceKind.SAME_CODE, f"not mosaic: {refusal}" if refusal else "")
        if not CHOICES.measured_on(call.device, ("sm_90",)):
            return ImplementationChoice(
                "xla", ChoiceKind.SAME_CODE, "not mosaic: not measured here; fusionlab.tune measures", True
            )
        rows, groups = mosaic.rows_of(call.shapes), call.shapes["group_sizes"].shape[0]
        if rows < LEAST_ROWS or groups < LEAST_GROUPS:
            why = f"not mosaic: with fewer than {LEAST_ROWS} rows or {LEAST_GROUPS} groups it was measured slower"
            return ImplementationChoice("xla", ChoiceKind.SAME_CODE, f"{why} {_RECORD}")
        return ImplementationChoice("mosaic", ChoiceKind.CHOSEN, f"{_WHY} {_RECORD}")

    def formula(self, *, kind: str = "rows", w_contract: int = 0, **_: Any) -> str:
        """ "x @ w[group]"."""
        if kind == "weights":
            return "x[group].T @ y[group]"
        return "x @ w[group].T" if w_contract else "x @ w[group]"


def _check(given: Mapping[str, Any], kind: str, w_contract: int) -> None:
    check_given("grouped_matmul", given, GroupedMatmul.slots)
    _check_shapes(given, kind, w_contract)
    check_dtypes("grouped_matmul", {slot: given[slot] for slot in ("x", "w")})
    if np.dtype(given["group_sizes"].dtype).kind not in "iu":
        raise ArgumentError(f"grouped_matmul: group_sizes has dtype {given['group_sizes'].dtype}, needed whole numbers")


def _check_shapes(given: Mapping[str, Any], kind: str, w_contract: int) -> None:
    x, w, sizes = (tuple(given[slot].shape) for slot in GroupedMatmul.slots)
    for slot, rank, axes in (
        ("x", 2, "rows x K"),
        ("w", 2 if kind == "weights" else 3, "groups x K x N"),
        ("group_sizes", 1, "a number of rows for each group"),
    ):
        if len(given[slot].shape) != rank:
            raise ArgumentError(
                f"grouped_matmul: {slot} has shape {tuple(given[slot].shape)}, needed rank {rank}: {axes}"
            )
    if kind == "rows" and (w[1 + w_contract], w[0]) != (x[1], sizes[0]):
        raise ArgumentError(
            f"grouped_matmul: x {x}, w {w} and group_sizes {sizes} do not fit: needed rows x K, groups x K x N "
            f"(groups x N x K with w_contract=1) and groups"
        )
    if kind == "weights" and x[0] != w[0]:
        raise ArgumentError(f"grouped_matmul: x {x} and w {w} have different numbers of rows")


GROUPED_MATMUL = GroupedMatmul()


@own_lines_hidden
def grouped_matmul(
    x: Array,
    w: Array,
    group_sizes: Array,
    *,
    w_contract: int = 0,
    precision: Any = None,
    implementation: str | None = None,
) -> Array:
    """Each row of x times the matrix of its group, differentiable as `jax.lax.ragged_dot` is, as one op.

    Args:
      x: rows x K. The rows of the first group come first, then those of the second, and so on.
      w: groups x K x N, or groups x N x K with `w_contract=1`.
      group_sizes: how many rows each group has, whole numbers; rows beyond their sum belong to none.
      w_contract: 0 or 1: which axis of each matrix is summed over.
      precision: as for `jax.lax.ragged_dot`; None takes the default in force at the call.
      implementation: None may choose; "xla" is `jax.lax.ragged_dot_general`, "mosaic" kernels for Hopper GPUs (sm_90), for bfloat16 and
        float16 and axes that are multiples of 64.

    Returns:
      rows x N in the operands' dtype (float32, bfloat16, float16 or float64), zeros for rows of no group. Sums are float32 (float64 for
      float64), rounded once.

    Raises:
      ArgumentError: a wrong rank, size or dtype; names the argument.
      UnknownNameError: no implementation has that name.
      BackendError: the named implementation cannot run this call here.

    Source: T. Gale et al. 2022, MegaBlocks, arXiv:2211.15841 (a mixture of experts as products of groups of rows).

    >>> import jax.numpy as jnp
    >>> w = jnp.stack([jnp.eye(2), 10 * jnp.eye(2)])
    >>> grouped_matmul(jnp.ones((3, 2)), w, jnp.asarray([1, 2])).tolist()
    [[1.0, 1.0], [10.0, 10.0], [10.0, 10.0]]
    """
    attrs = {"w_contract": w_contract, "precision": precision, "implementation": implementation}
    return GROUPED_MATMUL.call(x, w, group_sizes, **attrs)
