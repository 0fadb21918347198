"""Layers whose queries and keys are turned by a rotary embedding, and those turned otherwise than the op does. Not a test module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import layer_parts as parts
from .layer_parts import (
    DECODER,
    ENCODER,
    FUSED,
    SMAX,
    STEP,
    B,
    Case,
    D,
    E,
    G,
    H,
    Heads,
    Miss,
    Params,
    Parts,
    Program,
    S,
    T,
    params,
)

Array = jax.Array
Turn = Callable[[Array, Array, Array], Array]
LLAMA = Parts(norm=parts.rms_norm, attend=parts.attend_grouped, mlp=parts.swiglu)


def tables(width: int = D, length: int = SMAX, base: float = 100.0) -> tuple[Array, Array]:
    """(cos, sin) `[length, width]`: of a whole head, or of the half."""
    angles = np.arange(length)[:, None] * base ** (-np.arange(D // 2) / (D // 2))
    both = np.tile(angles, (1, width // (D // 2)))
    return jnp.asarray(np.cos(both), jnp.float32), jnp.asarray(np.sin(both), jnp.float32)


def over_heads(table: Array) -> Array:
    return table[..., None, :]


def by_width(x: Array, cos: Array, sin: Array) -> Array:
    left, right = x[..., : D // 2], x[..., D // 2 :]
    return (x * over_heads(cos) + jnp.concatenate([-right, left], -1) * over_heads(sin)).astype(x.dtype)


def by_halves(x: Array, cos: Array, sin: Array) -> Array:
    left, right = jnp.split(x, 2, -1)
    cos, sin = over_heads(cos[..., : D // 2]), over_heads(sin[..., : D // 2])
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1).astype(x.dtype)


def backwards(x: Array, cos: Array, sin: Array) -> Array:
    """The other way round: by minus the angle."""
    left, right = x[..., : D // 2], x[..., D // 2 :]
    return x * over_heads(cos) + jnp.concatenate([right, -left], -1) * over_heads(sin)


def exchanged(x: Array, cos: Array, sin: Array) -> Array:
    """By halves, with the sum and the difference exchanged."""
    left, right = jnp.split(x, 2, -1)
    cos, sin = over_heads(cos[..., : D // 2]), over_heads(sin[..., : D // 2])
    return jnp.concatenate([right * cos + left * sin, left * cos - right * sin], -1)


def neighbours(x: Array, cos: Array, sin: Array) -> Array:
    left, right = x[..., ::2], x[..., 1::2]
    cos, sin = over_heads(cos[..., : D // 2]), over_heads(sin[..., : D // 2])
    return jnp.stack([left * cos - right * sin, right * cos + left * sin], -1).reshape(x.shape)


def in_part(x: Array, cos: Array, sin: Array) -> Array:
    """Half of the features are turned, the rest stay."""
    turned, kept = x[..., : D // 2], x[..., D // 2 :]
    left, right = turned[..., : D // 4], turned[..., D // 4 :]
    cos, sin = over_heads(cos[..., : D // 2]), over_heads(sin[..., : D // 2])
    return jnp.concatenate([turned * cos + jnp.concatenate([-right, left], -1) * sin, kept], -1)


def heads_of_their_own(x: Array, cos: Array, sin: Array) -> Array:
    """Every head by tables of its own: [S, heads, D]."""
    left, right = x[..., : D // 2], x[..., D // 2 :]
    return x * cos + jnp.concatenate([-right, left], -1) * sin


def turning(how: Parts, turn: Turn, which: str = "qk", keys: Turn | None = None) -> Parts:
    """A layer whose projections are turned by its tables "cos" and "sin"."""

    def project(p: Params, h: Array) -> Heads:
        turns = {"q": turn, "k": keys or turn, "v": turn}
        heads = zip("qkv", how.project(p, h), strict=True)
        q, k, v = (turns[name](x, p["cos"], p["sin"]) if name in which else x for name, x in heads)
        return q, k, v

    return replace(how, project=project)


def encode_program(
    how: Parts, given: tuple[Array, Array], kv_heads: int = H, layers: int = 2, dtype: Any = None
) -> Program:
    """Layers that share tables `[S, W]` or `[B, S, W]`."""

    def fn(weights: list[Params], cos: Array, sin: Array, x: Array) -> Array:
        for p in weights:
            x = parts.encode(how, {**p, "cos": cos, "sin": sin}, x, parts.causal())
        return x

    weights = [params(i, kv_heads=kv_heads) for i in range(layers)]
    args = parts.of_dtype((weights, parts.inputs()), dtype or jnp.float32)
    return fn, (args[0], *given, args[1])


def by_positions(x: Array, positions: Array, _: Array) -> Array:
    """The tables are made where heads are turned: once for queries, once for keys."""
    angles = positions[:, None] * jnp.asarray(100.0, jnp.float32) ** (-jnp.arange(D // 2, dtype=jnp.float32) / (D // 2))
    left, right = jnp.split(x, 2, -1)
    cos, sin = over_heads(jnp.cos(angles).astype(x.dtype)), over_heads(jnp.sin(angles).astype(x.dtype))
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def positions() -> tuple[Array, Array]:
    return jnp.arange(S, dtype=jnp.float32), jnp.zeros(())


def scanned(how: Parts, given: tuple[Array, Array]) -> Program:
    def fn(weights: Params, cos: Array, sin: Array, x: Array) -> Array:
        def body(x: Array, p: Params) -> tuple[Array, None]:
            return parts.encode(how, {**p, "cos": cos, "sin": sin}, x, parts.causal()), None

        return lax.scan(body, x, weights)[0]

    return fn, (jax.tree.map(lambda *a: jnp.stack(a), params(0), params(1)), *given, parts.inputs())


def decode_program(how: Parts, kv_heads: int, writes: bool, length: int = 1) -> Program:
    """The tables of all positions are given; those of this call's are read off them at the step."""

    def fn(
        weights: list[Params], cos: Array, sin: Array, x: Array, cache: list[parts.Pair], step: Array
    ) -> tuple[Array, list[parts.Pair]]:
        here = {n: lax.dynamic_slice_in_dim(a, step, length) for n, a in (("cos", cos), ("sin", sin))}
        pairs = []
        for p, pair in zip(weights, cache, strict=True):
            x, pair = (
                parts.write(how, {**p, **here}, x, pair, step) if writes else parts.append(how, {**p, **here}, x, pair)
            )
            pairs.append(pair)
        return x, pairs

    weights = [params(i, kv_heads=kv_heads) for i in range(2)]
    cache = parts.caches(SMAX if writes else T, heads=kv_heads)
    return fn, (weights, *tables(), parts.inputs(B, length, E), cache, jnp.int32(STEP if writes else T))


def cases() -> Iterator[Case]:
    def encode(name: str, how: Parts, given: Any, fused: str = "", layers: int = 2, **rest: Any) -> Case:
        build = partial(encode_program, how, given, layers=layers, **rest)
        return Case(f"rotary/{name}", "encode", build, {ENCODER + fused: layers}, layers)

    here = tables(length=S)
    for turn in (by_width, by_halves):
        yield encode(turn.__name__, turning(LLAMA, turn), here, kv_heads=G)
        yield encode(f"{turn.__name__}/bfloat16", turning(LLAMA, turn), here, kv_heads=G, dtype=jnp.bfloat16)
    yield encode("tables_of_the_half", turning(LLAMA, by_halves), tables(D // 2, S), kv_heads=G)
    each = jax.tree.map(lambda a: jnp.stack([a[i : i + S] for i in range(B)]), tables(length=S + B))
    yield encode("positions_of_each", turning(LLAMA, by_width), each, kv_heads=G)
    yield encode("made_of_positions", turning(LLAMA, by_positions), positions(), kv_heads=G)
    yield encode(
        "made_of_positions/bfloat16", turning(LLAMA, by_positions), positions(), kv_heads=G, dtype=jnp.bfloat16
    )
    for project in (parts.concatenated, parts.interleaved):
        yield encode(project.__name__, turning(Parts(project=project), by_width), here, FUSED)
    yield encode("three", turning(Parts(), by_halves), here, layers=3)
    yield Case("rotary/scanned", "encode", partial(scanned, turning(Parts(), by_width), here), {ENCODER: 1})
    for name, writes in (("append", False), ("write", True)):
        for turn in (by_width, by_halves):
            build = partial(decode_program, turning(LLAMA, turn), G, writes)
            yield Case(f"rotary/{name}/{turn.__name__}", "decode", build, {DECODER: 2})
    several = partial(decode_program, turning(Parts(), by_width), H, True, 3)
    yield Case("rotary/write/several", "decode", several, {DECODER: 2})


def misses() -> Iterator[Miss]:
    def miss(name: str, how: Parts, says: str, code: str = "rotary") -> Miss:
        build = partial(encode_program, how, tables(length=S), layers=1)
        return Miss(f"rotary_{name}", build, ENCODER, code, says)

    yield miss("of_queries", turning(Parts(), by_width, "q"), "is applied only to the queries")
    yield miss("of_keys", turning(Parts(), by_width, "k"), "is applied only to the keys")
    yield miss("of_values_too", turning(Parts(), by_width, "qkv"), "values are changed")
    yield miss("backwards", turning(Parts(), backwards), "rotary embedding in another form")
    yield miss("exchanged", turning(Parts(), exchanged), "rotary embedding in another form")
    yield miss("of_neighbours", turning(Parts(), neighbours), "pairs neighbouring features")
    yield miss("in_part", turning(Parts(), in_part), "rotary embedding in another form")
    each = jax.tree.map(lambda a: a[:, None] * jnp.arange(1, H + 1)[:, None], tables(length=S))
    of_heads = partial(encode_program, turning(Parts(), heads_of_their_own), each, layers=1)
    yield Miss("rotary_of_each_head", of_heads, ENCODER, "rotary", "tables of its own")
    later = turning(Parts(), by_width, keys=lambda x, cos, sin: by_width(x, sin, cos))
    shifted = turning(Parts(), by_positions, keys=lambda x, at, zero: by_positions(x, at + 1, zero))
    yield Miss(
        "rotary_of_other_positions",
        partial(encode_program, shifted, positions(), layers=1),
        ENCODER,
        "rotary",
        "different tables",
    )
    yield miss("of_other_tables", later, "use different tables")
