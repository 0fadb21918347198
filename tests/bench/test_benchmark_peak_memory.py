"""`python -m benchmarks peak_memory` at tiny sizes: the buffers of a train step add up to XLA's figure, and have their lines."""

from __future__ import annotations

import pytest

from benchmarks.programs import peak_memory as bench
from benchmarks.programs.language_steps import TINY


@pytest.mark.dear
def test_the_largest_buffers_of_a_scanned_step_have_lines_and_add_up():
    found = bench.measure(TINY[0], "step", bench.train_step(TINY[0]))
    assert found["sum_bytes"] == found["xla_bytes"]
    assert found["off"] == 0
    assert bench.line(found).startswith("ok: sum ")
    largest = found["buffers"]["buffers"][:10]
    assert all(b["line"].startswith("language_steps.py:") for b in largest)
    assert all(b["bytes"] > 0 for b in largest)


def test_a_sum_that_is_off_and_a_program_without_buffers_fail():
    found = {
        "xla_bytes": 1000,
        "argument_bytes": 10,
        "sum_bytes": 900,
        "live_bytes": 800,
        "off": -0.1,
        "device_peak": None,
    }
    assert bench.line(found).startswith("FAILED: sum 900 B, XLA's figure 1000 B, -10.00%")
    assert bench.line(found | {"off": None}).startswith("FAILED")
