"""What each kernel takes: on this machine, and from a made-up trace of a GPU."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.errors import ArgumentError
from fusionlab.evidence import kernel_times as module
from fusionlab.evidence.kernel_times import kernel_times


def looped(x, w):
    y, _ = jax.lax.scan(lambda c, _: (jnp.sin(c @ w), None), x, None, length=5)
    return jax.nn.softmax(y @ w).sum(0)


def test_the_kernels_of_a_program_on_this_machine():
    x = jnp.ones((256, 256))
    found = kernel_times(looped, x, x, runs=4)
    by_name = {k.name: k for k in found.kernels}
    (sine,) = [k for name, k in by_name.items() if "sin" in name]
    assert sine.launches == 5
    assert len(sine.samples_s) == 4
    assert found.kernels[0].median_s == max(k.median_s for k in found.kernels)
    assert found.sum_s == pytest.approx(sum(k.median_s for k in found.kernels))
    assert found.source == "XLA's marks on the host"
    assert "median of 4 runs" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["runs"] == 4


def test_a_fused_function_is_as_good():
    x = jnp.ones((64, 64))
    assert kernel_times(fl.fuse(looped), x, x, runs=1).kernels


def test_bad_arguments_are_named():
    with pytest.raises(ArgumentError, match="runs: got 0"):
        kernel_times(looped, jnp.ones((4, 4)), jnp.ones((4, 4)), runs=0)
    with pytest.raises(ArgumentError, match="needed arrays"):
        kernel_times(looped, jax.ShapeDtypeStruct((4, 4), "float32"), jnp.ones((4, 4)))


# A trace made up: planes of lines of events, as the profiler gives them.


def event(name, start_us, duration_us, **stats):
    return SimpleNamespace(name=name, start_ns=start_us * 1e3, duration_ns=duration_us * 1e3, stats=stats.items())


def trace(**planes):
    lines = {plane: [SimpleNamespace(name=n, events=e) for n, e in of.items()] for plane, of in planes.items()}
    return SimpleNamespace(planes=[SimpleNamespace(name=n, lines=of) for n, of in lines.items()])


def test_kernels_of_a_gpu_are_those_of_its_streams():
    stream = [event("gemm", t, 10, hlo_op="custom-call") for t in (0, 20)] + [
        event("loop", t, d, hlo_op="fusion.1")
        for t, d in ((9, 1), (12, 2), (28, 1.5), (34, 4.5))  # two start before the kernel ahead has ended
    ]
    on_device = {"Stream #1(Compute)": stream, "XLA Ops": [event("custom-call", 0, 10, hlo_op="custom-call")]}
    host = {"python": [event("gemm", 0, 100, hlo_op="custom-call")]}
    found = module._kernels(trace(**{"/device:GPU:0": on_device, "/host:CPU": host}), 2, on_gpu=True)
    assert [(k.name, k.hlo, k.launches) for k in found] == [("gemm", "custom-call", 1), ("loop", "fusion.1", 2)]
    assert found[0].samples_s == pytest.approx((10e-6, 10e-6))
    assert found[1].samples_s == pytest.approx((3e-6, 6e-6))
    assert (found[0].label, found[1].label) == ("gemm (custom-call)", "loop (fusion.1)")


def test_a_loop_takes_what_its_body_does_not():
    line = [
        event("while", 0, 100, hlo_op="while", run_id=7),
        event("dot", 10, 30, hlo_op="dot", run_id=7),
        event("fusion", 15, 5, hlo_op="fusion", run_id=7),
        event("dot", 50, 40, hlo_op="dot", run_id=7),
        event("add", 100, 1, hlo_op="add", run_id=7),
        event("python", 0, 500),
    ]
    found = module._kernels(trace(**{"/host:CPU": {"thread": line}}), 1, on_gpu=False)
    times = {k.name: k.samples_s[0] for k in found}
    assert times == pytest.approx({"dot": 65e-6, "while": 30e-6, "fusion": 5e-6, "add": 1e-6})
