"""`matmul`: a product of two arrays, with factors, a bias, an activation and a cast behind it, as one op."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from ....device import Device
from ....errors import ArgumentError
from ....tracebacks import own_lines_hidden
from ...choose.choices import NEAR_GAIN
from ...op.arrays import batch_size, canonical_precision, check_given, check_name, with_rank
from ...op.implementation import Call, ChoiceKind, Implementation, ImplementationChoice
from ...op.labels import SummedCall
from ...op.op import Op
from ..gemm_epilogue.activations import ACTIVATIONS, call_of_activation
from . import cublaslt, cuda, reference, routes
from .axes import Dimensions, ProductAxes, canonical, free

Array = Any

_ROWS = ("a", "d_a", "ct", "mask", "preactivation")  # operands with one entry for each row of a
_BIASES = ("bias", "d_bias")
XLA = Implementation.of_reference("the same product, and its epilogue as jnp code", reference)


class Matmul(Op):
    """cast(act(alpha * (a . b) + beta * bias)); see `matmul` below for shapes and attributes.

    Further attributes than `matmul`'s: `dimensions`, as of `jax.lax.dot_general`, for products of any axes; `product`, the dtype of
    a . b, by default that of the operands.
    """

    name = "matmul"
    slots = ("a", "b", "bias")
    sizes = routes.SIZES
    traits, numbers = ("activation", "product", "out"), ("alpha", "beta")
    least_gain = NEAR_GAIN
    defaults: ClassVar[Mapping[str, Any]] = {
        "dimensions": None,
        "precision": None,
        "product": None,
        "out": None,
        "alpha": 1.0,
        "beta": 1.0,
        "activation": "none",
        "library": None,
    }
    implementations: ClassVar[Mapping[str, Implementation]] = {
        "xla": XLA,
        "cublaslt": XLA.by_kernels(
            "cublaslt",
            "one cuBLASLt call: factors, bias, activation and the cast of the result in it",
            cublaslt,
            roles=("call",),
        ),
        "cuda": XLA.by_kernels(
            "cuda",
            "XLA's product and one of FusionLab's own kernels for bias and activation",
            cuda,
            roles=("call",),
        ),
    }

    def prepare(self, given: Mapping[str, Any], attrs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        full = self.with_defaults(attrs)
        a, b = _operands(given)
        full["dimensions"] = _dimensions(a, b, full["dimensions"])
        dtype = np.dtype(a.dtype).name
        full["product"] = _dtype("product", full["product"] or dtype)
        full["out"] = _dtype("out", full["out"] or full["product"])
        check_name("activation", full["activation"], ACTIVATIONS)
        for name in ("alpha", "beta"):
            full[name] = _factor(name, full[name])
        _check_switch(full["library"])
        full["precision"] = canonical_precision(full["precision"])
        present, full["bias_axes"] = dict(given), ()
        if "bias" in given:
            result = ProductAxes.of(a.shape, b.shape, full["dimensions"]).result
            present["bias"] = _bias(given["bias"], result)
            full["bias_axes"] = tuple(n == m for n, m in zip(present["bias"].shape, result, strict=True))
        full["dtypes"] = tuple((slot, np.dtype(operand.dtype).name) for slot, operand in present.items())
        return present, full

    def residual_names(self, *, activation: str, **_: Any) -> tuple[str, ...]:
        kind = ACTIVATIONS[activation].residual
        return () if kind == "none" else (kind,)

    def reads(self, wanted: tuple[str, ...], **attrs: Any) -> frozenset[str]:
        other = {"a": ("b",), "b": ("a",), "bias": ()}
        operands = {name for slot in wanted for name in other[slot]}
        return frozenset(operands.union(self.residual_names(**attrs)) if wanted else ())

    def batch(
        self, role: str, names: tuple[str, ...], values: list[Array], dims: list[int | None], params: dict[str, Any]
    ) -> tuple[list[Array], dict[str, Any]] | None:
        """Over both operands: one more axis of the batch. Over a alone, of a product without a batch: more rows."""
        by_name = dict(zip(names, dims, strict=True))
        ((lc, rc), (lb, rb)) = params["dimensions"]
        lc, lb = map(_shifted, (lc, lb))
        if _is_more_rows(role, by_name, params):
            copied = [n for n in names if n in _ROWS]
            dimensions = ((lc, rc), (lb, rb))
        else:
            if any(d is None for n, d in by_name.items() if n not in _BIASES):
                return None  # an operand that all of the batch share would be copied
            rc, rb = map(_shifted, (rc, rb))
            copied, dimensions = [], ((lc, rc), ((0, *lb), (0, *rb)))
        size = batch_size(values, dims)

        def moved(name: str, value: Array, dim: int | None) -> Array:
            if dim is not None:
                return jnp.moveaxis(value, dim, 0)
            front = value[None] if name in (*copied, *_BIASES) else value
            return jnp.broadcast_to(front, (size, *value.shape)) if name in copied else front

        values = [moved(*operand) for operand in zip(names, values, dims, strict=True)]
        return values, params | {"dimensions": dimensions, "bias_axes": _batched_bias_axes(role, by_name, params)}

    def decide(self, role: str, shapes: Mapping[str, Any], device: Device, **attrs: Any) -> ImplementationChoice:
        if role != "call":
            return self.rule(Call(role, shapes, device, attrs), "")
        *refusals, taken = self.routes(shapes, device, **attrs)
        refused = "; ".join(f"not {answer.route.name}: {answer.sentence}" for answer in refusals)
        if taken.route.name == "xla":
            untried = any(answer.code == ChoiceKind.UNMEASURED.value for answer in refusals)
            return ImplementationChoice("xla", ChoiceKind.SAME_CODE, refused, untried)
        why = "; ".join(filter(None, (taken.sentence, refused)))
        return ImplementationChoice(taken.route.implementation, ChoiceKind.CHOSEN, why)

    def rule(self, call: Call, unable: str) -> ImplementationChoice:
        return ImplementationChoice("xla", ChoiceKind.SAME_CODE, "the products of a backward, and forward mode")

    def routes(self, shapes: Mapping[str, Any], device: Device, **attrs: Any) -> tuple[routes.Answer, ...]:
        """The answer of each route to a call with these operands and attributes, as `prepare` gives them."""
        measured = functools.partial(self.measured, Call("call", shapes, device, attrs))
        return routes.answers(measured, shapes, device, **attrs)

    def case(self, role: str, shapes: Mapping[str, Any], **attrs: Any) -> str | None:
        return routes.case(shapes, **attrs) if role == "call" else None

    def labels(self, shapes: Mapping[str, tuple[int, ...]], /, **attrs: Any) -> Mapping[str, tuple[str, ...]]:
        """A batch "b0", ..., rows "m0", ..., contracted "k0", ..., columns "n0", ..."""
        (lc, rc), (lb, rb) = attrs["dimensions"]
        ranks = {slot: len(shapes[slot]) for slot in ("a", "b") if slot in shapes}
        if not ranks:
            return {}
        # Where one operand is not there, its rank follows from that of the result.
        both = len(shapes.get("out", ())) + len(lb) + 2 * len(lc)
        a = _labels(ranks.get("a", both - ranks.get("b", 0)), lc, lb, "m")
        b = _labels(ranks.get("b", both - ranks.get("a", 0)), rc, rb, "n")
        result = (*(f"b{i}" for i in range(len(lb))), *(x for x in a + b if x[0] in "mn"))
        return {"a": a, "b": b, **dict.fromkeys(("bias", "out", "mask", "preactivation"), result)}

    def summed_call(self, params: Mapping[str, Any]) -> SummedCall:
        """The bare product of the parts; its epilogue follows once it is summed."""
        bare = {
            "activation": "none",
            "alpha": 1.0,
            "out": params["product"],
            "present": ("a", "b"),
            "bias_axes": (),
            "dtypes": params["dtypes"][:2],
            "residuals": False,
        }
        if params["implementation"] == "cuda":  # its kernel is what follows the product
            bare["implementation"] = None
        behind = {name: params[name] for name in ("alpha", "beta", "activation", "out")}

        def finish(product: Array, operands: Mapping[str, Array]) -> list[Array]:
            return reference.epilogue(product, operands.get("bias"), params["residuals"], **behind)

        return SummedCall({**params, **bare}, finish)

    def anchor_dimensions(self, params: Mapping[str, Any]) -> Any:
        return params["dimensions"]

    def formula(
        self,
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
        activation: str = "none",
        bias: bool = False,
        product: str | None = None,
        out: str | None = None,
        **_: Any,
    ) -> str:
        """ "bfloat16(relu(2 * a @ b + bias))"."""
        text = "a @ b" if alpha == 1.0 else f"{alpha:g} * (a @ b)"
        if bias:
            text += " + bias" if beta == 1.0 else f" + {beta:g} * bias"
        if activation != "none":
            text = f"{activation}({text})"
        return text if out in (None, product) else f"{out}({text})"


def _labels(rank: int, contracted: tuple[int, ...], batch: tuple[int, ...], own: str) -> tuple[str, ...]:
    """Of an operand, whose free axes are labelled `own`."""
    groups = (("k", contracted), ("b", batch), (own, free(rank, contracted, batch)))
    named = {axis: f"{letter}{i}" for letter, axes in groups for i, axis in enumerate(axes)}
    return tuple(named[i] for i in range(rank))


def _operands(given: Mapping[str, Any]) -> tuple[Any, Any]:
    check_given("matmul", given, ("a", "b"))
    for slot in ("a", "b"):
        if not jnp.issubdtype(given[slot].dtype, jnp.floating):
            raise ArgumentError(f"matmul: {slot} has dtype {given[slot].dtype}, needed a float")
    a, b = given["a"], given["b"]
    if a.dtype != b.dtype:
        raise ArgumentError(
            f"matmul: a has dtype {a.dtype} and b {b.dtype}; operands must agree: cast one with .astype"
        )
    return a, b


def _check_switch(library: Any) -> None:
    if not any(library is known for known in (None, True, False)):
        raise ArgumentError(f"matmul: library is {library!r}, needed True, False or None")


def _shifted(axes: tuple[int, ...]) -> tuple[int, ...]:
    """The numbers of axes once there is one more before them."""
    return tuple(i + 1 for i in axes)


def _is_more_rows(role: str, dims: Mapping[str, int | None], params: Mapping[str, Any]) -> bool:
    """Whether a batch of calls, of operands batched along `dims`, is one call with more rows of a."""
    _, (batch, _) = params["dimensions"]
    # Sums over the rows are wanted of each of the batch, not of all rows together.
    if batch or (role == "cotangent" and any(params["live"][1:])):
        return False
    shared = all(d is None for n, d in dims.items() if n not in (*_ROWS, *_BIASES))
    return shared and any(dims[n] is not None for n in dims if n in _ROWS)


def _batched_bias_axes(role: str, dims: Mapping[str, int | None], params: Mapping[str, Any]) -> tuple[bool, ...]:
    """In a backward there is a gradient for each of the batch, also of a bias they share."""
    along = dims.get("bias", dims.get("d_bias")) is not None or role == "cotangent"
    return (along, *params["bias_axes"]) if params["bias_axes"] else ()


def _of_matrices(a: Any, b: Any) -> Dimensions:
    """Those of matrices with the same batch before them."""
    if len(a.shape) < 2 or len(a.shape) != len(b.shape):
        raise ArgumentError(
            f"matmul: a has shape {tuple(a.shape)} and b {tuple(b.shape)}; needed matrices, *B x M x K and *B x K x N, or `dimensions`"
        )
    batch = tuple(range(len(a.shape) - 2))
    return ((len(batch) + 1,), (len(batch),)), (batch, batch)


def _dimensions(a: Any, b: Any, given: Any) -> Dimensions:
    """As given, or those of matrices with the same batch before them."""
    if given is None:
        given = _of_matrices(a, b)
    try:
        found = canonical(given)
    except (TypeError, ValueError) as e:
        raise ArgumentError(
            f"matmul: dimensions is {given!r}, needed ((contracted of a, of b), (batch of a, of b)) as jax.lax.dot_general has them"
        ) from e
    for (left, right), kind in zip(found, ("contracted", "batch"), strict=True):
        sizes = [[s[i] for i in axes if i < len(s)] for s, axes in ((a.shape, left), (b.shape, right))]
        if sizes[0] != sizes[1] or len(sizes[0]) != len(left) or len(left) != len(right):
            raise ArgumentError(
                f"matmul: a {tuple(a.shape)} and b {tuple(b.shape)} differ along their {kind} axes {left} and {right}; needed equal sizes"
            )
    return found


def _dtype(name: str, given: Any) -> str:
    try:
        dtype = jnp.dtype(given)
    except TypeError as e:
        raise ArgumentError(f"matmul: {name} is {given!r}, needed a dtype") from e
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ArgumentError(f"matmul: {name} is {dtype.name}, needed a float")
    return dtype.name


def _factor(name: str, given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float | np.number) or not math.isfinite(given):
        raise ArgumentError(f"matmul: {name} is {given!r}, needed a finite number")
    return float(given)


def _bias(bias: Any, result: tuple[int, ...]) -> Any:
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise ArgumentError(f"matmul: bias has dtype {bias.dtype}, needed a float")
    given = with_rank(bias, len(result))
    if len(given.shape) != len(result) or any(n not in (1, m) for n, m in zip(given.shape, result, strict=True)):
        raise ArgumentError(
            f"matmul: bias has shape {tuple(bias.shape)}, needed one that broadcasts to the result's, {result}: N for the columns, "
            f"M x 1 for the rows"
        )
    return given


MATMUL = Matmul()


@own_lines_hidden
def matmul(
    a: Array,
    b: Array,
    bias: Array | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: str = "none",
    product: Any = None,
    out: Any = None,
    dimensions: Any = None,
    precision: Any = None,
    library: bool | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """cast(act(alpha * (a @ b) + beta * bias)) as one op, differentiable to any order.

    Args:
      a, b: *B x M x K and *B x K x N of one float dtype; of any axes with `dimensions`.
      bias: broadcasts to the result: N runs along the columns, M x 1 along the rows.
      alpha, beta: finite numbers.
      activation: a key of `ACTIVATIONS`, as for `gemm_epilogue`.
      product: the dtype of a @ b, in which alpha, bias and activation are computed; None for that of the operands.
      out: the dtype of the result; None for `product`.
      dimensions: as of `jax.lax.dot_general`; None for matrices.
      precision: as for `jax.lax.dot_general`; None takes the default in force at the call.
      library: True: cuBLASLt wherever it can run; False: never; None: where it was measured fastest.
      implementation: None lets the op choose; "xla" is the plain jnp code, "cublaslt" one library call, "cuda" XLA's product and
        FusionLab's kernel.
      return_residual: also return the saved residual: relu's mask (bool, h > 0), or h, in the dtype `product`.

    Returns:
      *B x M x N in the dtype `out`; with `return_residual`, `(out, residual)`.

    Raises:
      ArgumentError: shapes, dtypes or numbers that do not fit, or a residual asked for that does not exist; names the argument.
      UnknownNameError: no activation or implementation has that name.
      BackendError: the named implementation cannot run this call here.

    >>> import jax.numpy as jnp
    >>> matmul(jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.asarray([[0.0], [1.0]]), alpha=2.0)[:, 0].tolist()
    [6.0, 7.0]
    """
    return call_of_activation(MATMUL, **locals())
