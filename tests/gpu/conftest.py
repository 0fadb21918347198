"""Tests that need a CUDA device. On a machine with one: `FUSIONLAB_TEST_PLATFORMS=cuda,cpu pytest tests/gpu`."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

HERE = Path(__file__).parent


def has_cuda() -> bool:
    return any(d.platform == "gpu" for d in jax.devices())


def pytest_collection_modifyitems(items):
    mine = [item for item in items if HERE in item.path.parents]
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        if not has_cuda():
            item.add_marker(
                pytest.mark.skip(reason="needs a CUDA device; with one, set FUSIONLAB_TEST_PLATFORMS=cuda,cpu")
            )
