"""Transformer layers by hand, in the forms that the passes take: what `layer_parts.py` has, varied. Not a test module."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.zoo.kinds import structured

from . import layer_parts as parts
from .layer_parts import (
    DECODER,
    ENCODER,
    FUSED,
    PROJECTIONS,
    SMAX,
    STEP,
    B,
    Case,
    D,
    E,
    G,
    H,
    Params,
    Parts,
    Program,
    S,
    T,
    params,
    suffix,
)

Array = jax.Array

# -- by hand: what the passes take ------------------------------------------------------------------------------------

LLAMA = Parts(norm=parts.rms_norm, attend=parts.attend_grouped, mlp=parts.swiglu)
POST = Parts(pre=False)
RELU = Parts(mlp=parts.mlp_relu)
POST_RELU = Parts(mlp=parts.mlp_relu, pre=False)


def unbiased() -> Parts:
    def project(p: Params, h: Array) -> parts.Heads:
        q, k, v = (parts.split(h @ p[name]) for name in "qkv")
        return q, k, v

    return Parts(
        project=project,
        out=lambda p, mixed: mixed.reshape(*mixed.shape[:-2], -1) @ p["out"],
        mlp=lambda p, h: jax.nn.gelu(h @ p["up"]) @ p["down"],
    )


def turned() -> Parts:
    """Weights that lie `[out, in]`: those of the attention are square, so that their shapes do not tell."""

    def project(p: Params, h: Array) -> parts.Heads:
        q, k, v = (parts.split(h @ p[name].T + p[f"{name}_bias"]) for name in "qkv")
        return q, k, v

    return Parts(project=project, out=lambda p, m: m.reshape(*m.shape[:-2], -1) @ p["out"].T + p["out_bias"])


def thirds(p: Params, h: Array) -> parts.Heads:
    """The concatenated form, by a reshape and an index."""
    qkv = parts.linear(p, "qkv", h).reshape(*h.shape[:-1], 3, -1, D)
    return qkv[..., 0, :, :], qkv[..., 1, :, :], qkv[..., 2, :, :]


def by_head(p: Params, h: Array) -> parts.Heads:
    """The interleaved form, with an axis for the three."""
    qkv = parts.linear(p, "qkv_by_head", h).reshape(*h.shape[:-1], -1, 3, D)
    return qkv[..., 0, :], qkv[..., 1, :], qkv[..., 2, :]


def first_axis(p: Params, h: Array) -> parts.Heads:
    """The concatenated form, its three moved to the front before they are taken apart."""
    q, k, v = jnp.moveaxis(parts.linear(p, "qkv", h).reshape(*h.shape[:-1], 3, -1, D), -3, 0)
    return q, k, v


def own_epsilons() -> Parts:
    epsilons = {"norm1": 1e-6, "norm2": 1e-4}
    return Parts(norm=lambda p, name, x: parts.layer_norm(p, name, x, epsilons[name]))


def other_scale() -> Parts:
    """The scores are not divided by sqrt(D): the fused op takes any scale."""
    return Parts(attend=lambda q, k, v, mask: parts.attend(q * (0.1 * math.sqrt(D)), k, v, mask))


def heads_first() -> Parts:
    """Attention by way of `[B, H, S, D]` and `@`."""

    def attend(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        q, k, v = (a.swapaxes(1, 2) for a in (q, k, v))
        scores = q @ k.swapaxes(2, 3) / math.sqrt(D)
        scores = scores if mask is None else jnp.where(mask, scores, -1e9)
        return (jax.nn.softmax(scores) @ v).swapaxes(1, 2)

    return Parts(attend=attend)


def encode_program(how: Parts, mask: Array | None = None, layers: int = 2, **sizes: int) -> Program:
    def fn(weights: list[Params], x: Array, *mask: Array) -> Array:
        for p in weights:
            x = parts.encode(how, p, x, *mask)
        return x

    weights = [params(i, **sizes) for i in range(layers)]
    return fn, (weights, parts.inputs(), *(() if mask is None else (mask,)))


def lengths_program() -> Program:
    """Each row has a length of its own, behind which nothing is seen."""

    def fn(weights: list[Params], x: Array, lengths: Array) -> Array:
        seen = (jnp.arange(S) < lengths[:, None])[:, None, None]
        for p in weights:
            x = parts.encode(Parts(), p, x, seen)
        return x

    return fn, ([params(0), params(1)], parts.inputs(), jnp.asarray([16, 3, 9, 1, 12, 7], jnp.int32))


def integer_mask() -> Program:
    def fn(weights: list[Params], x: Array, mask: Array) -> Array:
        for p in weights:
            x = parts.encode(Parts(), p, x, mask[:, None, None, :] != 0)
        return x

    return fn, ([params(0), params(1)], parts.inputs(), jnp.ones((B, S), jnp.int32).at[0, 5:].set(0))


def first_keys() -> Program:
    """An encoder that also gives keys and values of its layers, for a cache that somebody else keeps."""

    def fn(weights: list[Params], x: Array) -> tuple[Array, list[parts.Pair]]:
        pairs = []
        for p in weights:
            mask = parts.causal()
            x, pair = parts.run(Parts(), p, x, lambda q, k, v, mask=mask: (parts.attend(q, k, v, mask), (k, v)))
            pairs.append(pair)
        return x, pairs

    return fn, ([params(0), params(1)], parts.inputs())


def renamed() -> Program:
    """Parameters without telling names, and a norm of the model's before the first layer."""
    fn, (weights, x) = encode_program(Parts())
    order = sorted(weights[0])

    def anonymous(values: list[list[Array]], first: Params, x: Array) -> Array:
        return fn([dict(zip(order, v, strict=True)) for v in values], parts.layer_norm(first, "norm1", x))

    return anonymous, ([[p[name] for name in order] for p in weights], params(9), x)


def hand_cases() -> Iterator[Case]:
    def encode(name: str, how: Parts, *args: Any, fused: str = "", note: str = "", **sizes: int) -> Case:
        build = partial(encode_program, how, *args, **sizes)
        return Case(f"hand/{name}", "encode", build, {ENCODER + fused: 2}, note=note)

    for name, project in PROJECTIONS.items():
        yield encode(f"pre/{name}", Parts(project=project), parts.causal(), fused=suffix(name))
    for project in (thirds, by_head, first_axis):
        yield encode(f"pre/{project.__name__}", Parts(project=project), fused=FUSED)
    yield encode("post", POST)
    yield encode("post_relu", POST_RELU)
    yield encode("post_fused", dataclasses.replace(POST_RELU, project=parts.concatenated), fused=FUSED)
    yield encode("relu", RELU)
    yield encode("rms", Parts(norm=parts.rms_norm))
    yield encode("llama", LLAMA, parts.causal(), kv_heads=G, note="RMS norm, SwiGLU, grouped heads")
    yield encode("no_biases", unbiased())
    yield encode("pruned_heads", Parts(), heads=3, kv_heads=3, note="3 of 4 heads: H D is not E")
    yield encode("turned_weights", turned(), note="x @ w.T with a square w: the numbers tell, not the shapes")
    yield encode("own_epsilons", own_epsilons())
    yield encode("other_scale", other_scale())
    yield encode("heads_first", heads_first(), parts.causal())
    rows, heads = parts.inputs(B, 1, 1, S) > -0.5, parts.inputs(B, H, S, S)
    yield encode("mask_of_rows", Parts(), rows.at[..., 0].set(True))
    for off in (-2, 1):
        yield encode(f"causal_but_for_{off}", Parts(), parts.causal(off).at[:, 0].set(True), note="not `is_causal`")
    yield encode("mask_of_heads", Parts(), heads, note="float, added to the scores")
    yield Case("hand/mask_of_integers", "encode", integer_mask, {ENCODER: 2})
    yield Case("hand/lengths", "encode", lengths_program, {ENCODER: 2})
    yield Case("hand/gives_keys", "encode", first_keys, {ENCODER: 2}, note="keys and values are results too")
    yield Case("hand/renamed", "encode", renamed, {ENCODER: 2})
    yield Case(
        "hand/three", "encode", partial(encode_program, Parts(), layers=3), {ENCODER: 3}, 3, "a row to be stacked"
    )


# -- by hand: caches --------------------------------------------------------------------------------------------------


def append_program(how: Parts, kv_heads: int = H, length: int = 1) -> Program:
    def fn(weights: list[Params], x: Array, cache: list[parts.Pair]) -> tuple[Array, list[parts.Pair]]:
        pairs = []
        for p, pair in zip(weights, cache, strict=True):
            x, pair = parts.append(how, p, x, pair)
            pairs.append(pair)
        return x, pairs

    weights = [params(i, kv_heads=kv_heads) for i in range(2)]
    return fn, (weights, parts.inputs(B, length, E), parts.caches(T, heads=kv_heads))


def prefix_program(how: Parts) -> Program:
    """Keys and values that were learnt stand before the tokens' own, are seen by all of them, and are given back to nobody."""
    seen = jnp.concatenate([jnp.ones((S, T), bool), parts.causal()], axis=1)

    def fn(weights: list[Params], x: Array, prefix: list[parts.Pair]) -> Array:
        def layer(p: Params, x: Array, pair: parts.Pair) -> Array:
            def mix(q: Array, k: Array, v: Array) -> tuple[Array, None]:
                keys, values = (jnp.concatenate([before, own], 1) for before, own in zip(pair, (k, v), strict=True))
                return parts.attend(q, keys, values, seen), None

            return parts.run(how, p, x, mix)[0]

        for p, pair in zip(weights, prefix, strict=True):
            x = layer(p, x, pair)
        return x

    return fn, ([params(0), params(1)], parts.inputs(), parts.caches(T))


def write_program(how: Parts, kv_heads: int = H, length: int = 1, off: int | None = 0) -> Program:
    def fn(weights: list[Params], x: Array, cache: list[parts.Pair], step: Array) -> tuple[Array, list[parts.Pair]]:
        pairs = []
        for p, pair in zip(weights, cache, strict=True):
            x, pair = parts.write(how, p, x, pair, step, off)
            pairs.append(pair)
        return x, pairs

    weights = [params(i, kv_heads=kv_heads) for i in range(2)]
    return fn, (weights, parts.inputs(B, length, E), parts.caches(SMAX, heads=kv_heads), jnp.int32(STEP))


def prefill_program(start: int) -> Program:
    """Own tokens are attended to; their keys and values are written into a cache from `start` on."""

    def fn(weights: list[Params], x: Array, cache: list[parts.Pair]) -> tuple[Array, list[parts.Pair]]:
        pairs = []
        for p, (keys, values) in zip(weights, cache, strict=True):
            x, (k, v) = parts.run(Parts(), p, x, lambda q, k, v: (parts.attend(q, k, v, parts.causal()), (k, v)))
            pairs.append((parts.put(keys, k, start), parts.put(values, v, start)))
        return x, pairs

    return fn, ([params(0), params(1)], parts.inputs(), parts.caches(SMAX))


def heads_first_cache(appends: bool) -> Program:
    """A cache `[B, H, T, D]`: keys and values are turned before they are remembered."""

    def layer(p: Params, x: Array, cache: parts.Pair, step: Array | int) -> tuple[Array, parts.Pair]:
        def mix(q: Array, k: Array, v: Array) -> tuple[Array, parts.Pair]:
            k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
            if appends:
                keys, values = jnp.concatenate([cache[0], k], 2), jnp.concatenate([cache[1], v], 2)
            else:
                keys, values = (
                    lax.dynamic_update_slice(c, n, (0, 0, step, 0)) for c, n in zip(cache, (k, v), strict=True)
                )
            scores = q.swapaxes(1, 2) @ keys.swapaxes(2, 3) / math.sqrt(D)
            if not appends:
                scores = jnp.where(jnp.arange(SMAX) <= step, scores, -1e9)
            return (jax.nn.softmax(scores) @ values).swapaxes(1, 2), (keys, values)

        return parts.run(Parts(), p, x, mix)

    def fn(weights: list[Params], x: Array, cache: list[parts.Pair], *step: Array) -> tuple[Array, list[parts.Pair]]:
        pairs = []
        for p, pair in zip(weights, cache, strict=True):
            x, pair = layer(p, x, pair, *(step or (0,)))
            pairs.append(pair)
        return x, pairs

    cache = jax.tree.map(lambda a: a.swapaxes(1, 2), parts.caches(T if appends else SMAX))
    args = [params(0), params(1)], parts.inputs(B, 1, E), cache
    return fn, args if appends else (*args, jnp.int32(STEP))


def decode_cases() -> Iterator[Case]:
    for name, project in PROJECTIONS.items():
        how, sites = Parts(project=project), {DECODER + suffix(name): 2}
        yield Case(f"append/{name}", "decode", partial(append_program, how), sites)
        yield Case(f"write/{name}", "decode", partial(write_program, how), sites)
        prefix = partial(prefix_program, how)
        yield Case(f"prefix/{name}", "encode", prefix, sites, note="a prefix of keys and values, as of prefix tuning")
    yield Case("append/post_relu", "decode", partial(append_program, POST_RELU), {DECODER: 2})
    yield Case("write/post_relu", "decode", partial(write_program, POST_RELU), {DECODER: 2})
    yield Case("append/llama", "decode", partial(append_program, LLAMA, G), {DECODER: 2})
    yield Case("write/llama", "decode", partial(write_program, LLAMA, G), {DECODER: 2})
    several = "several tokens at once, each seeing those before it"
    yield Case("write/several", "decode", partial(write_program, Parts(), length=3), {DECODER: 2}, note=several)
    for off in (-1, 1, None):
        build = partial(write_program, Parts(), length=3, off=off)
        yield Case(f"write/causal_but_for_{off}", "decode", build, {DECODER: 2}, note="not `is_causal`")
    for start in (0, 1):
        build = partial(prefill_program, start)
        note = "written at 0" if start == 0 else "written at 1, which is not what a prefill of the op does"
        yield Case(f"prefill/at_{start}", "prefill", build, {ENCODER: 2}, note=note)
    yield Case("append/heads_first", "decode", partial(heads_first_cache, True), {DECODER: 2})
    yield Case("write/heads_first", "decode", partial(heads_first_cache, False), {DECODER: 2})


# -- by hand: layers inside other programs ----------------------------------------------------------------------------


def body(p: Params, x: Array) -> Array:
    return parts.encode(Parts(), p, x, parts.causal())


def in_while(p: Params, x: Array, times: Array) -> Array:
    return lax.while_loop(lambda s: s[0] < times, lambda s: (s[0] + 1, body(p, s[1])), (0, x))[1]


def in_cond(first: Params, second: Params, x: Array, which: Array) -> Array:
    return lax.cond(which, lambda x: body(first, x), lambda x: parts.encode(RELU, second, x), x)


def wrapped(name: str) -> Program:
    """`body` wrapped and run as `structured.py` runs its layers."""
    wrap, run, leading, sets = structured.ENCODERS[name]

    def one(seed: int) -> Params:
        if not leading:
            return params(seed)
        return jax.tree.map(lambda *a: jnp.stack(a), *(params(10 * seed + i) for i in range(*leading)))

    return partial(run, wrap(body)), ([one(i) for i in range(sets)] if sets else one(0), parts.inputs())


def in_shard_map() -> Program:
    """Data parallel, over two devices where they are there and one otherwise."""
    devices = jax.devices()[:2]
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=kinds, devices=devices)
    rows, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    fn = jax.shard_map(
        lambda first, second, x: body(second, body(first, x)),
        mesh=mesh,
        in_specs=(whole, whole, rows),
        out_specs=rows,
    )
    return fn, (params(0), params(1), parts.inputs())


def structure_cases() -> Iterator[Case]:
    x, one, two = parts.inputs, partial(params, 0), partial(params, 1)
    loop = lambda: (in_while, (one(), x(), jnp.int32(3)))  # noqa: E731
    cond = lambda: (in_cond, (one(), two(), x(), jnp.bool_(True)))  # noqa: E731
    yield Case("inside/while", "encode", loop, {ENCODER: 1}, None)
    yield Case("inside/cond", "encode", cond, {ENCODER: 2}, 1, "one layer in each branch")
    yield Case("inside/shard_map", "encode", in_shard_map, {ENCODER: 2})
    for name, sites, layers in WRAPPED:
        note = "no batch: a layer of `[S, E]`" if name == "row_by_row" else ""
        yield Case(f"inside/{name}", "encode", partial(wrapped, name), {ENCODER: sites}, layers, note)


# Of `structured.ENCODERS`: how many layers stand in the program, and how many are run.
WRAPPED = (
    *(("nested_jit", 2, 2), ("remat", 2, 2), ("remat_policy", 2, 2), ("jit_of_remat", 2, 2), ("shared", 2, 2)),
    *(("scan", 1, 6), ("scan_remat", 1, 6), ("scan_jit", 1, 6), ("scan_pairs", 2, 12), ("looped", 1, 3)),
    *(("mapped_rows", 2, 2), ("row_by_row", 2, 2)),
)


def cases() -> Iterator[Case]:
    yield from hand_cases()
    yield from decode_cases()
    yield from structure_cases()
