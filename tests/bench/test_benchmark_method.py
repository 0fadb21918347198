"""`python -m benchmarks timing_method --busy` and `optimiser_steps` at few runs and layers: what their records hold, what is a fault."""

from __future__ import annotations

import json

import pytest

from benchmarks.method import optimiser_steps, timing_method


@pytest.mark.dear
def test_a_record_beside_a_busy_process_has_each_run_and_what_was_wrong(tmp_path):
    status = timing_method.main(["--busy", "--runs", "2", "-o", str(tmp_path / "busy.json")])
    record = json.loads((tmp_path / "busy.json").read_text())
    assert record["command"] == "python -m benchmarks timing_method --busy --runs 2"
    assert record["wrong verdicts"] == timing_method.wrong_verdicts(record)
    assert status == (record["wrong verdicts"] > 0)
    for kind in timing_method.WRONG:
        assert len(record[kind]["runs"]) == sum(record[kind]["verdicts"].values()) == 2
        assert all(one["others"] >= 0 and one["waited"] >= 0 for one in record[kind]["runs"])


@pytest.mark.dear
def test_a_record_of_steps_has_the_seconds_of_each_stage(tmp_path):
    optimiser_steps.main(["--layers", "1", "--only", "sgd, pure", "-o", str(tmp_path / "steps.json")])
    (row,) = json.loads((tmp_path / "steps.json").read_text())["steps"]
    assert (row["step"], row["WORSE"], row["gradients"]) == ("sgd, pure", [], 0)
    stages = {stage.partition(", about ")[0] for stage in row["stages"]}  # a long one has an estimate
    assert {"float64 reference", "timing step", "searching"} <= stages
    assert sum(wall for wall, _ in row["stages"].values()) == pytest.approx(row["seconds"], rel=0.1)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, []),
        ({"WORSE": ["output w"]}, ["1 outputs WORSE"]),
        ({"gradients": 3}, ["differentiated once more"]),
        ({"differentiated once more": True}, ["differentiated once more"]),
        ({"seconds": 20.5}, ["took more than 20 s"]),
    ],
)
def test_what_a_step_falls_short_of(changed, says):
    row = {"WORSE": [], "gradients": 0, "differentiated once more": False, "seconds": 3.0}
    assert list(optimiser_steps.faults(row | changed)) == says
