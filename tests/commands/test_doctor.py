"""`fusionlab doctor` says what is here, what is missing, and one thing to do next."""

import dataclasses
import importlib.util
import json
import shutil

import jax
import numpy as np
import pytest

from fusionlab.commands.doctor import doctor
from fusionlab.commands.kernels_by_gpu import kernels_by_gpu
from fusionlab.device import Device, driver_in
from fusionlab.errors import ArgumentError, CacheWarning
from fusionlab.evidence.instruments import peaks
from fusionlab.kernels import CARDS, OPS, sources
from fusionlab.kernels.choose import choices
from fusionlab.kernels.choose.plan_files import Choice, Measured, case_text, write


@pytest.fixture
def without(monkeypatch):
    """Hides packages and programs by name."""

    def hide(*names):
        find, which = importlib.util.find_spec, shutil.which
        monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n in names else find(n, *a))
        monkeypatch.setattr(shutil, "which", lambda n, *a, **k: None if n in names else which(n, *a, **k))

    return hide


def by_name(records):
    return {r.name: r for r in records}


def test_versions_and_devices_are_this_machines():
    found = doctor()
    assert found.versions["jax"] == jax.__version__
    assert found.versions["numpy"] == np.__version__
    assert len(found.devices) == len(jax.devices())
    assert found.devices[0].startswith("cpu: ")
    assert found.next_command == "fusionlab demo -o demo"
    abilities = by_name(found.abilities)
    assert abilities["backend xla"].ready
    assert abilities["backend xla_blockwise"].ready
    for name in ("cublaslt", "cuda", "cudnn"):
        assert not abilities[f"backend {name}"].ready
        assert "JAX sees no CUDA GPU" in abilities[f"backend {name}"].reason


def test_the_caches_of_the_process_are_counted():
    found = doctor()
    assert set(found.caches) == {"plans", "kernels", "choices"}
    before = found.caches["choices"]
    device = Device.of("sm_90")
    shapes = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((64, 32), (32, 8))]
    OPS["gemm_epilogue"].backends(*shapes, device=device, activation="relu")
    after = doctor().caches["choices"]
    assert sum(after.values()) > sum(before.values())
    assert "  choices " in str(found)


def test_the_device_s_peaks_are_measured_when_asked_for(monkeypatch):
    def measured():
        return dataclasses.replace(Device.current(), copy_bytes_per_s=25e9, gemm_flop_per_s=1.5e11)

    assert "(measured" not in str(doctor())
    assert doctor().device.copy_bytes_per_s is None
    monkeypatch.setattr(peaks, "measure_peaks", measured)
    found = doctor(measure=True)
    assert "GiB, copies 25 GB/s (measured, read and written), multiplies 0.15 TFLOP/s (measured, float32)" in str(found)
    assert found.to_dict()["device"]["gemm_flop_per_s"] == 1.5e11


class FakeGpu:
    """What JAX says of a GPU."""

    platform, device_kind, compute_capability = "gpu", "NVIDIA H200", "9.0"

    class client:  # noqa: N801
        platform_version = "PJRT C API\ncuda 13000"

    def memory_stats(self):
        return {"bytes_limit": 1 << 37}


def test_a_gpu_is_described_by_what_jax_and_the_packages_say(monkeypatch, without, request):
    without("nvmath")
    monkeypatch.setattr(jax, "local_devices", lambda: [FakeGpu()])
    platforms = jax.config.jax_platforms
    request.addfinalizer(lambda: jax.config.update("jax_platforms", platforms))
    jax.config.update("jax_platforms", None)  # told to use the CPU alone, JAX is not asked
    versions = {"nvidia-cudnn-cu12": "9.10.2.21", "nvidia-cublas": "13.1.0.3"}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = Device.current()
    assert (found.platform, found.arch, found.name, found.memory) == ("cuda", "sm_90", "NVIDIA H200", 1 << 37)
    assert (found.runtime, found.cudnn, found.cublaslt) == ("13000", "9.10.2.21", "13.1.0.3")
    assert "nvmath" in found.missing


def test_every_backend_of_every_op_is_reported():
    backends = {a.name.removeprefix("backend ") for a in doctor().abilities if a.name.startswith("backend ")}
    assert backends == {name for op in OPS.values() for name in op.implementations}
    assert all({r.name for r in card.requirements} == set(card.op.implementations) for card in CARDS)


def test_what_each_gpu_has_of_each_pass_is_a_table(monkeypatch):
    lines = str(doctor()).splitlines()
    head = next(line for line in lines if line.split()[:1] == ["sm_75"])
    assert head.split() == ["sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120"]
    (row,) = [line for line in lines if line.startswith("  multi_transformer ")]
    assert row.split()[1:] == ["refused", "refused", "refused", "measured", "compiled", "compiled"]
    monkeypatch.setattr(Device, "current", lambda: Device.of("sm_103"))  # of a machine with such a GPU
    found = doctor()
    assert [one.state.value for one in found.kernels["lerp"]][-2:] == ["compiled"] * 2
    assert found.kernels["lerp"][-1].arch == "sm_103"
    assert "grouped_matmul: mosaic: sm_103 is not sm_90, which alone has warpgroup products (wgmma)" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["kernels"]["lerp"][-1]["runs"] == ["cuda"]


def test_a_missing_package_is_named_with_its_remedy(without):
    without("vl_convert", "matplotlib")
    found = doctor()
    assert not by_name(found.abilities)["PDF pictures"].ready
    assert not by_name(found.abilities)["plots"].ready
    assert found.next_command == "pip install matplotlib"
    assert "pip install 'fusionlab[pdf]'" in str(found)


def test_the_report_prints_every_need_and_goes_through_json():
    found = doctor()
    data = json.loads(json.dumps(found.to_dict()))
    assert {n["name"] for n in data["needs"]} >= {"graphviz", "matplotlib", "anywidget"}
    assert any(n["name"] in ("cupy", "cupy-cuda12x", "cupy-cuda13x") for n in data["needs"])
    assert all(n["present"] == (n["version"] is not None) for n in data["needs"])
    text = str(found)
    assert all(n.name in text for n in found.needs)
    assert all(a.reason in text for a in found.abilities)
    assert text.endswith(found.next_command)


def test_nothing_optional_is_imported_to_find_out(monkeypatch):
    asked = []
    monkeypatch.setattr(importlib, "import_module", lambda name, *a: asked.append(name))
    doctor()
    assert asked == []


def test_a_device_is_named_simulated_or_refused():
    assert Device.of("sm_90").capability == 90
    assert Device.of("sm_90").simulated
    assert str(Device.of("sm_120")) == "a CUDA sm_120 device (simulated)"
    assert Device.of(None) == Device.current()
    assert not Device.current().simulated
    assert Device.of("cpu").capability == 0
    for odd in ("sm90", "h-1000", "", "sm_90a"):
        with pytest.raises(
            ArgumentError,
            match=r"device: got .*'sm_NN'.* one of 'a100', 'l4', 'h100', 'h200', 'b200', 'rtx4090', 'rtx5090', 't4'",
        ):
            Device.of(odd)


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("a100", 80),
        ("L4", 89),
        ("h100", 90),
        ("H200", 90),
        ("B200", 100),
        ("RTX 4090", 89),
        ("rtx4090", 89),
        ("rtx5090", 120),
        ("T4", 75),
    ],
)
def test_a_card_is_one_of_its_architecture(name, arch):
    card = Device.of(name)
    assert (card.capability, card.platform, card.simulated) == (arch, "cuda", True)
    assert name.upper().replace(" ", "") in str(card)
    assert str(card).endswith(f", sm_{arch} (simulated)")
    assert Device.of("SM_90") == Device.of("sm_90")


def test_a_notebook_shows_a_line_or_the_report():
    found = doctor()
    assert "\n" not in repr(found)
    ready = sum(a.ready for a in found.abilities)
    assert repr(found).startswith(f"<Doctor: {ready} of {len(found.abilities)} backends and outputs ready; next: ")
    html = found._repr_html_()
    assert html.startswith(f"<p>{ready} of {len(found.abilities)} backends and outputs ready on ")
    assert "<td>fusing</td><td>ready</td>" in html
    assert "&#x27;" in found._repr_html_()


# What /proc/driver/nvidia/version says: of the open modules (580, 550), which name the processor first, and of the closed ones.
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build  (dvs-builder)\nGCC version:  gcc 12.3.0\n"
ARM = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  550.90.07  Release Build  (dvs-builder)\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"


@pytest.mark.parametrize(
    ("text", "version"), [(OPEN, "580.159.03"), (ARM, "550.90.07"), (CLOSED, "535.104.05"), ("", None)]
)
def test_the_driver_s_version_is_read_from_what_the_kernel_says(text, version):
    assert driver_in(text) == version


@pytest.mark.parametrize(("runtime", "told"), [("13000", "CUDA 13.0"), ("12090", "CUDA 12.9"), ("13020", "CUDA 13.2")])
def test_cuda_and_the_driver_are_told_as_they_are_written(monkeypatch, runtime, told):
    card = dataclasses.replace(Device.of("h200"), runtime=runtime, driver="580.159.03")
    monkeypatch.setattr(Device, "current", lambda: card)
    assert f"{told}, driver 580.159.03" in str(doctor())


def test_a_plan_file_makes_an_op_measured_on_its_own_card_alone(monkeypatch, tmp_path):
    file = tmp_path / "plans.json"
    monkeypatch.setenv("FUSIONLAB_PLAN_FILE", str(file))
    slow = {case_text("lerp", "call", rows=8): Choice("xla", {"xla": 1.0, "cuda": 2.0})}
    here = Device("cuda", "sm_89", "NVIDIA L4", driver="570.1")

    def states(device):
        return {op: one.state.value for op, row in kernels_by_gpu(device).items() for one in row if one.arch == "sm_89"}

    before = states(here)
    assert before["lerp"] == before["layer_norm"] == "compiled"
    write(file, "sm_89", Measured(slow, {}, here.name, {"driver": "570.1"}))
    assert states(here) == before | {"lerp": "measured"}
    with pytest.warns(CacheWarning, match="none of this card"):
        assert states(dataclasses.replace(here, name="NVIDIA GeForce RTX 4090")) == before
    assert states(None) == before


def test_a_shipped_table_makes_an_op_measured_for_its_architecture(monkeypatch, tmp_path):
    monkeypatch.setattr(choices, "TABLES", tmp_path)
    monkeypatch.setattr(sources, "CHOICES", choices.Choices())
    one = {case_text("lerp", "call", rows=8): Choice("cuda", {"xla": 2.0, "cuda": 1.0})}
    write(tmp_path / "sm_89.json", "sm_89", Measured(one, {}, "NVIDIA L4", {}))
    found = {one.arch: one.state.value for one in kernels_by_gpu()["lerp"]}
    assert (found["sm_89"], found["sm_80"]) == ("measured", "compiled")
