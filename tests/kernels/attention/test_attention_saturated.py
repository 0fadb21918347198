"""Gradients of a softmax near one key, by the implementations that run on a CPU and by the CUDA kernels, emulated there."""

from __future__ import annotations

import pytest

from tests.kernels.emulated import attention_on_the_cpu
from tests.kernels.saturated import SaturatedSuite


class TestXla(SaturatedSuite):
    implementation = "xla"
    tf32 = False


class TestBlockwise(SaturatedSuite):
    implementation = "xla_blockwise"
    tf32 = False


class TestCudaEmulated(SaturatedSuite):
    """attention.cu itself, as C++, launched by XLA's CPU backend."""

    implementation = "cuda"

    @pytest.fixture(autouse=True)
    def _on_the_cpu(self, emulator):
        with attention_on_the_cpu(emulator):
            yield
