"""The entry of `dot_product_attention` in the lists of all ops."""

from __future__ import annotations

from typing import Any

from ...op.card import CUDA, XLA, Card, Requirement, Variants
from .cudnn.call import why_missing
from .cudnn.probe import PROBE, probe_plan
from .op import DOT_PRODUCT_ATTENTION
from .own import tiles
from .settings import ROUNDED_OFF

_SCORES = ("bool", (0, 0, 1024, 1))
_KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "local": {"window": (255, 0)},
    "mask": {"mask": _SCORES, "mask_value": -1e9},
    "bias": {"bias": ("bfloat16", _SCORES[1])},
    "dropout": {"factors": _SCORES},
    "dropout by key": {"dropout": _SCORES[1], "keep": 0.9},
}


def variants(arch: str) -> Variants:
    """Each kind of operand of the scores, each way of saving, the sizes with most registers."""
    yield "attention probe", probe_plan(64, 1024)
    if arch not in tiles.SOURCE.archs:
        return
    everything = [("bfloat16", f, k) for f in (64, 128) for k in _KINDS]
    everything += [("float32", f, k) for f in (64, 128) for k in ("causal", "mask")] + [("float16", 64, "causal")]
    for case in everything if arch == "sm_90" else (("bfloat16", 128, "mask"), ("float32", 64, "mask")):
        yield from _of(*case)


def _of(dtype: str, features: int, kind: str) -> Variants:
    strides = (1024 * features, features, features)
    sizes = (2, 4, 1024, 1024, features, features)
    call = tiles.TiledAttention(dtype, *sizes, strides, strides, strides, strides, features**-0.5, **_KINDS[kind])
    saves = "logsumexp" if call.plain else "max_and_log_sum"
    saves += ROUNDED_OFF if dtype != "float32" else ""
    name = f"attention {dtype} {features} {kind}"
    yield f"{name}: forward", tiles.forward_plan(call, saves)
    for some in tiles.together(call, ("query", "key", "value")):
        yield f"{name}: {' and '.join(some)}", tiles.backward_plan(call, saves, some)


CARD = Card(
    20,
    DOT_PRODUCT_ATTENTION,
    hue="sky",
    concepts=("attention",),
    kinds=("attention_unmasked", "attention_causal", "attention_masked"),
    requirements=(
        XLA,
        Requirement(20, "xla_blockwise", "attention in blocks of queries, compiled by XLA; runs wherever JAX runs"),
        Requirement(50, "cudnn", "cuDNN's fused attention, as JAX calls it", (why_missing,)),
        CUDA,
    ),
    sources=(tiles.SOURCE, PROBE),
    variant="attention {dtype}",
    variants=variants,
)
