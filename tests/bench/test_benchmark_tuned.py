"""The benchmark of tuning within budgets, at tiny sizes on a CPU: a record that is added to, a program at a time."""

from __future__ import annotations

import json
import os

import pytest

from benchmarks.method import tuned as bench


@pytest.mark.dear
def test_a_record_is_added_to_by_the_next_run(tmp_path, capsys, monkeypatch):
    path = tmp_path / "tuned.json"
    assert bench.main(["--quick", "--only", "decode", "-o", str(path), "--budgets", "1,2"]) == 0
    first = json.loads(path.read_text())
    assert list(first["cases"]) == ["decode step"]
    case = first["cases"]["decode step"]
    assert case["tuning"].keys() == {"1", "2"}
    for way in ("jax.jit", "table", "untuned", "tuned 1 s", "tuned 2 s"):
        low, high = case[way]["interval"]
        assert low <= case[way]["ratio"] <= high
    assert case["share"]["table"] == pytest.approx(1.0)
    capsys.readouterr()

    def one(name, budgets, quick, keep):
        assert name == "vit train"
        keep({"tuning": {}})
        return case

    monkeypatch.setattr(bench, "one", one)
    assert bench.main(["--quick", "--only", "decode|vit", "-o", str(path)]) == 0
    assert "decode step: in the record already" in capsys.readouterr().out
    record = json.loads(path.read_text())
    assert record["cases"] == first["cases"] | {"vit train": {"tuning": {}}}
    assert record["command"].startswith(f"{first['command']}; python -m benchmarks tuned")
    assert "commit" not in record["command"]  # of both

    monkeypatch.setenv("FUSIONLAB_COMMIT", "0" * 40)
    assert bench.main(["--quick", "--only", "vit", "-o", str(path)]) == 0
    assert json.loads(path.read_text())["command"].endswith(f"  # commit {'0' * 40}")


def test_a_budget_is_that_of_all_before_it_too(tmp_path, monkeypatch):
    """The second plan begins as the first ended, and the time that took counts."""
    import fusionlab as fl
    from fusionlab.kernels.choose.tuned import Tuned

    now, asked = [100.0], []

    def tune(step, *args, budget_s, real=fl.tune):
        file = bench.Path(bench.os.environ["FUSIONLAB_PLAN_FILE"])
        asked.append((budget_s, bench.os.environ["FUSIONLAB_TABLES"], file.read_text() if file.exists() else ""))
        now[0] += budget_s
        file.write_text(f"{asked[-1][2]}{budget_s:g} ")
        return Tuned(fl.kernels.choose.choices.Measured(), None, 0, fl.Device.of("h200"))

    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(fl, "tune", tune)
    monkeypatch.setattr(bench, "programs", lambda quick: {"a step": lambda: (None, ())})
    told = bench.tune("a step", {300.0: tmp_path / "b", 60.0: tmp_path / "a"}, True)
    assert asked == [(60.0, "none", ""), (240.0, "none", "60 ")]
    assert [one["seconds"] for one in told.values()] == [60.0, 300.0]
    assert (tmp_path / "b").read_text() == "60 240 "


def test_choices_are_set_back_and_nothing_else_is(tmp_path, monkeypatch):
    """Mosaic sets a variable when it is first imported; without it no kernel of its own compiles."""
    monkeypatch.setenv("FUSIONLAB_PLAN_FILE", "mine.json")
    monkeypatch.delenv("FUSIONLAB_TABLES", raising=False)
    monkeypatch.delenv("SET_MEANWHILE", raising=False)
    with bench._choices(tmp_path / "plan.json", tables=False):
        assert os.environ["FUSIONLAB_PLAN_FILE"] == str(tmp_path / "plan.json")
        assert os.environ["FUSIONLAB_TABLES"] == "none"
        monkeypatch.setenv("SET_MEANWHILE", "1")
    assert os.environ["FUSIONLAB_PLAN_FILE"] == "mine.json"
    assert "FUSIONLAB_TABLES" not in os.environ
    assert os.environ["SET_MEANWHILE"] == "1"
