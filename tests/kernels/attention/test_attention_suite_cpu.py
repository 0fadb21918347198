"""The suite that the CUDA implementations inherit, held by those that run on a CPU; and the CUDA kernels, emulated there."""

from __future__ import annotations

import pytest

from tests.kernels.attention.attention_suite import CASES, AttentionSuite
from tests.kernels.emulated import attention_on_the_cpu


class TestXla(AttentionSuite):
    implementation = "xla"
    least = len(CASES) - 12
    slack = 1.5  # it rounds the probabilities it keeps


class TestBlockwise(AttentionSuite):
    implementation = "xla_blockwise"
    skips = True
    least = 20
    slack = 1.5


class TestCudaEmulated(AttentionSuite):
    """attention.cu itself, as C++, launched by XLA's CPU backend."""

    implementation = "cuda"
    skips = True
    least = len(CASES) - 12
    dtypes = ("bfloat16", "float16", "float32")  # float32 takes three products for one

    @pytest.fixture(autouse=True)
    def _on_the_cpu(self, emulator):
        with attention_on_the_cpu(emulator):
            yield
