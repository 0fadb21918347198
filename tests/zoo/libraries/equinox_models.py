"""Models of Equinox: modules of one vector or one sequence, mapped over rows and batch; weights are `[out, in]`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..config import Attention, Config, Control, Mlp, Norm, Recurrent, Transformer
from ..model import Built, Model, activations, assemble, key_struct, memory, struct, tokens

Array = jax.Array
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu_tanh": jax.nn.gelu,
    "gelu_erf": partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}
Make = Callable[[Any, Array], Any]
Apply = Callable[..., Any]


def perceptron(config: Mlp, key: Array) -> eqx.nn.MLP:
    sizes = config.sizes
    function = (lambda x: x) if config.activation is None else ACTIVATIONS[config.activation]
    return eqx.nn.MLP(
        sizes.model,
        sizes.out,
        sizes.hidden,
        config.products - 1,
        function,
        use_bias=config.biased != "none",
        use_final_bias=config.biased == "all",
        key=key,
    )


def rows(net: Any, x: Array) -> Array:
    """A module of one vector on `[batch, length, features]`."""
    return jax.vmap(jax.vmap(net))(x)


def attention(config: Attention | Transformer, key: Array, dropout: float = 0.0) -> eqx.nn.MultiheadAttention:
    return eqx.nn.MultiheadAttention(
        config.sizes.heads,
        config.sizes.model,
        use_query_bias=config.bias,
        use_key_bias=config.bias,
        use_value_bias=config.bias,
        use_output_bias=config.bias,
        dropout_p=dropout,
        key=key,
    )


def lower(x: Array) -> Array:
    return jnp.tril(jnp.ones((x.shape[-2], x.shape[-2]), bool))


def attends_itself(net: Any, x: Array) -> Array:
    return jax.vmap(lambda row: net(row, row, row))(x)


def attends_causally(net: Any, x: Array) -> Array:
    return jax.vmap(lambda row: net(row, row, row, mask=lower(row)))(x)


def attends_memory(net: Any, x: Array, source: Array) -> Array:
    return jax.vmap(lambda row, other: net(row, other, other))(x, source)


def attends_masked(net: Any, x: Array, source: Array, mask: Array) -> Array:
    def one(row: Array, other: Array, keep: Array) -> Array:
        return net(row, other, other, mask=jnp.broadcast_to(keep, (row.shape[0], other.shape[0])))

    return jax.vmap(one)(x, source, mask)


def attends_dropping(net: Any, x: Array, key: Array) -> Array:
    keys = jax.random.split(key, x.shape[0])
    return jax.vmap(lambda row, one: net(row, row, row, key=one, inference=False))(x, keys)


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: Any

    def __init__(self, config: Norm, key: Array) -> None:
        width = config.sizes.model
        self.linear = eqx.nn.Linear(width, width, key=key)
        layer: Any = eqx.nn.LayerNorm if config.kind == "layer_norm" else eqx.nn.RMSNorm
        self.norm = layer(width, use_weight=config.scale, use_bias=config.shift)

    def __call__(self, x: Array) -> Array:
        return x + self.norm(self.linear(x))


class Layer(eqx.Module):
    """A transformer layer on one sequence, its norms first; a decoder's attends to a source too."""

    norms: list[eqx.nn.LayerNorm]
    itself: eqx.nn.MultiheadAttention
    cross: eqx.nn.MultiheadAttention | None
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    activation: str = eqx.field(static=True)

    def __init__(self, config: Transformer, key: Array, crosses: bool = False) -> None:
        sizes = config.sizes
        keys = jax.random.split(key, 4)
        self.norms = [eqx.nn.LayerNorm(sizes.model) for _ in range(2 + crosses)]
        self.itself = attention(config, keys[0])
        self.cross = attention(config, keys[1]) if crosses else None
        self.up = eqx.nn.Linear(sizes.model, sizes.hidden, key=keys[2])
        self.down = eqx.nn.Linear(sizes.hidden, sizes.model, key=keys[3])
        self.activation = config.activation

    def __call__(self, x: Array, mask: Array | None = None, source: Array | None = None) -> Array:
        h = jax.vmap(self.norms[0])(x)
        x = x + self.itself(h, h, h, mask=mask)
        if self.cross is not None and source is not None:
            x = x + self.cross(jax.vmap(self.norms[1])(x), source, source)

        def feed_forward(row: Array) -> Array:
            return self.down(ACTIVATIONS[self.activation](self.up(self.norms[-1](row))))

        return x + jax.vmap(feed_forward)(x)


class Encoder(eqx.Module):
    """Layers over one sequence of vectors, or of tokens with tied logits; further layers decode."""

    embed: eqx.nn.Embedding | None
    layers: list[Layer]
    decoder: list[Layer]
    norm: eqx.nn.LayerNorm | None

    def __init__(self, config: Transformer, key: Array) -> None:
        sizes = config.sizes
        keys = jax.random.split(key, config.layers + config.decoder_layers + 1)
        self.embed = eqx.nn.Embedding(sizes.vocab, sizes.model, key=keys[0]) if config.tables else None
        self.layers = [Layer(config, one) for one in keys[1 : config.layers + 1]]
        self.decoder = [Layer(config, one, True) for one in keys[config.layers + 1 :]]
        self.norm = eqx.nn.LayerNorm(sizes.model) if config.norms_outside else None

    def __call__(self, x: Array, target: Array | None = None) -> Array:
        mask = None
        if self.embed is not None:
            x = jax.vmap(self.embed)(x)
            mask = lower(x)
        for layer in self.layers:
            x = layer(x, mask)
        if target is not None:
            for layer in self.decoder:
                target = layer(target, lower(target), x)
            return target
        if self.norm is not None:
            x = jax.vmap(self.norm)(x)
        return x if self.embed is None else x @ self.embed.weight.T


def recurrent(config: Recurrent, key: Array) -> Any:
    cell = eqx.nn.GRUCell if config.cell == "equinox_gru" else eqx.nn.LSTMCell
    return cell(config.sizes.model, config.sizes.hidden, key=key)


def runs(net: Any, x: Array) -> Array:
    """The cell over time, for one row after another."""

    def one(row: Array) -> Array:
        zero = jnp.zeros(net.hidden_size, row.dtype)
        carry = zero if isinstance(net, eqx.nn.GRUCell) else (zero, zero)

        def step(carry: Any, value: Array) -> tuple[Any, Array]:
            carry = net(value, carry)
            return carry, jax.tree.leaves(carry)[0]

        return jax.lax.scan(step, carry, row)[1]

    return jax.vmap(one)(x)


def convolutional(config: Control, key: Array) -> eqx.nn.Sequential:
    first, second = jax.random.split(key)
    relu = eqx.nn.Lambda(jax.nn.relu)
    return eqx.nn.Sequential([eqx.nn.Conv1d(12, 7, 3, key=first), relu, eqx.nn.Conv1d(7, 5, 3, key=second), relu])


def build(make: Make, apply: Apply, inputs: Callable[[Any, Any], list[Any]], config: Config, dtype: Any) -> Built:
    """The built model, all parameters of `dtype`."""
    net = eqx.filter_eval_shape(make, config, jax.random.key(0))
    params, static = eqx.partition(net, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    params = jax.tree.map(lambda leaf: struct(leaf.shape, dtype), params)

    def forward(params: Any, *given: Array) -> Any:
        return apply(eqx.combine(params, static), *given)

    return assemble(forward, params, inputs(config, dtype), config)


def inputs_of(config: Config, dtype: Any) -> list[Any]:
    return [activations(config, dtype)]


def both(config: Config, dtype: Any) -> list[Any]:
    return [activations(config, dtype), memory(config, dtype)]


def masked(config: Config, dtype: Any) -> list[Any]:
    return [*both(config, dtype), struct((config.sizes.batch, config.sizes.keys), jnp.bool_)]


def keyed(config: Config, dtype: Any) -> list[Any]:
    return [activations(config, dtype), key_struct()]


def mapped(net: Any, *given: Array) -> Any:
    return jax.vmap(net)(*given)


def _model(name: str, config: Config, make: Make, apply: Apply = rows, inputs: Any = inputs_of) -> Model:
    return Model(name, "equinox", config, partial(build, make, apply, inputs, config))


def _attends(name: str, apply: Apply, inputs: Any = inputs_of, dropout: float = 0.0, **fields: Any) -> Model:
    config = Attention(**fields)
    return _model(f"attention_{name}", config, partial(attention, dropout=dropout), apply, inputs)


MODELS: tuple[Model, ...] = (
    *(_model(f"mlp_{name}", Mlp(activation=name, products=3), perceptron) for name in ACTIVATIONS),
    _model("mlp_none", Mlp(activation=None), perceptron),
    _model("mlp_no_bias", Mlp(activation="relu", biased="none", optimizer="sgd"), perceptron),
    _model("mlp_hidden_bias", Mlp(activation="gelu_tanh", biased="hidden"), perceptron),
    _attends("plain", attends_itself),
    _attends("no_bias", attends_itself, bias=False, optimizer="sgd"),
    _attends("causal", attends_causally, mask="causal"),
    _attends("cross", attends_memory, both),
    _attends("padding", attends_masked, masked, mask="masked"),
    _attends("dropout", attends_dropping, keyed, dropout=0.1, mask="masked"),
    _model("layer_norm", Norm(), Normed),
    _model("layer_norm_bare", Norm(scale=False, shift=False), Normed),
    _model("rms_norm", Norm(kind="rms_norm", shift=False), Normed),
    _model("rms_norm_biased", Norm(kind="rms_norm"), Normed),
    _model("encoder", Transformer(), Encoder, mapped),
    _model(
        "gpt", Transformer(mask="causal", tables=1, head="tied"), Encoder, mapped, lambda config, _: [tokens(config)]
    ),
    _model(
        "encoder_decoder",
        Transformer(decoder_layers=2, norms_outside=0, activation="relu", optimizer="sgd"),
        Encoder,
        mapped,
        lambda config, dtype: [memory(config, dtype), activations(config, dtype)],
    ),
    _model("gru", Recurrent(cell="equinox_gru"), recurrent, runs),
    _model("lstm", Recurrent(cell="equinox_lstm"), recurrent, runs),
    _model(
        "convolutions",
        Control(leaves=4),
        convolutional,
        mapped,
        lambda config, dtype: [struct((config.sizes.batch, 12, 20), dtype)],
    ),
)
