"""Ten programs as people write them, on which the picture is judged: they differ in scopes, loops, libraries and in how deep they are.

Arguments are shapes alone (`jax.ShapeDtypeStruct`), so that building and tracing one computes nothing, whatever its size.
`PROGRAMS` is `((name, build), ...)`; `build()` gives a function and its arguments.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

Array = jax.Array
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def floats(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


# -- a transformer with scopes, AdamW written plainly ------------------------------------------------------------------------


def layer_norm(p: Any, x: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    return centred * lax.rsqrt(variance + 1e-5) * p["g"] + p["b"]


def split_heads(x: Array, heads: int) -> Array:
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)


def attention(p: Any, x: Array, heads: int) -> Array:
    q, k, v = (split_heads(part, heads) for part in jnp.split(x @ p["qkv"], 3, axis=-1))
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1)
    return (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape) @ p["out"]


def mlp(p: Any, x: Array) -> Array:
    return jax.nn.gelu(x @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]


def transformer(params: Any, tokens: Array, heads: int) -> Array:
    with jax.named_scope("embed"):
        x = params["embed"]["tokens"][tokens] + params["embed"]["positions"]
    for i, p in enumerate(params["layers"]):
        with jax.named_scope(f"layer_{i}"):
            with jax.named_scope("attn"):
                x = x + attention(p, layer_norm(p["ln1"], x), heads)
            with jax.named_scope("mlp"):
                x = x + mlp(p, layer_norm(p["ln2"], x))
    with jax.named_scope("head"):
        return layer_norm(params["head"]["ln"], x) @ params["head"]["w"]


def cross_entropy(logits: Array, labels: Array) -> Array:
    with jax.named_scope("cross_entropy"):
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
        return -chosen.mean()


def adamw(params: Any, grads: Any, m: Any, v: Any, step: Array) -> tuple[Any, Any, Any]:
    m = jax.tree.map(lambda old, g: 0.9 * old + 0.1 * g, m, grads)
    v = jax.tree.map(lambda old, g: 0.999 * old + 0.001 * g * g, v, grads)
    rate = 1e-3 * jnp.sqrt(1 - 0.999**step) / (1 - 0.9**step)

    def moved(p: Array, m: Array, v: Array) -> Array:
        return p - rate * m / (jnp.sqrt(v) + 1e-8) - 1e-5 * p

    return jax.tree.map(moved, params, m, v), m, v


def transformer_step(heads: int) -> Callable[..., Any]:
    def train_step(params: Any, m: Any, v: Any, step: Array, tokens: Array) -> Any:
        def loss(params: Any) -> Array:
            return cross_entropy(transformer(params, tokens[:, :-1], heads), tokens[:, 1:])

        value, grads = jax.value_and_grad(loss)(params)
        return value, *adamw(params, grads, m, v, step)

    return train_step


def layer_shapes(width: int) -> Any:
    def norm() -> Any:
        return {"g": floats(width), "b": floats(width)}

    attn = {"ln1": norm(), "qkv": floats(width, 3 * width), "out": floats(width, width)}
    up = {"ln2": norm(), "up": floats(width, 4 * width), "up_bias": floats(4 * width)}
    return attn | up | {"down": floats(4 * width, width), "down_bias": floats(width)}


def transformer_program(layers: int, batch: int = 8, length: int = 1024, width: int = 1024) -> Program:
    vocabulary = 32768
    params = {
        "embed": {"tokens": floats(vocabulary, width), "positions": floats(length, width)},
        "layers": [layer_shapes(width) for _ in range(layers)],
        "head": {"ln": {"g": floats(width), "b": floats(width)}, "w": floats(width, vocabulary)},
    }
    return transformer_step(width // 64), (params, params, params, floats(), integers(batch, length + 1))


# -- an MLP without any scope ------------------------------------------------------------------------------------------------


def normalise(x: Array) -> Array:
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)


def dense(w: Array, b: Array, x: Array) -> Array:
    return x @ w + b


def relu(x: Array) -> Array:
    return jnp.maximum(x, 0.0)


def predict(params: Any, x: Array) -> Array:
    x = normalise(x)
    for w, b in params[:-1]:
        x = relu(dense(w, b, x))
    return dense(*params[-1], x)


def mlp_loss(params: Any, x: Array, labels: Array) -> Array:
    logits = predict(params, x)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, logits.shape[-1]), axis=-1))


def clip(grads: Any, most: float) -> Any:
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, most / (norm + 1e-6)), grads)


def update(params: Any, grads: Any, momentum: Any) -> tuple[Any, Any]:
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.01 * m, params, momentum), momentum


def mlp_step(params: Any, momentum: Any, x: Array, labels: Array) -> Any:
    loss, grads = jax.value_and_grad(mlp_loss)(params, x, labels)
    return loss, *update(params, clip(grads, 1.0), momentum)


def mlp_program() -> Program:
    widths = (784, 2048, 2048, 1024, 10)
    params = [(floats(n, m), floats(m)) for n, m in itertools.pairwise(widths)]
    return mlp_step, (params, params, floats(4096, 784), integers(4096))


# -- a U-Net with scopes -----------------------------------------------------------------------------------------------------


def conv(w: Array, x: Array, stride: int = 1) -> Array:
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def group_norm(g: Array, b: Array, x: Array, groups: int = 8) -> Array:
    parts = x.reshape(*x.shape[:-1], groups, -1)
    mean = parts.mean((1, 2, 4), keepdims=True)
    variance = parts.var((1, 2, 4), keepdims=True)
    return ((parts - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape) * g + b


def conv_block(p: Any, x: Array) -> Array:
    x = jax.nn.silu(group_norm(p["g"], p["b"], conv(p["first"], x)))
    return x + jax.nn.silu(conv(p["second"], x))


def unet(params: Any, x: Array) -> Array:
    skips = []
    for i, p in enumerate(params["down"]):
        with jax.named_scope(f"down_{i}"):
            x = conv_block(p, x)
            skips.append(x)
            x = conv(p["shrink"], x, stride=2)
    with jax.named_scope("mid"):
        x = conv_block(params["mid"], x)
    for i, (p, skip) in enumerate(zip(params["up"], reversed(skips), strict=True)):
        with jax.named_scope(f"up_{i}"):
            grown = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
            x = conv_block(p, jnp.concatenate([grown, skip], axis=-1))
    with jax.named_scope("out"):
        return conv(params["out"], x)


def unet_step(params: Any, momentum: Any, noisy: Array, noise: Array) -> Any:
    def loss(params: Any) -> Array:
        return jnp.mean((unet(params, noisy) - noise) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return value, *update(params, grads, momentum)


def block_shapes(before: int, after: int) -> Any:
    kernels = {"first": floats(3, 3, before, after), "second": floats(3, 3, after, after)}
    return kernels | {"g": floats(after), "b": floats(after)}


def unet_program() -> Program:
    widths = (64, 128, 256)
    befores = (3, *widths)
    down = [block_shapes(a, b) | {"shrink": floats(3, 3, b, b)} for a, b in zip(befores, widths, strict=False)]
    up, below = [], 512
    for width in reversed(widths):
        up.append(block_shapes(below + width, width))
        below = width
    params = {"down": down, "mid": block_shapes(256, 512), "up": up, "out": floats(3, 3, 64, 3)}
    return unet_step, (params, params, floats(16, 128, 128, 3), floats(16, 128, 128, 3))


# -- Hugging Face's BERT -----------------------------------------------------------------------------------------------------


def bert_program() -> Program:
    from transformers import BertConfig, FlaxBertForMaskedLM

    net = FlaxBertForMaskedLM(BertConfig(num_hidden_layers=12), _do_init=False)
    batch, length = 16, 512
    params = jax.eval_shape(lambda: net.init_weights(jax.random.key(0), (batch, length)))
    rule = optax.adamw(1e-4)

    def train_step(params: Any, state: Any, ids: Array, mask: Array, labels: Array, key: Array) -> Any:
        def loss(params: Any) -> Array:
            logits = net(ids, attention_mask=mask, params=params, dropout_rng=key, train=True).logits
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = rule.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    ids, key = integers(batch, length), jax.eval_shape(lambda: jax.random.key(0))
    return train_step, (params, jax.eval_shape(rule.init, params), ids, ids, ids, key)


# -- a Llama-like model whose layers are scanned -----------------------------------------------------------------------------


def rms_norm(g: Array, x: Array) -> Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * g


def rotary(x: Array) -> Array:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10000.0 ** (jnp.arange(half) / half)
    sin, cos = (f(angles)[None, :, None, :].astype(x.dtype) for f in (jnp.sin, jnp.cos))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def grouped_attention(p: Any, x: Array, head: int = 64) -> Array:
    q, k, v = ((x @ p[name]).reshape(*x.shape[:2], -1, head) for name in ("q", "k", "v"))
    q, k = rotary(q), rotary(k)
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(head)
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape) @ p["out"]


def swiglu(p: Any, x: Array) -> Array:
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def llama_layer(p: Any, x: Array) -> Array:
    x = x + grouped_attention(p, rms_norm(p["ln1"], x))
    return x + swiglu(p, rms_norm(p["ln2"], x))


def llama(params: Any, tokens: Array) -> Array:
    body = jax.checkpoint(llama_layer)
    x, _ = lax.scan(lambda x, p: (body(p, x), None), params["embed"][tokens], params["layers"])
    return rms_norm(params["ln"], x) @ params["embed"].T


def llama_step(params: Any, momentum: Any, tokens: Array) -> Any:
    def loss(params: Any) -> Array:
        logits = llama(params, tokens[:, :-1])
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return value, *update(params, grads, momentum)


def llama_layer_shapes(width: int, hidden: int, *leading: int) -> Any:
    shapes = {"q": (width, width), "k": (width, width // 4), "v": (width, width // 4), "out": (width, width)}
    shapes |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    shapes |= {"ln1": (width,), "ln2": (width,)}
    return {name: floats(*leading, *shape) for name, shape in shapes.items()}


def llama_program() -> Program:
    width = 2048
    layers = llama_layer_shapes(width, 5632, 32)
    params = {"embed": floats(32000, width), "layers": layers, "ln": floats(width)}
    return llama_step, (params, params, integers(4, 1025))


# -- what the libraries' own modules give, in files of their own ---------------------------------------------------------------


def nnx_program() -> Program:
    from .nnx_step import program

    return program()


def equinox_program() -> Program:
    from .equinox_step import program

    return program()


# -- decoding with a cache, in a loop ----------------------------------------------------------------------------------------


def decode_layer(p: Any, x: Array, keys: Array, values: Array, at: Array, head: int = 64) -> tuple[Array, ...]:
    h = rms_norm(p["ln1"], x)
    q, k, v = ((h @ p[name]).reshape(x.shape[0], 1, -1, head) for name in ("q", "k", "v"))
    keys = lax.dynamic_update_slice_in_dim(keys, k, at, axis=1)
    values = lax.dynamic_update_slice_in_dim(values, v, at, axis=1)
    grouped = q.reshape(x.shape[0], 1, k.shape[2], -1, head)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, keys) / math.sqrt(head)
    scores = jnp.where(jnp.arange(keys.shape[1]) <= at, scores, -jnp.inf)
    mixed = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores, axis=-1), values)
    x = x + mixed.reshape(x.shape) @ p["out"]
    return x + swiglu(p, rms_norm(p["ln2"], x)), keys, values


def generate(params: Any, cache: Any, tokens: Array, start: Array) -> tuple[Array, Any]:
    """Writes tokens at `start` and on until all are written or every text has ended."""

    def unfinished(state: Any) -> Array:
        at, tokens, _ = state
        return (at < tokens.shape[1] - 1) & jnp.any(tokens[:, 0] >= 0)

    def one_token(state: Any) -> Any:
        at, tokens, cache = state
        x = params["embed"][lax.dynamic_slice_in_dim(tokens, at, 1, axis=1)]
        written = []
        for p, (keys, values) in zip(params["layers"], cache, strict=True):
            x, keys, values = decode_layer(p, x, keys, values, at)
            written.append((keys, values))
        logits = rms_norm(params["ln"], x) @ params["head"]
        chosen = logits.argmax(-1).astype(tokens.dtype)
        return at + 1, lax.dynamic_update_slice_in_dim(tokens, chosen, at + 1, axis=1), written

    _, tokens, cache = lax.while_loop(unfinished, one_token, (start, tokens, cache))
    return tokens, cache


def decode_program() -> Program:
    width, batch, length, layers = 1024, 8, 512, 8
    stacked = [llama_layer_shapes(width, 2816) for _ in range(layers)]
    params = {"embed": floats(32000, width), "layers": stacked, "ln": floats(width), "head": floats(width, 32000)}
    one = floats(batch, length, width // 4 // 64, 64)
    return generate, (params, [(one, one)] * layers, integers(batch, length), integers())


PROGRAMS: tuple[tuple[str, Callable[[], Program]], ...] = (
    ("transformer of 2 layers", partial(transformer_program, 2)),
    ("transformer of 24 layers", partial(transformer_program, 24)),
    ("transformer of 96 layers", partial(transformer_program, 96)),
    ("MLP without scopes", mlp_program),
    ("U-Net", unet_program),
    ("BERT", bert_program),
    ("scanned Llama", llama_program),
    ("nnx of 12 layers", nnx_program),
    ("equinox", equinox_program),
    ("decode loop", decode_program),
)
