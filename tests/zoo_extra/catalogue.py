"""The list of the extra zoo's models, and of the programs that they make.

Looked at and left out before the list was made, because JAX 0.10 does not run them or Python 3.11 does not install them:
T5 in transformers (`jnp.clip` by an old name), SegFormer and Swin in jax-models (no jit can trace their `.item()`), Swin in
jaxonmodels (imports PyTorch), colabdesign and flaxmodels' whole GPT-2 (names that JAX dropped), recurrentgemma, haliax, jvt
and jimmy-vision (imports that fail), eqx-zoo and lalamo (Python 3.12). DeepMind's own gemma brings half of Google Cloud.
nanodl's decoders multiply scores by their mask, and are other functions than attention; its image model has none.
"""

from __future__ import annotations

from collections.abc import Iterator

from zoo import catalogue
from zoo.catalogue import DTYPES, VARIANTS, Program
from zoo.model import Model

from . import equinox_models, haiku_models, keras_models, linen_models, nnx_models, penzai_models, transformers_models
from .pins import PINS, reason

__all__ = ["DTYPES", "EVERY", "LEFT_OUT", "MODELS", "PINS", "VARIANTS", "Model", "Program", "programs"]

EVERY: tuple[Model, ...] = (
    *(*keras_models.MODELS, *penzai_models.MODELS, *nnx_models.MODELS, *linen_models.MODELS),
    *(*equinox_models.MODELS, *haiku_models.MODELS, *transformers_models.MODELS),
)
LEFT_OUT: dict[str, str] = {model.id: why for model in EVERY if (why := reason(model.library)) is not None}
MODELS: tuple[Model, ...] = tuple(model for model in EVERY if model.id not in LEFT_OUT)


def programs() -> Iterator[Program]:
    """Every model that can be built here in each dtype, forward and as a train step."""
    return catalogue.programs(MODELS)
