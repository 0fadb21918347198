"""A small GPT in plain JAX: prefill and decode with a preallocated cache of keys and values, and a greedy `generate`.

    x = tokens[t] + positions[p]
    x = x + attention(layer_norm(x))          each layer; a query sees no later key
    x = x + mlp(layer_norm(x))                mlp = gelu_tanh(x @ w1 + b1) @ w2 + b2
    logits = layer_norm(x) @ head             head = tokens^T where tied

`Config` chooses the spelling: the projections of queries, keys and values are three products or one, the layers are
unrolled or scanned. One key gives the same model in every spelling, so results can be compared across them.

Letters: B batch, S tokens of one call, T keys attended to, Smax cache size, H heads, D features per head, E = H * D,
F feed-forward width, V vocabulary, n layers.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from fusionlab.errors import ArgumentError, unknown_name

from . import transformer
from .layers import Params, dense, layer_norm, layer_norm_init

Projections = Literal["separate", "concatenated", "interleaved"]
KeysAndValues = tuple[jax.Array, jax.Array]
# One (keys, values) per layer; where the layers are scanned, one pair of stacked arrays.
Cache = list[KeysAndValues] | KeysAndValues
# How a layer attends: (queries, keys, values) [B, S, H, D] -> (mixed values [B, S, H, D], the layer's new cache).
Attend = Callable[[jax.Array, jax.Array, jax.Array, KeysAndValues], tuple[jax.Array, KeysAndValues]]

# Deviations of the two embeddings. Where tokens weigh more than positions, a model with random weights soon repeats
# itself: what it says next then hardly depends on where it is.
TOKEN_SCALE = 0.4
POSITION_SCALE = 1.0


@dataclass(frozen=True)
class Config:
    """The model's sizes and spelling.

    `ffn` is F (4 * E when None), `longest` the number of positions, and so the largest cache.
    `projections`: "separate" is three products; the others are one of `[E, 3 E]`, whose columns are all queries', then
    all keys', then all values' ("concatenated"), or those three one head after another ("interleaved").
    `tied`: the logits are a product with the token embedding; otherwise with a separate `head`.
    `scanned`: the parameters and caches of all layers are stacked, and one `lax.scan` runs over them.

    Raises:
      ArgumentError: `embed` is not a multiple of `heads`, or a size is not positive.
      UnknownNameError: `projections` is not one of the three.
    """

    layers: int = 2
    embed: int = 64
    heads: int = 4
    ffn: int | None = None
    vocab: int = 256
    longest: int = 512
    projections: Projections = "separate"
    tied: bool = True
    scanned: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "embed", "heads", "vocab", "longest"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name}: got {getattr(self, name)}; needed at least 1")
        if self.embed % self.heads:
            raise ArgumentError(f"heads: got {self.heads} for E = {self.embed}; needed E to be a multiple of heads")
        if self.projections not in get_args(Projections):
            raise unknown_name("projections", self.projections, get_args(Projections))


SMALL = Config()


def init(key: jax.Array, config: Config = SMALL, dtype: Any = jnp.float32) -> Params:
    """Parameters of `dtype`, the same function of `key` in every spelling.

    `tokens [V, E]`, `positions [longest, E]`, `norm` (see `layers.layer_norm_init`), `head [E, V]` unless tied, and
    `layers`: a list of blocks, or one block whose arrays have a leading axis n where the layers are scanned. A block is
    that of `transformer.init_block`; where the projections are one product, its `attention` has a dense `qkv` in the
    place of `q`, `k` and `v`.
    """
    token_key, position_key, head_key, layers_key = jax.random.split(key, 4)

    def normal(key: jax.Array, shape: tuple[int, int], deviation: float) -> jax.Array:
        return (deviation * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    blocks = transformer.init(layers_key, config.layers, config.embed, config.ffn, dtype)
    blocks = [{**b, "attention": _pack(b["attention"], config)} for b in blocks]
    params: Params = {
        "tokens": normal(token_key, (config.vocab, config.embed), TOKEN_SCALE),
        "positions": normal(position_key, (config.longest, config.embed), POSITION_SCALE),
        "layers": jax.tree.map(lambda *a: jnp.stack(a), *blocks) if config.scanned else blocks,
        "norm": layer_norm_init(config.embed, dtype),
    }
    if not config.tied:
        params["head"] = normal(head_key, (config.embed, config.vocab), TOKEN_SCALE)
    return params


def _pack(attention: Params, config: Config) -> Params:
    """The parameters of an attention, with the three projections as one product if `config` wants that."""
    if config.projections == "separate":
        return attention
    q, k, v = (attention[name] for name in ("q", "k", "v"))

    def join(*parts: jax.Array) -> jax.Array:
        if config.projections == "concatenated":
            return jnp.concatenate(parts, -1)
        heads = [p.reshape(*p.shape[:-1], config.heads, -1) for p in parts]
        return jnp.concatenate(heads, -1).reshape(*parts[0].shape[:-1], -1)

    return {"qkv": jax.tree.map(join, q, k, v), "out": attention["out"]}


def init_cache(batch: int, config: Config = SMALL, size: int | None = None, dtype: Any = jnp.float32) -> Cache:
    """An empty cache: per layer keys and values `[B, Smax, H, D]`, zero; stacked, `[n, B, Smax, H, D]`, if scanned.

    `size` is Smax, `config.longest` when None.

    Raises:
      ArgumentError: `size` is above `config.longest`.
    """
    size = config.longest if size is None else size
    if size > config.longest:
        raise ArgumentError(f"size: got {size}; the model has {config.longest} positions (Config.longest)")
    shape = (batch, size, config.heads, config.embed // config.heads)
    if config.scanned:
        return jnp.zeros((config.layers, *shape), dtype), jnp.zeros((config.layers, *shape), dtype)
    return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.layers)]


def cache_size(cache: Cache) -> int:
    """Smax of a cache, in either form."""
    return jax.tree.leaves(cache)[0].shape[-3]


def prefill(params: Params, tokens: jax.Array, cache: Cache, *, config: Config = SMALL) -> tuple[jax.Array, Cache]:
    """The prompt at once: `tokens` int `[B, S]` -> logits `[B, S, V]`, and the cache with keys and values of 0..S-1.

    Raises:
      ArgumentError: S is above the cache's size.
    """
    seq = tokens.shape[1]
    if seq > cache_size(cache):
        raise ArgumentError(f"tokens: got {seq} for a cache of {cache_size(cache)}; give init_cache a larger size")
    seen = jnp.tril(jnp.ones((seq, seq), bool))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: KeysAndValues) -> tuple[jax.Array, KeysAndValues]:
        return _attention(q, k, v, seen), _write(cache, k, v, 0)

    with jax.named_scope("embed"):
        x = params["tokens"][tokens] + params["positions"][:seq]
    x, cache = _layers(params["layers"], x, cache, attend, config)
    return _logits(params, x), cache


def decode(
    params: Params, token: jax.Array, cache: Cache, step: jax.Array | int, *, config: Config = SMALL
) -> tuple[jax.Array, Cache]:
    """One token at position `step`: `token` int `[B]` -> logits `[B, V]`, and the cache with its key and value.

    `step` is an int or an int32 scalar, at least 0 and below Smax: the number of filled positions of the cache. A traced
    step is not checked; one that is too large would overwrite the last position.

    Raises:
      ArgumentError: `step` is known and not below Smax, or negative.
    """
    size = cache_size(cache)
    if not isinstance(step, Tracer) and not 0 <= int(step) < size:
        raise ArgumentError(f"step: got {int(step)} for a cache of {size}; needed 0 to {size - 1}")
    seen = jnp.arange(size) <= step

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: KeysAndValues) -> tuple[jax.Array, KeysAndValues]:
        keys, values = _write(cache, k, v, step)
        return _attention(q, keys, values, seen), (keys, values)

    with jax.named_scope("embed"):
        x = (params["tokens"][token] + params["positions"][step])[:, None]
    x, cache = _layers(params["layers"], x, cache, attend, config)
    return _logits(params, x)[:, 0], cache


def generate(params: Params, prompt: jax.Array, steps: int, *, config: Config = SMALL) -> jax.Array:
    """The `steps` tokens that follow `prompt` int `[B, S]`, the most likely one at each step: int32 `[B, steps]`.

    A prefill, then a `lax.while_loop` that decodes; the cache has `config.longest` positions.

    Raises:
      ArgumentError: `steps` is below 1, or prompt and steps together need more positions than the model has.
    """
    batch, seq = prompt.shape
    if steps < 1 or seq + steps - 1 > config.longest:  # the last token is never read
        longest = config.longest
        raise ArgumentError(f"steps: got {steps} after {seq} tokens; needed 1 to {longest - seq + 1}")
    logits, cache = prefill(params, prompt, init_cache(batch, config, dtype=params["tokens"].dtype), config=config)
    out = jnp.zeros((batch, steps), jnp.int32)

    def more(state: tuple[jax.Array, jax.Array, jax.Array, Cache]) -> jax.Array:
        return state[0] < steps

    def step(state: tuple[jax.Array, jax.Array, jax.Array, Cache]) -> tuple[jax.Array, jax.Array, jax.Array, Cache]:
        done, token, out, cache = state
        logits, cache = decode(params, token, cache, seq - 1 + done, config=config)
        token = _likeliest(logits)
        return done + 1, token, lax.dynamic_update_slice(out, token[:, None], (0, done)), cache

    first = _likeliest(logits[:, -1])
    state = jnp.ones((), jnp.int32), first, out.at[:, 0].set(first), cache
    return lax.while_loop(more, step, state)[2]


def smallest_margin(params: Params, prompt: jax.Array, generated: jax.Array, *, config: Config = SMALL) -> jax.Array:
    """The smallest difference between the best two logits over all steps, a float32 scalar.

    `prompt` int `[B, S]`, `generated` int `[B, steps]` as `generate` returns it. The logits are recomputed in one
    prefill. A program whose logits differ by less than half of this margin chooses the same tokens.
    """
    tokens = jnp.concatenate([prompt, generated[:, :-1]], 1)
    cache = init_cache(len(tokens), config, dtype=params["tokens"].dtype)
    logits = prefill(params, tokens, cache, config=config)[0][:, prompt.shape[1] - 1 :]
    best = lax.top_k(logits.astype(jnp.float32), 2)[0]
    return jnp.min(best[..., 0] - best[..., 1])


def _likeliest(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, -1).astype(jnp.int32)


def _logits(params: Params, x: jax.Array) -> jax.Array:
    """`[B, S, E]` -> `[B, S, V]`."""
    with jax.named_scope("head"):
        x = layer_norm(params["norm"], x)
        return x @ (params["head"] if "head" in params else params["tokens"].T)


def _layers(params: Any, x: jax.Array, cache: Any, attend: Attend, config: Config) -> tuple[jax.Array, Cache]:
    """All layers on `x [B, S, E]`, each with its own cache, unrolled or scanned."""
    if not config.scanned:
        pairs = []
        for i, (layer, pair) in enumerate(zip(params, cache, strict=True)):
            with jax.named_scope(f"layer_{i}"):
                x, pair = _block(layer, x, pair, attend, config)
            pairs.append(pair)
        return x, pairs

    def body(x: jax.Array, layer: tuple[Params, KeysAndValues]) -> tuple[jax.Array, KeysAndValues]:
        return _block(layer[0], x, layer[1], attend, config)

    with jax.named_scope("layers"):
        return lax.scan(body, x, (params, cache))


def _block(
    params: Params, x: jax.Array, cache: KeysAndValues, attend: Attend, config: Config
) -> tuple[jax.Array, KeysAndValues]:
    """One layer, `[B, S, E]` -> `[B, S, E]` and its new cache."""
    with jax.named_scope("ln1"):
        h = layer_norm(params["ln1"], x)
    with jax.named_scope("attention"):
        mixed, cache = attend(*_project(params["attention"], h, config), cache)
        x = x + dense(params["attention"]["out"], mixed.reshape(x.shape))
    with jax.named_scope("ln2"):
        h = layer_norm(params["ln2"], x)
    with jax.named_scope("mlp"):
        return x + transformer.mlp(params["mlp"], h), cache


def _project(params: Params, x: jax.Array, config: Config) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values `[B, S, H, D]` of `x [B, S, E]`."""
    split = (*x.shape[:2], config.heads, config.embed // config.heads)
    if config.projections == "separate":
        q, k, v = (dense(params[name], x).reshape(split) for name in ("q", "k", "v"))
    elif config.projections == "concatenated":
        q, k, v = (part.reshape(split) for part in jnp.split(dense(params["qkv"], x), 3, -1))
    else:
        q, k, v = jnp.split(dense(params["qkv"], x).reshape(*split[:3], 3 * split[3]), 3, -1)
    return q, k, v


def _attention(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """`softmax(q k^T / sqrt(D)) v`, its softmax in float32: q `[B, S, H, D]`, k and v `[B, T, H, D]`, seen `[(S,) T]`."""
    scores = jnp.einsum("bshd,bthd->bhst", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(jnp.float32).min), axis=-1)
    return jnp.einsum("bhst,bthd->bshd", weights.astype(v.dtype), v)


def _write(cache: KeysAndValues, k: jax.Array, v: jax.Array, step: jax.Array | int) -> KeysAndValues:
    """Keys and values `[B, S, H, D]` put into the cache from position `step` on."""
    start = (0, step, 0, 0)
    return lax.dynamic_update_slice(cache[0], k, start), lax.dynamic_update_slice(cache[1], v, start)
