"""Tokens a second of a GPT's greedy `generate`, batch 1: jax.jit of the model as it is written, and the same with its layers fused.

    python -m benchmarks multi_transformer --only generate

The loop is the program's own `lax.while_loop` inside one jit, and its time is in the figure: by the host's clock, from the call until the
tokens are there. Programs take turns, and every sample is kept. The two are of one dtype, and may choose different tokens where two are
almost alike; the record holds how many are the same.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..measuring import compared, compiled_at_once

PASSES = tuple(f"multi_transformer_{kind}{fused}" for kind in ("encoder", "decoder") for fused in ("", "_fuse_qkv"))


@dataclass(frozen=True)
class Size:
    """GPT-2 medium's sizes (Radford et al., 2019), and how much is generated."""

    layers: int = 24
    embed: int = 1024
    heads: int = 16
    vocab: int = 50257
    longest: int = 512
    prompt: int = 16
    steps: int = 256


TINY = Size(2, 32, 4, 64, 24, 4, 8)


def strategy(stacked: bool) -> Any:
    """The passes of whole layers; `stacked`: identical layers in a row are one call."""
    import fusionlab as fl

    return fl.Strategy(**{name: {"stacked": stacked} for name in PASSES})


def generate(size: Size, samples: int, dtype: str = "bfloat16") -> dict[str, Any]:
    """Seconds for all steps, tokens a second and the same tokens, of each program."""
    import jax
    import numpy as np

    import fusionlab as fl
    from fusionlab.models import gpt

    config = gpt.Config(size.layers, size.embed, size.heads, None, size.vocab, size.longest)
    params = gpt.init(jax.random.key(0), config, dtype)
    prompt = jax.random.randint(jax.random.key(1), (1, size.prompt), 0, size.vocab)
    run = functools.partial(gpt.generate, steps=size.steps, config=config)
    rivals: dict[str, Callable] = {
        "jax.jit": run,
        "fusionlab": fl.fuse(run, passes=strategy(stacked=True)),
        "a call for each layer": fl.fuse(run, passes=strategy(stacked=False)),
    }
    programs = compiled_at_once({name: (f, (params, prompt)) for name, f in rivals.items()})
    tokens = {name: np.asarray(program()) for name, program in programs.items()}
    found: dict[str, Any] = compared(in_turns(programs, samples), "jax.jit", 1)
    for name, one in found.items():
        one["tokens_per_s"] = size.steps / one["median_s"]
        one["same_tokens"] = int(np.sum(tokens[name] == tokens["jax.jit"]))
    return {**found, "size": asdict(size) | {"dtype": dtype}}


def in_turns(programs: Mapping[str, Callable[[], Any]], samples: int) -> dict[str, list[float]]:
    """Seconds of each call, by the host's clock."""
    import jax

    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(samples):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            times[name].append(time.perf_counter() - start)
    return times
