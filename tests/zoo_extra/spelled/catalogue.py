"""The layers, and the programs that they make."""

from __future__ import annotations

from collections.abc import Iterator

from zoo import catalogue
from zoo.catalogue import Program
from zoo.model import Model

from . import of_alphafold, of_equinox, of_keras, of_linen, of_nnx, of_penzai, of_transformers

MODELS: tuple[Model, ...] = (
    *(*of_keras.MODELS, *of_penzai.MODELS, *of_nnx.MODELS, *of_linen.MODELS),
    *(*of_equinox.MODELS, *of_alphafold.MODELS, *of_transformers.MODELS),
)


def programs() -> Iterator[Program]:
    """Every layer in each dtype, forward and as a train step."""
    return catalogue.programs(MODELS)
