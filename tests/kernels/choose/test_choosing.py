"""Which implementation a call of gemm_epilogue takes: the decision on every device, and what a plan file changes."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from fusionlab.device import Device
from fusionlab.errors import BackendError, UnknownNameError
from fusionlab.kernels.choose import choices
from fusionlab.kernels.choose.choices import Choice, Choices, Measured, write
from fusionlab.kernels.op import chooser
from fusionlab.kernels.op.arrays import FLOATS as DTYPES
from fusionlab.kernels.ops.gemm_epilogue import ACTIVATIONS, GEMM_EPILOGUE, choosing, gemm_epilogue
from fusionlab.kernels.ops.gemm_epilogue import cublaslt as by_cublaslt
from fusionlab.kernels.ops.gemm_epilogue.elementwise import KERNEL_ACTIVATIONS

DEVICES = ("cpu", "sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
PRECISIONS = (None, lax.Precision.DEFAULT, lax.Precision.HIGH, lax.Precision.HIGHEST, "BF16_BF16_F32")
NAMES = tuple(GEMM_EPILOGUE.implementations)
OWN = tuple(name for name in NAMES if name != "xla")


def operands(dtype="bfloat16", m=64, k=32, n=128):
    return [jax.ShapeDtypeStruct(s, getattr(jnp, dtype)) for s in ((m, k), (k, n), (n,))]


def verdicts(*args, device="sm_90", **attrs):
    return {v.name: v for v in GEMM_EPILOGUE.backends(*args, device=device, **attrs)}


def chosen(found):
    return [name for name, v in found.items() if v.verdict in ("chosen", "same code")]


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path, monkeypatch):
    """Neither this machine's plan file nor a table decides a test; returns what writes a plan file of the test's own."""
    file = tmp_path / "plans.json"
    known = Choices(file)
    monkeypatch.setattr(chooser, "CHOICES", known)
    monkeypatch.setattr(by_cublaslt, "CHOICES", known)
    monkeypatch.setattr(choices, "TABLES", tmp_path / "tables")
    monkeypatch.setattr(choices.CHOICES, "_tables", {})  # a table read of that folder stays in none

    def measure(args, implementation, times, role="call", device="sm_90", packed=False, settings=None, **attrs):
        present, full = GEMM_EPILOGUE._prepared(args, attrs, Device.of(device))
        case = choosing.case(role, present, {**full, "packed": packed, "residuals": packed})
        write(file, device, Measured({case: Choice(implementation, times, settings or {})}))

    return measure


# Every device, activation, dtype and precision.


@pytest.mark.parametrize("device", DEVICES)
def test_one_verdict_for_each_implementation_and_the_chosen_one_can_run(device):
    for activation, dtype, precision, bias in itertools.product(ACTIVATIONS, DTYPES, PRECISIONS, (True, False)):
        args = operands(dtype)[: 3 if bias else 2]
        found = GEMM_EPILOGUE.backends(*args, device=device, activation=activation, precision=precision)
        what = (activation, dtype, precision, bias)
        assert [v.name for v in found] == list(NAMES), what
        assert all(v.reason for v in found), what
        by_name = {v.name: v for v in found}
        assert chosen(by_name) == ["xla"], what  # nothing was measured
        for name in OWN:
            refused = by_name[name].verdict == "unavailable"
            asked = {"device": device, "activation": activation, "precision": precision, "implementation": name}
            if refused:
                with pytest.raises(BackendError) as caught:
                    GEMM_EPILOGUE.choose(*args, **asked)
                assert by_name[name].reason in str(caught.value), what
            else:
                assert GEMM_EPILOGUE.choose(*args, **asked) == name, what
                assert chosen(verdicts(*args, **asked)) == [name], what


@pytest.mark.parametrize("device", DEVICES[2:])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_runs_where_there_is_a_recent_gpu(device, activation):
    found = verdicts(*operands(), device=device, activation=activation)
    runs = {name for name in OWN if found[name].verdict == "possible"}
    assert ("cublaslt" in runs) == (activation in ("none", "relu", "gelu_tanh"))
    assert ("cuda" in runs) == (activation in KERNEL_ACTIVATIONS and activation != "none")


def test_an_old_gpu_is_refused_with_the_oldest_that_would_do():
    found = verdicts(*operands(), device="sm_70", activation="relu")
    for name in OWN:
        assert found[name].verdict == "unavailable"
        assert "sm_70 is older than sm_75" in found[name].reason
        with pytest.raises(BackendError, match="sm_70 is older than sm_75"):
            GEMM_EPILOGUE.choose(*operands(), device="sm_70", activation="relu", implementation=name)


@pytest.mark.parametrize(("missing", "refused"), [("cupy", OWN), ("nvmath", ("cublaslt",))])
def test_a_device_without_a_package_is_refused_what_needs_it(missing, refused):
    device = dataclasses.replace(Device.of("sm_90"), missing=(missing,))
    found = verdicts(*operands(), device=device, activation="relu")
    assert {name for name in OWN if found[name].verdict == "unavailable"} == set(refused)
    for name in refused:
        assert "is not installed: pip install" in found[name].reason


def test_a_decision_hangs_on_the_device_s_record_alone(monkeypatch):
    real = dataclasses.replace(Device.of("sm_90"), simulated=False, cudnn="8.9.7")

    def asked(name, *_):
        raise AssertionError(f"asked whether {name} is installed")

    monkeypatch.setattr(importlib.util, "find_spec", asked)
    assert {v.name for v in verdicts(*operands(), device=real, activation="relu").values()} == set(NAMES)


@pytest.mark.parametrize("name", OWN)
def test_a_cpu_is_refused_with_the_reason(name):
    assert "it needs a CUDA device, this is a CPU (simulated)" in verdicts(*operands(), device="cpu")[name].reason
    x, w, b = jnp.ones((8, 4)), jnp.ones((4, 16)), jnp.ones(16)
    with pytest.raises(
        BackendError, match=f"implementation '{name}' cannot run this call on .*: it needs a CUDA device"
    ):
        gemm_epilogue(x, w, b, activation="relu", implementation=name)


@pytest.mark.parametrize(
    ("attrs", "sizes", "reason"),
    [
        ({"activation": "silu"}, {}, "no epilogue for silu"),
        ({"precision": lax.Precision.HIGH}, {}, "precision HIGH"),
        ({"precision": (lax.Precision.HIGHEST, lax.Precision.HIGH)}, {}, "precision HIGH"),
        ({"precision": "BF16_BF16_F32"}, {}, "names an algorithm"),
        ({"activation": "gelu_tanh"}, {"n": 12}, "N = 12 is not a multiple of 8"),
        ({}, {"m": 0}, "an operand is empty"),
    ],
)
def test_cublaslt_says_what_it_cannot_do(attrs, sizes, reason):
    found = verdicts(*operands(**sizes), **attrs)["cublaslt"]
    assert found.verdict == "unavailable"
    assert reason in found.reason


def test_a_misspelt_implementation_is_told():
    with pytest.raises(UnknownNameError, match="Did you mean 'cublaslt'"):
        GEMM_EPILOGUE.choose(*operands(), device="sm_90", implementation="cublas")


def test_forward_mode_is_xla_s_and_says_so():
    present, full = GEMM_EPILOGUE._prepared(operands(), {}, Device.of("sm_90"))
    found = GEMM_EPILOGUE.decide("tangent", present, Device.of("sm_90"), **full)
    assert found.implementation == "xla"
    assert "forward mode" in found.reason


def test_another_platform_is_xla_s():
    present, full = GEMM_EPILOGUE._prepared(operands(), {}, Device("tpu"))
    assert GEMM_EPILOGUE.decide("call", present, Device("tpu"), **full).implementation == "xla"
    assert {v.verdict for v in GEMM_EPILOGUE.backends(*operands(), device=Device("tpu"))} == {
        "same code",
        "unavailable",
    }


# What was measured.

XLA_WINS, CUBLASLT_WINS = {"xla": 10.0, "cublaslt": 12.5}, {"xla": 12.5, "cublaslt": 10.0}


def test_a_measured_call_is_taken_with_both_times_as_its_reason(nothing_measured):
    nothing_measured(operands(), "cublaslt", CUBLASLT_WINS, activation="relu")
    found = verdicts(*operands(), activation="relu")
    assert chosen(found) == ["cublaslt"]
    assert found["cublaslt"].verdict == "chosen"
    assert found["cublaslt"].reason.startswith("measured: cublaslt 10 µs, xla 12.5 µs (plan file ")
    assert GEMM_EPILOGUE.choose(*operands(), device="sm_90", activation="relu") == "cublaslt"
    assert chooser.CHOICES.counters()["hits"] >= 2


def test_where_xla_won_the_fusion_stays_off_and_both_times_say_why(nothing_measured):
    nothing_measured(operands(), "xla", XLA_WINS, activation="relu")
    found = verdicts(*operands(), activation="relu")
    assert chosen(found) == ["xla"]
    assert found["xla"].verdict == "same code"
    assert "measured: xla 10 µs, cublaslt 12.5 µs (plan file " in found["xla"].reason
    assert found["cublaslt"].verdict == "possible"
    named = verdicts(*operands(), activation="relu", implementation="cublaslt")
    assert chosen(named) == ["cublaslt"]
    assert named["cublaslt"].reason == "named by the caller"


@pytest.mark.parametrize(
    ("args", "attrs", "device"),
    [
        (operands(), {"activation": "gelu_tanh"}, "sm_90"),
        (operands()[:2], {"activation": "relu"}, "sm_90"),
        (operands("float16"), {"activation": "relu"}, "sm_90"),
        (operands(n=132), {"activation": "relu"}, "sm_90"),
        (operands(m=512), {"activation": "relu"}, "sm_90"),
        (operands(), {"activation": "relu"}, "sm_80"),
        (operands(), {"activation": "relu"}, "cpu"),
    ],
    ids=["activation", "bias", "dtype", "columns", "far rows", "architecture", "cpu"],
)
def test_what_was_measured_decides_no_other_call(nothing_measured, args, attrs, device):
    nothing_measured(operands(), "cublaslt", CUBLASLT_WINS, activation="relu")
    assert chosen(verdicts(*args, device=device, **attrs)) == ["xla"]


def test_a_call_near_the_measured_one_takes_its_choice_and_says_so(nothing_measured):
    nothing_measured(operands(), "cublaslt", CUBLASLT_WINS, activation="relu")
    found = verdicts(*operands(m=128), activation="relu")
    assert chosen(found) == ["cublaslt"]
    assert found["cublaslt"].reason.endswith("at 64 x 128 x 32, the nearest measured)")


def test_a_table_says_who_won_before_and_a_plan_file_who_wins_here(nothing_measured, monkeypatch):
    nothing_measured(operands(), "cublaslt", CUBLASLT_WINS, activation="relu")
    file = chooser.CHOICES.path
    choices.TABLES.mkdir()
    file.rename(choices.TABLES / "sm_90.json")
    monkeypatch.setattr(chooser, "CHOICES", Choices(file))  # tables are read once
    assert "(the table for sm_90)" in verdicts(*operands(), activation="relu")["cublaslt"].reason
    nothing_measured(operands(), "xla", XLA_WINS, activation="relu")
    assert chosen(verdicts(*operands(), activation="relu")) == ["xla"]


def test_a_winner_that_cannot_run_the_call_is_passed_over_with_the_reason(nothing_measured):
    nothing_measured(operands(n=16), "cublaslt", CUBLASLT_WINS, activation="silu")
    found = verdicts(*operands(n=16), activation="silu")
    assert chosen(found) == ["xla"]
    assert "'cublaslt' was fastest but cannot run this call: cuBLASLt has no epilogue for silu" in found["xla"].reason


def test_a_winner_that_this_version_does_not_have_is_passed_over(nothing_measured):
    nothing_measured(operands(), "of the future", {"xla": 12.5, "of the future": 1.0}, activation="relu")
    found = verdicts(*operands(), activation="relu")
    assert chosen(found) == ["xla"]
    assert (
        "'of the future' was fastest but cannot run this call: this version of FusionLab has no such"
        in found["xla"].reason
    )


# Masks in bits.


def packed(device, *args, **attrs):
    return GEMM_EPILOGUE._prepared(args or operands(), attrs, Device.of(device))[1]["packed"]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("implementation", [None, *NAMES])
def test_masks_are_packed_on_cuda_alone_and_not_for_xla_s_code(activation, implementation):
    wanted = activation in ("relu", "relu_where") and implementation in OWN
    for device in DEVICES[1:]:
        assert packed(device, activation=activation, implementation=implementation) is wanted
    assert packed("cpu", activation=activation, implementation=implementation) is False


@pytest.mark.parametrize("bits", [True, False])
def test_whether_a_mask_is_packed_is_measured_too(nothing_measured, bits):
    nothing_measured(operands(), "cuda", {"cuda": 1.0}, packed=True, settings={"packed": bits}, activation="relu")
    assert packed("sm_90", activation="relu") is bits
    assert packed("cpu", activation="relu") is False
    assert packed("sm_80", activation="relu") is False


def test_masks_are_not_packed_where_columns_may_be_split(monkeypatch):
    assert packed("sm_90", activation="relu", implementation="cuda") is True
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert packed("sm_90", activation="relu", implementation="cuda") is False
