"""One transformer layer by hand, whose parts can be exchanged one by one. Not a test module.

What `layer_models.py` varies and `layer_misses.py` breaks. Letters as in the sizes below, which all differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array
Params = Mapping[str, Array]
Heads = tuple[Array, Array, Array]
Pair = tuple[Array, Array]
Program = tuple[Callable[..., Any], tuple[Any, ...]]
# Batch, tokens of a call, keys seen before, cache size, width, heads, heads of keys, their size, feed-forward width.
B, S, T, SMAX, E, H, G, D, F = 6, 16, 11, 24, 32, 4, 2, 8, 48
STEP = 13


ENCODER, DECODER = "multi_transformer_encoder", "multi_transformer_decoder"
FUSED = "_fuse_qkv"  # the end of a pass's name where queries, keys and values are one product


@dataclass(frozen=True)
class Case:
    """A program with layers in it.

    Attributes:
      name: unique among `CASES`.
      phase: "encode" (attention over the own tokens), "prefill", "decode" or "generate" (a prefill and a loop of decodes).
      build: the function and its arguments.
      sites: pass -> how many layers stand in the program; one in the body of a scan or a loop counts once.
      layers: how many layers a run goes through; None where that is known only at run time.
      note: what is special.
    """

    name: str
    phase: str
    build: Callable[[], Program]
    sites: Mapping[str, int]
    layers: int | None = 2
    note: str = ""
    missing: Callable[[], str | None] = lambda: None  # why it cannot be built here


@dataclass(frozen=True)
class Miss:
    """A program whose one layer is declined.

    Attributes:
      name: unique among `MISSES`.
      build: the function and its arguments.
      pass_name: the pass that declines it.
      code: the rejection's code.
      says: a fragment of its sentence, whatever the case of letters.
    """

    name: str
    build: Callable[[], Program]
    pass_name: str
    code: str
    says: str


def suffix(projections: str) -> str:
    return "" if projections == "separate" else FUSED


def params(seed: int = 0, heads: int = H, kv_heads: int = H, width: int = E) -> Params:
    """Parameters of a layer in every form: its three projections and the same as one, and a gate."""
    generator = np.random.default_rng(seed)
    queries, keys = heads * D, kv_heads * D
    shapes = {"q": (width, queries), "k": (width, keys), "v": (width, keys), "out": (queries, width)}
    shapes |= {"up": (width, F), "gate": (width, F), "down": (F, width)}
    made: dict[str, Any] = {}
    for name, (rows, columns) in shapes.items():
        made[name] = generator.normal(0, 1 / math.sqrt(rows), (rows, columns))
        made[f"{name}_bias"] = generator.normal(0, 0.1, columns)
    for name in ("norm1", "norm2"):
        made[f"{name}_scale"] = generator.normal(1, 0.1, width)
        made[f"{name}_bias"] = generator.normal(0, 0.1, width)
    for part in ("", "_bias"):
        each = [made[f"{name}{part}"] for name in "qkv"]
        made[f"qkv{part}"] = np.concatenate(each, -1)
        if heads == kv_heads:
            by_head = np.concatenate([a.reshape(*a.shape[:-1], heads, D) for a in each], -1)
            made[f"qkv_by_head{part}"] = by_head.reshape(made[f"qkv{part}"].shape)
    return {name: jnp.asarray(value, jnp.float32) for name, value in made.items()}


def inputs(*shape: int, seed: int = 7) -> Array:
    """Standard normal values of a shape, `[B, S, E]` if none is given."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape or (B, S, E)), jnp.float32)


def layer_norm(p: Params, name: str, x: Array, epsilon: float = 1e-5) -> Array:
    mean = x.mean(-1, keepdims=True)
    variance = x.var(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + epsilon) * p[f"{name}_scale"] + p[f"{name}_bias"]


def rms_norm(p: Params, name: str, x: Array, epsilon: float = 1e-6) -> Array:
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + epsilon) * p[f"{name}_scale"]


def linear(p: Params, name: str, x: Array) -> Array:
    return x @ p[name] + p[f"{name}_bias"]


def split(x: Array) -> Array:
    """`[B, S, H * D]` -> `[B, S, H, D]`."""
    return x.reshape(*x.shape[:-1], -1, D)


def separate(p: Params, h: Array) -> Heads:
    return split(linear(p, "q", h)), split(linear(p, "k", h)), split(linear(p, "v", h))


def concatenated(p: Params, h: Array) -> Heads:
    """One product whose columns are all queries', all keys', all values'."""
    q, k, v = jnp.split(linear(p, "qkv", h), 3, -1)
    return split(q), split(k), split(v)


def interleaved(p: Params, h: Array) -> Heads:
    """One product whose columns are query, key and value of one head after another."""
    q, k, v = jnp.split(linear(p, "qkv_by_head", h).reshape(*h.shape[:-1], -1, 3 * D), 3, -1)
    return q, k, v


PROJECTIONS = {"separate": separate, "concatenated": concatenated, "interleaved": interleaved}


def attend(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
    """`[B, S, H, D]` and `[B, T, H, D]` -> `[B, S, H, D]`; a bool mask hides, a float one is added to the scores."""
    scores = jnp.einsum("...shd,...thd->...hst", q, k) / math.sqrt(D)
    if mask is not None:
        hides = mask.dtype == jnp.bool_
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min) if hides else scores + mask
    return jnp.einsum("...hst,...thd->...shd", jax.nn.softmax(scores, axis=-1), v)


def attend_grouped(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
    """Several heads of queries share one of keys, which is repeated."""
    repeats = q.shape[2] // k.shape[2]
    return attend(q, jnp.repeat(k, repeats, 2), jnp.repeat(v, repeats, 2), mask)


def mlp(p: Params, h: Array) -> Array:
    return linear(p, "down", jax.nn.gelu(linear(p, "up", h)))


def mlp_relu(p: Params, h: Array) -> Array:
    return linear(p, "down", jax.nn.relu(linear(p, "up", h)))


def swiglu(p: Params, h: Array) -> Array:
    return (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def out(p: Params, mixed: Array) -> Array:
    return linear(p, "out", mixed.reshape(*mixed.shape[:-2], -1))


def add(x: Array, h: Array, y: Array) -> Array:
    """The residual: of `x`, the layer's input, of which `h` is the normed form."""
    return x + y


@dataclass(frozen=True)
class Parts:
    """How a layer is written; `pre` says whether its norms come first."""

    norm: Callable[[Params, str, Array], Array] = layer_norm
    project: Callable[[Params, Array], Heads] = separate
    attend: Callable[..., Array] = attend
    out: Callable[[Params, Array], Array] = out
    mlp: Callable[[Params, Array], Array] = mlp
    join: Callable[[Array, Array, Array], Array] = add
    pre: bool = True


def encode(parts: Parts, p: Params, x: Array, mask: Array | None = None) -> Array:
    """One layer on `[B, S, E]` that attends to its own tokens."""
    return run(parts, p, x, lambda q, k, v: (parts.attend(q, k, v, mask), None))[0]


def run(
    parts: Parts, p: Params, x: Array, mix: Callable[[Array, Array, Array], tuple[Array, Any]]
) -> tuple[Array, Any]:
    """One layer; `mix` turns queries, keys and values into what is attended to, and something that is handed back."""
    h = parts.norm(p, "norm1", x) if parts.pre else x
    mixed, extra = mix(*parts.project(p, h))
    x = parts.join(x, h, parts.out(p, mixed))
    if parts.pre:
        h = parts.norm(p, "norm2", x)
        return parts.join(x, h, parts.mlp(p, h)), extra
    x = parts.norm(p, "norm1", x)
    return parts.norm(p, "norm2", parts.join(x, x, parts.mlp(p, x))), extra


def append(parts: Parts, p: Params, x: Array, cache: Pair) -> tuple[Array, Pair]:
    """Keys and values are put behind those of the cache `[B, T, H, D]`, all of which are seen."""

    def mix(q: Array, k: Array, v: Array) -> tuple[Array, Pair]:
        keys, values = jnp.concatenate([cache[0], k], 1), jnp.concatenate([cache[1], v], 1)
        return parts.attend(q, keys, values), (keys, values)

    return run(parts, p, x, mix)


def write(parts: Parts, p: Params, x: Array, cache: Pair, step: Array, off: int | None = 0) -> tuple[Array, Pair]:
    """Keys and values are written into the cache `[B, Smax, H, D]` at `step`; a query sees what is not later than it.

    `off` further ones than that; with None, every query sees what the last one does.
    """
    last = step + x.shape[1] - 1 if off is None else step + off + jnp.arange(x.shape[1])[:, None]
    seen = jnp.arange(cache[0].shape[1]) <= last

    def mix(q: Array, k: Array, v: Array) -> tuple[Array, Pair]:
        keys, values = put(cache[0], k, step), put(cache[1], v, step)
        return parts.attend(q, keys, values, seen), (keys, values)

    return run(parts, p, x, mix)


def put(cache: Array, new: Array, step: Array | int) -> Array:
    return lax.dynamic_update_slice(cache, new, (0, step, 0, 0))


def causal(off: int = 0) -> Array:
    """`[S, S]`: a query sees keys not later than itself, but for `off`."""
    return jnp.tril(jnp.ones((S, S), bool), off)


def caches(length: int, layers: int = 2, heads: int = H) -> list[Pair]:
    """Keys and values `[B, length, heads, D]` of each layer, as if they had been computed before."""
    return [
        (inputs(B, length, heads, D, seed=2 * i), inputs(B, length, heads, D, seed=2 * i + 1)) for i in range(layers)
    ]


def of_dtype(args: Any, dtype: Any) -> Any:
    """Arguments whose floating arrays are of another dtype."""
    return jax.tree.map(lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, args)
