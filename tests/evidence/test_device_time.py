"""Device time, on a simulated GPU: which clock is taken, what a sample is made of, and what is said of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from jax import numpy as jnp

import fusionlab as fl
from fusionlab.device import Device
from fusionlab.evidence import Evidence, time_pair
from fusionlab.evidence.instruments import device_clock, peaks
from fusionlab.evidence.instruments import timing as timing_module
from fusionlab.evidence.instruments.turns import take_turns
from fusionlab.kernels.ops import clock


def f(x):
    return jnp.tanh(x) @ x


def g(x):
    return jnp.sin(x) @ x


X = np.ones((8, 8), np.float32)


def test_on_a_gpu_functions_are_compared_in_device_time(gpu):
    gpu.takes = {"before": 3e-6, "after": 2e-6}
    found = fl.compare(f, g, X, numerics=False)
    for timing in found.timings:
        assert timing.clock == "device time"
        assert timing.ratio == pytest.approx(1.5)
        assert timing.before.repeats == device_clock.CALLS
        assert timing.before.samples_s == pytest.approx([3e-6] * 40)
        assert timing.text.endswith("1.50x [1.50, 1.50], faster (median of 40 samples each, device time)")
    again = Evidence.from_dict(found.to_dict())
    assert [t.clock for t in again.timings] == ["device time"] * 2


@pytest.mark.parametrize(("seconds", "calls"), [(1e-3, 8), (0.004, 8), (0.01, 3), (0.029, 2), (1.0, 1)])
def test_long_calls_make_short_samples(seconds, calls, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(device_clock.time, "perf_counter", lambda: now[0])

    def run():
        now[0] += seconds

    assert device_clock.calls_of(lambda n: [run] * n) == calls


def test_a_record_without_a_clock_is_of_wall_time(gpu):
    gpu.takes = {"before": 3e-6, "after": 2e-6}
    data = fl.compare(f, g, X, numerics=False, grad=False).to_dict()
    for run in ("before", "after"):
        del data["timing"][run]["clock"]
    assert Evidence.from_dict(data).timings[0].clock == "wall time"


def test_a_sample_is_queued_behind_a_wait_and_a_call_of_its_own_kind(gpu):
    gpu.takes = {"before": 1e-6, "after": 1e-6}
    time_pair(f, f, X, samples=2)
    sample = ["wait", "{}", "mark 0", *["{}"] * device_clock.CALLS, "mark 1"]
    turns = [[step.format(name) for step in sample] for name in ("before", "after", "after", "before")]
    assert gpu.log[-4 * len(sample) :] == [step for turn in turns for step in turn]


def test_with_cold_caches_each_call_stands_between_marks_behind_a_flush(gpu, monkeypatch):
    monkeypatch.setattr(device_clock, "_flush", lambda: lambda: gpu.log.append("flush"))
    gpu.takes = {"before": 3e-6, "after": 2e-6}
    timing = time_pair(f, g, X, samples=2, cold=True)
    assert timing.before.cold
    assert "cold caches" in str(timing)
    assert timing.before.repeats == device_clock.CALLS // 2
    at = gpu.log.index("flush")
    assert gpu.log[at : at + 4] == ["flush", "mark 0", "before", "mark 1"]
    assert gpu.log.count("flush") == 2 * 2 * timing.before.repeats
    assert (timing.before.median_s, timing.after.median_s) == pytest.approx((3e-6, 2e-6))


def test_donated_arguments_are_copied_for_each_call_before_the_sample(gpu):
    gpu.takes = {"before": 1e-6, "after": 2e-6}
    x = jnp.asarray(X)
    timing = time_pair(f, f, x, samples=2, donate_argnums=0)
    assert timing.before.repeats == 1
    assert timing.ratio == pytest.approx(0.5)
    assert float(x.sum()) == 64


@pytest.mark.parametrize("why", ["a CPU", "no CuPy", "another device"])
def test_where_there_is_no_device_time_wall_time_is_taken_and_said(gpu, monkeypatch, why):
    if why == "a CPU":
        gpu.device = Device.of("cpu")
    elif why == "no CuPy":
        gpu.device = dataclasses.replace(gpu.device, missing=("cupy",))
    else:
        monkeypatch.setattr(clock, "device", lambda: "another")
    timing = time_pair(f, g, X, samples=2)
    assert timing.clock == "wall time"
    assert "samples each, wall time)" in timing.text
    assert gpu.log == []


def test_turns_go_forwards_and_backwards():
    order = []
    samplers = {name: lambda name=name: (order.append(name), 1.0)[1] for name in "ABC"}
    taken, stopped = take_turns(samplers, 4)
    assert "".join(order) == "ABCCBACBAABC"
    assert taken == {name: [1.0] * 4 for name in "ABC"}
    assert stopped == ""


def test_an_odd_number_of_samples_is_taken_and_told():
    steps = []
    taken, _ = take_turns({"A": lambda: 1.0}, 5, step=steps.append)
    assert len(taken["A"]) == 5
    assert steps == [2, 2, 1]


@pytest.mark.parametrize("budget_s", [3.0, 10.0, 11.0, 12.5, 40.0])
def test_a_budget_is_kept_to_within_a_sample_of_each(budget_s, monkeypatch):
    now, takes = [0.0], {"a": 1.0, "b": 2.0}
    monkeypatch.setattr("fusionlab.evidence.instruments.turns.time.perf_counter", lambda: now[0])

    def sampler(name):
        def sample():
            now[0] += takes[name]
            return takes[name]

        return sample

    taken, stopped = take_turns({name: sampler(name) for name in takes}, 100, budget_s=budget_s)
    assert stopped == "time budget"
    assert len(taken["a"]) == len(taken["b"]) >= 2
    assert now[0] <= max(budget_s + 3.0, 6.0)
    assert now[0] > budget_s - 6.0  # nor is it left while there is time for two rounds


# Peaks.


@pytest.mark.dear
def test_more_samples_are_taken_until_they_are_enough_or_ten_times_as_many():
    for answers, count in (((True,), 4), ((False, True), 8), ((False,) * 9, 40)):
        left, seen = iter(answers), []
        taken, stopped = take_turns(
            {"a": lambda: 1.0, "b": lambda: 2.0},
            4,
            enough=lambda t, left=left, seen=seen: seen.append(len(t["a"])) or next(left),
        )
        assert [len(t) for t in taken.values()] == [count, count]
        assert stopped == ""
        assert seen == [4 * (i + 1) for i in range(len(answers))]
    taken, stopped = take_turns({"a": lambda: 1.0}, 4, budget_s=1e-9, enough=lambda t: False)
    assert (len(taken["a"]), stopped) == (2, "time budget")
    taken, stopped = take_turns({"a": lambda: 1.0}, 2, budget_s=1e-9, enough=lambda t: False)
    assert (len(taken["a"]), stopped) == (2, "")  # as many as were asked for


def test_a_ratio_that_is_left_open_gets_more_samples(gpu, monkeypatch):
    gpu.takes = {"before": 3e-6, "after": 3e-6}
    assert len(time_pair(f, g, X).before.samples_s) == 40
    monkeypatch.setattr(timing_module, "ratio_interval", lambda *_, **__: (0.95, 1.05))
    assert len(time_pair(f, g, X).before.samples_s) == 400
    monkeypatch.setattr(timing_module, "PATIENCE_S", 0.0)
    assert len(time_pair(f, g, X).before.samples_s) == 40
    assert len(time_pair(f, g, X, samples=10).before.samples_s) == 10  # no verdict hangs on these


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(peaks, "COPY_BYTES", {"cuda": 1 << 20, "cpu": 1 << 20})
    monkeypatch.setattr(peaks, "SIDE", {"cuda": 64, "cpu": 64})
    monkeypatch.setattr(peaks, "SAMPLES", 3)


def test_peaks_of_this_machine_are_measured_and_part_of_no_key(small):
    here = Device.current()
    assert here.copy_bytes_per_s is here.gemm_flop_per_s is None
    found = peaks.measure_peaks(here)
    assert 1e6 < found.copy_bytes_per_s < 1e14
    assert 1e6 < found.gemm_flop_per_s < 1e17
    assert found == here
    assert hash(found) == hash(here)
    assert dataclasses.replace(here, memory=1) != here


def test_peaks_of_a_gpu_are_in_device_time_and_count_both_directions(small, gpu, monkeypatch):
    gpu.takes = {"function": 1e-6}
    made = []
    monkeypatch.setattr(peaks, "compile_program", _recording(peaks.compile_program, made))
    found = peaks.measure_peaks()
    assert found.copy_bytes_per_s == pytest.approx(2 * (1 << 20) / 1e-6)
    assert found.gemm_flop_per_s == pytest.approx(2 * 64**3 / 1e-6)
    assert [a.dtype for args in made for a in args] == [jnp.uint32, jnp.bfloat16, jnp.bfloat16]
    assert all(len(np.unique(np.asarray(a))) > 100 for args in made for a in args)


def _recording(compile_program, made):
    def compiled(fn, args, kwargs):
        made.append(args)
        return compile_program(fn, args, kwargs)

    return compiled


def test_what_is_copied_is_a_small_part_of_the_memory(small, gpu, monkeypatch):
    gpu.takes = {"function": 1e-6}
    gpu.device = dataclasses.replace(gpu.device, memory=32 << 16)
    assert peaks.measure_peaks().copy_bytes_per_s == pytest.approx(2 * (1 << 16) / 1e-6)


def test_only_what_is_here_is_measured():
    with pytest.raises(
        fl.errors.ArgumentError, match=r"got a CUDA sm_90 device \(simulated\).*only this process's device"
    ):
        peaks.measure_peaks(Device.of("sm_90"))
