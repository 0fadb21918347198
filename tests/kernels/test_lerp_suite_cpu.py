"""The suite that the implementations of lerp are held to on a GPU, held by XLA's and by the CUDA kernels emulated on a CPU."""

from __future__ import annotations

import pytest

from fusionlab.kernels.lerp import cuda
from tests.kernels.emulated import emulator_in, kernels_on_the_cpu
from tests.kernels.lerp_suite import LerpSuite, turns


class TestXla(LerpSuite):
    implementation = "xla"


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return emulator_in(tmp_path_factory.mktemp("emulated"))


class TestCudaEmulated(LerpSuite):
    """lerp.cu itself, as C++, launched by XLA's CPU backend; test_lerp_cuda.py holds it to every kind of broadcast."""

    implementation = "cuda"
    turns = turns(
        (
            "alike",
            "w [1]",
            "w wider than x and y",
            "ranks that differ, leading",
            "sum over both ends",
            "two sums",
            "rank 0",
            "rank 8",
            "empty",
            "sums of nothing",
            "7 x 33 x 1001",
        )
    )

    @pytest.fixture(autouse=True)
    def _on_the_cpu(self, emulator):
        with kernels_on_the_cpu(emulator, cuda):
            yield
