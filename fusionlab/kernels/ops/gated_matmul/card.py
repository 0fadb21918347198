"""The entry of `gated_matmul` in the lists of all ops."""

from __future__ import annotations

from ...op.card import CUDA, XLA, Card, Requirement, Variants
from .op import GATED_MATMUL
from .plan import SOURCE, forward_plan

_EVERYTHING = (
    *(("bfloat16", a, t) for a in ("silu", "gelu_tanh", "gelu_erf", "relu") for t in (False, True)),
    ("float16", "silu", False),
)


def variants(arch: str) -> Variants:
    """Each way the weights lie, each activation of feed-forwards, many rows and few, and sizes that fit no vector."""
    if arch not in SOURCE.archs:
        return
    for dtype, activation, transposed in _EVERYTHING if arch == "sm_90" else _EVERYTHING[:2]:
        sizes = ((4096, 4096, 1024), (64, 4096, 1024), (4096, 4095, 1023))
        for rows, columns, inner in sizes if activation == "silu" else sizes[:1]:
            for saves in (False, True):
                plan = forward_plan(rows, columns, inner, dtype, activation, transposed=transposed, saves=saves)
                kind = f"{'N x K' if transposed else 'K x N'}{', saves' if saves else ''}"
                yield f"gated {dtype} {activation} {rows}x{inner}x{columns} {kind}", plan


CARD = Card(
    70,
    GATED_MATMUL,
    hue="lime",
    requirements=(
        XLA,
        Requirement(
            10, "concatenated", "both products of a gated pair as one, compiled by XLA; runs wherever JAX runs"
        ),
        CUDA,
    ),
    sources=(SOURCE,),
    variant="gated {dtype} {activation}",
    variants=variants,
)
