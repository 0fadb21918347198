"""Models of `flax.linen`. Parameters are f32; with bf16 the modules cast them where they use them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ..config import Attention, Config, Control, Mlp, Norm, Recurrent, Sizes, Transformer
from ..model import Built, Model, activations, assemble, key_struct, memory, struct, tokens

Array = jax.Array
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": nn.relu,
    "gelu_tanh": partial(nn.gelu, approximate=True),
    "gelu_erf": partial(nn.gelu, approximate=False),
    "silu": nn.silu,
    "sigmoid": nn.sigmoid,
    "tanh": nn.tanh,
}


class Perceptron(nn.Module):
    """Dense layers with an activation between them; `heads`: the hidden ones have two feature axes."""

    config: Mlp
    dtype: Any
    heads: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        config, sizes = self.config, self.config.sizes
        for index in range(config.products - 1):
            use_bias = config.biased != "none"
            if self.heads:
                features: Any = (sizes.heads, sizes.head + 4 * index)
                axis = -1 if index == 0 else (-2, -1)
                x = nn.DenseGeneral(features, axis, use_bias=use_bias, dtype=self.dtype)(x)
            else:
                x = nn.Dense(sizes.hidden + 8 * index, use_bias=use_bias, dtype=self.dtype)(x)
            if config.activation is not None:
                x = ACTIVATIONS[config.activation](x)
        last = nn.DenseGeneral(
            sizes.out, (-2, -1) if self.heads else -1, use_bias=config.biased == "all", dtype=self.dtype
        )
        return last(x)


class Attends(nn.Module):
    """One `MultiHeadDotProductAttention`; `how` chooses its mask and what it attends to."""

    config: Attention
    dtype: Any
    how: str

    @nn.compact
    def __call__(self, x: Array, *rest: Array) -> Array:
        heads = self.config.sizes.heads
        dropout = 0.1 if self.how == "dropout" else 0.0
        layer = nn.MultiHeadDotProductAttention(
            heads, dtype=self.dtype, dropout_rate=dropout, deterministic=not dropout, use_bias=self.config.bias
        )
        if self.how == "causal":
            return layer(x, mask=nn.make_causal_mask(x[..., 0]))
        if self.how == "padding":
            return layer(x, rest[0], mask=nn.make_attention_mask(jnp.ones(x.shape[:2], bool), rest[1]))
        if self.how == "cross":
            return layer(x, rest[0])
        return layer(x)


class Biased(nn.Module):
    """`nn.dot_product_attention` with an additive bias, between dense layers."""

    config: Attention
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, source: Array, bias: Array) -> Array:
        sizes = self.config.sizes
        features = (sizes.heads, sizes.head)
        q = nn.DenseGeneral(features, dtype=self.dtype, name="query")(x)
        k = nn.DenseGeneral(features, dtype=self.dtype, name="key")(source)
        v = nn.DenseGeneral(features, dtype=self.dtype, name="value")(source)
        o = nn.dot_product_attention(q, k, v, bias=bias, dtype=self.dtype)
        return nn.DenseGeneral(sizes.model, (-2, -1), dtype=self.dtype, name="out")(o)


class Normed(nn.Module):
    config: Norm
    norm: Callable[..., nn.Module]
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for _ in range(self.config.blocks):
            x = x + self.norm(dtype=self.dtype)(nn.Dense(self.config.sizes.model, dtype=self.dtype)(x))
        return x


class Layer(nn.Module):
    """A transformer layer, before or after which the norms stand; with a `source` it attends to that as well."""

    config: Transformer
    dtype: Any
    norm_first: bool

    @nn.compact
    def __call__(self, x: Array, mask: Array | None = None, source: Array | None = None) -> Array:
        config, sizes = self.config, self.config.sizes

        def around(x: Array, function: Callable[[Array], Array]) -> Array:
            norm = nn.LayerNorm(dtype=self.dtype) if config.norm == "layer_norm" else nn.RMSNorm(dtype=self.dtype)
            return x + function(norm(x)) if self.norm_first else norm(x + function(x))

        def feed_forward(x: Array) -> Array:
            x = ACTIVATIONS[config.activation](nn.Dense(sizes.hidden, dtype=self.dtype)(x))
            return nn.Dense(sizes.model, dtype=self.dtype)(x)

        attention = partial(nn.MultiHeadDotProductAttention, sizes.heads, dtype=self.dtype)
        x = around(x, lambda h: attention(name="itself")(h, mask=mask))
        if source is not None:
            x = around(x, lambda h: attention(name="cross")(h, source))
        return around(x, feed_forward)


class Encoder(nn.Module):
    """Layers over embedded tokens, over patches, or over the input as it is (`form`)."""

    config: Transformer
    dtype: Any
    form: str
    norm_first: bool = True

    @nn.compact
    def __call__(self, x: Array) -> Array:
        config, sizes = self.config, self.config.sizes
        embed = nn.Embed(sizes.vocab, sizes.model, dtype=self.dtype)
        if self.form == "tokens":
            mask = nn.make_causal_mask(x) if config.mask == "causal" else None
            positions = self.param("positions", nn.initializers.normal(), (sizes.length, sizes.model))
            x = embed(x) + jnp.asarray(positions, self.dtype)
        else:
            mask = None
        if self.form == "conv_patches":
            x = nn.Conv(sizes.model, (4, 4), (4, 4), dtype=self.dtype)(x)
            x = x.reshape(x.shape[0], -1, sizes.model)
        if self.form == "patches":
            batch, rows, columns, channels = x.shape
            x = x.reshape(batch, rows // 4, 4, columns // 4, 4, channels).transpose(0, 1, 3, 2, 4, 5)
            x = nn.Dense(sizes.model, dtype=self.dtype)(x.reshape(batch, rows * columns // 16, -1))
        for _ in range(config.layers):
            x = Layer(config, self.dtype, self.norm_first)(x, mask)
        for _ in range(config.norms_outside):
            x = nn.LayerNorm(dtype=self.dtype)(x)
        if config.head == "tied":
            return embed.attend(x)
        if config.head == "biased":
            return nn.Dense(sizes.out, dtype=self.dtype)(x.mean(1))
        return x


class EncoderDecoder(nn.Module):
    config: Transformer
    dtype: Any

    @nn.compact
    def __call__(self, source: Array, x: Array) -> Array:
        for index in range(self.config.layers):
            source = Layer(self.config, self.dtype, True, name=f"encoder{index}")(source)
        mask = nn.make_causal_mask(x[..., 0])
        for index in range(self.config.decoder_layers):
            x = Layer(self.config, self.dtype, True, name=f"decoder{index}")(x, mask, source)
        return nn.Dense(self.config.sizes.out, use_bias=False, dtype=self.dtype)(x)


class Convolutions(nn.Module):
    """A convolutional net that ends in one dense layer: relu follows convolutions, not products."""

    config: Control
    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.relu(nn.Conv(8, (3, 3), dtype=self.dtype)(x))
        x = nn.avg_pool(nn.relu(nn.Conv(12, (3, 3), dtype=self.dtype)(x)), (2, 2), (2, 2))
        return nn.Dense(self.config.sizes.out, dtype=self.dtype)(x.reshape(x.shape[0], -1))


class Scanned(nn.Module):
    """A recurrent cell over time."""

    config: Recurrent
    dtype: Any
    cell: Any

    @nn.compact
    def __call__(self, x: Array) -> Any:
        return nn.RNN(self.cell(self.config.sizes.hidden, dtype=self.dtype))(x)


def build(
    module: Callable[..., nn.Module], inputs: Callable[[Any, Any], list[Any]], config: Config, dtype: Any
) -> Built:
    """The built model; a key among the inputs is that of dropout."""
    net = module(config, dtype)
    values = inputs(config, dtype)
    arrays = [value for value in values if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key)]

    def apply(params: Any, *given: Array) -> Any:
        rngs = {"dropout": given[-1]} if len(arrays) < len(values) else None
        return net.apply({"params": params}, *given[: len(arrays)], rngs=rngs)

    names = {name: jax.random.key(0) for name in ("params", "dropout")}
    params = jax.eval_shape(lambda *given: net.init(names, *given), *arrays)["params"]
    return assemble(apply, params, values, config)


def inputs_of(config: Config, dtype: Any) -> list[Any]:
    return [activations(config, dtype)]


def images(config: Config, dtype: Any) -> list[Any]:
    return [struct((config.sizes.batch, 8, 12, 5), dtype)]


def masked_memory(config: Config, dtype: Any) -> list[Any]:
    mask = struct((config.sizes.batch, config.sizes.keys), jnp.bool_)
    return [activations(config, dtype), memory(config, dtype), mask]


def biased_memory(config: Config, dtype: Any) -> list[Any]:
    sizes = config.sizes
    bias = struct((1, sizes.heads, sizes.length, sizes.keys), dtype)
    return [activations(config, dtype), memory(config, dtype), bias]


def _model(name: str, config: Config, module: Callable[..., nn.Module], inputs: Any = inputs_of) -> Model:
    return Model(name, "linen", config, partial(build, module, inputs, config))


def _attends(how: str, inputs: Any = inputs_of, **fields: Any) -> Model:
    config = Attention(spelling="sqrt_in_program", **fields)
    return _model(f"attention_{how}", config, partial(Attends, how=how), inputs)


def _normed(name: str, norm: Callable[..., nn.Module], **fields: Any) -> Model:
    return _model(name, Norm(**fields), lambda config, dtype: Normed(config, norm, dtype))


def _encoder(name: str, form: str, inputs: Any = inputs_of, norm_first: bool = True, **fields: Any) -> Model:
    config = Transformer(spelling="sqrt_in_program", **fields)
    return _model(name, config, partial(Encoder, form=form, norm_first=norm_first), inputs)


PATCHES = Sizes(length=6)
MODELS: tuple[Model, ...] = (
    *(_model(f"mlp_{name}", Mlp(activation=name, products=3), Perceptron) for name in ACTIVATIONS),
    _model("mlp_none", Mlp(activation=None), Perceptron),
    _model("mlp_no_bias", Mlp(activation="relu", biased="none", optimizer="sgd"), Perceptron),
    _model("dense_general", Mlp(activation="gelu_tanh", products=3), partial(Perceptron, heads=True)),
    _attends("plain"),
    _attends("no_bias", bias=False, optimizer="sgd"),
    _attends("causal", mask="causal"),
    _attends("padding", masked_memory, mask="masked"),
    _attends("cross", lambda config, dtype: [activations(config, dtype), memory(config, dtype)]),
    _attends("dropout", lambda config, dtype: [activations(config, dtype), key_struct()], mask="masked"),
    _model("attention_biased", Attention(spelling="sqrt_in_program", mask="masked"), Biased, biased_memory),
    _normed("layer_norm", nn.LayerNorm, blocks=2),
    _normed("layer_norm_two_pass", partial(nn.LayerNorm, use_fast_variance=False)),
    _normed("layer_norm_no_bias", partial(nn.LayerNorm, use_bias=False), shift=False),
    _normed("layer_norm_bare", partial(nn.LayerNorm, use_bias=False, use_scale=False), scale=False, shift=False),
    _normed("rms_norm", nn.RMSNorm, kind="rms_norm", shift=False),
    _encoder("encoder_pre", "none", head="biased"),
    _encoder("encoder_post", "none", norm_first=False, norms_outside=0, activation="relu", optimizer="sgd"),
    _encoder("gpt", "tokens", lambda config, _: [tokens(config)], mask="causal", head="tied", tables=2),
    _encoder("vit_dense", "patches", images, in_products=1, head="biased", sizes=PATCHES, activation="gelu_erf"),
    _encoder("vit_conv", "conv_patches", images, tables=2, head="biased", sizes=PATCHES),
    _model(
        "encoder_decoder",
        Transformer(spelling="sqrt_in_program", layers=2, decoder_layers=2, norms_outside=0, head="no_bias"),
        EncoderDecoder,
        lambda config, dtype: [memory(config, dtype), activations(config, dtype)],
    ),
    _model("convolutions", Control(linear=1, leaves=6), Convolutions, images),
    _model("lstm", Recurrent(cell="linen_lstm"), partial(Scanned, cell=nn.LSTMCell)),
    _model("gru", Recurrent(cell="linen_gru"), partial(Scanned, cell=nn.GRUCell)),
)
