"""The suite that the implementations of lerp are held to on a GPU, held by XLA's and by the CUDA kernels emulated on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
from jax.profiler import ProfileData

from fusionlab.kernels.ops.lerp import cuda
from fusionlab.kernels.ops.lerp.axes import SLOTS
from fusionlab.kernels.ops.lerp.plan import backward_passes, forward_plan
from tests.gpu.activity import read
from tests.kernels.emulated import kernels_on_the_cpu
from tests.kernels.lerp.lerp_suite import LARGE, LerpSuite, beyond_32_bits, turns


class TestXla(LerpSuite):
    implementation = "xla"


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


@pytest.mark.parametrize("what", ["forward", "sums", "no sums"])
def test_what_is_asked_of_large_arrays_holds_for_small_ones(emulator, what):
    beyond_32_bits("xla", what, 65, 96)
    with kernels_on_the_cpu(emulator, cuda):
        beyond_32_bits("cuda", what, 65, 96)


def passes_of(case):
    shapes = dict(zip(SLOTS, (with_shape(s, case) for s in case), strict=True))
    return forward_plan(shapes, "float32"), backward_passes(shapes, SLOTS, "float32")


def with_shape(shape, case):
    rank = len(np.broadcast_shapes(*case))
    return (1,) * (rank - len(shape)) + shape


def test_the_large_cases_have_what_the_small_ones_lack():
    """Many blocks of every kernel, several stages between two tiles, partial sums, vectors of one element and of 16 bytes."""
    entries, seen = set(), set()
    for case in LARGE.values():
        forward, passes = passes_of(case)
        for launch in (*forward.launches, *(launch for one in passes for launch in one.plan.launches)):
            assert launch.grid[0] > 1 or launch.entry == "lerp_sum"
            entries.add(launch.entry)
        seen |= {o for plan in (forward, *(one.plan for one in passes)) for o in plan.options}
    assert entries == {"lerp_forward", "lerp_backward_flat", "lerp_backward", "lerp_sum"}
    assert {"-DFL_VEC=1", "-DFL_VEC=4", "-DFL_SPLITS_P=0", "-DFL_SPLITS_P=1", "-DFL_W_ONE=1", "-DFL_W_STAYS=1"} <= seen
    assert any(o.startswith("-DFL_STAGE=") and int(o.partition("=")[2]) > 1 for o in seen)


def test_a_trace_is_read_by_streams_and_by_the_driver_s_calls():
    """As JAX's profiler writes it on a machine with a GPU."""
    text = """
      planes { name: "/device:GPU:0"
        lines { name: "Stream #20(Compute)" events { metadata_id: 1 } events { metadata_id: 1 } events { metadata_id: 2 } }
        lines { name: "XLA Ops" events { metadata_id: 3 } }
        event_metadata { key: 1 value { id: 1 name: "lerp_forward" } }
        event_metadata { key: 2 value { id: 2 name: "MemcpyD2D" } }
        event_metadata { key: 3 value { id: 3 name: "custom-call.1" } } }
      planes { name: "/host:CPU"
        lines { name: "python" events { metadata_id: 1 } events { metadata_id: 2 } }
        event_metadata { key: 1 value { id: 1 name: "cuStreamSynchronize" } }
        event_metadata { key: 2 value { id: 2 name: "cuLaunchKernelEx" } } }
    """
    found = read(ProfileData.from_text_proto(text))
    assert found.kernels == {"lerp_forward": 2}
    assert found.copies == {"MemcpyD2D": 1}
    assert found.waits == {"cuStreamSynchronize": 1}
