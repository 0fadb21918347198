"""How long work tells how far it is: stages, their clocks, and the line that shows them."""

from __future__ import annotations

import contextlib
import math
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import ClassVar

import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab import progress
from fusionlab.progress import Clock, Reporter, Stages, Stopped, Watch, clock_text, somebody_looks, watched

ROOT = str(Path(fl.__file__).parents[1])
SLOW = """
import time
import jax.numpy as jnp

def slow(x):
    time.sleep(2.3)
    return jnp.sin(x)

example_args = (jnp.ones(4),)
"""


class Heard(Watch):
    def __init__(self):
        self.steps = []

    def __call__(self, task, done=0, total=0, budget_s=math.inf, expected_s=math.inf):
        self.steps.append((task, done, total, budget_s))


@pytest.fixture
def at(monkeypatch):
    """`at(seconds)` sets the clock."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return lambda seconds: now.__setitem__(0, seconds)


# A clock.


def test_a_clock_begins_with_its_stage_and_goes_on_with_its_steps(at):
    clock = Clock()
    assert clock.tell("tracing")
    at(3.4)
    assert (str(clock), clock.left_s) == ("tracing · 3 s", None)
    assert clock.tell("timing", 0, 40)
    assert clock.seconds == 0
    at(13.4)
    assert not clock.tell("timing", 10, 40)
    assert str(clock) == "timing 10/40 · 10 s, about 30 s left"
    assert clock.tell("timing", 0, 40)  # again from the start
    assert clock.seconds == 0


def test_what_is_left_is_told_by_steps_a_budget_and_what_it_took_before(at):
    clock = Clock()
    clock.tell("timing", 0, 40, 20.0)
    assert clock.left_s == 20.0
    at(10.0)
    clock.tell("timing", 4, 40, 20.0)
    assert clock.left_s == 10.0  # and not 90: the budget ends it
    clock.tell("timing", 30, 40, 20.0)
    assert clock.left_s == pytest.approx(10 / 3)
    clock.tell("compiling")
    at(70.0)
    clock.end()
    clock.tell("compiling")
    at(75.0)
    assert str(clock) == "compiling · 5 s, about 55 s left"
    at(200.0)
    assert clock.left_s == 0.0  # it takes longer than before: nothing is promised
    clock.drop()  # cancelled: what it took says nothing of the next
    clock.tell("trial 2: compiling")
    assert clock.left_s == 60.0


def test_seconds_are_told_as_a_clock_tells_them():
    assert [clock_text(s) for s in (0.4, 59.9, 60, 125.5)] == ["0 s", "59 s", "1 min 00 s", "2 min 05 s"]


# Who is told.


def test_a_function_is_told_of_each_stage_and_step_and_a_watch_of_the_budget_too():
    told, watch = [], Heard()
    for listener in (lambda *step: told.append(step), watch):
        with Reporter(listener, "timing", 3, 5.0) as stage:
            stage.step(2)
            stage.step(2)
    assert told == [("timing", n, 3) for n in (0, 2, 3)]
    assert watch.steps == [("timing", n, 3, 5.0) for n in (0, 2, 3)]


def test_stages_inside_of_others_are_named_and_a_cancel_ends_them():
    watch, cancelled = Heard(), []
    stages = Stages(watch, lambda: bool(cancelled)).inside("trial 3")
    stages("timing", 2).step()
    assert [step[:3] for step in watch.steps] == [("trial 3: timing", 0, 2), ("trial 3: timing", 1, 2)]
    cancelled.append(1)
    with pytest.raises(Stopped, match="compiling"):
        stages("compiling")
    assert len(watch.steps) == 2
    Stages()("tracing").step()  # nobody is told


@pytest.mark.parametrize("given", [False, True])
def test_nobody_is_told_by_a_process_that_does_not_speak(monkeypatch, given):
    monkeypatch.setattr(progress, "speaks", lambda: False)
    monkeypatch.setattr(progress, "Line", None)
    with watched(given) as told:
        assert told is False
        Reporter(given, "timing", 3).step()


def test_a_search_tells_which_pass_looks_and_how_many_sites_there_are():
    told = []
    found = fl.find(
        lambda x, w: jnp.tanh(x @ w), jnp.ones((4, 4)), jnp.ones((4, 4)), progress=lambda *s: told.append(s)
    )
    tasks = list(dict.fromkeys(task for task, *_ in told))
    assert tasks[:3] == ["tracing", "searching", "searching: gemm_epilogue, 0 sites so far"]
    assert tasks[3:-1] == [f"searching: {name}, 1 site so far" for name in found.passes if name != "gemm_epilogue"]


# The line.


class Drawn:
    """Stands for the line on a screen."""

    all: ClassVar[list] = []

    def __init__(self):
        self.texts, self.closed = [], False
        Drawn.all.append(self)

    def draw(self, clock):
        self.texts.append(str(clock))

    def close(self):
        self.closed = True


@pytest.fixture
def screen(monkeypatch):
    monkeypatch.setattr(progress, "somebody_looks", lambda: True)
    monkeypatch.setattr(progress, "_Bar", Drawn)
    monkeypatch.setattr(Drawn, "all", [])
    monkeypatch.setattr(progress, "WAIT_S", 0.05)
    monkeypatch.setattr(progress, "TICK_S", 0.05)
    return Drawn


def test_what_is_quick_shows_nothing(screen):
    with watched(True) as told:
        Stages(told)("tracing")
    assert screen.all == []
    assert not [t for t in threading.enumerate() if t.name == "fusionlab-progress"]


def test_a_line_is_redrawn_while_nothing_is_told_and_is_gone_at_the_end(screen, monkeypatch):
    with watched(True) as told:
        Stages(told)("tracing")
        deadline = time.monotonic() + 20
        while not (screen.all and len(screen.all[0].texts) > 3) and time.monotonic() < deadline:
            time.sleep(0.01)
        Stages(told)("searching")
    (line,) = screen.all
    assert line.texts[:3] == ["tracing · 0 s"] * 3
    assert "searching · 0 s" in line.texts
    assert line.closed
    told("late")  # of a thread that goes on
    assert not any("late" in text for text in line.texts)


@pytest.mark.parametrize("interrupted", ["fl.explore(slow, X)", "fl.find(slow, X, progress=True)"])
def test_an_interrupt_leaves_nothing_half_done(screen, interrupted):
    begun = threading.Event()

    def slow(x):
        if not begun.is_set():
            begun.set()
            time.sleep(30)
        return jnp.sin(x)

    def press():
        deadline = time.monotonic() + 20
        assert begun.wait(20)
        while not screen.all and time.monotonic() < deadline:  # else the line is missing, which is found below
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            eval(interrupted, {"fl": fl, "slow": slow, "X": jnp.ones(3)})
    finally:
        signal.signal(signal.SIGINT, handler)
    assert [line.closed for line in screen.all] == [True]
    assert not [t for t in threading.enumerate() if t.name.startswith("fusionlab")]
    assert eval(interrupted, {"fl": fl, "slow": slow, "X": jnp.ones(3)}).graph.node_count == 1


# As it stands in a terminal and in a pipe.


def command(tmp_path):
    (tmp_path / "model.py").write_text(SLOW)
    env = os.environ | {"PYTHONPATH": ROOT}
    return [sys.executable, "-m", "fusionlab.cli", "find", str(tmp_path / "model.py:slow")], env


def test_nothing_of_it_goes_into_a_pipe(tmp_path):
    line, env = command(tmp_path)
    done = subprocess.run(line, env=env, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"gemm_epilogue" in done.stdout
    assert b"\r" not in done.stdout


def test_a_log_has_a_line_for_each_stage(monkeypatch, capsys):
    monkeypatch.setattr(progress, "WAIT_S", 0.0)
    with watched(True) as told:
        end = time.monotonic() + 30
        while not capsys.readouterr().err and time.monotonic() < end:
            told("compiling")
            time.sleep(0.01)
        for k in range(3):
            told("timing", k, 3)
        told("saving")
    assert capsys.readouterr().err == "timing\nsaving\n"


def test_a_terminal_sees_one_line_with_a_clock_that_ticks_and_is_gone(tmp_path):
    line, env = command(tmp_path)
    here, there = pty.openpty()
    termios.tcsetwinsize(there, (24, 80))
    done = subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=there)
    os.close(there)
    seen = b""
    with contextlib.suppress(OSError):  # of a terminal whose program has ended
        while piece := os.read(here, 4096):
            seen += piece
    out, _ = done.communicate()
    os.close(here)
    assert done.returncode == 0
    assert b"gemm_epilogue" in out
    shown = [part.decode().strip() for part in seen.split(b"\r")]
    clocks = [text for text in shown if text.startswith("tracing · ")]
    assert len(set(clocks)) >= 2, shown
    assert shown[-1] == ""
    assert b"\n" not in seen


def test_somebody_looks_at_a_terminal_and_at_a_notebook_alone(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert not somebody_looks()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert somebody_looks()
