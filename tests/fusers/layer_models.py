"""Models made of transformer layers, for the passes that find whole ones. Not a test module.

Each case is a small program and how many layers of which pass stand in it. Nothing is built before `build`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fusionlab.models import gpt, transformer
from tests.zoo import equinox_models, hf, nnx, structured
from tests.zoo.config import Transformer
from tests.zoo.model import concrete

from . import layer_parts as parts
from .layer_parts import PROJECTIONS, SMAX, STEP, B, D, E, G, H, Params, Parts, Program, S, T, params

Array = jax.Array
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


def suffix(projections: str) -> str:
    return "" if projections == "separate" else FUSED


# -- models/gpt.py and models/transformer.py --------------------------------------------------------------------------


def gpt_program(phase: str, config: gpt.Config, dtype: Any = jnp.float32, steps: int = 6) -> Program:
    weights = gpt.init(jax.random.key(1), config, dtype)
    tokens = jax.random.randint(jax.random.key(2), (B, S), 0, config.vocab)
    if phase == "generate":
        return (lambda weights, prompt: gpt.generate(weights, prompt, steps, config=config)), (weights, tokens)
    cache = gpt.init_cache(B, config, dtype=dtype)
    if phase == "prefill":
        return partial(gpt.prefill, config=config), (weights, tokens, cache)
    _, cache = jax.jit(partial(gpt.prefill, config=config))(weights, tokens, cache)
    return partial(gpt.decode, config=config), (weights, tokens[:, 0], cache, jnp.int32(S))


def gpt_cases() -> Iterator[Case]:
    for projections in PROJECTIONS:
        for scanned in (False, True):
            config = gpt.Config(
                layers=3, embed=E, heads=H, ffn=48, vocab=37, longest=SMAX, projections=projections, scanned=scanned
            )
            places, end = 1 if scanned else 3, suffix(projections)
            for phase in ("prefill", "decode", "generate"):
                passes = {"prefill": [ENCODER], "decode": [DECODER], "generate": [ENCODER, DECODER]}[phase]
                name = f"gpt/{phase}/{'scanned' if scanned else 'unrolled'}/{projections}"
                build = partial(gpt_program, phase, config)
                yield Case(name, phase, build, {p + end: places for p in passes}, None if phase == "generate" else 3)


def transformer_program(spelling: transformer.Spelling, causal: bool) -> Program:
    weights = transformer.init(jax.random.key(0), 2, E, 48)
    fn = partial(transformer.encoder, heads=H, causal=causal, spelling=spelling)
    return fn, (weights, transformer.inputs(jax.random.key(1), B, S, E))


# -- libraries --------------------------------------------------------------------------------------------------------


def zoo_program(model: Any) -> Program:
    """A model of the zoo with random parameters."""
    built = model.build(jnp.float32)
    return built.forward, concrete(built.args)


def zoo_model(module: Any, name: str) -> Any:
    return next(m for m in module.MODELS if m.name == name)


GPT2 = Transformer(**hf.GPT2, mask="masked", spelling="sqrt_in_program")


def hf_cached(length: int, filled: int) -> Program:
    """FlaxGPT2 on `length` tokens, `filled` of which came before them, with its `past_key_values`."""
    net, shapes = hf.network("gpt2", GPT2, jnp.float32)
    batch, weights = GPT2.sizes.batch, concrete(shapes)
    past = jax.tree.map(lambda a: a, net.init_cache(batch, hf.LONGEST))
    mask = jnp.ones((batch, hf.LONGEST), jnp.int32).at[0, 0].set(0)  # the first row is padded on the left

    def fn(weights: Any, tokens: Array, past: Any, mask: Array, positions: Array) -> tuple[Array, Any]:
        result = net(tokens, params=weights, past_key_values=past, attention_mask=mask, position_ids=positions)
        return result.logits, result.past_key_values

    def args(tokens: Array, past: Any, first: int) -> tuple[Any, ...]:
        positions = jnp.broadcast_to(first + jnp.arange(tokens.shape[1]), tokens.shape)
        return weights, tokens, past, mask, positions

    tokens = jax.random.randint(jax.random.key(0), (batch, filled + length), 0, GPT2.sizes.vocab)
    if filled:
        _, past = jax.jit(fn)(*args(tokens[:, :filled], past, 0))
    return fn, args(tokens[:, filled:], past, filled)


def library_cases() -> Iterator[Case]:
    for name in ("gpt2", "gpt2_unmasked"):
        build = partial(zoo_program, zoo_model(hf, name))
        yield Case(f"hf/{name}", "encode", build, {ENCODER + FUSED: 2}, missing=hf.reason)
    bert = partial(zoo_program, zoo_model(hf, "bert"))
    yield Case("hf/bert", "encode", bert, {ENCODER: 2}, note="post-LN, gelu of erf, a mask", missing=hf.reason)
    llama = partial(zoo_program, zoo_model(hf, "llama"))
    yield Case("hf/llama", "encode", llama, {ENCODER: 2}, note="RMS, SwiGLU, rotary, grouped", missing=hf.reason)
    note = "written into a cache at an index of its own, then attends to all of it"
    for name, length, filled in (("prefill", 10, 0), ("decode", 1, 10), ("decode_several", 3, 10)):
        build = partial(hf_cached, length, filled)
        phase = name.split("_")[0]
        yield Case(f"hf/gpt2/{name}", phase, build, {DECODER + FUSED: 2}, note=note, missing=hf.reason)
    for library, module in (("nnx", nnx), ("equinox", equinox_models)):
        for name in ("gpt", "encoder"):
            yield Case(f"{library}/{name}", "encode", partial(zoo_program, zoo_model(module, name)), {ENCODER: 2})
    rms = zoo_model(nnx, "encoder_rms")
    yield Case("nnx/encoder_rms", "encode", partial(zoo_program, rms), {ENCODER: 2}, note="RMS norm, silu")


# -- by hand: what the passes take ------------------------------------------------------------------------------------

LLAMA = Parts(norm=parts.rms_norm, attend=parts.attend_grouped, mlp=parts.swiglu)
POST = Parts(pre=False)
RELU = Parts(mlp=parts.mlp_relu)
POST_RELU = Parts(mlp=parts.mlp_relu, pre=False)


def no_biases(p: Params, name: str, x: Array) -> Array:
    return x @ p[name]


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


def integer_mask(how: Parts) -> Program:
    fn, args = encode_program(how)
    mask = jnp.ones((B, S), jnp.int32).at[0, 5:].set(0)
    return (lambda weights, x, m: encode_all(how, weights, x, m[:, None, None, :] != 0)), (*args, mask)


def encode_all(how: Parts, weights: list[Params], x: Array, mask: Array) -> Array:
    for p in weights:
        x = parts.encode(how, p, x, mask)
    return x


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
    yield encode("mask_of_heads", Parts(), heads, note="float, added to the scores")
    yield Case("hand/mask_of_integers", "encode", partial(integer_mask, Parts()), {ENCODER: 2})
    yield Case("hand/lengths", "encode", lengths_program, {ENCODER: 2})
    yield Case("hand/gives_keys", "encode", first_keys, {ENCODER: 2}, note="keys and values are results too")
    yield Case("hand/renamed", "encode", renamed, {ENCODER: 2})
    yield Case(
        "hand/three", "encode", partial(encode_program, Parts(), layers=3), {ENCODER: 3}, 3, "a row to be stacked"
    )
    spellings: tuple[transformer.Spelling, ...] = transformer.SPELLINGS  # type: ignore[assignment]
    for spelling in spellings:
        for causal in (False, True):
            name = f"transformer/{spelling}{'_causal' if causal else ''}"
            yield Case(name, "encode", partial(transformer_program, spelling, causal), {ENCODER: 2})


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


def write_program(how: Parts, kv_heads: int = H, length: int = 1) -> Program:
    def fn(weights: list[Params], x: Array, cache: list[parts.Pair], step: Array) -> tuple[Array, list[parts.Pair]]:
        pairs = []
        for p, pair in zip(weights, cache, strict=True):
            x, pair = parts.write(how, p, x, pair, step)
            pairs.append(pair)
        return x, pairs

    weights = [params(i, kv_heads=kv_heads) for i in range(2)]
    return fn, (weights, parts.inputs(B, length, E), parts.caches(SMAX, heads=kv_heads), jnp.int32(STEP))


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
    yield Case("append/post_relu", "decode", partial(append_program, POST_RELU), {DECODER: 2})
    yield Case("write/post_relu", "decode", partial(write_program, POST_RELU), {DECODER: 2})
    yield Case("append/llama", "decode", partial(append_program, LLAMA, G), {DECODER: 2})
    yield Case("write/llama", "decode", partial(write_program, LLAMA, G), {DECODER: 2})
    several = "several tokens at once, each seeing those before it"
    yield Case("write/several", "decode", partial(write_program, Parts(), length=3), {DECODER: 2}, note=several)
    yield Case("append/heads_first", "decode", partial(heads_first_cache, True), {DECODER: 2})
    yield Case("write/heads_first", "decode", partial(heads_first_cache, False), {DECODER: 2})


# -- by hand: layers inside other programs ----------------------------------------------------------------------------


def body(p: Params, x: Array) -> Array:
    return parts.encode(Parts(), p, x, parts.causal())


def in_while(p: Params, x: Array, times: Array) -> Array:
    return lax.while_loop(lambda s: s[0] < times, lambda s: (s[0] + 1, body(p, s[1])), (0, x))[1]


def in_cond(first: Params, second: Params, x: Array, which: Array) -> Array:
    return lax.cond(which, lambda x: body(first, x), lambda x: parts.encode(RELU, second, x), x)


def in_remat(first: Params, second: Params, x: Array) -> Array:
    layer = jax.checkpoint(body)
    return layer(second, layer(first, x))


def in_scan(stacked: Params, x: Array) -> Array:
    return lax.scan(lambda x, p: (body(p, x), None), x, stacked)[0]


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
    remat = lambda: (in_remat, (one(), two(), x()))  # noqa: E731
    scan = lambda: (in_scan, (jax.tree.map(lambda *a: jnp.stack(a), one(), two(), params(2)), x()))  # noqa: E731
    yield Case("inside/while", "encode", loop, {ENCODER: 1}, None)
    yield Case("inside/cond", "encode", cond, {ENCODER: 2}, 1, "one layer in each branch")
    yield Case("inside/remat", "encode", remat, {ENCODER: 2})
    yield Case("inside/scan", "encode", scan, {ENCODER: 1}, 3)
    yield Case("inside/shard_map", "encode", in_shard_map, {ENCODER: 2})
    for name, sites, layers in ZOO:
        model = zoo_model(structured, f"encoder_{name}")
        yield Case(f"structured/{name}", "encode", partial(zoo_program, model), {ENCODER: sites}, layers)


# Models of `structured.py` (norms in float32, a causal mask, products that are named for remat): places, layers.
ZOO = (
    *(("unrolled", 2, 2), ("nested_jit", 2, 2), ("remat", 2, 2), ("jit_of_remat", 2, 2), ("scan", 1, 6)),
    *(("scan_remat", 1, 6), ("scan_jit", 1, 6), ("scan_pairs", 2, 12), ("looped", 1, 3), ("shared", 2, 2)),
    *(("mapped_rows", 2, 2), ("row_by_row", 2, 2)),
)
CASES: Mapping[str, Case] = {
    case.name: case for case in (*gpt_cases(), *library_cases(), *hand_cases(), *decode_cases(), *structure_cases())
}
