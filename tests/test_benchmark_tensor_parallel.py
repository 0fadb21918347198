"""`python -m benchmarks tensor_parallel` at a small size: right results, the sites it names, a record."""

from __future__ import annotations

import json

from benchmarks.tensor_parallel import main

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
