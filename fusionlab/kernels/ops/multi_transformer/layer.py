"""A transformer layer made of parts: the computation of `multi_transformer`, however its parts are computed.

Letters: B batch, S tokens of this call, T keys they attend to, Smax the size of a cache, E model width, H query heads, G key/value heads,
D head size, F feed-forward width. Products, norms and the attention round to the dtype of x; parameters are cast to it. Softmax and
statistics are float32 (float64 for float64).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ....graph.dtypes import arithmetic_dtype

Array = Any
Weights = Mapping[str, Array]  # slot, without the layer's number -> array; absent ones are not there


@dataclass(frozen=True)
class LayerOps:
    """The functions that compute a layer's parts: each takes the arguments of the op of that name.

    Attributes: `linear` (gemm_epilogue), `gated` (gated_matmul), `attention` (dot_product_attention), `norm` (layer_norm).
    """

    linear: Callable[..., Array]
    gated: Callable[..., Array]
    attention: Callable[..., Array]
    norm: Callable[..., Array]


@dataclass(frozen=True)
class LayerForm:
    """The attributes that define the computation, with their defaults; see `multi_transformer`."""

    layers: int = 1
    heads: Any = None  # an int, as kv_heads and head_size, and scale a float, once they are checked
    kv_heads: Any = None
    qkv: str = "separate"
    pre_norm: bool = True
    norm: str = "layer"
    epsilons: tuple[float | None, float | None] = (1e-5, 1e-5)
    activation: str = "gelu_tanh"
    gated: bool = False
    scale: Any = None
    is_causal: bool = False
    mask_value: float = -math.inf
    cache: str | None = None
    cache_layout: str = "BSHD"
    gives_keys: bool = False
    rotary: int | None = None
    precision: Any = None
    attention_precision: Any = None
    turned: tuple[str, ...] = ()
    head_size: Any = None
    part: str | None = None

    @classmethod
    def of(cls, attrs: Mapping[str, Any]) -> LayerForm:
        """From among the attributes of a call."""
        return cls(**{f.name: attrs[f.name] for f in fields(cls) if f.name in attrs})

    @property
    def axis(self) -> int:
        """The sequence axis of a cache."""
        return 1 if self.cache_layout == "BSHD" else 2


@dataclass(frozen=True)
class Sight:
    """The keys that a query sees, as the attention takes them."""

    bias: Array | None
    mask: Array | None
    is_causal: bool


def forward_by(ops: LayerOps) -> Callable[..., list[Array]]:
    """The forward of an implementation: (**operands by name, **attributes) -> [y], and the keys and values of each layer where they are
    given back: [y, k_0, v_0, k_1, ...]."""

    def forward(*, present: tuple[str, ...], **everything: Any) -> list[Array]:
        given, form = {name: everything[name] for name in present}, LayerForm.of(everything)
        x, results, sight = given["x"], [], _sight(given, form)
        shared = {name: a for name, a in given.items() if "." not in name}
        for i in range(form.layers):
            suffix = f".{i}"
            weights = {name.removesuffix(suffix): a for name, a in given.items() if name.endswith(suffix)}
            x, keys = (_layer if form.part is None else _part)(ops, x, shared | weights, sight, form)
            results += keys
        return [x, *(results if form.cache is not None or form.gives_keys else ())]

    return forward


def _layer(ops: LayerOps, x: Array, w: Weights, sight: Sight, form: LayerForm) -> tuple[Array, list[Array]]:
    norm1, norm2 = (functools.partial(_norm, ops, w=w, form=form, number=n) for n in (1, 2))
    attended, keys = _attend(ops, norm1(x) if form.pre_norm else x, w, sight, form)
    if form.pre_norm:
        a = x + attended
        return a + _feed_forward(ops, norm2(a), w, form), keys
    a = norm1(x + attended)
    return norm2(a + _feed_forward(ops, a, w, form)), keys


def _part(ops: LayerOps, x: Array, w: Weights, sight: Sight, form: LayerForm) -> tuple[Array, list[Array]]:
    """The attention or the feed-forward, behind its norm where that comes first."""
    number = 1 if form.part == "attention" else 2
    h = _norm(ops, x, w, form, number) if form.pre_norm else x
    return _attend(ops, h, w, sight, form) if number == 1 else (_feed_forward(ops, h, w, form), [])


def _norm(ops: LayerOps, x: Array, w: Weights, form: LayerForm, number: int) -> Array:
    epsilon = form.epsilons[number - 1]
    if epsilon is None:
        return x
    scale, bias = (_narrow(w.get(f"norm{number}_{part}"), x.dtype) for part in ("scale", "bias"))
    return ops.norm(x, scale, bias, kind=form.norm, epsilon=epsilon)


def _narrow(parameter: Array | None, dtype: Any) -> Array | None:
    """A norm's parameter, no wider than the norm's arithmetic."""
    if parameter is None:
        return None
    wide = jnp.dtype(arithmetic_dtype(dtype))
    return parameter.astype(wide) if parameter.dtype.itemsize > wide.itemsize else parameter


def _linear(
    ops: LayerOps,
    x: Array,
    w: Weights,
    slot: str,
    form: LayerForm,
    activation: str = "none",
    contract: int | None = None,
) -> Array:
    """x @ w[slot] + its bias, the weight as a matrix: [in, out], or [out, in] where it is turned (`contract` 1)."""
    bias = w.get(f"{slot}_bias")
    bias = None if bias is None else bias.reshape(-1).astype(x.dtype)
    contract = int(slot in form.turned) if contract is None else contract
    weight = _matrix(w[slot], x.shape[-1], contract).astype(x.dtype)
    return ops.linear(x, weight, bias, activation=activation, w_contract=contract, precision=form.precision)


def _matrix(weight: Array, summed: int, contract: int) -> Array:
    """A weight with one axis for what is summed over: nothing moves."""
    return weight.reshape((-1, summed) if contract else (summed, -1))


def _feed_forward(ops: LayerOps, x: Array, w: Weights, form: LayerForm) -> Array:
    linear = functools.partial(_linear, ops, x, w, form=form)
    alike = ("gate" in form.turned) == ("up" in form.turned)
    if not form.gated:
        hidden = linear("up", activation=form.activation)
    elif "gate_bias" in w or "up_bias" in w or not alike:
        hidden = linear("gate", activation=form.activation) * linear("up")
    else:
        gate, up = w["gate"].astype(x.dtype), w["up"].astype(x.dtype)
        turned = int("up" in form.turned)
        hidden = ops.gated(x, gate, up, activation=form.activation, w_contract=turned, precision=form.precision)
    return _linear(ops, hidden, w, "down", form)


# Attention.


def _attend(ops: LayerOps, x: Array, w: Weights, sight: Sight, form: LayerForm) -> tuple[Array, list[Array]]:
    """The term that the attention adds to x, and the layer's keys and values in the form they are returned."""
    q, k, v = _queries_keys_values(ops, x, w, form)
    if form.rotary is not None:
        q, k = (rotated(a, w["cos"], w["sin"], form.rotary) for a in (q, k))
    swapped = form.cache_layout == "BHSD"
    if swapped:
        q, k, v = (jnp.swapaxes(a, 1, 2) for a in (q, k, v))
    (all_k, kept_k), (all_v, kept_v) = (
        _with_cache(a, w.get(slot), w.get("step"), form) for a, slot in ((k, "cache_k"), (v, "cache_v"))
    )
    out = ops.attention(
        q,
        all_k.astype(x.dtype),
        all_v.astype(x.dtype),
        sight.bias,
        sight.mask,
        is_causal=sight.is_causal,
        scale=form.scale,
        mask_value=form.mask_value,
        precision=form.precision if form.attention_precision is None else form.attention_precision,
        layout="BNTH" if swapped else "BTNH",
    )
    if swapped:
        out = jnp.swapaxes(out, 1, 2)
    merged = out.reshape(*out.shape[:2], -1)
    return _linear(ops, merged, w, "out", form), [kept_k, kept_v]


def _queries_keys_values(ops: LayerOps, x: Array, w: Weights, form: LayerForm) -> tuple[Array, Array, Array]:
    """Each [B, S, its heads, D]. Weights are read as they lie: what reshapes there are move nothing."""
    linear, lead, size = functools.partial(_linear, ops, x, w, form=form), x.shape[:2], form.head_size
    if form.qkv == "separate":
        q, k, v = (linear(slot).reshape(*lead, -1, size) for slot in "qkv")
        return q, k, v
    if form.qkv == "packed":
        both = linear("qkv", contract=1).reshape(*lead, 3, form.heads, size)
        return both[:, :, 0], both[:, :, 1], both[:, :, 2]
    together = linear("qkv")
    if form.qkv == "interleaved":
        both = together.reshape(*lead, form.heads, 3, size)
        return both[:, :, :, 0], both[:, :, :, 1], both[:, :, :, 2]
    ends = (form.heads * size, (form.heads + form.kv_heads) * size)
    q, k, v = (a.reshape(*lead, -1, size) for a in jnp.split(together, ends, axis=-1))
    return q, k, v


def rotated(a: Array, cos: Array, sin: Array, parts: int) -> Array:
    """a [B, S, N, D] turned by angles: cos and sin are [S, W] or [1|B, S, W], W up to D; what is beyond W stays.

    The W features are `parts` pieces of two halves, and the angle of entry j of either half turns the pair of both: (l, r) becomes
    (l cos - r sin, r cos + l sin), in float32. With two parts, cos and sin hold two position tables side by side.
    Source: Su et al. 2021, arXiv:2104.09864, with the pairs as Paddle's fused_multi_transformer has them (rotary_emb_dims = parts).
    """
    width = cos.shape[-1]
    wide = a[..., :width].astype(jnp.promote_types(a.dtype, jnp.float32))
    halves = wide.reshape(*a.shape[:-1], parts, 2, width // (2 * parts))
    across = jnp.stack([-halves[..., 1, :], halves[..., 0, :]], axis=-2).reshape(wide.shape)
    cos, sin = (jnp.expand_dims(t.astype(wide.dtype), -2) for t in (cos, sin))  # alike for all heads
    turned = (wide * cos + across * sin).astype(a.dtype)
    return turned if width == a.shape[-1] else jnp.concatenate([turned, a[..., width:]], axis=-1)


# Caches, and who sees what of them.


def _with_cache(own: Array, cache: Array | None, step: Array | None, form: LayerForm) -> tuple[Array, Array]:
    """(what is attended to, what is given back): keys or values in the caches' layout."""
    if form.cache is None or cache is None:
        return own, own
    new = own.astype(cache.dtype)
    if form.cache == "append":
        both = jnp.concatenate([cache, new], axis=form.axis)
        return both, both
    written = _written(cache, new, 0 if step is None else step, form.axis)
    return (own if form.cache == "prefill" else written), written


def _written(cache: Array, new: Array, step: Any, axis: int) -> Array:
    """The cache with `new` at `step` along an axis; where there is a step for each row, at its own."""
    if jnp.ndim(step):
        return jax.vmap(functools.partial(_written, axis=axis - 1))(cache, new, step)
    first = jnp.zeros_like(step)  # of the step's dtype, as all starts have to be
    starts = [step if i == axis else first for i in range(cache.ndim)]
    # As the primitive has it: a start out of range is moved until the slice fits, none is counted from the end.
    return lax.dynamic_update_slice(cache, new, starts, allow_negative_indices=False)


def _sight(given: Mapping[str, Array], form: LayerForm) -> Sight:
    """What mask, lengths and causality leave to be seen; positions count from the first key that is attended to."""
    mask = given.get("mask")
    whole = form.cache in (None, "prefill")  # then the queries are the keys, and the attention knows what causal means
    hidden = _by_position(given, form, form.is_causal and not whole)
    is_causal = form.is_causal and whole
    if mask is None:
        return Sight(None, hidden, is_causal)
    if mask.dtype != jnp.bool_:
        return Sight(mask, hidden, is_causal)
    return Sight(None, mask if hidden is None else mask & hidden, is_causal)


def _by_position(given: Mapping[str, Array], form: LayerForm, causal: bool) -> Array | None:
    """True where the position of a key makes it visible, [1|B, 1, 1|S, T]; None if all keys are visible."""
    lengths = given.get("lengths")
    if not causal and lengths is None:
        return None
    rows = given["x"].shape[1]
    past = given["cache_k.0"].shape[form.axis] if form.cache in ("append", "write") else 0
    start = _column(given["step"]) if form.cache == "write" else past if form.cache == "append" else 0
    keys = past if form.cache == "write" else past + rows
    position = lax.broadcasted_iota(jnp.int32, (1, 1, 1, keys), 3)
    seen = []
    if causal:
        seen.append(position <= start + lax.broadcasted_iota(jnp.int32, (1, 1, rows, 1), 2))
    if lengths is not None:
        seen.append(position < start + _column(lengths))
    return functools.reduce(jnp.logical_and, seen)


def _column(rows: Array) -> Array:
    """A number, or one for each of B, shaped to broadcast with scores [B, H, S, T]."""
    return rows.astype(jnp.int32).reshape(-1, 1, 1, 1)
