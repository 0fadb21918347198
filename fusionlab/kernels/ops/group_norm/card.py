"""The entry of `group_norm` in the lists of all ops."""

from __future__ import annotations

from ...op.card import Card, Variants
from .op import GROUP_NORM
from .plan import SOURCE, Images, backward_pass, forward_pass


def variants(arch: str) -> Variants:
    """Channels of diffusion models, narrow and odd ones, and as many as there can be, with SiLU and without."""
    every = ((320, 32), (512, 32), (1280, 32), (2560, 32), (3000, 24), (4096, 32), (8, 8), (1023, 11))
    some = ((320, 32), (1023, 11))
    sizes = (
        {"float32": every, "bfloat16": every, "float16": some}
        if arch == "sm_90"
        else {"float32": some, "bfloat16": some}
    )
    for dtype, groupings in sizes.items():
        vectors = tuple((s, dtype) for s in ("bias", "scale"))
        for channels, groups in groupings:
            for activation in ("silu", "none") if channels == 320 else ("silu",):
                given = Images(4, 4096, channels, groups, dtype, activation, vectors)
                name = f"group norm {dtype} {activation} {channels}"
                yield f"{name}: forward, saves", forward_pass(given, 1e-5, saves=True).plan
                yield f"{name}: backward", backward_pass(given, ("x", "scale", "bias")).plan


CARD = Card(
    40, GROUP_NORM, hue="vermilion", sources=(SOURCE,), variant="group norm {dtype} {activation}", variants=variants
)
