"""`dot_product_attention`: scores, softmax and the weighted sum of values as one op."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ...device import Device
from ...errors import ArgumentError, unknown_name
from ..arrays import batch_to_front, canonical_precision, check_dtypes, is_explicitly_sharded
from ..implementation import Implementation
from ..op import Op
from . import blockwise, reference

Array = Any

DTYPES = ("float32", "bfloat16", "float16", "float64")
# Per head. Below, the composite fits in the cache, and keeping the probabilities is cheaper than computing them again.
_BLOCKWISE_SCORES = 512 * 512


def _refuses_blockwise(shapes: Mapping[str, Any], device: Device, **attrs: Any) -> str | None:
    """Why the blockwise form cannot run, or None."""
    if any(is_explicitly_sharded(a) for a in shapes.values()):
        return "operands sharded over explicit mesh axes cannot be looped over in blocks"
    return None


class DotProductAttention(Op):
    """softmax(scale * query @ key^T) @ value; see `dot_product_attention` below for shapes and attributes."""

    name = "dot_product_attention"
    slots = ("query", "key", "value")
    implementations: ClassVar[Mapping[str, Implementation]] = {
        "xla": Implementation(
            "xla",
            "scores, softmax and weighted sum as jnp code: the T x S matrix exists",
            reference.forward,
            reference.tangent,
            reference.cotangent,
        ),
        "xla_blockwise": Implementation(
            "xla_blockwise",
            "blocks of query rows: the T x S matrix never exists; backward recomputes it from O(T) statistics",
            blockwise.forward,
            reference.tangent,
            blockwise.cotangent,
            _refuses_blockwise,
        ),
    }

    def prepare(self, operands: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = dict(zip(self.slots, operands, strict=False))
        present: tuple[Any, ...] = tuple(given.get(slot) for slot in self.slots)
        known = {"scale": None, "is_causal": False, "precision": None, "implementation": None}
        for name in attrs:
            if name not in known:
                raise unknown_name("dot_product_attention attribute", name, known)
        full = known | dict(attrs)
        self.check_implementation(full["implementation"])
        _check_shapes(*present)
        check_dtypes(self.name, dict(zip(self.slots, present, strict=True)), DTYPES)
        if not isinstance(full["is_causal"], bool):
            raise ArgumentError(f"dot_product_attention: is_causal is {full['is_causal']!r}, needed True or False")
        full["scale"] = _scale(full["scale"], present[0].shape[-1])
        full["precision"] = canonical_precision(full["precision"])
        return present, full

    def for_device(self, shapes: Mapping[str, Any], attrs: dict[str, Any], device: Device) -> dict[str, Any]:
        return attrs | {"saves": _saves(shapes, attrs["implementation"], device)}

    def residual_names(self, *, saves: str, **attrs: Any) -> tuple[str, ...]:
        return (saves,)

    def reads(self, wanted: tuple[str, ...], *, saves: str, **attrs: Any) -> frozenset[str]:
        if not wanted:
            return frozenset()
        if saves == "probabilities":
            other = {"query": {"key", "value"}, "key": {"query", "value"}, "value": set()}
            return frozenset({"probabilities"}).union(*(other[slot] for slot in wanted))
        probabilities = frozenset({"query", "key", "logsumexp"})
        return probabilities if wanted == ("value",) else probabilities | {"value", "out"}

    def batch(
        self, role: str, names: tuple[str, ...], values: list[Array], dims: list[int | None], params: dict[str, Any]
    ) -> tuple[list[Array], dict[str, Any]] | None:
        """One more leading batch axis."""
        return batch_to_front(values, dims), params

    def preferred(self, shapes: Mapping[str, Any], device: Device, *, saves: str, **attrs: Any) -> tuple[str, str]:
        size = " x ".join(str(shapes[n].shape[-3]) for n in ("query", "key") if n in shapes)
        if device.platform != "cpu":
            return "xla", "what XLA runs anyway: the blockwise form was measured on CPUs only"
        if saves == "probabilities":
            why = _refuses_blockwise(shapes, device) or f"{size} scores a head are few enough to be kept"
            return "xla", f"what XLA runs anyway: {why}"
        return "xla_blockwise", f"{size} scores a head: measured faster on a CPU, and the score matrix never exists"

    def is_what_xla_runs(self, name: str, /, *, saves: str, **attrs: Any) -> bool:
        return name == "xla" and saves == "probabilities"

    def anchor_dimensions(self, params: Mapping[str, Any]) -> Any:
        return ((3,), (1,)), ((0, 1), (0, 2))  # the weighted sum of values, over batch and heads

    def formula(self, *, scale: float | None = None, is_causal: bool = False, **_: Any) -> str:
        """ "softmax(0.125 * q @ k.T, causal) @ v"."""
        factor = "1/sqrt(H)" if scale is None else f"{scale:.6g}"
        return f"softmax({factor} * q @ k.T{', causal' if is_causal else ''}) @ v"


def _saves(shapes: Mapping[str, Any], implementation: str | None, device: Device) -> str:
    """What the forward keeps for the backward: probabilities cost memory, computing them again costs time.

    Beside the size of the cache, it depends on what there is to run: off the CPU that is the composite alone, which gains nothing by
    computing them again.
    """
    if implementation is not None:
        return "probabilities" if implementation == "xla" else "logsumexp"
    few = shapes["query"].shape[-3] * shapes["key"].shape[-3] < _BLOCKWISE_SCORES
    return "probabilities" if few or device.platform != "cpu" or _refuses_blockwise(shapes, device) else "logsumexp"


def _check_shapes(query: Any, key: Any, value: Any) -> None:
    for slot, a in (("query", query), ("key", key), ("value", value)):
        if a is None:
            raise ArgumentError(f"dot_product_attention: {slot} is missing, needed an array")
        if len(a.shape) < 3:
            raise ArgumentError(
                f"dot_product_attention: {slot} has shape {tuple(a.shape)}, rank {len(a.shape)}; needed rank 3 or "
                f"more: *batch, length, heads, features"
            )
    q, k, v = (tuple(a.shape) for a in (query, key, value))
    for slot, shape in (("key", k), ("value", v)):
        if shape[:-3] != q[:-3]:
            raise ArgumentError(
                f"dot_product_attention: {slot} {shape} has batch axes {shape[:-3]}, query {q} has {q[:-3]}; needed "
                f"the same: broadcast them"
            )
        if shape[-2] != q[-2]:
            raise ArgumentError(
                f"dot_product_attention: {slot} {shape} has {shape[-2]} heads at axis -2, query {q} has {q[-2]}; needed "
                f"the same: repeat the {slot}'s heads"
            )
    if k[-1] != q[-1]:
        raise ArgumentError(
            f"dot_product_attention: key {k} has {k[-1]} features, query {q} has {q[-1]}; needed the same H"
        )
    if v[-3] != k[-3]:
        raise ArgumentError(
            f"dot_product_attention: value {v} has length {v[-3]}, key {k} has {k[-3]}; needed the same S"
        )
    if k[-3] < 1 or q[-1] < 1:
        raise ArgumentError(f"dot_product_attention: key has shape {k}; needed at least one key and one feature")


def _scale(scale: Any, features: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(features)
    try:
        number = float(scale)
    except TypeError as e:  # a traced value, or no number at all
        raise ArgumentError(f"dot_product_attention: scale is {scale!r}, needed a number known when tracing") from e
    if not math.isfinite(number):
        raise ArgumentError(f"dot_product_attention: scale is {number}, needed a finite number")
    return number


DOT_PRODUCT_ATTENTION = DotProductAttention()


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    precision: Any = None,
    implementation: str | None = None,
) -> Array:
    """softmax(scale * query @ key^T) @ value as one op, differentiable to any order.

    Args:
      query: *B x T x N x H: any number of batch axes (also none), length, heads, features.
      key: *B x S x N x H.
      value: *B x S x N x Hv.
      scale: multiplies the scores; None is 1/sqrt(H).
      is_causal: row t sees keys s <= t, aligned at the top left, as `jax.nn.dot_product_attention` does.
      precision: as for `jax.lax.dot_general`; None takes the default in force at the call.
      implementation: None may choose; "xla" is the plain jnp code; "xla_blockwise" never makes the T x S matrix.

    Returns:
      *B x T x N x Hv in the operands' dtype (float32, bfloat16, float16 or float64; they must agree). Scores and softmax
      are float32 (float64 for float64). Differentiated, it keeps the result and one statistic a row; or,
      where the "xla" implementation runs (below 512 x 512 scores a head, and off the CPU), the probabilities.

    Raises:
      ArgumentError: a wrong rank, size, dtype or scale; the message names the argument.
      UnknownNameError: no implementation has that name.
      BackendError: the named implementation cannot run this call here.

    >>> import jax.numpy as jnp
    >>> q = k = jnp.zeros((1, 4, 2, 8))
    >>> v = jnp.arange(4.0).reshape(1, 4, 1, 1).repeat(2, axis=2)
    >>> dot_product_attention(q, k, v, is_causal=True)[0, :, 0, 0].tolist()
    [0.0, 0.5, 1.0, 1.5]
    """
    return DOT_PRODUCT_ATTENTION.call(
        query, key, value, scale=scale, is_causal=is_causal, precision=precision, implementation=implementation
    )
