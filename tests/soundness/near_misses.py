"""The corpus of near-misses, the forms in which each is tried, and the rejection codes that none of them can get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from fusionlab.graph.dtypes import is_float

from .near import near_attention, near_gemm, near_lerp, near_loss, near_norm
from .near.near_miss import FORMS as FORMS
from .near.near_miss import NearMiss

CORPUS: tuple[NearMiss, ...] = (
    *near_gemm.CORPUS,
    *near_attention.CORPUS,
    *near_norm.CORPUS,
    *near_lerp.CORPUS,
    *near_loss.CORPUS,
)

# Lookalikes that a matcher modulo scalars and layouts is known to take for the real thing.
NOTORIOUS = (
    "softmax over the queries",
    "softmax over the heads",
    "weights contracted over the queries",
    "relu before the bias",
    "full-tensor bias",
    "bias along the rows",
    "mean over another axis",
    "variance over another axis",
    "gelu with 0.8 for 0.7979",
    "maximum with 0.1",
    "masked with 0.5",
    "exp(s - 2 max)",
    "the sample variance, ddof=1",
    "two masks of different fills",
)

# Code -> why no small program gets it.
UNREACHED: dict[str, str] = {
    "region": "needs a mesh: a site in a shard_map that checks which mesh axes values vary along",
    "sharding": "needs a mesh: a layout that is said, or explicit axes (tests/fusers/devices/test_explicit_axes.py)",
    "uncertified": "a net under the matcher: whatever an example holds can be evaluated",
    "implementation": "given where an option names one that cannot run the call (tests/fusers/devices/test_devices_asked.py)",
    "slower": "given on a GPU, real or simulated (tests/kernels/attention/test_attention_cuda.py)",
    "unmeasured": "given on a GPU, real or simulated (tests/kernels/attention/test_attention_cuda.py)",
    "device": "given on a GPU, real or simulated (tests/kernels/attention/test_attention_cuda.py)",
    "symbolic": "given to programs of symbolic sizes (tests/calls/test_jits.py)",
    "order": "given to sites of several results (tests/fusers/test_several_results.py)",
    "rotary": "given to whole layers, whose passes are asked by name (tests/fusers/transformer/layer_rotary.py)",
}


def in_form(entry: NearMiss, form: str) -> tuple[Callable[..., Any], tuple[np.ndarray, ...]]:
    """The entry's program, as it is or under a transformation, and its arguments; scan and vmap go over two of each."""
    if form == "plain":
        return entry.fn, entry.args
    if form == "remat":
        return jax.checkpoint(entry.fn), entry.args
    args = tuple(_two(a) if i in entry.mapped else a for i, a in enumerate(entry.args))
    if form == "vmap":
        return jax.vmap(entry.fn, tuple(0 if i in entry.mapped else None for i in range(len(args)))), args
    return _scanned(entry), args


def _scanned(entry: NearMiss) -> Callable[..., Any]:
    def over_steps(*args: Any) -> Any:
        def step(count: Any, xs: Any) -> tuple[Any, Any]:
            full = list(args)
            for i, x in zip(entry.mapped, xs, strict=True):
                full[i] = x
            return count + 1, entry.fn(*full)

        return lax.scan(step, 0, tuple(args[i] for i in entry.mapped))

    return over_steps


def _two(a: np.ndarray) -> np.ndarray:
    """Two different arrays, stacked."""
    return np.stack([a, (a * 0.5).astype(a.dtype) if is_float(a.dtype) else a])
