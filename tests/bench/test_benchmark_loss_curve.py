"""`python -m benchmarks loss_curve` at tiny sizes: what is wrong is outside the band, the fused program is not."""

from __future__ import annotations

import json

import pytest

from benchmarks.programs import loss_curve as bench


@pytest.mark.dear
def test_the_fused_program_is_inside_and_wrong_gradients_are_seen(tmp_path, capsys):
    file = tmp_path / "record.json"
    assert bench.main(["--quick", "--runs", "3", "--layers", "2", "--width", "32", "--gradients", "-o", str(file)]) == 0
    record = json.loads(file.read_text())
    cases = record["cases"]
    assert {name: one["verdict"] for name, one in cases.items() if name != "times 1.01"} == {
        "fused": "inside the band",
        "one step late": "outside the band",
        "times 1.5, SGD": "outside the band",
    }
    weight = "['layers'][0]['up']"
    assert f"moments['first']{weight}" in cases["one step late"]["arrays_outside"]
    assert f"parameters{weight}" in cases["times 1.5, SGD"]["arrays_outside"]
    assert not any(name.startswith(("parameters", "loss")) for name in cases["times 1.01"]["arrays_outside"])
    (worse,) = record["gradients"]["worse"]
    assert worse.startswith(f"gradient parameters{weight}")
    assert "1.01 times the reference as a whole" in worse
    assert "one step late: outside the band" in capsys.readouterr().out
