"""`multi_transformer`: a row of transformer layers as one op, with or without a cache of keys and values."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

import jax.numpy as jnp

from ....device import Device
from ...choose.choices import Choice
from ...op.arrays import batch_size, canonical_precision
from ...op.chooser import exact_case
from ...op.composite import CompositeOp, composite_implementation
from ...op.implementation import Call, ChoiceKind, Implementation, ImplementationChoice
from . import choosing, composed, reference
from .checks import PER_LAYER, SHARED, checked
from .decode import backend as cuda
from .layer import LayerForm

Array = Any

_PIECES_DO = "its pieces run the same kernels when they are fused one by one; name the pass to have the layer as one op"
# Shared operands that may have an entry for each of the batch.
_PER_ROW = ("x", "mask", "step", "lengths", "cos", "sin")


class MultiTransformer(CompositeOp):
    """A row of layers; see `multi_transformer` for shapes and attributes. Of the primitive:

    Operands, by name: x [B, S, E]; mask, bool or a float that is added to the scores, [1|B, 1|H, 1|S, T]; step, an integer or [B];
    lengths [B]; cos and sin [S, W] or [1|B, S, W]. With the number of a layer behind it (".0"): norm1_scale, norm1_bias [E] (of the
    attention's norm), q [E, H, D], k and v [E, G, D], q_bias, k_bias, v_bias ("separate"); or qkv and qkv_bias, [E, (H + 2 G) D]
    ("concatenated": all queries, then keys, then values), [E, H, 3, D] ("interleaved") or [3, H, D, E] ("packed"); out [H, D, E],
    out_bias [E], norm2_scale, norm2_bias (of the feed-forward's norm), up [E, F], up_bias, gate [E, F], gate_bias, down [F, E], down_bias;
    heads may be merged with their entries (q [E, H D], out [H D, E]) where `heads` and `kv_heads` are given;
    cache_k and cache_v, [B, past, G, D] (or [B, G, past, D]). Biases and norms' parameters are optional.

    Attributes: `epsilons`, of both norms, None for one that is not there; `cache`: None (attention over the call's own keys), "append"
    (over those of the cache and then them), "write" (they are written to the cache at `step`; attention over all of it), "prefill" (over
    the own ones, which are written to the cache at 0). Causal, token i sees the keys up to its own; `lengths` hides the keys of this call
    from that on. `mask_value`: what a bool mask puts in place of a score. `attention_precision`: that of the
    attention's products, where it is another than the others'. `turned`: the weights that are [out, in] (q
    [H, D, E], out [E, H, D]). `gives_keys`: the keys and values are given back without a cache.

    `part`: None, or "attention" or "feed_forward" of one layer, without what comes behind its last product: no bias, no residual sum, no
    norm after it. Where the products' columns and rows are spread over devices, that is what they sum.

    Results: (y, k_0, v_0, k_1, v_1, ...) with a cache or `gives_keys`, else (y,). The k_i are all that was attended to ("append"), the
    written cache, or the call's own keys, turned by the rotary angles.
    """

    name = "multi_transformer"
    slots = (*SHARED, *(f"{slot}.0" for slot in PER_LAYER))
    defaults: ClassVar[Mapping[str, Any]] = {field.name: field.default for field in fields(LayerForm)}
    implementations: ClassVar[Mapping[str, Implementation]] = {
        "xla": composite_implementation("xla", "norms, products and attention as jnp code", reference.forward),
        "composed": composite_implementation(
            "composed",
            "FusionLab's attention, products and norms, each with the implementation it chooses",
            composed.forward,
        ),
        "cuda": composite_implementation(
            "cuda",
            "one token per text: FusionLab's own CUDA kernels, five per layer or one for all layers, caches updated in place",
            cuda.forward,
            cuda.refuses,
            opaque=True,
            unable_on=lambda device: cuda.refuses_device(device),
        ),
    }

    @property
    def composed(self) -> str:
        return "composed"

    def prepare(self, given: Mapping[str, Any], attrs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        full = checked(given, self.with_defaults(attrs))
        full["precision"] = canonical_precision(full["precision"])
        if full["attention_precision"] is not None:
            full["attention_precision"] = canonical_precision(full["attention_precision"])
        return dict(given), full

    def dissolved(self, attrs: Mapping[str, Any]) -> str:
        """Kernels that only run forward have no gradient: then it is the project's other ops."""
        return "xla" if attrs["implementation"] == "xla" else self.composed

    def fold(
        self, values: list[Array], dims: list[int | None], params: dict[str, Any]
    ) -> tuple[list[Array], dict[str, Any]] | None:
        """More rows of the batch; a batch of weights is not this op."""
        names = params["present"]
        if any(d is not None and not _has_rows(n) for n, d in zip(names, dims, strict=True)):
            return None
        size = batch_size(values, dims)
        x = names.index("x")
        own = next(n for i, n in enumerate(values[x].shape) if i != dims[x])
        folded = [
            _folded(n, v, d, size, own) if _has_rows(n) else v for n, v, d in zip(names, values, dims, strict=True)
        ]
        return folded, params

    def case(self, role: str, shapes: Mapping[str, Any], **attrs: Any) -> str | None:
        """By everything."""
        return exact_case(self, self.defaults, role, shapes, attrs)

    def to_time(self, operands: dict[str, Any], **attrs: Any) -> dict[str, Any]:
        """A cache that is half full."""
        caches = [a for name, a in operands.items() if name.startswith("cache_k")]
        if "step" not in operands or not caches:
            return operands
        return {**operands, "step": operands["step"] * 0 + max(caches[0].shape[1:3]) // 2}

    def by_measurement(self, found: Choice) -> ImplementationChoice:
        if found.implementation == "cuda":
            return super().by_measurement(found)
        return ImplementationChoice("composed", ChoiceKind.IN_PIECES, found.reason)

    def rule(self, call: Call, unable: str) -> ImplementationChoice:
        if call.role == "call" and not choosing.why_not_cuda(call.shapes, call.device, **call.attrs):
            return ImplementationChoice("cuda", ChoiceKind.CHOSEN, choosing.FASTER)
        return ImplementationChoice("composed", ChoiceKind.IN_PIECES, "each of its pieces chooses for itself")

    def left_to_xla(self, *operands: Any, device: Device | str | None = None, **attrs: Any) -> ImplementationChoice:
        return ImplementationChoice("composed", ChoiceKind.IN_PIECES, _PIECES_DO)

    def formula(self, **attrs: Any) -> str:
        """ "2 layers: a = x + attend(layer_norm(x)), y = a + mlp(layer_norm(a)), mlp gelu_tanh, causal, cache write"."""
        form = LayerForm.of(attrs)
        first, second = (f"{form.norm}_norm" if e is not None else "" for e in form.epsilons)
        if form.part is not None:
            text = f"attend({_normed(first, 'x')})" if form.part == "attention" else f"mlp({_normed(second, 'x')})"
        elif form.pre_norm:
            text = f"a = x + attend({_normed(first, 'x')}), y = a + mlp({_normed(second, 'a')})"
        else:
            text = f"a = {_normed(first, 'x + attend(x)')}, y = {_normed(second, 'a + mlp(a)')}"
        mlp, cache, qkv = f"mlp {form.activation}{' gated' * form.gated}", f"cache {form.cache}", f"qkv {form.qkv}"
        said = (form.part != "attention", form.is_causal, form.cache is not None, form.qkv != "separate")
        parts = [text, *itertools.compress((mlp, "causal", cache, qkv), said)]
        row = "layer" if form.layers == 1 else f"{form.layers} layers"
        return f"{row if form.part is None else 'part of a layer'}: {', '.join(parts)}"


def _normed(norm: str, x: str) -> str:
    return f"{norm}({x})" if norm else x


def _has_rows(name: str) -> bool:
    """Whether an operand may have an entry for each of the batch."""
    return name in _PER_ROW or name.partition(".")[0] in ("cache_k", "cache_v")


def _folded(name: str, value: Array, dim: int | None, size: int, own: int) -> Array:
    """An operand of a batch of `size` calls of `own` rows each, as that of one call."""
    if dim is None and not _is_per_row(name, value.shape, own):
        return value
    whole = jnp.broadcast_to(value, (size, *value.shape)) if dim is None else jnp.moveaxis(value, dim, 0)
    if whole.ndim - 1 < {"step": 1, "cos": 3, "sin": 3}.get(name, 0):  # none for each row yet
        whole = whole[:, None]
    rows = jnp.broadcast_to(whole, (size, own, *whole.shape[2:]))
    return rows.reshape(size * own, *rows.shape[2:])


def _is_per_row(name: str, shape: tuple[int, ...], own: int) -> bool:
    """Whether an operand that all calls share has an entry for each row, and so has to be there for each of them."""
    if name == "step":
        return len(shape) == 1
    if name in ("cos", "sin"):
        return len(shape) == 3 and shape[0] != 1
    return name != "mask" or shape[0] != 1


MULTI_TRANSFORMER = MultiTransformer()
