"""What describes `multi_transformer` in the lists of all ops."""

from __future__ import annotations

from ...op.card import CUDA, XLA, Card, Requirement, Variants
from .decode.persistent import plan as persistent
from .decode.phased import plan as decode
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
        norm = "layer" if pre_norm and decode.fuses_norm(rows, e) else None
        own = pre_norm and norm is None
        attention = decode.AttentionPhase(
            rows,
            h,
            g,
            d,
            1024,
            "BSHD",
            False,
            True,
            d**-0.5,
            False,
            False,
            False,
            False,
            1 if turned else None,
            d if turned else 0,
        )
        found[f"{dtype} E{e} of {rows}"] = decode.Row(
            dtype,
            True,
            pre_norm,
            ("layer", "layer"),
            (1e-5, 1e-5),
            "silu" if turned else "gelu_tanh",
            decode.ProductPhase(rows, e, (h * d, g * d, g * d), turned, norm=norm, strips=own),
            attention,
            decode.ProductPhase(rows, h * d, (e,), turned, strips=True),
            decode.ProductPhase(rows, e, (4 * e,), turned, turned, norm, own),
            decode.ProductPhase(rows, 4 * e, (e,), turned, strips=True),
        )
    return found


def variants(arch: str) -> Variants:
    """Layers that decode one token a text, by a kernel for each phase and by one kernel for all layers."""
    if arch not in decode.SOURCE.archs:
        return
    nowhere = decode.Places({}, *[decode.NOTHING] * 7)
    for name, row in decode_rows().items():
        yield f"decode {name}", decode.decode_plan(row, [nowhere])
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
    source=decode.SOURCE,
    variant="decode {dtype}",
    variants=variants,
)
