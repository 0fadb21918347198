"""The rule that says which cases run, held against made-up suites; and that this suite keeps every test function."""

from __future__ import annotations

import json

import pytest

from tests import durations, tiers

SUITE = [f"tests/a.py::test_{f}[{case}]" for f in "xyz" for case in range(200)] + ["tests/a.py::test_alone"]
TREES = [f"{n:040x}" for n in range(7, 70)]


def one(case):
    return 1


def test_every_function_keeps_its_first_case_and_about_one_in_n_of_the_others():
    kept = tiers.default_tier(SUITE, one, one_in=20)
    assert {tiers.function_of(case) for case in kept} == {tiers.function_of(case) for case in SUITE}
    assert {"tests/a.py::test_x[0]", "tests/a.py::test_alone"} <= kept
    assert 15 <= len(kept) <= 60


def test_a_case_stays_where_it_is_when_others_come_and_go():
    kept = tiers.default_tier(SUITE, one)
    fewer = [case for i, case in enumerate(SUITE) if i % 3 or i % 200 == 0]
    assert tiers.default_tier(fewer, one) == kept & set(fewer)


@pytest.mark.parametrize(("least", "count"), [(float("inf"), 200), (2, 2)])
def test_more_of_the_first_cases_are_kept_where_that_is_asked_for(least, count):
    mine = [case for case in SUITE if "test_x[" in case]
    kept = tiers.default_tier(SUITE, lambda case: least if case in mine else 1)
    assert set(mine[:count]) <= kept


def test_the_slices_together_are_the_rest_and_each_has_its_share_of_the_time():
    slices = [tiers.slice_of(SUITE, tree, lambda case: 2.0, budget=150.0) for tree in TREES]
    assert {s.parts for s in slices} == {9}  # 601 cases of 2 s
    by_index = {s.index: s.cases for s in slices}
    assert sorted(by_index) == list(range(9))
    assert sum(map(len, by_index.values())) == len(SUITE) == len(set().union(*by_index.values()))
    assert all(60 <= s.seconds <= 240 for s in slices)
    assert str(slices[0]).startswith("slice 8 of 9: ")
    assert "9 commits see everything if each draws another slice, 25 on average" in str(slices[0])


def test_a_slice_is_asked_for_by_the_hash_of_a_tree():
    with pytest.raises(ValueError, match=r"FUSIONLAB_SLICE: got 'main', needed the hash of a tree"):
        tiers.slice_of(SUITE, "main", lambda case: 1.0)


def test_what_a_case_takes_is_the_mean_on_record(tmp_path):
    path = tmp_path / "durations.json"
    held = {"seconds": {"t.py::f": 6.0, "t.py::g": 1.0}, "cases": {"t.py::f": 3, "t.py::g": 1}}
    path.write_text(json.dumps(held | {"rest_seconds": {"t.py::g": 8.0}, "rest_cases": {"t.py::g": 2}}))
    seconds = tiers.seconds_on_record(path)
    assert seconds("t.py::f[1]") == 2.0
    assert seconds("t.py::g[a[0]]") == 4.0
    assert seconds("t.py::new") == tiers.UNKNOWN_SECONDS


MODULE = """
import pytest

@pytest.mark.parametrize("case", range(100))
def test_many(case):
    pass

@pytest.mark.whole
@pytest.mark.parametrize("case", range(30))
def test_whole(case):
    pass

@pytest.mark.parametrize("case", [pytest.param("a", marks=pytest.mark.whole), "b", pytest.param("c", marks=pytest.mark.whole)])
def test_some(case):
    pass
"""


@pytest.fixture
def suite(pytester):
    """A suite with this project's conftest and options."""
    root = durations.ROOT
    pytester.makeini(
        f"[pytest]\npythonpath = {root}\naddopts = -m 'not rest' -p no:cacheprovider\n"
        "markers =\n  whole: x\n  rest: x\n  slice: x\n  gpu: x\n  devices: x\n"
    )
    tests = pytester.mkdir("tests")
    (tests / "conftest.py").write_text((root / "tests" / "conftest.py").read_text())
    (tests / "test_made.py").write_text(MODULE)

    def counts(*arguments):
        done = pytester.runpytest_subprocess("tests", *arguments)
        outcomes = done.parseoutcomes()
        return outcomes["passed"], done.stdout.str()

    return counts


def test_the_markers_choose_the_tier(suite, monkeypatch):
    monkeypatch.setenv(tiers.SLICE_VARIABLE, TREES[0])
    default, _ = suite()
    assert 33 <= default <= 45
    chosen, text = suite("-m", "slice")
    assert "slice 1 of 1: " in text
    assert default + chosen == 133


def test_a_case_asked_for_by_name_runs(pytester, suite):
    done = pytester.runpytest_subprocess(*(f"tests/test_made.py::test_many[{n}]" for n in range(40, 60)))
    assert done.parseoutcomes()["passed"] == 20
