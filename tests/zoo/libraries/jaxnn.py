"""Models made of the functions of `jax.nn` between products written with `@`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..config import GROUPED, Attention, Config, Control, Mlp, Norm, Transformer
from ..kinds.handwritten import build_mlp
from ..kinds.norms import build_norm
from ..model import Built, Model, Shape, activations, assemble, memory, struct, structs

Array = jax.Array
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu_erf": partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jax.nn.tanh,
}
# Activations that belong to no concept.
OTHERS: dict[str, Callable[[Array], Array]] = {
    "elu": jax.nn.elu,
    "softplus": jax.nn.softplus,
    "soft_sign": jax.nn.soft_sign,
    "leaky_relu": jax.nn.leaky_relu,
}
Attend = Callable[..., Array]


def plain(q: Array, k: Array, v: Array) -> Array:
    return jax.nn.dot_product_attention(q, k, v)


def scaled(q: Array, k: Array, v: Array) -> Array:
    return jax.nn.dot_product_attention(q, k, v, scale=0.3)


def causal(q: Array, k: Array, v: Array) -> Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def window(q: Array, k: Array, v: Array) -> Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(3, 0))


def masked(q: Array, k: Array, v: Array, mask: Array) -> Array:
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None, None])


def masked_causal(q: Array, k: Array, v: Array, mask: Array) -> Array:
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None, None], is_causal=True)


def lengths(q: Array, k: Array, v: Array, used: Array) -> Array:
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=used)


def biased(q: Array, k: Array, v: Array, bias: Array) -> Array:
    return jax.nn.dot_product_attention(q, k, v, bias=bias)


def build_attention(
    function: Attend, itself: bool, extra: Callable[..., Any] | None, config: Attention, dtype: Any
) -> Built:
    """Four products with bias around the attention; with `itself`, keys are of the input."""
    sizes = config.sizes
    narrow = (sizes.kv_heads if sizes == GROUPED else sizes.heads) * sizes.head
    columns = {"query": sizes.model, "key": narrow, "value": narrow, "output": sizes.model}
    shapes: dict[str, Shape] = {name: (sizes.model, width) for name, width in columns.items()}
    shapes |= {f"{name}_bias": (width,) for name, width in columns.items()}
    inputs = [activations(config, dtype)]
    if not itself:
        inputs.append(memory(config, dtype))
    if extra is not None:
        inputs.append(extra(config, dtype))

    def forward(params: dict[str, Array], x: Array, *rest: Array) -> Array:
        source, others = (x, rest) if itself else (rest[0], rest[1:])

        def heads(name: str, value: Array) -> Array:
            h = value @ params[name] + params[f"{name}_bias"]
            return h.reshape(*value.shape[:2], -1, sizes.head)

        o = function(heads("query", x), heads("key", source), heads("value", source), *others)
        return o.reshape(x.shape) @ params["output"] + params["output_bias"]

    return assemble(forward, structs(shapes, dtype), inputs, config)


def build_head(function: Callable[[Array], Array], config: Control, dtype: Any) -> Built:
    """A classifier: two products with relu between them, and `function` of the logits."""
    sizes = config.sizes
    shapes = {
        "w0": (sizes.model, sizes.hidden),
        "b0": (sizes.hidden,),
        "w1": (sizes.hidden, sizes.out),
        "b1": (sizes.out,),
    }

    def forward(params: dict[str, Array], x: Array) -> Array:
        h = jax.nn.relu(x @ params["w0"] + params["b0"])
        return function(h @ params["w1"] + params["b1"])

    return assemble(forward, structs(shapes, dtype), [activations(config, dtype)], config)


def build_transformer(config: Transformer, dtype: Any) -> Built:
    """A decoder as Llama has it: RMS norms, no bias, gated feed-forward, and logits from a product of their own."""
    sizes = config.sizes
    shapes: dict[str, Shape] = {"table": (sizes.vocab, sizes.model), "norm": (sizes.model,)}
    for layer in range(config.layers):
        shapes |= {f"{name}{layer}": (sizes.model, sizes.model) for name in ("query", "key", "value", "output")}
        shapes |= {f"{name}{layer}": (sizes.model, sizes.hidden) for name in ("gate", "up")}
        shapes |= {f"down{layer}": (sizes.hidden, sizes.model)}
        shapes |= {f"{name}{layer}": (sizes.model,) for name in ("norm", "second")}

    def norm(x: Array, gain: Array) -> Array:
        wide = x.astype(jnp.float32)
        root = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6)
        return (wide * root).astype(x.dtype) * gain

    def forward(params: dict[str, Array], tokens: Array) -> Array:
        x = params["table"][tokens]
        for layer in range(config.layers):
            h = norm(x, params[f"norm{layer}"])
            q, k, v = (
                (h @ params[f"{name}{layer}"]).reshape(*h.shape[:2], sizes.heads, sizes.head)
                for name in ("query", "key", "value")
            )
            x = x + causal(q, k, v).reshape(x.shape) @ params[f"output{layer}"]
            h = norm(x, params[f"second{layer}"])
            h = jax.nn.silu(h @ params[f"gate{layer}"]) * (h @ params[f"up{layer}"])
            x = x + h @ params[f"down{layer}"]
        return norm(x, params["norm"]) @ params["table"].T

    ids = struct((sizes.batch, sizes.length), jnp.int32)
    return assemble(forward, structs(shapes, dtype), [ids], config)


def _model(name: str, config: Config, builder: Callable[..., Built], *arguments: Any) -> Model:
    return Model(name, "jaxnn", config, partial(builder, *arguments, config))


def _attention(name: str, function: Attend, itself: bool = False, extra: Any = None, **fields: Any) -> Model:
    return _model(f"attention_{name}", Attention(**fields), build_attention, function, itself, extra)


def _key_mask(config: Config, dtype: Any) -> Any:
    return struct((config.sizes.batch, config.sizes.keys), jnp.bool_)


def _own_mask(config: Config, dtype: Any) -> Any:
    return struct((config.sizes.batch, config.sizes.length), jnp.bool_)


def _bias(config: Config, dtype: Any) -> Any:
    sizes = config.sizes
    return struct((1, sizes.heads, sizes.length, sizes.keys), dtype)


def _used(config: Config, dtype: Any) -> Any:
    return struct((config.sizes.batch,), jnp.int32)


def _head(name: str, function: Callable[[Array], Array], **fields: Any) -> Model:
    return _model(f"head_{name}", Control(linear=2, relu=1, leaves=4, **fields), build_head, function)


MODELS: tuple[Model, ...] = (
    *(
        _model(f"mlp_{name}", Mlp(activation=name), build_mlp, function, "matmul")
        for name, function in ACTIVATIONS.items()
    ),
    *(
        _model(f"mlp_{name}", Mlp(activation=name, spelling=f"jax_{name}"), build_mlp, function, "matmul")
        for name, function in OTHERS.items()
    ),
    _attention("plain", plain),
    _attention("scaled", scaled, optimizer="sgd"),
    _attention("grouped", plain, sizes=GROUPED),
    _attention("causal", causal, itself=True, mask="causal"),
    _attention("window", window, itself=True, mask="masked"),
    _attention("masked", masked, extra=_key_mask, mask="masked"),
    _attention("masked_causal", masked_causal, itself=True, extra=_own_mask, mask="masked"),
    _attention("lengths", lengths, extra=_used, mask="masked"),
    _attention("biased", biased, extra=_bias, mask="masked"),
    _model("standardize", Norm(scale=False, shift=False), build_norm, jax.nn.standardize),
    _head("softmax", jax.nn.softmax, softmax=1),
    _head("log_softmax", jax.nn.log_softmax, spelling="log_softmax"),
    _head("softmax_over_length", partial(jax.nn.softmax, axis=1), softmax=1),
    _head("logsumexp", partial(jax.nn.logsumexp, axis=-1), spelling="logsumexp"),
    _model(
        "llama",
        Transformer(
            mask="causal",
            norm="rms_norm",
            norm_leaves=1,
            activation="silu",
            glu=True,
            bias=False,
            mlp_bias=False,
            tables=1,
            head="tied",
        ),
        build_transformer,
    ),
)
