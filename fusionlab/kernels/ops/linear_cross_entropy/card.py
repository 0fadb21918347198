"""The entry of `linear_cross_entropy` in the lists of all ops."""

from __future__ import annotations

from ...op.card import XLA, Card, Requirement
from .op import LINEAR_CROSS_ENTROPY

CARD = Card(
    100,
    LINEAR_CROSS_ENTROPY,
    concepts=("linear_cross_entropy",),
    requirements=(
        XLA,
        Requirement(90, "xla_chunked", "plain jax.numpy in a loop over chunks of rows; runs wherever JAX runs"),
    ),
    measured=(),
)
