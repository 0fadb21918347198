"""What the tests take, by the record: it is judged, never the clock. `python -m tests.durations record` writes it anew."""

from __future__ import annotations

import json

import pytest

from tests import durations
from tests.tiers import RECORD, function_of

HELD = json.loads(RECORD.read_text("utf-8"))


def limit(name: str) -> float:
    return durations.MOST_SECONDS_OF_A_SCREEN if name.startswith(durations.SCREENS) else durations.MOST_SECONDS


def test_no_test_of_the_default_tier_takes_longer_than_it_may():
    assert {name: s for name, s in HELD["seconds"].items() if s > limit(name)} == {}


def test_the_default_tier_stays_within_its_minutes():
    assert sum(HELD["seconds"].values()) / 60 <= durations.MOST_MINUTES


def test_the_record_knows_nearly_all_tests(request):
    """Of those that this run collects; a new one may wait for the next record, but not many may."""
    mine = {function_of(item.nodeid) for item in request.session.items if "gpu" not in item.keywords}
    missing = mine - HELD["seconds"].keys()
    assert len(missing) <= 0.05 * len(HELD["seconds"]), missing


def test_a_run_is_held_against_the_record(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(durations, "RECORD", tmp_path / "held.json")
    (tmp_path / "held.json").write_text(json.dumps({"seconds": {"a": 4.0, "b": 4.0, "c": 0.1, "d": 9.0}}))
    (tmp_path / "fresh.json").write_text(json.dumps({"seconds": {"a": 9.0, "b": 7.0, "c": 1.0, "e": 3.0}}))
    assert durations.main(["compare", str(tmp_path / "fresh.json")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "0.3 minutes of processor time, 0.3 on record; 2 tests differ by more than 2x",
        "    9.0 s, 4.0 s on record: a",
        "    3.0 s, not on record: e",
    ]


@pytest.mark.parametrize(
    ("arguments", "whole"),
    [
        (["tests/house"], True),
        (["-q", "tests/house/test_durations.py"], True),
        (["tests/docs", "tests/house/test_prose.py"], False),
        (["tests/house/test_durations.py", "-k", "time"], False),
        (["tests/house/test_durations.py::test_time_of_child_processes_counts"], False),
        (["-q"], False),
    ],
)
def test_a_file_that_was_run_whole_has_no_other_tests(arguments, whole):
    assert durations.ran_whole("tests/house/test_durations.py::test_that_was_removed", arguments) is whole


def test_time_of_child_processes_counts():
    begun = durations.processor_seconds()
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    durations.subprocess.run([durations.sys.executable, "-c", burn], check=True)
    assert durations.processor_seconds() - begun >= 0.3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_writes_what_its_tests_took(pytester, workers):
    pytester.makeini(f"[pytest]\npythonpath = {durations.ROOT}\n")
    pytester.makeconftest(
        "from pathlib import Path\nfrom tests.durations import Recorder\n"
        "def pytest_configure(config):\n    config.pluginmanager.register(Recorder(config, Path('told.json')))\n"
    )
    pytester.makepyfile(
        "import pytest, time\n@pytest.mark.parametrize('n', range(3))\ndef test_busy(n):\n"
        "    end = time.process_time() + 0.1\n    while time.process_time() < end: pass\ndef test_idle(): time.sleep(0.3)\n"
    )
    done = pytester.runpytest_subprocess("-n", str(workers), "-p", "no:cacheprovider")
    assert done.parseoutcomes()["passed"] == 4
    told = json.loads((pytester.path / "told.json").read_text())
    (busy, idle) = (next(v for k, v in told["seconds"].items() if name in k) for name in ("busy", "idle"))
    assert 0.3 <= busy < 1.0
    assert idle < 0.2
    assert sorted(told["cases"].values()) == [1, 3]
    assert len(told["collection"]) == max(1, workers)
    done.stdout.fnmatch_lines(["processor time: * of 4 cases of 2 functions; collection *"])
