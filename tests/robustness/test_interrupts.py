"""Ctrl-C during a measurement: it ends, and the process can be used as before."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import pytest
from jax import numpy as jnp
from tqdm.auto import tqdm

import fusionlab as fl
from fusionlab import cli, progress
from fusionlab.device import Device
from fusionlab.evidence import tuning as measuring
from fusionlab.evidence.instruments import device_clock
from fusionlab.evidence.instruments.device_clock import DeviceTimes
from fusionlab.evidence.instruments.turns import take_turns
from fusionlab.kernels.choose import choices
from fusionlab.kernels.ops import clock
from fusionlab.verbs import tuning
from fusionlab.viz.explorer.widget import Explorer

SCRIPT = Path(__file__).with_name("interrupted.py")
X, W, B = jnp.ones((8, 16)), jnp.ones((16, 4)) / 16, jnp.zeros(4)
EFFORT = {"samples": 4, "budget_s": 5.0}


def layer(x, w, b):
    return jax.nn.relu(x @ w + b)


def same(x, w, b):
    return layer(x, w, b)


def interrupt(*_, **__):
    raise KeyboardInterrupt("of the user")


@pytest.mark.parametrize("verb", ["compare", "time_pair", "bisect"])
def test_a_signal_during_a_measurement_ends_it_and_leaves_the_process_usable(verb):
    done = subprocess.run([sys.executable, str(SCRIPT), verb], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["interrupted", "usable"]


@pytest.mark.parametrize("collecting", [True, False])
@pytest.mark.parametrize("at", ["sample", "step", "cancel"])
def test_turns_leave_the_garbage_collector_as_it_was(collecting, at):
    hooks = {k: interrupt for k in (at,) if k != "sample"}
    was = gc.isenabled()
    (gc.enable if collecting else gc.disable)()
    try:
        with pytest.raises(KeyboardInterrupt, match="of the user"):
            take_turns({"a": interrupt if at == "sample" else (lambda: 0.0)}, 4, **hooks)
        assert gc.isenabled() == collecting
    finally:
        (gc.enable if was else gc.disable)()


@pytest.mark.parametrize("part", ["samples", "numerics", "memory"])
def test_a_comparison_interrupted_anywhere_closes_its_bars_and_works_again(part, monkeypatch):
    from fusionlab.evidence import measuring as steps
    from fusionlab.evidence.instruments import timing

    where = {"samples": (timing, "take_turns"), "numerics": (steps.Original, "errors"), "memory": (steps, "memory_of")}
    bars, closed = [], []

    class Bar(tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            bars.append(self)  # kept, as else forgetting it closes it

        def close(self):
            closed.append(self)
            super().close()

    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    monkeypatch.setattr(progress, "somebody_looks", lambda: True)
    monkeypatch.setattr(progress, "WAIT_S", 0.0)
    monkeypatch.setattr(*where[part], interrupt)
    with pytest.raises(KeyboardInterrupt, match="of the user"):
        fl.compare(layer, same, X, W, B, progress=True, **EFFORT)
    assert len(bars) == 1
    assert all(any(bar is one for one in closed) for bar in bars)
    assert not [t for t in threading.enumerate() if t.name == "fusionlab-progress"]
    monkeypatch.undo()
    assert fl.compare(layer, same, X, W, B, **EFFORT).numerics.regressions == ()


def test_the_clock_of_the_device_is_left_as_it_was(monkeypatch):
    """Marks are slots recorded anew for each sample: one that was begun says nothing of the next."""
    marks = {}
    monkeypatch.setattr(clock, "wait", lambda ns: lambda: None)
    monkeypatch.setattr(clock, "mark", lambda slot: lambda: marks.__setitem__(slot, marks.get("now", 0.0)))
    monkeypatch.setattr(clock, "elapsed_s", lambda a, b: marks[b] - marks[a])
    calls = []

    def run():
        calls.append(1)
        marks["now"] = marks.get("now", 0.0) + 1.0
        if len(calls) == broken_at:
            interrupt()
        return jnp.zeros(())

    broken_at = 0
    sample = device_clock.sampler(lambda n: [run] * n, calls=4)
    assert sample() == 1.0
    broken_at = len(calls) + 3  # in the midst of a sample
    with pytest.raises(KeyboardInterrupt):
        sample()
    assert sample() == 1.0


# Tuning.


@pytest.mark.parametrize("at", ["a call", "the write", "its last step"])
def test_tuning_leaves_no_half_written_plan_and_nothing_on_trial(tmp_path, monkeypatch, at):
    file = tmp_path / "plans.json"
    monkeypatch.setenv("FUSIONLAB_PLAN_FILE", str(file))
    monkeypatch.setattr(Device, "current", classmethod(lambda cls: Device.of("sm_90")))
    monkeypatch.setattr(measuring, "_program", lambda function, operands: function)
    monkeypatch.setattr(measuring, "_try_algorithms", lambda *_: choices.CHOICES.trial.update(p=("00", 1)))
    monkeypatch.setattr(
        measuring, "time_on_device", lambda programs, **_: {n: DeviceTimes(n, (1e-5,) * 4, 8) for n in programs}
    )
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 32), (32, 128), (128,))]
    known = choices.case_text("op", "call", i=1)
    choices.write(file, "sm_90", choices.Measured({known: choices.Choice("xla", {"xla": 1.0})}))
    before = file.read_bytes()
    with monkeypatch.context() as patch:
        if at == "a call":
            patch.setattr(measuring, "time_on_device", interrupt)
        elif at == "the write":
            patch.setattr(tuning, "write", interrupt)
        else:
            patch.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt, match="of the user"):
            fl.tune(layer, *args, progress=True)
    assert file.read_bytes() == before  # the first call was not measured yet
    assert [p.name for p in tmp_path.iterdir()] == ["plans.json"]  # no temporary file and no lock
    assert choices.CHOICES.trial == {}
    assert not tqdm._instances
    fl.tune(layer, *args)
    cases = choices.read_plan_file(file, "")["sm_90"].cases
    assert known in cases
    assert len(cases) > 1


# Where it is shown.


def test_the_explorer_can_measure_again():
    found = fl.find(layer, X, W, B)
    failing = [True]

    def measure(setting, progress, cancel):
        if failing:
            interrupt()
        return fl.compare(layer, same, X, W, B, **EFFORT)

    lab = Explorer(found.graph, found, measure=measure)
    with pytest.raises(KeyboardInterrupt):
        lab.measure()
    assert lab.status.startswith("measurement failed: KeyboardInterrupt")
    assert not lab.busy["running"]
    failing.clear()
    assert lab.measure() is lab.evidence


def test_the_command_line_says_so_in_a_line_and_with_the_status_of_a_signal(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_doctor", interrupt)
    assert cli.main(["doctor"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "fusionlab: interrupted\n"
