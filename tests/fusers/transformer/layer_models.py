"""Models made of transformer layers, for the passes that find whole ones. Not a test module.

`CASES`: small programs, each with how many layers of which pass stand in it. Here are the models of libraries and of
`fusionlab.models`; `layer_variants.py` has those by hand. Nothing is built before `build`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fusionlab.models import gpt, transformer
from tests.zoo.config import Transformer
from tests.zoo.libraries import equinox_models, hf, nnx
from tests.zoo.model import concrete

from . import layer_rotary, layer_variants
from .layer_parts import DECODER, ENCODER, FUSED, PROJECTIONS, SMAX, B, Case, E, H, Program, S, suffix

Array = jax.Array

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


def transformer_cases() -> Iterator[Case]:
    spellings: tuple[transformer.Spelling, ...] = transformer.SPELLINGS  # type: ignore[assignment]
    for spelling in spellings:
        for causal in (False, True):
            name = f"transformer/{spelling}{'_causal' if causal else ''}"
            yield Case(name, "encode", partial(transformer_program, spelling, causal), {ENCODER: 2})


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


CASES: Mapping[str, Case] = {
    case.name: case
    for case in (*gpt_cases(), *transformer_cases(), *library_cases(), *layer_variants.cases(), *layer_rotary.cases())
}
