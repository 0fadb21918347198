"""Near misses of layers with a cache of keys and values. Not a test module; `layer_misses.py` lists them with the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from . import layer_parts as parts
from .layer_parts import DECODER, ENCODER, FUSED, SMAX, STEP, B, E, Heads, Miss, Pair, Params, Parts, Program, params

Array = jax.Array
PRE = Parts()
Mix = Callable[[Array, Array, Array, Pair, Array], tuple[Array, Any]]


def cached(mix: Mix, project: Callable[[Params, Array], Heads] = parts.separate) -> Callable[[], Program]:
    """One token with a cache `[B, Smax, H, D]`; `mix` remembers and attends, and hands back what is returned beside y."""

    def fn(p: Params, x: Array, cache: Pair, step: Array) -> tuple[Array, Any]:
        return parts.run(replace(PRE, project=project), p, x, lambda q, k, v: mix(q, k, v, cache, step))

    return lambda: (fn, (params(), parts.inputs(B, 1, E), parts.caches(SMAX, 1)[0], jnp.int32(STEP)))


def seen(step: Array) -> Array:
    return jnp.arange(SMAX) <= step


def values_one_later(q: Array, k: Array, v: Array, cache: Pair, step: Array) -> tuple[Array, Pair]:
    keys, values = parts.put(cache[0], k, step), parts.put(cache[1], v, step + 1)
    return parts.attend(q, keys, values, seen(step)), (keys, values)


def attended_before(q: Array, k: Array, v: Array, cache: Pair, step: Array) -> tuple[Array, Pair]:
    """The token does not see itself: the cache is attended to as it was."""
    mixed = parts.attend(q, *cache, jnp.arange(SMAX) < step)
    return mixed, (parts.put(cache[0], k, step), parts.put(cache[1], v, step))


def old_values(q: Array, k: Array, v: Array, cache: Pair, step: Array) -> tuple[Array, Pair]:
    """The new keys are attended to, with the values of before."""
    keys, values = parts.put(cache[0], k, step), parts.put(cache[1], v, step)
    return parts.attend(q, keys, cache[1], seen(step)), (keys, values)


def other_axis(q: Array, k: Array, v: Array, cache: Pair, step: Array) -> tuple[Array, Pair]:
    """Written at a position of the heads, too: of the last two heads alone."""
    start = (0, step, 2, 0)
    keys, values = (jax.lax.dynamic_update_slice(c, n[:, :, 2:], start) for c, n in zip(cache, (k, v), strict=True))
    return parts.attend(q, keys, values, seen(step)), (keys, values)


def put_in_front(q: Array, k: Array, v: Array, cache: Pair, step: Array) -> tuple[Array, Pair]:
    """The new keys come before those of the cache: their order matters to whoever reads the cache next."""
    keys, values = jnp.concatenate([k, cache[0]], 1), jnp.concatenate([v, cache[1]], 1)
    return parts.attend(q, keys, values), (keys, values)


def own_steps() -> Program:
    """Keys are written at one step, values at another."""

    def fn(p: Params, x: Array, cache: Pair, step: Array, other: Array) -> tuple[Array, Pair]:
        def mix(q: Array, k: Array, v: Array) -> tuple[Array, Pair]:
            keys, values = parts.put(cache[0], k, step), parts.put(cache[1], v, other)
            return parts.attend(q, keys, values, seen(step)), (keys, values)

        return parts.run(PRE, p, x, mix)

    return fn, (params(), parts.inputs(B, 1, E), parts.caches(SMAX, 1)[0], jnp.int32(STEP), jnp.int32(STEP - 1))


def read_inside() -> Program:
    """The MLP's bias is computed from the new keys: an operand of the layer hangs on one of its results."""

    def fn(p: Params, x: Array, cache: Pair, step: Array) -> tuple[Array, Pair]:
        kept: list[Pair] = []

        def mix(q: Array, k: Array, v: Array) -> tuple[Array, Pair]:
            keys, values = parts.put(cache[0], k, step), parts.put(cache[1], v, step)
            kept.append((keys, values))
            return parts.attend(q, keys, values, seen(step)), (keys, values)

        def mlp(p: Params, h: Array) -> Array:
            return parts.mlp({**p, "up_bias": p["up_bias"] + kept[0][0].mean()}, h)

        return parts.run(replace(PRE, mlp=mlp), p, x, mix)

    return fn, (params(), parts.inputs(B, 1, E), parts.caches(SMAX, 1)[0], jnp.int32(STEP))


def misses() -> Iterator[Miss]:
    def decoder(name: str, mix: Mix, code: str, says: str) -> Miss:
        return Miss(name, cached(mix), DECODER, code, says)

    yield decoder("values_one_later", values_one_later, "structure", "different positions")
    yield Miss("own_steps", own_steps, DECODER, "structure", "different positions")
    yield Miss("attended_before", cached(attended_before), ENCODER, "structure", "another value")
    yield decoder("old_values", old_values, "structure", "cache")
    yield decoder("part_of_the_heads", other_axis, "axes", "along its positions")
    yield decoder("put_in_front", put_in_front, "structure", "projection")
    yield Miss("cache_read_inside", read_inside, DECODER, "structure", "computed from it")
    fused = cached(values_one_later, parts.concatenated)
    yield Miss("values_one_later_fused", fused, DECODER + FUSED, "structure", "different positions")
