"""The entry of `multi_transformer` in the lists of all ops."""

from __future__ import annotations

import jax

from ...op.card import CUDA, XLA, Card, Requirement, Variants
from .attributes import TURNED
from .decode.backend import row_of
from .decode.persistent import plan as persistent
from .decode.phased import plan as decode
from .layer import LayerForm
from .op import MULTI_TRANSFORMER


def decode_rows() -> dict[str, decode.Row]:
    """Layers that decode one token a text: few and many texts, grouped heads, norms before and behind, weights turned and gated."""
    found = {}
    for dtype, e, h, g, d, rows, pre_norm, turned in (
        ("bfloat16", 4096, 32, 32, 128, 1, True, False),
        ("bfloat16", 4096, 32, 32, 128, 16, True, False),
        ("bfloat16", 1024, 16, 16, 64, 1, True, False),
        ("bfloat16", 4096, 32, 8, 128, 4, True, True),
        ("float16", 768, 12, 12, 64, 3, False, False),
    ):
        form = LayerForm(
            heads=h,
            kv_heads=g,
            pre_norm=pre_norm,
            activation="silu" if turned else "gelu_tanh",
            gated=turned,
            scale=d**-0.5,
            is_causal=True,
            rotary=1 if turned else None,
            turned=TURNED if turned else (),
            head_size=d,
        )
        shapes = {"x": (rows, 1, e), "step": (), "cache_k.0": (rows, 1024, g, d)}
        shapes |= {"down.0": (e, 4 * e), "cos": (1, d)} if turned else {"down.0": (4 * e, e)}
        given = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
        found[f"{dtype} E{e} of {rows}"] = row_of(given, form, parameters=True)
    return found


def variants(arch: str) -> Variants:
    """Layers that decode one token a text, by a kernel for each phase and by one kernel for all layers."""
    if arch not in decode.SOURCE.archs:
        return
    nowhere = decode.Places({}, *[decode.NOTHING] * 7)
    for name, row in decode_rows().items():
        yield f"decode {name}", decode.decode_plan(row, [nowhere], arch)
        if arch in persistent.SOURCE.archs and persistent.takes(row):
            yield f"decode {name} by one kernel", persistent.persistent_plan(row, [nowhere] * 8, {})


CARD = Card(
    80,
    MULTI_TRANSFORMER,
    hue="purple",
    requirements=(
        XLA,
        Requirement(30, "composed", "whole transformer layers made of the other fused ops; runs wherever JAX runs"),
        CUDA,
    ),
    sources=(decode.SOURCE, persistent.SOURCE),
    variant="decode {dtype}",
    variants=variants,
)
