"""Attention written by hand: each spelling of `attend.py` between the learned products of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..config import GROUPED, Attention, Sizes
from ..model import Built, Model, Shape, activations, assemble, key_struct, memory, struct, structs
from . import attend

Array = jax.Array
Inputs = Callable[[Sizes, Any], Any]
KEY_HEADS = ("grouped_repeat", "grouped_axis", "one_key_head")

# The further input of a spelling: a mask over the keys, a bias of every score, or a random key.
EXTRA: Mapping[str, Inputs] = {
    "mask": lambda sizes, dtype: struct((sizes.batch, sizes.keys), jnp.bool_),
    "own_mask": lambda sizes, dtype: struct((sizes.batch, sizes.length), jnp.bool_),
    "bias": lambda sizes, dtype: struct((1, sizes.heads, sizes.length, sizes.keys), dtype),
    "key": lambda sizes, dtype: key_struct(),
}
# The further parameters of a spelling.
PARAMETERS: Mapping[str, Callable[[Sizes], dict[str, Shape]]] = {
    "scale_traced": lambda sizes: {"scale": ()},
    "relative": lambda sizes: {"table": (11, sizes.heads)},
    "normed_heads": lambda sizes: {"query_gain": (sizes.head,), "key_gain": (sizes.head,)},
}


def key_heads(name: str, sizes: Sizes) -> int:
    if name == "one_key_head":
        return 1
    return sizes.kv_heads if name in KEY_HEADS else sizes.heads


def build(name: str, function: Callable[..., Array], itself: bool, extra: str, config: Attention, dtype: Any) -> Built:
    """Query, key and value products, the attention, and the output product; with `itself`, keys are of the input."""
    sizes = config.sizes
    narrow = key_heads(name, sizes) * sizes.head
    columns = {"query": sizes.model, "key": narrow, "value": narrow, "output": sizes.model}
    shapes: dict[str, Shape] = {product: (sizes.model, width) for product, width in columns.items()}
    if config.bias:
        shapes |= {f"{product}_bias": (width,) for product, width in columns.items()}
    further = PARAMETERS[name](sizes) if name in PARAMETERS else {}
    inputs = [activations(config, dtype)]
    if not itself:
        inputs.append(memory(config, dtype))
    if extra:
        inputs.append(EXTRA[extra](sizes, dtype))

    def forward(params: dict[str, Array], x: Array, *rest: Array) -> Array:
        source, others = (x, rest) if itself else (rest[0], rest[1:])

        def product(which: str, value: Array) -> Array:
            result = value @ params[which]
            return result + params[f"{which}_bias"] if config.bias else result

        def heads(value: Array) -> Array:
            return value.reshape(*value.shape[:2], -1, sizes.head)

        q, k, v = heads(product("query", x)), heads(product("key", source)), heads(product("value", source))
        result = function(q, k, v, *others, *(params[parameter] for parameter in further))
        return product("output", result.reshape(x.shape))

    return assemble(forward, structs(shapes | further, dtype), inputs, config)


def build_fused(stacked: bool, config: Attention, dtype: Any) -> Built:
    """One product for queries, keys and values, split along its columns or indexed along a leading axis of three."""
    sizes = config.sizes
    heads = (sizes.batch, sizes.length, sizes.heads, sizes.head)
    inner = (sizes.model, 3, sizes.heads, sizes.head) if stacked else (sizes.model, 3 * sizes.model)
    shapes = {"inner": inner, "inner_bias": inner[1:], "output": (sizes.model,) * 2, "output_bias": (sizes.model,)}

    def forward(params: dict[str, Array], x: Array) -> Array:
        h = jnp.tensordot(x, params["inner"], 1) + params["inner_bias"]
        if stacked:
            q, k, v = (h[:, :, index] for index in range(3))
        else:
            q, k, v = (part.reshape(heads) for part in jnp.split(h, 3, axis=-1))
        return attend.causal_tril(q, k, v).reshape(x.shape) @ params["output"] + params["output_bias"]

    return assemble(forward, structs(shapes, dtype), [activations(config, dtype)], config)


def build_bare(rank: int, config: Attention, dtype: Any) -> Built:
    """Queries, keys and values are inputs of rank 2 (one head of one row), 3 (one head) or 4; the output is a product."""
    sizes = config.sizes
    lengths = {"q": sizes.length, "k": sizes.keys, "v": sizes.keys}
    leading, heads = (sizes.batch,) * (rank > 2), (sizes.heads,) * (rank > 3)
    inputs = [struct((*leading, length, *heads, sizes.head), dtype) for length in lengths.values()]

    def forward(params: dict[str, Array], q: Array, k: Array, v: Array) -> Array:
        if rank == 4:
            o = attend.attend(q, k, v)
        else:
            o = jax.nn.softmax(q @ k.swapaxes(-1, -2) * attend.scale_of(q)) @ v
        return o @ params["output"]

    return assemble(forward, structs({"output": (sizes.head, sizes.out)}, dtype), inputs, config)


def build_weights(config: Attention, dtype: Any) -> Built:
    """The probabilities are a result of the model too."""
    sizes = config.sizes
    shapes = {"query": (sizes.model, sizes.model), "output": (sizes.model, sizes.model)}

    def forward(params: dict[str, Array], x: Array, source: Array) -> tuple[Array, Array]:
        keys = source.reshape(*source.shape[:2], sizes.heads, sizes.head)
        q = (x @ params["query"]).reshape(*x.shape[:2], sizes.heads, sizes.head)
        p = jax.nn.softmax(attend.scores_of(q, keys) * attend.scale_of(q))
        return attend.weighted(p, keys).reshape(x.shape) @ params["output"], p

    return assemble(forward, structs(shapes, dtype), [activations(config, dtype), memory(config, dtype)], config)


def _model(name: str, function: Callable[..., Array], *, itself: bool = False, extra: str = "", **fields: Any) -> Model:
    """A spelling between four products: without bias unless asked for."""
    fields.setdefault("bias", False)
    fields.setdefault("spelling", name)
    config = Attention(**fields)
    return Model(name, "attention", config, partial(build, name, function, itself, extra, config))


def _other(name: str, builder: Callable[..., Built], argument: Any, **fields: Any) -> Model:
    config = Attention(spelling=name, **fields)
    arguments = () if argument is None else (argument,)
    return Model(name, "attention", config, partial(builder, *arguments, config))


SOFTMAXES = {
    "softmax_manual": attend.softmax_manual,
    "softmax_no_max": attend.softmax_no_max,
    "softmax_logsumexp": attend.softmax_logsumexp,
    "softmax_exp_log": attend.softmax_exp_log,
    "softmax_f32": attend.softmax_f32,
}
LAYOUTS = ("bhsd", "merged_heads", "transposed_scores", "mapped")
SCALES = ("scale_on_query", "scale_on_keys", "scale_on_both", "scale_absent", "scale_in_program")

MODELS: tuple[Model, ...] = (
    _model("plain", attend.attend),
    _model("plain_biased", attend.attend, bias=True, optimizer="sgd"),
    *(_model(name, getattr(attend, name)) for name in (*LAYOUTS, *SCALES, "division_after")),
    _model("scale_traced", attend.scale_traced, extra_leaves=1),
    *(_model(name, partial(attend.attend, softmax=softmax)) for name, softmax in SOFTMAXES.items()),
    *(
        _model(name, getattr(attend, name), itself=True, mask="causal")
        for name in ("causal_tril", "causal_iota", "causal_additive", "rotary")
    ),
    *(_model(name, getattr(attend, name), itself=True, mask="masked") for name in ("window", "alibi")),
    *(
        _model(name, getattr(attend, name), extra="mask", mask="masked")
        for name in ("padding", "padding_additive", "softmax_where", "zeroed_after")
    ),
    _model("padding_then_causal", attend.padding_then_causal, itself=True, extra="own_mask", mask="masked"),
    _model("biased", attend.biased, extra="bias", mask="masked"),
    _model("relative", attend.relative, mask="masked", extra_leaves=1),
    _model("softcap", attend.softcap, mask="masked"),
    _model("dropout_select", attend.dropout_select, extra="key", mask="masked"),
    _model("dropout_multiply", attend.dropout_multiply, extra="key", mask="masked"),
    _model("grouped_repeat", attend.grouped_repeat, sizes=GROUPED),
    _model("grouped_axis", attend.grouped_axis, sizes=GROUPED),
    _model("one_key_head", attend.one_key_head),
    _model("normed_heads", attend.normed_heads, qk_norm=True),
    _other("fused_split", build_fused, False, projections=2, mask="causal"),
    _other("fused_stacked", build_fused, True, projections=2, mask="causal"),
    _other("bare_rank2", build_bare, 2, projections=1, bias=False),
    _other("bare_rank3", build_bare, 3, projections=1, bias=False),
    _other("bare_rank4", build_bare, 4, projections=1, bias=False),
    _other("weights_returned", build_weights, None, projections=2, bias=False),
)
