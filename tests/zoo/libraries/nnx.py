"""Models of `flax.nnx`. Parameters are f32; with bf16 the modules cast them where they use them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..config import GROUPED, Attention, Composite, Config, Glu, Mlp, Norm, Recurrent, Transformer
from ..model import Built, Model, activations, assemble, memory, struct, tokens

Array = jax.Array
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": nnx.relu,
    "gelu_tanh": nnx.gelu,
    "gelu_erf": partial(nnx.gelu, approximate=False),
    "silu": nnx.silu,
    "sigmoid": nnx.sigmoid,
    "tanh": nnx.tanh,
}


class Perceptron(nnx.Module):
    def __init__(self, config: Mlp, dtype: Any, rngs: nnx.Rngs) -> None:
        sizes = config.sizes
        widths = [sizes.model, *(sizes.hidden + 8 * index for index in range(config.products - 1)), sizes.out]
        pairs = pairwise(widths)
        bias = config.biased == "all"
        self.layers = nnx.List(
            [nnx.Linear(rows, columns, use_bias=bias, dtype=dtype, rngs=rngs) for rows, columns in pairs]
        )
        self.activation = config.activation

    def __call__(self, x: Array) -> Array:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if self.activation is not None and index < len(self.layers) - 1:
                x = ACTIVATIONS[self.activation](x)
        return x


class Gated(nnx.Module):
    def __init__(self, config: Glu, dtype: Any, rngs: nnx.Rngs) -> None:
        sizes = config.sizes
        linear = partial(nnx.Linear, use_bias=config.bias, dtype=dtype, rngs=rngs)
        self.gate, self.up = linear(sizes.model, sizes.hidden), linear(sizes.model, sizes.hidden)
        self.down = linear(sizes.hidden, sizes.model)
        self.activation = config.activation

    def __call__(self, x: Array) -> Array:
        return x + self.down(ACTIVATIONS[self.activation](self.gate(x)) * self.up(x))


class Attends(nnx.Module):
    """One `nnx.MultiHeadAttention`; `how` chooses its mask and what it attends to."""

    def __init__(self, how: str, config: Attention, dtype: Any, rngs: nnx.Rngs) -> None:
        sizes = config.sizes
        kv_heads = sizes.kv_heads if how == "grouped" else None
        self.layer = nnx.MultiHeadAttention(
            sizes.heads, sizes.model, num_kv_heads=kv_heads, decode=False, deterministic=True, dtype=dtype, rngs=rngs
        )
        self.how = how

    def __call__(self, x: Array, *rest: Array) -> Array:
        if self.how == "causal":
            return self.layer(x, mask=nnx.make_causal_mask(x[..., 0]))
        if self.how == "padding":
            return self.layer(x, rest[0], mask=rest[1][:, None, None])
        return self.layer(x, *rest)


class Normed(nnx.Module):
    def __init__(self, norm: Callable[..., nnx.Module], config: Norm, dtype: Any, rngs: nnx.Rngs) -> None:
        width = config.sizes.model
        self.linear = nnx.Linear(width, width, dtype=dtype, rngs=rngs)
        self.norm: Any = norm(width, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return x + self.norm(self.linear(x))


class Layer(nnx.Module):
    """A transformer layer with its norms first; a decoder's attends to a source too."""

    def __init__(self, config: Transformer, dtype: Any, rngs: nnx.Rngs, crosses: bool = False) -> None:
        sizes = config.sizes
        norm = nnx.LayerNorm if config.norm == "layer_norm" else nnx.RMSNorm
        attention = partial(nnx.MultiHeadAttention, sizes.heads, sizes.model, decode=False, dtype=dtype, rngs=rngs)
        self.norms = nnx.List([norm(sizes.model, dtype=dtype, rngs=rngs) for _ in range(2 + crosses)])
        self.itself, self.cross = attention(), attention() if crosses else None
        self.up = nnx.Linear(sizes.model, sizes.hidden, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(sizes.hidden, sizes.model, dtype=dtype, rngs=rngs)
        self.activation = config.activation

    def __call__(self, x: Array, mask: Array | None = None, source: Array | None = None) -> Array:
        x = x + self.itself(self.norms[0](x), mask=mask)
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), source)
        return x + self.down(ACTIVATIONS[self.activation](self.up(self.norms[-1](x))))


class Encoder(nnx.Module):
    """Layers over the input, or over embedded tokens with tied logits."""

    def __init__(self, config: Transformer, dtype: Any, rngs: nnx.Rngs) -> None:
        sizes = config.sizes
        self.embed = nnx.Embed(sizes.vocab, sizes.model, dtype=dtype, rngs=rngs) if config.tables else None
        self.layers = nnx.List([Layer(config, dtype, rngs) for _ in range(config.layers)])
        norm = nnx.LayerNorm if config.norm == "layer_norm" else nnx.RMSNorm
        self.norm = norm(sizes.model, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        mask = None
        if self.embed is not None:
            mask, x = nnx.make_causal_mask(x), self.embed(x)
        for layer in self.layers:
            x = layer(x, mask)
        x = self.norm(x)
        return x if self.embed is None else self.embed.attend(x)


class EncoderDecoder(nnx.Module):
    def __init__(self, config: Transformer, dtype: Any, rngs: nnx.Rngs) -> None:
        self.encoder = nnx.List([Layer(config, dtype, rngs) for _ in range(config.layers)])
        self.decoder = nnx.List([Layer(config, dtype, rngs, True) for _ in range(config.decoder_layers)])

    def __call__(self, source: Array, x: Array) -> Array:
        for layer in self.encoder:
            source = layer(source)
        for layer in self.decoder:
            x = layer(x, nnx.make_causal_mask(x[..., 0]), source)
        return x


class Adapted(nnx.Module):
    """A linear layer with a low-rank update: `x @ w + b` and `x @ a @ c`."""

    def __init__(self, config: Composite, dtype: Any, rngs: nnx.Rngs) -> None:
        sizes = config.sizes
        self.linear = nnx.Linear(sizes.model, sizes.out, dtype=dtype, rngs=rngs)
        self.update = nnx.LoRA(sizes.model, 6, sizes.out, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.linear(x) + self.update(x)


class Scanned(nnx.Module):
    def __init__(self, config: Recurrent, dtype: Any, rngs: nnx.Rngs) -> None:
        self.cell = nnx.GRUCell(config.sizes.model, config.sizes.hidden, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        carry = jnp.zeros((x.shape[0], self.cell.hidden_features), x.dtype)
        return jax.lax.scan(lambda h, step: self.cell(h, step), carry, x.swapaxes(0, 1))[1]


def build(
    module: Callable[..., nnx.Module], inputs: Callable[[Any, Any], list[Any]], config: Config, dtype: Any
) -> Built:
    """The built model; what is not a parameter (random states) is not kept: no model here draws."""
    abstract = nnx.eval_shape(lambda: module(config, dtype, nnx.Rngs(0)))
    graph, params, rest = nnx.split(abstract, nnx.Param, ...)
    others = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), _without_keys(rest))

    def forward(params: Any, *given: Array) -> Any:
        return nnx.merge(graph, params, others)(*given)

    return assemble(forward, params, inputs(config, dtype), config)


def _without_keys(state: Any) -> Any:
    if any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(state)):
        raise ValueError("a model with random states: pass its keys as arguments")
    return state


def inputs_of(config: Config, dtype: Any) -> list[Any]:
    return [activations(config, dtype)]


def masked_memory(config: Config, dtype: Any) -> list[Any]:
    mask = struct((config.sizes.batch, config.sizes.keys), jnp.bool_)
    return [activations(config, dtype), memory(config, dtype), mask]


def _model(name: str, config: Config, module: Callable[..., nnx.Module], inputs: Any = inputs_of) -> Model:
    return Model(name, "nnx", config, partial(build, module, inputs, config))


def _attends(how: str, inputs: Any = inputs_of, **fields: Any) -> Model:
    return _model(f"attention_{how}", Attention(**fields), partial(Attends, how), inputs)


def _both(config: Config, dtype: Any) -> list[Any]:
    return [activations(config, dtype), memory(config, dtype)]


UPDATE = Composite(parts=((1, Mlp(products=1)), (1, Mlp(products=2, activation=None, biased="none"))))
MODELS: tuple[Model, ...] = (
    *(_model(f"mlp_{name}", Mlp(activation=name), Perceptron) for name in ACTIVATIONS),
    _model("mlp_no_bias", Mlp(activation="gelu_tanh", biased="none", optimizer="sgd"), Perceptron),
    _model("swiglu", Glu(), Gated),
    _model("lora", UPDATE, Adapted),
    _attends("plain"),
    _attends("causal", mask="causal"),
    _attends("padding", masked_memory, mask="masked"),
    _attends("cross", _both, optimizer="sgd"),
    _attends("grouped", sizes=GROUPED),
    _model("layer_norm", Norm(), partial(Normed, nnx.LayerNorm)),
    _model("rms_norm", Norm(kind="rms_norm", shift=False), partial(Normed, nnx.RMSNorm)),
    _model("encoder", Transformer(), Encoder),
    _model("encoder_rms", Transformer(norm="rms_norm", norm_leaves=1, activation="silu", optimizer="sgd"), Encoder),
    _model("gpt", Transformer(mask="causal", tables=1, head="tied"), Encoder, lambda config, _: [tokens(config)]),
    _model(
        "encoder_decoder",
        Transformer(layers=2, decoder_layers=2, norms_outside=0),
        EncoderDecoder,
        lambda config, dtype: [memory(config, dtype), activations(config, dtype)],
    ),
    _model("gru", Recurrent(cell="nnx_gru"), Scanned),
)
