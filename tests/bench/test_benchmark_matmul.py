"""The benchmark of matrix products at tiny sizes on a CPU: what it asks, and what its record holds."""

from __future__ import annotations

import json

import jax
import pytest

import fusionlab as fl
from benchmarks.ops import matmul_schedule as bench


def test_every_case_traces_and_each_of_its_products_has_a_route():
    names = []
    for case in bench.cases(1024, 16):  # nothing is computed: the sizes of a GPU
        shapes = [jax.ShapeDtypeStruct(s, case.dtype) for s in case.shapes]
        on = fl.find(case.fn, *shapes, passes=fl.Strategy(matmul_schedule={"library": True}), device="sm_90")
        assert len(on.routes()) == (3 if case.name == "llama" else 1)
        assert on.routes().counts()["xla"] <= (
            case.name in ("[k] @ [b,k,n]", "[m,k] @ [b,k,n]", "[1,k] @ [b,k,n]", "[b,1,m,k] @ [b,k,n]")
        )
        names.append(case.name)
    assert len(set(names)) == len(names) >= 45
    assert {"llama", "widened, cast", "alpha of the sum bfloat16", "one term to a sum"} <= set(names)


def test_a_record_holds_samples_ratios_and_routes_of_every_setting(tmp_path):
    path = tmp_path / "record.json"
    assert bench.main(["--quick", "--only", "bias, relu bfloat16", "-o", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["benchmark"] == "matmul_schedule"
    assert set(record["environment"]) >= {"hardware", "driver", "versions", "xla_flags", "settings", "commit", "time"}
    for case in record["cases"].values():
        for name in ("jax.jit", "fusionlab", "library", "no library"):
            low, high = case[name]["interval"]
            assert low <= case[name]["ratio"] <= high
            assert len(case[name]["samples_s"]) == 2
            assert case["difference to jax.jit"][name] < 1e-2
        assert {setting: [tag for tag, _, _ in rows] for setting, rows in case["products"].items()} == {
            "fusionlab": ["xla"],
            "library": ["xla"],
            "no library": ["xla"],
        }


def test_of_a_gated_pair_there_are_two_more_settings(tmp_path):
    path = tmp_path / "record.json"
    assert bench.main(["--quick", "--only", "llama", "-o", str(path)]) == 0
    case = json.loads(path.read_text())["cases"]["llama"]
    assert all(case["difference to jax.jit"][f"gated {name}"] < 2e-2 for name in ("concatenated", "kernel"))
    formulas = {setting: [formula for _, formula, _ in rows] for setting, rows in case["products"].items()}
    pair = "silu(x @ w) * (x @ v)"
    assert formulas["gated concatenated"] == [pair, pair, "a @ b"]
    assert formulas["gated kernel"] == formulas["fusionlab"]  # there is no kernel for a CPU
    (llama,) = (c for c in bench.cases(1024, 16) if c.gated)
    shapes = [jax.ShapeDtypeStruct(s, llama.dtype) for s in llama.shapes]
    for name, tag in (("concatenated", "xla"), ("kernel", "kernel")):
        found = fl.find(llama.fn, *shapes, passes=fl.Strategy(gated_matmul={"prefer": name}), device="sm_90")
        assert [(row.formula, row.tag) for row in found.routes()][:2] == [(pair, tag)] * 2


def test_without_a_gpu_it_says_what_it_needs(capsys):
    assert bench.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.main(["--no-such-option"])
