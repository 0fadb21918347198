"""The benchmark of the first step: phases do not overlap, and a process that measures finds a train step's phases."""

from __future__ import annotations

import time

import pytest

from benchmarks.method import first_step
from benchmarks.method.first_step import PHASES, Clock, in_a_process, medians, row


def test_a_phase_inside_another_is_counted_once(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 10.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(time, "process_time", lambda: 0.0)
    clock = Clock()
    with clock.phase("lower"), clock.phase("find"):
        pass
    assert clock.seconds["find"] == 2.0
    assert clock.seconds["lower"] == 8.0
    assert sum(clock.seconds.values()) == 10.0


def test_a_record_has_the_medians_of_each_phase_and_of_the_sum():
    samples = [{"seconds": dict.fromkeys(PHASES, s)} for s in (1.0, 2.0, 9.0)]
    assert medians(samples) == dict.fromkeys(PHASES, 2.0) | {"sum": 2.0 * len(PHASES)}
    assert row("2 layers, cold, jit", medians(samples)).endswith(f"{2.0 * len(PHASES):9.2f}")


@pytest.mark.dear
def test_a_process_measures_every_phase_of_a_fused_step(tmp_path):
    sizes = {"embed": 32, "heads": 2, "vocab": 64, "batch": 1, "length": 8}
    found = in_a_process("fused", 1, sizes, tmp_path / "kernels", tmp_path / "programs")
    assert {phase for phase, s in found["seconds"].items() if s > 0} == {*PHASES} - {"kernels"}  # a CPU has none
    assert list((tmp_path / "programs").iterdir()), "JAX's cache was filled"
    assert first_step.STATES[0] == "cold"
