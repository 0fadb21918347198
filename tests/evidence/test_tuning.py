"""`fl.tune` on a simulated GPU: what it measures, what it writes, and that choices read it back."""

from __future__ import annotations

import dataclasses
import json
import math
from types import SimpleNamespace

import jax
import pytest
from jax import numpy as jnp

import fusionlab as fl
from fusionlab import progress
from fusionlab.device import Device
from fusionlab.errors import ArgumentError, CacheWarning, OutputError
from fusionlab.evidence import tuning
from fusionlab.evidence.instruments.device_clock import DeviceTimes
from fusionlab.kernels.choose import choices
from fusionlab.kernels.choose.plan_files import read_plan_file, read_sets
from fusionlab.kernels.launch import cublaslt
from fusionlab.kernels.launch import ffi_call as launch
from fusionlab.kernels.op import chooser
from fusionlab.kernels.ops.gemm_epilogue import cublaslt as by_cublaslt
from fusionlab.progress import Watch
from fusionlab.verbs import tuning as tuning_verb

S = jax.ShapeDtypeStruct
LAYER = (S((64, 32), jnp.bfloat16), S((32, 128), jnp.bfloat16), S((128,), jnp.bfloat16))
ALGORITHMS = ("aa" * 64, "bb" * 64)


def layer(x, w, b):
    return jax.nn.relu(x @ w + b)


class Bench:
    """`times_us`: what each implementation takes; `timed`: the names of the programs of each round, in order."""

    def __init__(self):
        self.times_us = {"xla": 30.0, "cublaslt": 10.0, "cuda": 20.0, ALGORITHMS[0]: 6.0, ALGORITHMS[1]: 5.0}
        self.timed = []

    def time_on_device(self, programs, samples=0, calls=8):
        assert samples >= 4
        self.timed.append(tuple(programs))
        return {name: DeviceTimes(name, (self.times_us.get(name, 25.0) * 1e-6,) * samples, calls) for name in programs}


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """An sm_90 that this process seems to have, with nothing measured before; programs are neither compiled nor run."""
    file, made = tmp_path / "mine" / "plans.json", Bench()
    monkeypatch.setenv("FUSIONLAB_PLAN_FILE", str(file))
    known = choices.Choices()
    for module in (chooser, by_cublaslt, tuning, tuning_verb):
        monkeypatch.setattr(module, "CHOICES", known)
    monkeypatch.setattr(choices, "TABLES", tmp_path / "tables")
    monkeypatch.setattr(Device, "current", classmethod(lambda cls: Device.of("sm_90")))
    monkeypatch.setattr(tuning, "time_on_device", made.time_on_device)
    monkeypatch.setattr(tuning, "_program", lambda function, operands: function)
    monkeypatch.setattr(cublaslt, "version", lambda: 130100)
    monkeypatch.setattr(cublaslt, "algorithms", lambda plan, device: list(ALGORITHMS))
    monkeypatch.setattr(jax, "local_devices", lambda **_: [type("Gpu", (), {"local_hardware_id": 0})])
    made.file = file
    return made


def choices_of(found):
    return [{b.name: b for b in c.backends} for c in found.candidates]


def test_what_was_measured_is_written_and_decides_from_then_on(bench):
    (before,) = choices_of(fl.find(layer, *LAYER))
    assert before["xla"].verdict == "same code"
    assert "no such call was measured for sm_90; fusionlab.tune measures" in before["xla"].reason
    tuned = fl.tune(layer, *LAYER)
    assert tuned.path == bench.file
    assert read_plan_file(bench.file, "")["sm_90"].cases.keys() == tuned.measured.cases.keys()
    (after,) = choices_of(fl.find(layer, *LAYER))
    assert after["cublaslt"].verdict == "chosen"
    assert after["cublaslt"].reason == f"measured: cublaslt 10 µs, cuda 20 µs, xla 30 µs (plan file {bench.file})"
    assert after["xla"].verdict == after["cuda"].verdict == "possible"


def test_the_result_prints_a_line_for_each_case_with_all_times(bench):
    text = repr(fl.tune(layer, *LAYER))
    assert f"cases on a CUDA sm_90 device (simulated), written to {bench.file}" in text
    lines = [line for line in text.splitlines()[1:] if not line.startswith("  matmul")]  # of a site that yielded
    assert all("gemm_epilogue relu 64x" in line for line in lines)
    assert all(line.endswith(": cublaslt (cublaslt 10 µs, cuda 20 µs, xla 30 µs)") for line in lines)
    assert "64x32x128 bfloat16 backward" in lines[0]  # the most time at stake first
    for role in (
        "forward:",
        "forward, keeping residuals:",
        "forward, keeping residuals, mask in bits:",
        "backward, mask in bits:",
    ):
        assert any(role in line for line in lines), role


def test_cases_of_every_op_are_printed(bench):
    def blend(x, y, w):
        return x + w * (y - x)

    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((4, 1, 8), (4, 6, 8), (1,))]
    lines = repr(fl.tune(blend, *shapes)).splitlines()[1:]
    case = "  lerp axes xy y xy, axis 0 4, axis 1 6, axis 2 8, dtype float32, {}: cuda (cuda 20 µs, xla 30 µs)"
    assert lines == [case.format("wanted x y w, backward"), case.format("forward")]


@pytest.mark.parametrize("records", [False, True])
def test_the_quickest_algorithm_is_kept_for_each_product(bench, monkeypatch, records):
    monkeypatch.setattr(launch, "LAUNCHER", SimpleNamespace(records=records))
    measured = fl.tune(layer, *LAYER, grad=False).measured
    assert set(measured.algorithms.values()) == {(ALGORITHMS[1], 130100)}
    for name in measured.algorithms:
        assert chooser.CHOICES.algorithm("sm_90", name) == (ALGORITHMS[1], 130100)
    assert chooser.CHOICES.trial == {}
    assert bench.timed[:2] == [ALGORITHMS, ("xla", "cublaslt", "cuda")]


def test_less_than_a_hundredth_is_no_reason_to_leave_xla_s_code(bench):
    bench.times_us |= {"xla": 10.05, "cuda": 10.0, "cublaslt": 10.0}
    fl.tune(layer, *LAYER, grad=False)
    (found,) = choices_of(fl.find(layer, *LAYER))
    assert found["xla"].verdict == "same code"
    assert "measured: cublaslt 10 µs, cuda 10 µs, xla 10.05 µs" in found["xla"].reason


def test_forward_and_backward_agree_on_how_a_mask_is_kept(bench):
    settings = {
        choice.settings["packed"]
        for text, choice in fl.tune(layer, *LAYER).measured.cases.items()
        if json.loads(text).get("residuals", True) and "gemm" in text
    }
    assert len(settings) == 1


def test_another_call_adds_to_the_file(bench):
    first = fl.tune(layer, *LAYER, grad=False).measured.cases
    wider = (S((64, 32), jnp.bfloat16), S((32, 256), jnp.bfloat16), S((256,), jnp.bfloat16))
    second = fl.tune(layer, *wider, grad=False).measured.cases
    cases = read_plan_file(bench.file, "")["sm_90"].cases
    assert cases.keys() == {*first, *second}
    assert len(cases) == len(first) + len(second)


def test_progress_is_told_for_each_call(bench):
    told = []
    tuned = fl.tune(layer, *LAYER, progress=lambda *step: told.append(step))
    assert told[:2] == [("tracing", 0, 0), ("searching", 0, 0)]
    assert told[2:-1] == [("tuning", i, tuned.calls) for i in range(tuned.calls + 1)]
    assert told[-1][0] == "searching whole layers"
    # Forward, forward keeping residuals, backward; and the product, either way, as a route takes it.
    assert tuned.calls == 5


class Estimates(Watch):
    def __init__(self):
        self.told = []

    def __call__(self, task, done=0, total=0, budget_s=math.inf, expected_s=math.inf):
        self.told.append((task, done, total, expected_s))


def test_an_estimate_is_told_before_the_first_measurement(bench):
    estimates = Estimates()
    ahead = fl.tune(layer, *LAYER, budget_s=0)
    assert ahead.left_s > 0
    fl.tune(layer, *LAYER, progress=estimates)
    first = next(told for told in estimates.told if told[0] == "tuning")
    assert first == ("tuning", 0, 5, pytest.approx(ahead.left_s))
    # Three implementations each of three calls, the two that keep a mask or read it in two ways; and the product by both routes.
    assert ahead.left_s == pytest.approx(tuning.PROGRAM_S * sum(map(len, bench.timed[1:])), rel=0.5)
    clock = progress.Clock()
    clock.tell("tuning", 0, 5, math.inf, 60.0)
    assert clock.left_s == pytest.approx(60, abs=1)
    assert str(clock).endswith("about 59 s left")


def test_what_was_measured_before_is_no_step_of_the_progress(bench):
    fl.tune(layer, *LAYER, grad=False)
    estimates = Estimates()
    whole = fl.tune(layer, *LAYER, progress=estimates)
    (total,) = {total for task, _, total, _ in estimates.told if task == "tuning"}
    assert total == whole.calls - whole.before > 0


@pytest.mark.parametrize("calls_done", [0, 1, 2])
def test_cancelled_it_keeps_what_was_measured_and_a_second_call_measures_the_rest(bench, calls_done):
    def interrupted(what, done, total):
        if done > calls_done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fl.tune(layer, *LAYER, progress=interrupted)
    assert chooser.CHOICES.trial == {}  # algorithms under trial decide nothing any more
    assert [p.name for p in bench.file.parent.iterdir()] == [bench.file.name]
    half = set(read_plan_file(bench.file, "")["sm_90"].cases)
    rounds = len(bench.timed)
    whole = fl.tune(layer, *LAYER)
    assert whole.before == calls_done + 1
    assert half <= whole.measured.cases.keys() == read_plan_file(bench.file, "")["sm_90"].cases.keys()
    assert len(bench.timed) - rounds < rounds or calls_done == 0
    bench.timed.clear()
    assert fl.tune(layer, *LAYER).before == whole.calls
    assert bench.timed == []
    assert fl.tune(layer, *LAYER, again=True).before == 0
    assert len(bench.timed) >= whole.calls


class Clock:
    """`perf_counter` for tuning, on which each round of a `Bench` takes `round_s`."""

    def __init__(self, bench, monkeypatch, round_s):
        self.now = 0.0

        def timed(programs, real=bench.time_on_device, **how):
            self.now += round_s
            return real(programs, **how)

        for module in (tuning, tuning_verb):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(tuning, "time_on_device", timed)
        monkeypatch.setattr(tuning, "_try_algorithms", lambda *_: None)


def many(x, weights, small):
    def one(x, w):
        return jax.nn.relu(x @ w), None

    y, _ = jax.lax.scan(one, x, weights)
    return jax.nn.relu(y @ small)


MANY = (S((64, 128), jnp.bfloat16), S((50, 128, 128), jnp.bfloat16), S((128, 256), jnp.bfloat16))


def test_a_budget_measures_the_most_time_first_and_says_what_is_left(bench, monkeypatch):
    clock = Clock(bench, monkeypatch, 10.0)
    asked = {"grad": False, "passes": "gemm_epilogue"}
    listed = fl.tune(many, *MANY, **asked, budget_s=0)
    assert (bench.timed, listed.path, len(listed.left)) == ([], None, 2)
    assert listed.left[0].at_stake_s > 10 * listed.left[1].at_stake_s  # it occurs in each of 50 trips
    assert "128x128" in str(listed.left[0])
    first = fl.tune(many, *MANY, **asked, budget_s=15)
    assert clock.now == 10  # another 10 s would not end in time
    assert list(first.measured.cases) == [listed.left[0].call]
    assert [one.call for one in first.left] == [listed.left[1].call]
    assert first.left_s == 10
    said = repr(first)
    assert "the budget ended: 1 call left, at most" in said
    assert "about 10 s of measuring; tune again to go on" in said
    second = fl.tune(many, *MANY, **asked, budget_s=15)
    assert (second.before, second.left, len(second.measured.cases)) == (1, (), 2)
    assert second.to_dict()["left"] == []
    with pytest.raises(ArgumentError, match="budget_s: got -1"):
        fl.tune(many, *MANY, budget_s=-1)


def test_a_call_that_is_too_large_leaves_the_others_measured(bench, monkeypatch):
    def timed(programs, real=bench.time_on_device, **how):
        if not bench.timed:
            bench.timed.append(())
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3 GiB")
        return real(programs, **how)

    monkeypatch.setattr(tuning, "time_on_device", timed)
    monkeypatch.setattr(tuning, "_try_algorithms", lambda *_: None)
    found = fl.tune(many, *MANY, grad=False, passes="gemm_epilogue")
    (large,) = found.too_large
    assert "128x128" in str(large)
    assert "ran out of memory" in large.why
    assert (len(found.measured.cases), found.left) == (1, ())
    assert "too little memory for gemm_epilogue relu 64x128x128 bfloat16 forward" in repr(found)
    assert json.loads(json.dumps(found.to_dict()))["too_large"][0]["call"] == large.call


def test_measured_in_one_process_it_is_used_in_another_and_measured_again_with_another_driver(bench, monkeypatch):
    """ "Another process" reads the file anew, on the card itself: no simulated one, which has no versions."""
    card = Device("cuda", "sm_90", "NVIDIA H100 80GB HBM3", memory=80 << 30, driver="570.1", cudnn="9.1")
    monkeypatch.setattr(Device, "current", classmethod(lambda cls: card))
    fl.tune(layer, *LAYER, grad=False)
    ((found,),) = read_sets(bench.file, "").values()
    assert (found.device, found.memory, found.versions["driver"]) == (card.name, 80 << 30, "570.1")
    bench.timed.clear()
    chooser.CHOICES.forget()
    assert fl.find(layer, *LAYER).candidates[0].backend.name == "cublaslt"
    newer = dataclasses.replace(card, driver="580.2")
    monkeypatch.setattr(Device, "current", classmethod(lambda cls: newer))
    with pytest.warns(CacheWarning, match=r"driver 570\.1, here 580\.2.*used, and fusionlab\.tune measures") as warned:
        (site,), _ = (fl.find(layer, *LAYER).candidates for _ in range(2))
    assert len(warned) == 1
    assert site.backend.name == "cublaslt"
    assert "stale: driver 570.1, here 580.2" in site.backend.reason
    assert bench.timed == []
    again = fl.tune(layer, *LAYER, grad=False)
    assert (again.before, len(read_sets(bench.file, "")["sm_90"])) == (0, 2)
    assert "stale" not in fl.find(layer, *LAYER).candidates[0].backend.reason


def test_a_plan_of_another_card_is_refused_with_a_warning_and_left_as_it_is(bench, monkeypatch):
    card = Device("cuda", "sm_90", "NVIDIA H100 80GB HBM3", driver="570.1")
    monkeypatch.setattr(Device, "current", classmethod(lambda cls: card))
    fl.tune(layer, *LAYER, grad=False)
    before = bench.file.read_bytes()
    other = Device("cuda", "sm_80", "NVIDIA A100-SXM4-80GB", driver="570.1")
    monkeypatch.setattr(Device, "current", classmethod(lambda cls: other))
    told = r"NVIDIA H100 80GB HBM3 \(sm_90\) and none of this card, NVIDIA A100-SXM4-80GB \(sm_80\): none is used"
    with pytest.warns(CacheWarning, match=told) as warned:
        (site,), _ = (fl.find(layer, *LAYER).candidates for _ in range(2))
    assert (len(warned), site.backend.name, site.waits) == (1, "xla", True)
    assert bench.file.read_bytes() == before
    fl.tune(layer, *LAYER, grad=False)
    assert read_sets(bench.file, "").keys() == {"sm_80", "sm_90"}
    asked = {c: fl.find(layer, *LAYER, device=c).candidates[0].backend.name for c in ("a100", "h100", "h200", "sm_90")}
    assert asked == {"a100": "cublaslt", "h100": "cublaslt", "h200": "xla", "sm_90": "cublaslt"}


@pytest.mark.parametrize("fails", [False, True])
def test_other_processes_are_never_left_waiting(bench, monkeypatch, fails):
    """They wait in `share` for what process 0 found; it comes there whatever became of its measuring."""
    shared = []
    monkeypatch.setattr(choices.Choices, "share", lambda self: shared.append(bench.file.exists()))

    def interrupted(*step):
        raise KeyboardInterrupt

    if fails:
        with pytest.raises(KeyboardInterrupt):
            fl.tune(layer, *LAYER, progress=interrupted)
    else:
        fl.tune(layer, *LAYER)
    assert shared == [not fails]


def test_a_process_beside_the_first_measures_nothing(bench, monkeypatch):
    monkeypatch.setattr(choices.Choices, "share", lambda self: None)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    fl.tune(layer, *LAYER)
    assert bench.timed == []
    assert not bench.file.exists()


def test_a_plan_file_that_cannot_be_written_is_told_before_anything_is_measured(bench):
    bench.file.parent.write_text("a file where the folder should be")
    with pytest.raises(OutputError, match="cannot write the file"):
        fl.tune(layer, *LAYER)
    assert bench.timed == []


@pytest.mark.filterwarnings("ignore::fusionlab.errors.CacheWarning")  # tracing looks it up first
def test_a_file_that_is_no_plan_file_is_told_before_anything_is_measured_and_left(bench):
    bench.file.parent.mkdir()
    bench.file.write_text("{}")
    with pytest.raises(ArgumentError, match="not a plan file that FusionLab can read"):
        fl.tune(layer, *LAYER, path=bench.file)
    assert bench.timed == []
    assert bench.file.read_text() == "{}"


def test_a_plan_file_of_its_own_that_is_damaged_is_built_again(bench):
    bench.file.parent.mkdir()
    bench.file.write_text("{}")
    with pytest.warns(CacheWarning, match="was not a plan file"):
        tuned = fl.tune(layer, *LAYER)
    assert read_plan_file(bench.file, "")["sm_90"].cases.keys() == tuned.measured.cases.keys()
    assert bench.file.with_name("plans.json.damaged").read_text() == "{}"


def test_without_a_gpu_nothing_is_measured_or_written(bench, monkeypatch):
    monkeypatch.setattr(Device, "current", classmethod(lambda cls: Device.of("cpu")))
    tuned = fl.tune(layer, *LAYER)
    assert tuned.path is None
    assert "nothing measured, nothing written" in repr(tuned)
    assert bench.timed == []
    assert not bench.file.parent.exists()


@pytest.mark.dear
def test_after_tuning_a_train_step_nothing_waits_and_every_op_was_measured(bench, monkeypatch):
    """Already differentiated: a search asks of the forward calls alone, which are in no such step."""

    def loss(p, x):
        wide = x.astype(jnp.float32)
        y = (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype) * p["scale"]
        y = jax.nn.gelu(y @ p["up"] + p["bias"])
        y = x + p["w"] * (y @ p["down"] - x)
        logits = (y @ p["head"]).astype(jnp.float32)
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])

    def step(p, x):
        return jax.value_and_grad(loss)(p, x)

    sizes = {"scale": (64,), "up": (64, 256), "bias": (256,), "down": (256, 64), "head": (64, 128), "w": (1,)}
    args = {n: S(shape, jnp.bfloat16) for n, shape in sizes.items()}, S((512, 64), jnp.bfloat16)
    monkeypatch.setenv(choices.NO_TABLES, "none")
    before = fl.find(step, *args).waiting
    assert len(before.sites) >= 3
    tuned = fl.tune(step, *args)
    assert {"gemm_epilogue", "layer_norm", "lerp", "matmul"} <= {json.loads(t)["op"] for t in tuned.measured.cases}
    assert fl.find(step, *args).waiting is None
    bench.timed.clear()
    assert (fl.tune(step, *args).before, bench.timed) == (tuned.calls, [])
