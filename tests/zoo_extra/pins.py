"""The libraries of the extra zoo, each in the one release that the truths were counted from."""

from __future__ import annotations

from functools import cache
from importlib import metadata

PINS = {
    "alphafold-colabfold": "2.3.12",  # AlphaFold's modules; later ones need kernels of their own
    "attnax": "0.2.0",
    "diffusers": "0.35.2",  # the last with Flax models
    "equimo": "1.1.0",
    "esm2quinox": "0.2.0",
    "flaxmodels": "0.1.3",
    "google-tunix": "0.1.7",
    "jax-models": "0.0.5",
    "jaxonmodels": "0.2.3",
    "keras": "3.15.1",
    "nanodl": "0.0.0",
    "penzai": "0.2.5",
    "transformers": "4.57.6",  # the last series with Flax models
}


@cache
def reason(distribution: str) -> str | None:
    """Why the models of a library cannot be built here; None if they can."""
    wanted = f"{distribution} {PINS[distribution]}"
    try:
        there = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return f"{wanted} is not installed (`pip install 'fusionlab[zoo-extra]'`)"
    return None if there == PINS[distribution] else f"{distribution} {there} is installed, and {wanted} was read"
