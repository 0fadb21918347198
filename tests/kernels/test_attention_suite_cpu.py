"""The suite that the CUDA implementations inherit, held by those that run on a CPU; and the CUDA kernels, emulated there."""

from __future__ import annotations

import pytest

from tests.kernels.attention_suite import CASES, AttentionSuite
from tests.kernels.emulated import attention_on_the_cpu, emulator_in

FEW = (
    "nothing",
    "causal, few keys",
    "lowest mask value",
    "dropout and mask",
    "dropout by key",
    "128 features",
    "other values",
    "key heads shared, bias, dropout",
    "local",
    "local, causal, few keys",
)


class TestXla(AttentionSuite):
    implementation = "xla"
    least = len(FEW)
    least_of_all = len(CASES) - 12
    slack = 1.5  # it rounds the probabilities it keeps

    def cases(self, dtype):
        return FEW


class TestBlockwise(AttentionSuite):
    implementation = "xla_blockwise"
    skips = True
    least = len(FEW)
    slack = 1.5

    def cases(self, dtype):
        return FEW


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return emulator_in(tmp_path_factory.mktemp("emulated"))


class TestCudaEmulated(AttentionSuite):
    """attention.cu itself, as C++, launched by XLA's CPU backend."""

    implementation = "cuda"
    skips = True
    least = 5
    least_of_all = len(CASES) - 12
    some = (
        ("nothing", "lowest mask value", "dropout and mask", "other values", "local, wide"),
        ("causal, few keys", "bias", "128 features", "key heads shared", "local, causal, few keys"),
    )

    def cases(self, dtype):
        """Each takes compiling three kernels: all of `some` in one dtype, and each in one of the others."""
        first, second = self.some
        return {"bfloat16": first + second, "float32": first, "float16": second}[dtype]

    @pytest.fixture(autouse=True)
    def _on_the_cpu(self, emulator):
        with attention_on_the_cpu(emulator):
            yield
