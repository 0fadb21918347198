"""Models of Haiku; parameters are of the dtype of the inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from ..config import Attention, Config, Control, Mlp, Norm, Recurrent, Transformer
from ..model import Built, Model, activations, assemble, memory, struct, tokens

Array = jax.Array
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu_tanh": jax.nn.gelu,
    "gelu_erf": partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}


def perceptron(config: Mlp, x: Array) -> Array:
    sizes = config.sizes
    hidden = [sizes.hidden + 8 * index for index in range(config.products - 1)]
    function = (lambda h: h) if config.activation is None else ACTIVATIONS[config.activation]
    return hk.nets.MLP([*hidden, sizes.out], activation=function, with_bias=config.biased == "all")(x)


def attention(config: Attention | Transformer, name: str | None = None) -> hk.MultiHeadAttention:
    sizes = config.sizes
    return hk.MultiHeadAttention(
        sizes.heads,
        sizes.head,
        w_init=hk.initializers.VarianceScaling(),
        with_bias=config.bias,
        model_size=sizes.model,
        name=name,
    )


def lower(x: Array) -> Array:
    return jnp.tril(jnp.ones((1, 1, x.shape[1], x.shape[1]), bool))


def attends_itself(config: Attention, x: Array) -> Array:
    return attention(config)(x, x, x)


def attends_causally(config: Attention, x: Array) -> Array:
    return attention(config)(x, x, x, mask=lower(x))


def attends_memory(config: Attention, x: Array, source: Array) -> Array:
    return attention(config)(x, source, source)


def attends_masked(config: Attention, x: Array, source: Array, mask: Array) -> Array:
    return attention(config)(x, source, source, mask=mask[:, None, None])


def norm_layer(kind: str | None, scale: bool = True, shift: bool = True) -> Callable[[Array], Array]:
    if kind == "rms_norm":
        return hk.RMSNorm(-1, create_scale=scale)
    return hk.LayerNorm(-1, create_scale=scale, create_offset=shift)


def normed(config: Norm, x: Array) -> Array:
    for _ in range(config.blocks):
        x = x + norm_layer(config.kind, config.scale, config.shift)(hk.Linear(config.sizes.model)(x))
    return x


def layer(config: Transformer, x: Array, mask: Array | None = None, source: Array | None = None) -> Array:
    """A transformer layer with its norms first; with a `source` it attends to that as well."""
    sizes = config.sizes
    h = norm_layer(config.norm)(x)
    x = x + attention(config)(h, h, h, mask=mask)
    if source is not None:
        x = x + attention(config)(norm_layer(config.norm)(x), source, source)
    h = hk.Linear(sizes.hidden)(norm_layer(config.norm)(x))
    return x + hk.Linear(sizes.model)(ACTIVATIONS[config.activation](h))


def encoder(config: Transformer, x: Array) -> Array:
    """Layers over the input, or over embedded tokens with positions and a product for the logits."""
    sizes = config.sizes
    mask = None
    if config.tables:
        dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.float32
        positions = hk.get_parameter("positions", [sizes.length, sizes.model], dtype, init=jnp.zeros)
        x = hk.Embed(sizes.vocab, sizes.model)(x) + positions
        mask = lower(x)
    for _ in range(config.layers):
        x = layer(config, x, mask)
    x = norm_layer(config.norm)(x)
    return hk.Linear(sizes.vocab, with_bias=config.head == "biased")(x) if config.head else x


def encoder_decoder(config: Transformer, source: Array, x: Array) -> Array:
    for _ in range(config.layers):
        source = layer(config, source)
    for _ in range(config.decoder_layers):
        x = layer(config, x, lower(x), source)
    return x


def recurrent(config: Recurrent, x: Array) -> Any:
    width = config.sizes.hidden
    core = hk.GRU(width) if config.cell == "haiku_gru" else hk.LSTM(width)
    state = jax.tree.map(lambda value: value.astype(x.dtype), core.initial_state(x.shape[0]))
    return hk.dynamic_unroll(core, x, state, time_major=False)[0]


def convolutional(config: Control, x: Array) -> Array:
    x = jax.nn.relu(hk.Conv2D(8, 3)(x))
    x = hk.avg_pool(jax.nn.relu(hk.Conv2D(12, 3)(x)), (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return hk.Linear(config.sizes.out)(hk.Flatten()(x))


def build(function: Callable[..., Array], inputs: Callable[[Any, Any], list[Any]], config: Config, dtype: Any) -> Built:
    net = hk.without_apply_rng(hk.transform(partial(function, config)))
    values = inputs(config, dtype)
    params = jax.eval_shape(net.init, jax.random.key(0), *values)
    params = jax.tree.map(lambda leaf: struct(leaf.shape, dtype), params)
    return assemble(net.apply, params, values, config)


def inputs_of(config: Config, dtype: Any) -> list[Any]:
    return [activations(config, dtype)]


def masked(config: Config, dtype: Any) -> list[Any]:
    mask = struct((config.sizes.batch, config.sizes.keys), jnp.bool_)
    return [activations(config, dtype), memory(config, dtype), mask]


def _model(name: str, config: Config, function: Callable[..., Array], inputs: Any = inputs_of) -> Model:
    return Model(name, "haiku", config, partial(build, function, inputs, config))


MODELS: tuple[Model, ...] = (
    *(_model(f"mlp_{name}", Mlp(activation=name, products=3), perceptron) for name in ACTIVATIONS),
    _model("mlp_no_bias", Mlp(activation="silu", biased="none", optimizer="sgd"), perceptron),
    _model("attention_plain", Attention(), attends_itself),
    _model("attention_no_bias", Attention(bias=False, optimizer="sgd"), attends_itself),
    _model("attention_causal", Attention(mask="causal"), attends_causally),
    _model(
        "attention_cross",
        Attention(),
        attends_memory,
        lambda config, dtype: [activations(config, dtype), memory(config, dtype)],
    ),
    _model("attention_padding", Attention(mask="masked"), attends_masked, masked),
    _model("layer_norm", Norm(blocks=2), normed),
    _model("layer_norm_bare", Norm(scale=False, shift=False), normed),
    _model("rms_norm", Norm(kind="rms_norm", shift=False), normed),
    _model("encoder", Transformer(activation="gelu_erf"), encoder),
    _model("encoder_rms", Transformer(norm="rms_norm", norm_leaves=1, head="biased", optimizer="sgd"), encoder),
    _model(
        "gpt",
        Transformer(mask="causal", tables=2, head="no_bias", activation="relu"),
        encoder,
        lambda config, _: [tokens(config)],
    ),
    _model(
        "encoder_decoder",
        Transformer(decoder_layers=2, norms_outside=0),
        encoder_decoder,
        lambda config, dtype: [memory(config, dtype), activations(config, dtype)],
    ),
    _model("lstm", Recurrent(cell="haiku_lstm"), recurrent),
    _model("gru", Recurrent(cell="haiku_gru"), recurrent),
    _model(
        "convolutions",
        Control(linear=1, leaves=6),
        convolutional,
        lambda config, dtype: [struct((config.sizes.batch, 8, 12, 5), dtype)],
    ),
)
