"""`dot_product_attention`: scores, softmax and the weighted sum of values as one op."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from ....device import Device
from ....errors import ArgumentError
from ....graph.canonical.fused_nodes import FusedForm
from ....tracebacks import own_lines_hidden
from ...op.arrays import batch_size, batch_to_front, canonical_precision, check_dtypes, check_name, with_rank
from ...op.implementation import Call, Implementation, ImplementationChoice
from ...op.labels import Axes, result_rank
from ...op.op import Op
from . import choosing, reference
from .blockwise import attention as blockwise
from .checks import (
    check_broadcast,
    check_numbers,
    check_shapes,
    checked_dropout_shape,
    checked_window,
    for_each_head,
    heads_sharing,
    scores_shape,
    seen_pairs,
)
from .cudnn import backend as cudnn
from .layouts import LAYOUTS, implementation
from .own import backend as cuda
from .settings import DEFAULTS, Settings

Array = Any

_BROADCAST = ("bias", "mask", "factors", "sink")  # operands of the scores' rank, whose axes of size 1 broadcast


class DotProductAttention(Op):
    """softmax(scale * query @ key^T + bias) * factors @ value; see `dot_product_attention` below for all of it."""

    name = "dot_product_attention"
    slots = ("query", "key", "value", "bias", "mask", "factors", "dropout_key", "sink")
    sizes = choosing.SIZES
    whole = frozenset("tscd")  # a part of these would need to know where it begins
    at_site = (("call", {}),)
    # On a GPU XLA's code of it was measured up to 1.5 times as slow as a site (batch 32, 16 heads, 1024 x 1024, with dropout).
    declines = True
    defaults: ClassVar[Mapping[str, Any]] = DEFAULTS
    implementations: ClassVar[Mapping[str, Implementation]] = {
        "xla": implementation(
            "xla",
            "scores, softmax and weighted sum as jnp code: the T x S matrix exists",
            reference.forward,
            reference.cotangent,
        ),
        "xla_blockwise": implementation(
            "xla_blockwise",
            "blocks of query rows: the T x S matrix never exists; backward recomputes it from O(T) statistics",
            blockwise.forward,
            blockwise.cotangent,
            unable=choosing.refuses_blockwise,
        ),
        "cudnn": implementation(
            "cudnn",
            f"cuDNN's fused attention through JAX's own call of it; backward from one statistic per row: {cudnn.PRECISION}",
            cudnn.forward,
            cudnn.cotangent,
            unable=cudnn.refuses,
            unable_on=lambda device: cudnn.refuses_device(device),
            opaque=True,
        ),
        "cuda": implementation(
            "cuda",
            "FusionLab's own kernels: the T x S matrix never exists, masks and biases are read in place; for the backward of 16-bit "
            "operands they keep the rounding error of the result",
            cuda.forward,
            cuda.cotangent,
            unable=cuda.refuses,
            unable_on=lambda device: cuda.refuses_device(device),
            opaque=True,
        ),
    }

    def prepare(self, given: Mapping[str, Any], attrs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        full = self.with_defaults(attrs)
        check_name("layout", full["layout"], LAYOUTS)
        check_shapes(given.get("query"), given.get("key"), given.get("value"), full["layout"])
        check_dtypes(self.name, {slot: given[slot] for slot in self.slots[:3]})
        scores = scores_shape(given["query"], given["key"], full["layout"])
        if "sink" in given:
            given = {**given, "sink": for_each_head(given["sink"])}
        for slot in _BROADCAST:
            if slot in given:
                check_broadcast(slot, given[slot], scores, given["query"].dtype)
        full["dropout_shape"] = checked_dropout_shape(given, full, scores)
        for name in ("is_causal", "deterministic"):
            if not isinstance(full[name], bool):
                raise ArgumentError(f"dot_product_attention: {name} is {full[name]!r}, needed True or False")
        full["is_causal"], full["window"] = checked_window(full["window"], full["is_causal"], *scores[-2:])
        check_numbers(full, given["query"].shape[-1])
        full["precision"] = canonical_precision(full["precision"])
        full["group"] = heads_sharing(given["query"], given["key"], full["layout"])
        present = {slot: with_rank(a, len(scores)) if slot in _BROADCAST else a for slot, a in given.items()}
        full["broadcast"] = _with_gradients(present)
        return present, full

    def for_device(self, shapes: Mapping[str, Any], attrs: dict[str, Any], device: Device) -> dict[str, Any]:
        training = {**attrs, "residuals": True, "saves": "logsumexp"}
        name = attrs["implementation"] or self.decide("call", shapes, device, **training).implementation
        return attrs | {"saves": choosing.saves(shapes, attrs, name)}

    def at_precision_set(self, params: dict[str, Any]) -> dict[str, Any]:
        # Scores that are computed again have to be those whose sums were saved: where a softmax saturates, other ones are far from them.
        return super().at_precision_set(params) if params["saves"] == "probabilities" else params

    def residual_names(self, **attrs: Any) -> tuple[str, ...]:
        return Settings.of(attrs).saved_names

    def reads(self, wanted: tuple[str, ...], **attrs: Any) -> frozenset[str]:
        form = Settings.of(attrs)
        scores, names = bool({"query", "key", "bias", "sink"} & set(wanted)), set()
        if scores or "factors" in wanted:
            names.add("value")
        if scores:
            names.add("mask")
        if scores or "value" in wanted:
            names |= {"factors", "dropout_key"}
        if form.saves == "probabilities":
            names |= _read_beside_probabilities(wanted, scores)
        else:
            names |= {"query", "key", "bias", "mask", "sink", *form.statistics}
            names |= {"out", "rounded_off"} if scores else set()
        there = (*form.present, *form.saved_names, "out")
        return frozenset(names).intersection(there) if wanted else frozenset()

    def batch(
        self, role: str, names: tuple[str, ...], values: list[Array], dims: list[int | None], params: dict[str, Any]
    ) -> tuple[list[Array], dict[str, Any]] | None:
        """One more leading batch axis, of size 1 where an operand that broadcasts is not batched."""
        if dict(zip(names, dims, strict=True)).get("dropout_key") is not None:
            return None  # a mask of its own for each of the batch
        size = batch_size(values, dims)
        result = _with_batch_axis(names, values, dims, size)
        if role == "cotangent":  # a gradient for each of the batch, also of an operand they share
            sizes = {slot: size for slot, *_ in params["broadcast"]}
        else:
            given = dict(zip(names, result, strict=True))
            prefix = "d_" if role == "tangent" else ""
            sizes = {n.removeprefix("d_"): a.shape[0] for n, a in given.items() if n.startswith(prefix)}
        broadcast = tuple((slot, (sizes.get(slot, 1), *shape), dtype) for slot, shape, dtype in params["broadcast"])
        drawn = params["dropout_shape"]
        return result, params | {"broadcast": broadcast, "dropout_shape": None if drawn is None else (1, *drawn)}

    def labels(self, shapes: Mapping[str, tuple[int, ...]], /, **attrs: Any) -> Mapping[str, tuple[str, ...]]:
        """Batch "b", heads "h" (of keys and values one for a group of them), queries "t", keys "s", their features "c", those of the values
        "d"."""
        batch, group = tuple(f"b{i}" for i in range(result_rank(shapes) - 3)), attrs["group"]
        k = "h" if group == 1 else f"h/{group}"
        axes = {"query": "thc", "key": ("s", k, "c"), "value": ("s", k, "d"), "out": "thd", "rounded_off": "thd"}
        swapped = attrs["layout"] == "BNTH"
        laid_out = {slot: (*batch, *((h, t, c) if swapped else (t, h, c))) for slot, (t, h, c) in axes.items()}
        scores = dict.fromkeys((*_BROADCAST, "probabilities", "tanh"), (*batch, *"hts"))
        statistics = dict.fromkeys(("logsumexp", "row_max", "log_sum", "sink_weight"), (*batch, *"ht"))
        return {**scores, **statistics, **laid_out, "dropout_key": ("w",)}

    def axes(self, shapes: Mapping[str, tuple[int, ...]], /, **attrs: Any) -> Axes:
        found = super().axes(shapes, **attrs)
        # The bits of a dropout mask hang on where an entry stands among all that are drawn.
        drawn = zip(found.labels.get("mask", ()), attrs["dropout_shape"] or (), strict=False)
        return replace(found, whole=found.whole.union(label for label, n in drawn if n != 1))

    def form(self, shapes: Mapping[str, tuple[int, ...]], /, **attrs: Any) -> FusedForm:
        """The heads of keys and values are "g" to the search, where they are fewer."""
        labels, group = self.labels(shapes, **attrs), attrs["group"]
        axes = {slot: tuple("g" if "/" in x else x for x in labels[slot]) for slot in shapes}
        drawn = (("dropout_shape", attrs["dropout_shape"]),) if "dropout_key" in shapes else ()
        shared = (("group", group),) if group > 1 else ()
        local = (("window", attrs["window"]),) if attrs["window"] is not None else ()
        traits = (("is_causal", attrs["is_causal"]), *drawn, *shared, *local)
        return FusedForm(tuple(axes), tuple(axes.values()), labels["out"], traits, _numbers(shapes, attrs))

    def rule(self, call: Call, unable: str) -> ImplementationChoice:
        return choosing.rule(call.role, call.shapes, call.device, call.attrs)

    def case(self, role: str, shapes: Mapping[str, Any], **attrs: Any) -> str | None:
        return None if role == "tangent" or choosing.keeps(role, attrs) else choosing.case(role, shapes, attrs)

    def share(self, shapes: Mapping[str, Any], /, **attrs: Any) -> float:
        """The pairs of a query and a key that are seen for their numbers alone: a kernel steps over the rest."""
        given = {slot.removeprefix("d_"): a for slot, a in shapes.items()}
        query, key = given.get("query"), given.get("key")
        if query is None or key is None:
            return 1.0
        *_, t, s = scores_shape(query, key, attrs["layout"])
        return seen_pairs(t, s, attrs["is_causal"], attrs["window"])

    def is_what_xla_runs(self, name: str, /, *, saves: str, **attrs: Any) -> bool:
        return name == "xla" and saves == "probabilities"

    def left(self, call: Call, decisions: Sequence[ImplementationChoice]) -> ImplementationChoice | None:
        return super().left(call, decisions) if call.device.platform == "cuda" else None

    def anchor_dimensions(self, params: Mapping[str, Any]) -> Any:
        return ((3,), (1,)), ((0, 1), (0, 2))  # the weighted sum of values, over batch and heads

    def formula(self, **attrs: Any) -> str:
        """ "softmax(0.125 * q @ k.T + bias, mask, causal, sink) @ v, 8 query heads a key head"; `bias`, `mask`, `factors`, `dropout_key`
        and `sink` say which operands there are."""
        form, there = Settings.of(attrs), {slot: bool(attrs.get(slot)) for slot in self.slots}
        scale = "1/sqrt(H)" if form.scale is None else f"{form.scale:.6g}"
        scores = "q @ k.T" if form.scale == 1 else f"{scale} * q @ k.T"
        if form.softcap is not None:
            scores = f"{form.softcap:.6g} * tanh({scores} / {form.softcap:.6g})"
        local = "" if form.window is None else f", local window of {sum(form.window) + 1} keys"
        seen = f"{' + bias' * there['bias']}{', mask' * there['mask']}{', causal' * form.is_causal}{local}"
        heads = f", {form.group} query heads a key head" * (form.group != 1)
        text = f"softmax({scores}{seen}{', sink' * there['sink']})"
        if there["factors"] or there["dropout_key"]:
            drawn = f"bernoulli(key, {form.keep:.6g})" if there["dropout_key"] else "factors"
            text = f"({text} * {drawn}{'' if form.factors_scale == 1.0 else f' * {form.factors_scale:.6g}'})"
        return f"{text} @ v{heads}"


def _with_gradients(present: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """(slot, shape, dtype) of the operands that broadcast and have a gradient: a bool has none."""
    return tuple(
        (slot, tuple(present[slot].shape), np.dtype(present[slot].dtype).name)
        for slot in ("bias", "factors", "sink")
        if slot in present and jnp.issubdtype(present[slot].dtype, jnp.floating)
    )


def _keeps_axes(name: str, dim: int | None) -> bool:
    """Whether an operand gets no axis for each of the batch: a key, which all of it share, and what broadcasts to the scores."""
    return name == "dropout_key" or (dim is None and name.removeprefix("d_") in _BROADCAST)


def _with_batch_axis(names: tuple[str, ...], values: list[Array], dims: list[int | None], size: int) -> list[Array]:
    """The operands, the batch as axis 0: of size 1 where an operand broadcasts; none of a key."""
    whole = [i for i, entry in enumerate(zip(names, dims, strict=True)) if not _keeps_axes(*entry)]
    moved = dict(zip(whole, batch_to_front([values[i] for i in whole], [dims[i] for i in whole], size), strict=True))
    return [moved[i] if i in moved else v if names[i] == "dropout_key" else v[None] for i, v in enumerate(values)]


def _read_beside_probabilities(wanted: tuple[str, ...], scores: bool) -> set[str]:
    """What the gradients wanted read, where it is there, of what is saved with probabilities: query's and key's read the other one."""
    other = {"query": "key", "key": "query"}
    factors = {other[slot] for slot in wanted if slot in other}
    return factors | {"probabilities"} | ({"tanh"} if factors else set()) | ({"sink_weight"} if scores else set())


def _numbers(shapes: Mapping[str, Any], attrs: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """The numbers of a call with these operands that mean something to it, by name."""
    of_operand = (
        ("mask", "mask_value"),
        ("factors", "factors_scale"),
        ("dropout_key", "factors_scale"),
        ("dropout_key", "keep"),
    )
    known = ["scale", "softcap", *(name for slot, name in of_operand if slot in shapes)]
    return tuple((name, float(attrs[name])) for name in known if attrs[name] is not None)


DOT_PRODUCT_ATTENTION = DotProductAttention()


@own_lines_hidden
def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    bias: Array | None = None,
    mask: Array | None = None,
    factors: Array | None = None,
    dropout_key: Array | None = None,
    sink: Array | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    window: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    mask_value: float = -math.inf,
    factors_scale: float = 1.0,
    keep: float = 1.0,
    dropout_shape: tuple[int, ...] | None = None,
    precision: Any = None,
    layout: str = "BTNH",
    deterministic: bool = False,
    implementation: str | None = None,
) -> Array:
    """softmax(scale * query @ key^T + bias) * factors @ value as one op, differentiable to any order.

    With a sink, the softmax is over the keys and one more logit, whose weight is dropped: exp(s) / (sum of exp(s) + exp(sink)).

    Args:
      query: *B x T x N x H: any number of batch axes (also none), length, heads, features.
      key: *B x S x K x H. N is a multiple of K: query head n reads key head n // (N / K), as in grouped-query (K < N) and
        multi-query (K = 1) attention. Nothing is repeated in memory, and the gradients have K heads.
      value: *B x S x K x Hv.
      bias: float, added to the scores (after the softcap); as mask and factors it broadcasts to *B x N x T x S.
      mask: bool; a score becomes `mask_value` where it is False, and has no gradient there.
      factors: float or bool; multiplies the probabilities (a dropout mask, weights on heads).
      dropout_key: uint32[2], the data of a threefry2x32 key, in place of factors: they are then
        `jax.random.bernoulli(key, keep, dropout_shape)`, to the bit (with jax_threefry_partitionable, JAX's default, and a float32
        `keep`, also where 64 bits are enabled).
      sink: float, N numbers, one for each head, or a shape that broadcasts to *B x N x T x 1: one more logit for each row, which no
        scale, softcap, bias or mask changes and whose weight goes to no value. A row that sees no key gives all of its weight to
        the sink, and is 0. It has a gradient of its own, in its dtype and shape. (A sink of 0 is softmax with 1 added to the sum.)
      scale: multiplies the scores; None is 1/sqrt(H).
      is_causal: row t sees keys s <= t, aligned at the top left, as `jax.nn.dot_product_attention` does; applied last.
      window: (left, right), or one number for both: row t sees only keys t - left to t + right, with is_causal up to t, aligned
        like it; scores outside are not computed, except to fill a block. A row without a key is 0. None: no such limit.
      softcap: scores become softcap * tanh(scores / softcap); None leaves them.
      mask_value: -inf, or a finite number. A query row that sees no key (all its scores are -inf) is 0, and so are its gradients,
        where a softmax would be NaN; a row masked as a whole with a finite number far from 0 is the mean of the values.
      factors_scale: multiplies the factors, if there are any (1 / keep, for a dropout).
      keep: the probability with which an entry is kept, for a dropout_key.
      dropout_shape: the shape in which a dropout_key's factors are drawn, which broadcasts to *B x N x T x S: (1, 1, T, S) drops the
        same entries in every head of every batch entry. None is the scores' own.
      precision: as for `jax.lax.dot_general`; None takes the default in force at the call.
      layout: "BTNH", or "BNTH" for query, key, value and result with heads before length; bias, mask and factors stay as they are.
      deterministic: the same bits in every run, also of the gradients: excludes cuDNN's backward, which adds to the query's
        gradient with atomics.
      implementation: None lets the op choose; "xla" is the plain jnp code; "xla_blockwise" never makes the T x S matrix; "cudnn" is
        cuDNN's fused attention, "cuda" FusionLab's own kernels: neither of these two takes a sink.

    Returns:
      *B x T x N x Hv in the dtype of query, key and value (float32, bfloat16, float16 or float64; they must agree). Scores
      and softmax are float32 (float64 for float64); no bias, factors or sink may be wider. When differentiated, it keeps the result
      and one statistic per row, or two if whole rows may be masked; or the probabilities, if the "xla" implementation runs (below
      512 x 512 scores per head, and off the CPU).

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
    return DOT_PRODUCT_ATTENTION.call_by_name(**locals())
