"""The table of a card as one record: what it holds, that an interrupt loses nothing, and that the card's choices come from it."""

from __future__ import annotations

import json

import jax
import pytest

import fusionlab as fl
from benchmarks.method import standard, table
from fusionlab.device import Device
from fusionlab.evidence import tuning
from fusionlab.kernels.choose import choices
from fusionlab.kernels.choose.plan_files import read_plan_file
from fusionlab.progress import Stages
from fusionlab.verbs import tuning as tuning_verb
from tests.evidence.test_tuning import bench as bench

SHIPPED = choices.TABLES / "sm_90.json"


@pytest.fixture
def card(bench, monkeypatch, tmp_path):
    """An L4 that this process seems to have, with no table; `card.out` is the record's file."""
    monkeypatch.setenv("FUSIONLAB_TABLES", "")
    bench.device = Device("cuda", "sm_89", "NVIDIA L4", memory=24 << 30, driver="570.1")
    monkeypatch.setattr(Device, "current", classmethod(lambda cls: bench.device))
    monkeypatch.setattr(table, "RESULTS", tmp_path / "results")
    bench.out = tmp_path / "out" / "mine.json"
    return bench


def measure(card, *more):
    return table.main(["--device", "here", "--quick", "-o", str(card.out), *more])


def test_a_record_is_a_plan_file_with_samples_flags_and_commit(card, capsys):
    assert measure(card) == 0
    record = json.loads(card.out.read_text())
    assert record["benchmark"] == "table"
    assert set(record["environment"]) >= {"hardware", "driver", "versions", "xla_flags", "settings", "commit", "time"}
    (measured,) = record["archs"]["sm_89"]
    assert (measured["device"], measured["versions"]["driver"]) == ("NVIDIA L4", "570.1")
    for case in measured["cases"].values():
        assert {name: len(taken) for name, taken in case["samples_us"].items()} == dict.fromkeys(case["times_us"], 10)
    said = capsys.readouterr().out
    n = len(measured["cases"])
    assert "0 calls measured before, 8 to measure, about " in said
    assert f"{n} calls measured, {n} of them with an implementation faster than XLA's; written to {card.out}" in said
    lines = card.out.read_text().splitlines()
    assert max(map(len, lines)) < 400
    assert len(lines) < 25 * n + 60
    _, fn, shapes = standard.programs(quick=True)[0]
    (site,) = fl.find(fn, *shapes).candidates  # `measure` has named it as the plan file
    assert site.backend.reason.endswith(f"(plan file {card.out})")


def test_interrupted_it_keeps_what_was_measured_and_the_same_command_goes_on(card, monkeypatch, capsys):
    def interrupted(programs, real=tuning.time_on_device, **how):
        if len(card.timed) == 5:
            raise KeyboardInterrupt
        return real(programs, **how)

    with monkeypatch.context() as patched:
        patched.setattr(tuning, "time_on_device", interrupted)
        assert measure(card) == table.INTERRUPTED
    half = json.loads(card.out.read_text())
    assert half["environment"]["commit"] is not None
    assert half["archs"]["sm_89"][0]["cases"]
    assert measure(card, "--budget", "0") == 0  # measures nothing, and lists what is left
    assert json.loads(card.out.read_text())["archs"] == half["archs"]
    capsys.readouterr()
    assert measure(card) == 0
    assert "calls measured before" in capsys.readouterr().out
    whole, rounds = json.loads(card.out.read_text())["archs"]["sm_89"][0]["cases"], len(card.timed)
    assert half["archs"]["sm_89"][0]["cases"].keys() < whole.keys()
    assert measure(card) == 0
    assert len(card.timed) == rounds


def test_taken_in_it_is_the_table_of_that_card_and_of_no_other_chip(card, monkeypatch, capsys):
    _, fn, shapes = standard.programs(quick=True)[0]
    assert measure(card) == 0
    assert table.main(["--add", str(card.out)]) == 1
    assert "got a record of --quick" in capsys.readouterr().err
    card.out.write_text(card.out.read_text().replace(" --quick", ""))
    before = card.out.read_bytes()
    assert table.main(["--add", str(card.out)]) == 0
    (kept,) = (table.RESULTS / "l4").iterdir()
    assert kept.read_bytes() == before
    card.out.write_text(card.out.read_text().replace("570.1", "580.2"))  # of another machine, on the same day
    for _ in range(2):
        assert table.main(["--add", str(card.out)]) == 0
    assert sorted(path.stem.partition("jax")[2].count("_") for path in kept.parent.iterdir()) == [0, 1]
    assert kept.read_bytes() == before
    monkeypatch.setenv("FUSIONLAB_TABLES", "")
    monkeypatch.setenv("FUSIONLAB_PLAN_FILE", str(card.file))
    added = read_plan_file(choices.TABLES / "sm_89.json", "")["sm_89"].cases
    assert added.keys() == read_plan_file(card.out, "")["sm_89"].cases.keys()
    assert not any(case.samples_us for case in added.values())
    chosen = {name: fl.find(fn, *shapes, device=name).candidates[0] for name in (None, "l4", "rtx4090", "a100")}
    assert {name: site.backend.name for name, site in chosen.items()} == {
        None: "cublaslt",
        "l4": "cublaslt",
        "rtx4090": "xla",
        "a100": "xla",
    }
    assert chosen["l4"].backend.reason.endswith("(the table for sm_89)")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (lambda record: record.pop("environment"), "without command, flags and commit"),
        (lambda record: record["archs"]["sm_89"][0].update(device=""), "needed the name of the card"),
        (lambda record: record["archs"]["sm_89"].append(record["archs"]["sm_89"][0] | {"device": "A"}), "one card"),
        (lambda record: [c.pop("samples_us") for c in record["archs"]["sm_89"][0]["cases"].values()], "samples"),
        (lambda record: record.update(format=9), "is not a plan file"),
    ],
)
def test_what_is_no_record_is_refused_and_nothing_is_added(card, capsys, changed, told):
    assert measure(card) == 0
    record = json.loads(card.out.read_text().replace(" --quick", ""))
    changed(record)
    card.out.write_text(json.dumps(record))
    assert table.main(["--add", str(card.out)]) == 1
    assert told in capsys.readouterr().err
    assert not choices.TABLES.exists()
    assert not table.RESULTS.exists()


def test_another_file_in_the_records_place_stays_as_it_is(card, capsys):
    card.out.parent.mkdir()
    card.out.write_text(text := '{"mine": 1}')
    assert measure(card) == 1
    assert "is not a plan file" in capsys.readouterr().err
    assert card.out.read_text() == text


def test_an_older_card_is_measured_in_float16(card):
    card.device = Device("cuda", "sm_75", "Tesla T4", driver="570.1")
    assert measure(card) == 0
    (measured,) = json.loads(card.out.read_text())["archs"]["sm_75"]
    dtypes = {json.loads(text)["dtype"] for text in measured["cases"]}
    assert dtypes == {"float16", "float32"}


def test_without_a_gpu_one_error_says_what_is_needed(card, capsys):
    card.device = Device.of("cpu")
    assert measure(card) == 2
    assert "needed a CUDA GPU that JAX sees" in capsys.readouterr().err
    assert not card.out.exists()


@pytest.mark.dear
def test_the_standard_programs_have_every_call_of_the_shipped_table(card):
    card.device = Device.of("h200")
    cases = set()
    for wide, programs in standard.by_precision(standard.programs()).items():
        every, shapes = standard.together(programs)
        with jax.enable_x64(wide):
            calls = next(tuning_verb._calls(every, (shapes,), {}, None, True, {}, Stages()))
            cases |= {call.case(**change) for call in calls for change, *_ in tuning._variants(call, card.device)}
    assert read_plan_file(SHIPPED, "")["sm_90"].cases.keys() <= cases
    ops = {json.loads(text)["op"] for text in cases}
    assert ops >= {"layer_norm", "group_norm", "dot_product_attention", "linear_cross_entropy", "gated_matmul"}
