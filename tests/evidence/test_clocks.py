"""Readings of the hardware's clocks, and what becomes of those that cannot be had."""

from __future__ import annotations

import subprocess

import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.evidence.comparison import Evidence
from fusionlab.evidence.instruments import clocks
from fusionlab.evidence.instruments.clocks import Clocks, parse_smi, read_clocks


def test_a_line_of_nvidia_smi_is_read():
    assert parse_smi("1980, 2619, 34, 119.42, 0x0000000000000000\n", 1.5) == Clocks(1980, 2619, 34, 119.42, (), 1.5)
    found = parse_smi("1200, 2619, 83, 700.00, 0x0000000000000044")
    assert found.throttled == ("power cap", "hardware thermal slowdown")
    assert (
        str(found)
        == "1200 MHz, memory 2619 MHz, 83 C, 700 W, throttled: power cap, throttled: hardware thermal slowdown"
    )


@pytest.mark.parametrize("line", ["", "[N/A], [N/A], [N/A], [N/A], [N/A]", "No devices were found", "1,2"])
def test_what_cannot_be_read_is_none(line):
    found = parse_smi(line)
    assert found.power_w is None
    assert found.throttled == ()


@pytest.mark.parametrize(
    "error", [OSError("gone"), subprocess.TimeoutExpired("nvidia-smi", 10), subprocess.CalledProcessError(9, "x")]
)
def test_a_tool_that_fails_costs_no_measurement(monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(clocks.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(clocks.subprocess, "run", fail)
    assert read_clocks("gpu").processor_mhz is None


def test_the_gpu_that_is_asked_is_the_one_that_jax_sees(monkeypatch):
    asked = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(clocks.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(
        clocks.subprocess,
        "run",
        lambda command, **_: asked.append(command[1]) or subprocess.CompletedProcess(command, 0, "1, 2, 3, 4, 0x0", ""),
    )
    assert read_clocks("cuda", 1).temperature_c == 3
    assert asked == ["--id=5"]


def test_a_timing_has_a_reading_before_and_after_and_keeps_it():
    def f(x):
        return jnp.sin(x) @ x

    found = fl.compare(
        f, fl.fuse(f), jnp.ones((8, 8)), samples=2, numerics=False, memory=False, same_code=False, grad=False
    )
    assert len(found.timing.clocks) == 2
    assert found.timing.clocks[0].load >= 0
    assert Evidence.from_dict(found.to_dict()).timing == found.timing
