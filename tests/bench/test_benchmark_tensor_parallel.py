"""`python -m benchmarks tensor_parallel` at a small size: right results, the sites it names, a record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.devices import tensor_parallel
from benchmarks.devices.tensor_parallel import ERROR, main

RECORDS = Path(tensor_parallel.__file__).parents[1] / "results" / "h100"

SMALL = [
    "--quick",
    "--embed",
    "64",
    "--head",
    "16",
    "--seq",
    "16",
    "--batch",
    "2",
    "--dtype",
    "float32",
    "--samples",
    "2",
]


def test_it_checks_and_times_every_program(tmp_path, capsys):
    path = tmp_path / "record.json"
    assert main([*SMALL, "--devices", "1,4096", "-o", str(path)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("1 devices: jax.jit ")
    assert "4096 devices: left out" in said.err
    record = json.loads(path.read_text())
    assert record["command"].startswith("python -m benchmarks tensor_parallel --quick --embed 64")
    (case,) = record["cases"].values()
    assert case["mesh"] == {"tensor": 1}
    assert case["programs"]["layers"]["sites"] == {"multi_devices_multi_transformer_encoder": 1}
    assert case["programs"]["pieces"]["sites"]["dot_product_attention"] == 1
    assert all(one["error"] < 1e-5 for one in case["programs"].values())
    assert set(case["times"]) == {"jax.jit", "layers", "pieces"}


@pytest.fixture(scope="module")
def record():
    return json.loads(max(RECORDS.glob("tensor_parallel_*.json")).read_text())


def test_on_record_every_program_is_right_and_the_fused_ones_are_faster_on_as_many_gpus(record):
    assert list(record["cases"]) == ["1", "2"]
    for case in record["cases"].values():
        assert all(one["error"] < ERROR["bfloat16"] for one in case["programs"].values())
        for fused in ("layers", "pieces"):
            assert case["programs"][fused]["collectives"] == case["programs"]["jax.jit"]["collectives"]
            assert case["times"][fused]["interval"][0] > 1.3  # times as fast as jax.jit


def test_on_record_two_gpus_are_faster_than_one(record):
    one, two = (record["cases"][n]["times"]["layers"]["median_s"] for n in "12")
    assert one / two > 1.6
