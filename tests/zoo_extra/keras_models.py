"""Models of Keras 3 on JAX: its own layers, put together as its guides do; with bf16 by the policy `mixed_bfloat16`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from zoo.config import GROUPED, Part, Sizes
from zoo.model import struct

from .parts import LAYERS, gated, layer, mlp, model, padding, tokens

DROPOUT = 0.1  # of the attention weights; not in training, but the layer computes its weights step by step


def library() -> Any:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    return keras


def stateless(
    net: Callable[[Any, Sizes], Any], inputs: Callable[[Sizes, Any], list[Any]], sizes: Sizes, dtype: Any
) -> Any:
    """A functional model, its trainable variables as the parameters; what else it keeps is closed over."""
    keras = library()
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16" if dtype == jnp.bfloat16 else "float32")
    try:
        built = net(keras, sizes)
    finally:
        keras.config.set_dtype_policy(before)
    params = [struct(v.shape, v.dtype) for v in built.trainable_variables]
    rest = [v.value for v in built.non_trainable_variables]

    def forward(params: Any, *given: Any) -> Any:
        return built.stateless_call(params, rest, list(given) if len(given) > 1 else given[0], training=False)[0]

    return forward, params, inputs(sizes, dtype)


def embedded(keras: Any, sizes: Sizes) -> tuple[Any, Any]:
    """Tokens, and their embeddings with those of their positions."""
    layers = keras.layers
    ids = keras.Input((sizes.length,), dtype="int32")
    positions = keras.ops.arange(sizes.length)
    table = layers.Embedding(16, sizes.model)
    return ids, layers.Embedding(sizes.vocab, sizes.model)(ids) + table(positions)


def attention(keras: Any, sizes: Sizes, **options: Any) -> Any:
    return keras.layers.MultiHeadAttention(sizes.heads, sizes.head, **options)


def bert(keras: Any, sizes: Sizes) -> Any:
    layers, norm = keras.layers, partial(keras.layers.LayerNormalization, epsilon=1e-12)
    ids, x = embedded(keras, sizes)
    mask = keras.Input((sizes.length,), dtype="bool")
    seen = keras.ops.expand_dims(mask, 1)
    x = norm()(x)
    for _ in range(LAYERS):
        x = norm()(x + attention(keras, sizes, dropout=DROPOUT)(x, x, attention_mask=seen))
        x = norm()(x + layers.Dense(sizes.model)(layers.Dense(sizes.hidden, activation="gelu")(x)))
    return keras.Model([ids, mask], layers.Dense(sizes.model, activation="tanh")(x[:, 0]))


def gpt(keras: Any, sizes: Sizes) -> Any:
    layers, norm = keras.layers, partial(keras.layers.LayerNormalization, epsilon=1e-5)
    ids, x = embedded(keras, sizes)
    for _ in range(LAYERS):
        h = norm()(x)
        x = x + attention(keras, sizes)(h, h, use_causal_mask=True)
        h = layers.Dense(sizes.hidden, activation=partial(keras.ops.gelu, approximate=True))(norm()(x))
        x = x + layers.Dense(sizes.model)(h)
    return keras.Model(ids, layers.Dense(sizes.vocab)(norm()(x)))


def vit(keras: Any, sizes: Sizes) -> Any:
    layers, norm = keras.layers, partial(keras.layers.LayerNormalization, epsilon=1e-6)
    image = keras.Input((8, 12, 5))
    x = layers.Reshape((6, sizes.model))(layers.Conv2D(sizes.model, 4, strides=4)(image))
    x = x + layers.Embedding(6, sizes.model)(keras.ops.arange(6))
    for _ in range(LAYERS):
        h = norm()(x)
        x = x + attention(keras, sizes, dropout=DROPOUT)(h, h)
        h = layers.Dense(sizes.hidden, activation="gelu")(norm()(x))
        x = x + layers.Dense(sizes.model)(h)
    return keras.Model(image, layers.Dense(sizes.out)(layers.GlobalAveragePooling1D()(norm()(x))))


def decoder(keras: Any, sizes: Sizes) -> Any:
    layers, norm = keras.layers, partial(keras.layers.RMSNormalization, epsilon=1e-6)
    ids, x = embedded(keras, sizes)
    dense = partial(layers.Dense, use_bias=False)
    for _ in range(LAYERS):
        h = norm()(x)
        attends = layers.GroupQueryAttention(sizes.head, sizes.heads, sizes.kv_heads, use_bias=False)
        x = x + attends(h, h, use_causal_mask=True)
        h = norm()(x)
        x = x + dense(sizes.model)(dense(sizes.hidden, activation="silu")(h) * dense(sizes.hidden)(h))
    return keras.Model(ids, dense(sizes.vocab)(norm()(x)))


def _model(name: str, net: Any, inputs: Any, *parts: tuple[int, Part], sizes: Sizes | None = None) -> Any:
    return model("keras", name, partial(stateless, net, inputs), *parts, sizes=sizes)


LAST = Part(layer_norms=1)
MODELS = (
    _model(
        "bert",
        bert,
        lambda sizes, _: [tokens(sizes), padding(sizes, jnp.bool_)],
        (LAYERS, layer(mlp("gelu_erf"), "masked")),
        (1, LAST),
        (1, Part(linear=1, activations=("tanh",))),
    ),
    _model(
        "gpt",
        gpt,
        lambda sizes, _: [tokens(sizes)],
        (LAYERS, layer(mlp("gelu_tanh"), "causal")),
        (1, LAST),
        (1, Part(linear=1)),
    ),
    _model(
        "vit",
        vit,
        lambda sizes, dtype: [struct((sizes.batch, 8, 12, 5), dtype)],
        (LAYERS, layer(mlp("gelu_erf"), "unmasked")),
        (1, LAST),
        (1, Part(linear=1)),
        sizes=Sizes(length=6),
    ),
    _model(
        "grouped_decoder",
        decoder,
        lambda sizes, _: [tokens(sizes)],
        (LAYERS, layer(gated("silu"), "causal", bias=False, norms="rms_norms")),
        (1, Part(rms_norms=1, no_bias=1)),
        sizes=GROUPED,
    ),
)
