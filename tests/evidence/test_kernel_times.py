"""What each kernel takes: on this machine, and from a made-up trace of a GPU."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.errors import ArgumentError
from fusionlab.evidence.instruments.timeline import RUN, middle, timelines_of
from fusionlab.evidence.kernel_times import kernel_times, kernels_in


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
    host = {"python": [event("gemm", 0, 100, hlo_op="custom-call"), event(RUN, -2, 20), event(RUN, 19, 21)]}
    runs = timelines_of(trace(**{"/device:GPU:0": on_device, "/host:CPU": host}), on_gpu=True)
    found = kernels_in(runs)
    assert [(k.name, k.hlo, k.launches) for k in found] == [("gemm", "custom-call", 1), ("loop", "fusion.1", 2)]
    assert found[0].samples_s == pytest.approx((10e-6, 10e-6))
    assert found[1].samples_s == pytest.approx((3e-6, 6e-6))
    assert (found[0].label, found[1].label) == ("gemm (custom-call)", "loop (fusion.1)")
    first = runs[0]  # for a microsecond both ran, and each has half of it
    assert {x.name: pytest.approx(x.share_s) for x in first.launches[:2]} == {"gemm": 9.5e-6, "loop": 0.5e-6}
    assert (first.whole_s, first.busy_s) == pytest.approx((20e-6, 12e-6))
    assert (first.between_s, first.around_s) == pytest.approx((2e-6, 6e-6))


def test_a_loop_takes_what_its_body_does_not():
    line = [
        event("while", 0, 100, hlo_op="while", run_id=7),
        event("dot", 10, 30, hlo_op="dot", run_id=7),
        event("fusion", 15, 5, hlo_op="fusion", run_id=7),
        event("dot", 50, 40, hlo_op="dot", run_id=7),
        event("add", 100, 1, hlo_op="add", run_id=7),
        event("python", 0, 500),
    ]
    (run,) = timelines_of(trace(**{"/host:CPU": {"thread": line, "main": [event(RUN, 0, 101)]}}), on_gpu=False)
    times = {k.name: k.samples_s[0] for k in kernels_in([run])}
    assert times == pytest.approx({"dot": 65e-6, "while": 30e-6, "fusion": 5e-6, "add": 1e-6})
    assert run.busy_s == pytest.approx(101e-6)


def test_two_threads_at_once_share_the_time_and_all_adds_up_to_the_run():
    one = [event("a", 10, 40, hlo_op="a"), event("c", 60, 20, hlo_op="c")]
    other = [event("b", 30, 40, hlo_op="b")]
    lines = {"one": one, "other": other, "main": [event(RUN, 0, 100)]}
    (run,) = timelines_of(trace(**{"/host:CPU": lines}), on_gpu=False)
    assert {x.name: pytest.approx(x.share_s) for x in run.launches} == {"a": 30e-6, "b": 25e-6, "c": 15e-6}
    assert run.busy_s + run.between_s + run.around_s == pytest.approx(run.whole_s)
    assert run.around_s == pytest.approx(30e-6)


def test_a_run_that_was_held_up_counts_for_nothing():
    runs = [SimpleNamespace(whole_s=s) for s in (1.0, 9.0, 1.1, 0.9, 1.2)]
    assert [run.whole_s for run in middle(runs)] == [1.0, 1.1, 1.2]
    assert [len(middle(runs[:k])) for k in range(1, 5)] == [1, 2, 1, 2]
