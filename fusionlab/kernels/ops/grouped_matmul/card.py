"""The entry of `grouped_matmul` in the lists of all ops."""

from __future__ import annotations

from ...op.card import XLA, Card, Requirement
from .mosaic import missing
from .op import GROUPED_MATMUL

CARD = Card(
    90,
    GROUPED_MATMUL,
    hue="violet",
    concepts=("grouped_matmul",),
    requirements=(
        XLA,
        Requirement(80, "mosaic", "Mosaic kernels, JAX's own and one of FusionLab's; Hopper GPUs", (missing,)),
    ),
)
