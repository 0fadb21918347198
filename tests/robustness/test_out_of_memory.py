"""A device that runs out of memory during a measurement: told as that, with what to do, and the next measurement works."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import jax
import pytest
from jax import numpy as jnp

import fusionlab as fl
from fusionlab.cli import main
from fusionlab.errors import FusionLabError, OutOfMemoryError
from fusionlab.evidence import tuning
from fusionlab.evidence.instruments import device_clock
from fusionlab.evidence.instruments import program as programs
from fusionlab.evidence.instruments.out_of_memory import out_of_memory
from fusionlab.evidence.instruments.timing import time_pair
from fusionlab.evidence.original import Original
from fusionlab.viz.explorer.widget import Explorer

X, W, B = jnp.ones((8, 16)), jnp.ones((16, 4)) / 16, jnp.zeros(4)
EFFORT = {"samples": 4, "budget_s": 5.0}
SAID = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3221225472 bytes.\nBufferAssignment: ..."


def layer(x, w, b):
    return jax.nn.relu(x @ w + b)


def same(x, w, b):
    return layer(x, w, b)


def exhausted(*_, **__):
    raise jax.errors.JaxRuntimeError(SAID)


def broken(*_, **__):
    raise jax.errors.JaxRuntimeError("INTERNAL: the driver said no")


class Faulty:
    """A compiled program whose calls fail; all else is the program's own."""

    def __init__(self, compiled, fail):
        self._compiled, self._fail = compiled, fail

    def __call__(self, *args, **kwargs):
        self._fail()
        return self._compiled(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._compiled, name)


@pytest.fixture
def runs(monkeypatch):
    """`runs(fail, name)`: from now on the runs of programs of that name ("after") fail so."""

    def plant(fail, name="after"):
        real = programs.Program.__init__

        def made(self, *given, **named):
            real(self, *given, **named)
            if self.name == name:
                object.__setattr__(self, "compiled", Faulty(self.compiled, fail))

        monkeypatch.setattr(programs.Program, "__init__", made)

    return plant


def works():
    return fl.compare(layer, fl.fuse(layer), X, W, B, **EFFORT).numerics.regressions == ()


VERBS = {
    "compare": lambda: fl.compare(layer, fl.fuse(layer), X, W, B, **EFFORT),
    "compare, time alone": lambda: fl.compare(layer, same, X, W, B, numerics=False, memory=False, **EFFORT),
    "time_pair": lambda: time_pair(layer, layer, X, W, B, **EFFORT),
    "bisect": lambda: fl.bisect(layer, X, W, B, passes="gemm_epilogue", **EFFORT),
    "bisect, of time": lambda: fl.bisect(layer, X, W, B, passes="gemm_epilogue", of="time", **EFFORT),
    "errors_by_site": lambda: fl.errors_by_site(layer, X, W, B, passes="gemm_epilogue"),
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_a_run_that_does_not_fit_is_one_error_that_says_what_and_what_to_do(verb, runs, monkeypatch):
    runs(exhausted)
    with pytest.raises(OutOfMemoryError) as caught:
        verb()
    said = str(caught.value)
    assert said.startswith("after: ")
    assert "ran out of memory, asking for 3 GiB" in said
    for advice in ("smaller inputs", "grad=False", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        assert advice in said
    assert "BufferAssignment" not in said  # the first line alone
    assert isinstance(caught.value, FusionLabError)
    assert isinstance(caught.value, MemoryError)
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
    monkeypatch.undo()
    assert works()


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_another_error_of_the_runtime_comes_through_as_it_is(verb, runs):
    runs(broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        verb()


@pytest.mark.parametrize("step", ["trace", "compile"])
def test_a_compile_that_does_not_fit_is_told_as_one(step, monkeypatch):
    if step == "compile":
        monkeypatch.setattr(jax.stages.Lowered, "compile", exhausted)
        function = layer
    else:
        function = exhausted
    with pytest.raises(OutOfMemoryError, match=r"before: (compiling|tracing) it ran out of memory"):
        time_pair(function, layer, X, W, B, **EFFORT)
    monkeypatch.undo()
    assert works()


def test_memory_that_really_cannot_be_had():
    """No simulation: 2**50 bytes are more than any address space of today holds."""

    def much(x):
        return jnp.broadcast_to(x, (1 << 24, 1 << 24))

    with pytest.raises(OutOfMemoryError, match=r"before: .* ran out of memory, asking for 1\.049e\+06 GiB"):
        time_pair(much, much, jnp.ones(1 << 24), **EFFORT)
    assert works()


def test_while_a_device_is_timed_by_its_own_clock(runs, monkeypatch):
    monkeypatch.setattr(device_clock, "can_time", lambda devices: True)
    monkeypatch.setattr(device_clock, "sampler", lambda ready, calls, flush: ready(1)[0])
    runs(exhausted)
    with pytest.raises(OutOfMemoryError, match="after: timing it"):
        fl.compare(layer, layer, X, W, B, numerics=False, memory=False, **EFFORT)


def test_the_error_keeps_no_array_of_the_failed_run_alive():
    held = []

    class Large:
        pass

    def failing():
        large = Large()
        held.append(weakref.ref(large))
        exhausted(large)

    with pytest.raises(OutOfMemoryError) as caught, out_of_memory("it"):
        failing()
    gc.collect()
    assert held[0]() is None, caught.value


# The reference alone.


@pytest.mark.parametrize("part", ["_outputs", "values_and_gradients"])
def test_where_the_float64_reference_does_not_fit_the_rest_is_measured_and_the_notes_say_so(part, monkeypatch):
    from fusionlab.graph.interpret.promote import Promoted

    monkeypatch.setattr(Promoted, part, exhausted)
    found = fl.compare(layer, same, X, W, B, **EFFORT)
    assert found.numerics is None
    assert found.memory is not None
    assert found.timing is not None
    (note,) = [n for n in found.notes if n.startswith("no errors were measured")]
    assert "the float64 reference ran out of memory, asking for 3 GiB" in note
    assert "errors_by_site(..., local=True)" in note


def test_a_program_that_fits_only_without_the_reference_is_measured_without_errors(runs, monkeypatch):
    full, forget = [True], Original.forget_reference
    runs(lambda: full and exhausted())
    monkeypatch.setattr(Original, "forget_reference", lambda self: (full.clear(), forget(self)))
    found = fl.compare(layer, same, X, W, B, memory=False, **EFFORT)
    assert found.numerics is None
    assert found.timing is not None
    assert any("no errors were measured: after: running it ran out of memory" in n for n in found.notes)


# Where it is shown.


def test_tuning_tells_which_call(monkeypatch):
    op = SimpleNamespace(name="gemm_epilogue")
    call = SimpleNamespace(primitive=SimpleNamespace(op=op, role="call"))
    monkeypatch.setattr(tuning, "_rivals", exhausted)
    monkeypatch.setattr(tuning, "_programs", lambda call, device: 2)
    tuning.CHOICES.trial["left over"] = ("00", 1)
    with pytest.raises(OutOfMemoryError, match="tuning gemm_epilogue call ran out of memory"):
        tuning.Tuning().run([call])
    assert tuning.CHOICES.trial == {}


def test_the_explorer_shows_it_with_its_code_and_measures_again():
    found = fl.find(layer, X, W, B)
    failing = [True]

    def measure(setting, progress, cancel):
        if failing:
            with out_of_memory("after: running it"):
                exhausted()
        return fl.compare(layer, layer, X, W, B, **EFFORT)

    lab = Explorer(found.graph, found, measure=measure)
    lab.start().join()
    assert lab.status.startswith("measurement failed: [out_of_memory] after: running it ran out of memory")
    assert lab.problem["code"] == "out_of_memory"
    assert lab.evidence is None
    assert not lab.busy["running"]
    failing.clear()
    lab.start().join()
    assert lab.status == "measured"
    assert lab.evidence is not None


def test_the_command_line_prints_a_line(capsys, tmp_path, runs):
    (tmp_path / "model.py").write_text("import jax\n\ndef layer(x, w, b):\n    return jax.nn.relu(x @ w + b)\n")
    runs(exhausted)
    arguments = [f"{tmp_path}/model.py:layer", "--args", "f32[8,16], f32[16,4], f32[4]"]
    assert main(["compare", *arguments]) == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("fusionlab: error: after: ")
    assert "ran out of memory" in said
