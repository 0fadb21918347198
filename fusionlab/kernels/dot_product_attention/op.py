"""`dot_product_attention`: scores, softmax and the weighted sum of values as one op."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from ...device import Device
from ...errors import ArgumentError
from ...graph.labelled import Form
from ..arrays import batch_size, batch_to_front, canonical_precision, check_dtypes, is_explicitly_sharded, with_rank
from ..implementation import Implementation
from ..op import Op
from . import blockwise, reference

Array = Any

DTYPES = ("float32", "bfloat16", "float16", "float64")
_BROADCAST = ("bias", "mask", "factors")  # operands of the scores' rank, whose axes of size 1 broadcast
# Per head. Below, the composite fits in the cache, and keeping the probabilities is cheaper than computing them again.
_BLOCKWISE_SCORES = 512 * 512


def _refuses_blockwise(shapes: Mapping[str, Any], device: Device, **attrs: Any) -> str | None:
    """Why the blockwise form cannot run, or None."""
    if any(is_explicitly_sharded(a) for a in shapes.values()):
        return "operands sharded over explicit mesh axes cannot be looped over in blocks"
    return None


class DotProductAttention(Op):
    """softmax(scale * query @ key^T + bias) * factors @ value; see `dot_product_attention` below for all of it."""

    name = "dot_product_attention"
    slots = ("query", "key", "value", "bias", "mask", "factors")
    defaults: ClassVar[Mapping[str, Any]] = {
        "scale": None,
        "is_causal": False,
        "softcap": None,
        "mask_value": -math.inf,
        "factors_scale": 1.0,
        "precision": None,
    }
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

    def prepare(self, given: Mapping[str, Any], attrs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        full = self.with_defaults(attrs)
        _check_shapes(*(given.get(slot) for slot in self.slots[:3]))
        check_dtypes(self.name, {slot: a for slot, a in given.items() if slot not in _BROADCAST}, DTYPES)
        scores = _scores_shape(given["query"], given["key"])
        for slot in _BROADCAST:
            if slot in given:
                _check_broadcast(slot, given[slot], scores, given["query"].dtype)
        if not isinstance(full["is_causal"], bool):
            raise ArgumentError(f"dot_product_attention: is_causal is {full['is_causal']!r}, needed True or False")
        _check_numbers(full, given["query"].shape[-1])
        full["precision"] = canonical_precision(full["precision"])
        present = {slot: with_rank(a, len(scores)) if slot in _BROADCAST else a for slot, a in given.items()}
        full["broadcast"] = tuple(
            (slot, tuple(present[slot].shape), np.dtype(present[slot].dtype).name)
            for slot in ("bias", "factors")
            if slot in present and jnp.issubdtype(present[slot].dtype, jnp.floating)
        )
        return present, full

    def for_device(self, shapes: Mapping[str, Any], attrs: dict[str, Any], device: Device) -> dict[str, Any]:
        return attrs | {"saves": _saves(shapes, attrs, device)}

    def residual_names(self, *, saves: str, softcap: float | None, **attrs: Any) -> tuple[str, ...]:
        return reference.residual_names(saves, softcap)

    def reads(
        self, wanted: tuple[str, ...], *, saves: str, softcap: float | None, present: tuple[str, ...], **attrs: Any
    ) -> frozenset[str]:
        if not wanted:
            return frozenset()
        scores = bool({"query", "key", "bias"} & set(wanted))
        names = set()
        if scores or "factors" in wanted:
            names.add("value")
        if scores:
            names.add("mask")
        if scores or "value" in wanted:
            names.add("factors")
        if saves == "probabilities":
            names.add("probabilities")
            other = {"query": "key", "key": "query"}
            names.update(other[slot] for slot in wanted if slot in other)
            if softcap is not None and {"query", "key"} & set(wanted):
                names.add("tanh")
            return frozenset(names).intersection((*present, "probabilities", "tanh"))
        statistics = self.residual_names(saves=saves, softcap=softcap)
        names |= {"query", "key", "bias", "mask", *statistics} | ({"out"} if scores else set())
        return frozenset(names).intersection((*present, "out", *statistics))

    def batch(
        self, role: str, names: tuple[str, ...], values: list[Array], dims: list[int | None], params: dict[str, Any]
    ) -> tuple[list[Array], dict[str, Any]] | None:
        """One more leading batch axis, of size 1 where an operand that broadcasts is not batched."""
        size = batch_size(values, dims)
        unbatched = {n for n, d in zip(names, dims, strict=True) if d is None and n.removeprefix("d_") in _BROADCAST}
        whole = [i for i, n in enumerate(names) if n not in unbatched]
        moved = dict(
            zip(whole, batch_to_front([values[i] for i in whole], [dims[i] for i in whole], size), strict=True)
        )
        result = [moved[i] if i in moved else v[None] for i, v in enumerate(values)]
        if role == "cotangent":  # a gradient for each of the batch, also of an operand they share
            sizes = {slot: size for slot, *_ in params["broadcast"]}
        else:
            given = dict(zip(names, result, strict=True))
            prefix = "d_" if role == "tangent" else ""
            sizes = {n.removeprefix("d_"): a.shape[0] for n, a in given.items() if n.startswith(prefix)}
        broadcast = tuple((slot, (sizes.get(slot, 1), *shape), dtype) for slot, shape, dtype in params["broadcast"])
        return result, params | {"broadcast": broadcast}

    def form(self, shapes: Mapping[str, tuple[int, ...]], /, **attrs: Any) -> Form:
        """Batch "b", heads "h", queries "t", keys "s", their features "c", those of the values "d"."""
        batch = tuple(f"b{i}" for i in range(len(shapes["query"]) - 3))
        axes = dict.fromkeys(_BROADCAST, (*batch, *"hts"))
        axes |= {slot: (*batch, *x) for slot, x in (("query", "thc"), ("key", "shc"), ("value", "shd"))}
        of_operand = (("mask", "mask_value"), ("factors", "factors_scale"))
        known = ["scale", "softcap", *(name for slot, name in of_operand if slot in shapes)]
        numbers = tuple((name, float(attrs[name])) for name in known if attrs[name] is not None)
        traits = (("is_causal", attrs["is_causal"]),)
        return Form(tuple(shapes), tuple(axes[slot] for slot in shapes), (*batch, *"thd"), traits, numbers)

    def preferred(
        self, role: str, shapes: Mapping[str, Any], device: Device, *, saves: str, **attrs: Any
    ) -> tuple[str, str]:
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

    def formula(
        self,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        softcap: float | None = None,
        factors_scale: float = 1.0,
        bias: bool = False,
        mask: bool = False,
        factors: bool = False,
        **_: Any,
    ) -> str:
        """ "softmax(0.125 * q @ k.T + bias, mask, causal) @ v"; `bias`, `mask` and `factors` say which of them there are."""
        scores = f"{'1/sqrt(H)' if scale is None else f'{scale:.6g}'} * q @ k.T"
        if softcap is not None:
            scores = f"{softcap:.6g} * tanh({scores} / {softcap:.6g})"
        text = f"softmax({scores}{' + bias' * bias}{', mask' * mask}{', causal' * is_causal})"
        if factors:
            text = f"({text} * factors{'' if factors_scale == 1.0 else f' * {factors_scale:.6g}'})"
        return f"{text} @ v"


def _saves(shapes: Mapping[str, Any], attrs: Mapping[str, Any], device: Device) -> str:
    """What the forward keeps for the backward: probabilities cost memory, computing them again costs time.

    Beside the size of the cache, it depends on what there is to run: off the CPU that is the composite alone, which gains nothing by
    computing them again.
    """
    few = shapes["query"].shape[-3] * shapes["key"].shape[-3] < _BLOCKWISE_SCORES
    composite = few or device.platform != "cpu" or _refuses_blockwise(shapes, device, **attrs)
    if attrs["implementation"] == "xla" or (attrs["implementation"] is None and composite):
        return "probabilities"
    far = "bias" in shapes or ("mask" in shapes and attrs["mask_value"] != -math.inf)  # a whole row may be far from 0
    return "max_and_log_sum" if far else "logsumexp"


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


def _scores_shape(query: Any, key: Any) -> tuple[int, ...]:
    *batch, t, heads, _ = query.shape
    return (*batch, heads, t, key.shape[-3])


def _check_broadcast(slot: str, operand: Any, scores: tuple[int, ...], dtype: Any) -> None:
    """A mask is bool, factors float or bool, a bias float; a float no wider than the scores; the shape broadcasts to them."""
    shape, own, wide = tuple(operand.shape), np.dtype(operand.dtype), np.dtype(reference.statistics_dtype(dtype))
    is_bool = own == np.bool_
    if not (is_bool if slot == "mask" else own.name in DTYPES or (is_bool and slot == "factors")):
        needed = {
            "mask": "bool",
            "bias": f"one of {', '.join(DTYPES)}",
            "factors": f"bool or one of {', '.join(DTYPES)}",
        }
        raise ArgumentError(f"dot_product_attention: {slot} has dtype {own.name}, needed {needed[slot]}")
    if not is_bool and own.itemsize > wide.itemsize:
        raise ArgumentError(
            f"dot_product_attention: {slot} has dtype {own.name}, wider than the {wide.name} that the scores of "
            f"{np.dtype(dtype).name} operands are computed in; cast {slot} or the operands with .astype"
        )
    aligned = zip(reversed(shape), reversed(scores), strict=False)
    if len(shape) > len(scores) or any(n not in (1, m) for n, m in aligned):
        raise ArgumentError(
            f"dot_product_attention: {slot} has shape {shape}, which does not broadcast to the scores {scores}; needed "
            f"*batch, heads, query length, key length, aligned right, each of them or 1"
        )


def _check_numbers(full: dict[str, Any], features: int) -> None:
    """Puts the numbers among the attributes in canonical form: floats, or None for no softcap."""
    scale = full["scale"]
    full["scale"] = 1.0 / math.sqrt(features) if scale is None else _number("scale", scale, "a finite number")
    full["factors_scale"] = _number("factors_scale", full["factors_scale"], "a finite number")
    if full["softcap"] is not None:
        full["softcap"] = _number("softcap", full["softcap"], "a finite number greater than 0, or None")
        if full["softcap"] <= 0:
            raise ArgumentError(f"dot_product_attention: softcap is {full['softcap']}, needed a number greater than 0")
    full["mask_value"] = _number("mask_value", full["mask_value"], "a finite number or -inf", (-math.inf,))


def _number(name: str, value: Any, needed: str, allowed: tuple[float, ...] = ()) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as e:  # a traced value, or no number at all
        raise ArgumentError(f"dot_product_attention: {name} is {value!r}, needed a number known when tracing") from e
    if not math.isfinite(number) and number not in allowed:
        raise ArgumentError(f"dot_product_attention: {name} is {number}, needed {needed}")
    return number


DOT_PRODUCT_ATTENTION = DotProductAttention()


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    bias: Array | None = None,
    mask: Array | None = None,
    factors: Array | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    softcap: float | None = None,
    mask_value: float = -math.inf,
    factors_scale: float = 1.0,
    precision: Any = None,
    implementation: str | None = None,
) -> Array:
    """softmax(scale * query @ key^T + bias) * factors @ value as one op, differentiable to any order.

    Args:
      query: *B x T x N x H: any number of batch axes (also none), length, heads, features.
      key: *B x S x N x H.
      value: *B x S x N x Hv.
      bias: float, added to the scores (after the softcap); as mask and factors it broadcasts to *B x N x T x S.
      mask: bool; a score becomes `mask_value` where it is False, and has no gradient there.
      factors: float or bool; multiplies the probabilities (a dropout mask, weights on heads).
      scale: multiplies the scores; None is 1/sqrt(H).
      is_causal: row t sees keys s <= t, aligned at the top left, as `jax.nn.dot_product_attention` does; applied last.
      softcap: scores become softcap * tanh(scores / softcap); None leaves them.
      mask_value: -inf (a row masked as a whole is NaN) or a finite number (then its weights are uniform, if it is far from 0).
      factors_scale: multiplies the factors, if there are any.
      precision: as for `jax.lax.dot_general`; None takes the default in force at the call.
      implementation: None may choose; "xla" is the plain jnp code; "xla_blockwise" never makes the T x S matrix.

    Returns:
      *B x T x N x Hv in the dtype of query, key and value (float32, bfloat16, float16 or float64; they must agree). Scores
      and softmax are float32 (float64 for float64); no bias or factors may be wider. Differentiated, it keeps the result
      and one statistic a row, or two where whole rows may be masked; or, where the "xla" implementation runs (below 512 x 512
      scores a head, and off the CPU), the probabilities.

    Raises:
      ArgumentError: a wrong rank, size, dtype or number; the message names the argument.
      UnknownNameError: no implementation has that name.
      BackendError: the named implementation cannot run this call here.

    >>> import jax.numpy as jnp
    >>> q = k = jnp.zeros((1, 4, 2, 8))
    >>> v = jnp.arange(4.0).reshape(1, 4, 1, 1).repeat(2, axis=2)
    >>> dot_product_attention(q, k, v, is_causal=True)[0, :, 0, 0].tolist()
    [0.0, 0.5, 1.0, 1.5]
    >>> dot_product_attention(q, k, v, mask=jnp.array([False, True, True, False]))[0, :, 0, 0].tolist()
    [1.5, 1.5, 1.5, 1.5]
    """
    return DOT_PRODUCT_ATTENTION.call(
        query,
        key,
        value,
        bias,
        mask,
        factors,
        scale=scale,
        is_causal=is_causal,
        softcap=softcap,
        mask_value=mask_value,
        factors_scale=factors_scale,
        precision=precision,
        implementation=implementation,
    )
