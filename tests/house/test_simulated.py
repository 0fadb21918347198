"""The process that runs trials on simulated devices: what it answers, what it survives, and what it does not. Its trials are in
trials_of_the_helper.py.
"""

from __future__ import annotations

import pytest

from tests.simulated import Resident

TRIALS = "tests.trials_of_the_helper"


@pytest.fixture(scope="module")
def resident():
    one = Resident()
    yield one
    one.close()


def test_a_right_trial_has_no_problem_and_eight_devices(resident):
    assert resident.problem(TRIALS, "right") is None


def test_what_a_trial_returns_or_raises_is_its_problem(resident):
    assert resident.problem(TRIALS, "wrong") == "seven instead of eight"
    raised = resident.problem(TRIALS, "raises")
    assert raised.startswith("Traceback")
    assert raised.endswith("ValueError: something went wrong\n")
    assert "in raises" in raised
    assert "DID NOT RAISE" in resident.problem(TRIALS, "an_error_does_not_come")
    assert "SystemExit: 3" in resident.problem(TRIALS, "leaves")
    assert resident.problem(TRIALS, "right") is None


def test_what_a_trial_prints_is_told_with_its_problem_and_is_no_answer(resident):
    problem, _, printed = resident.problem(TRIALS, "prints").partition("\nIt printed:\n")
    assert problem == "read ''"
    assert printed.splitlines() == ["printed", "written", "without Python", "by a child 0"]
    assert resident.problem(TRIALS, "wrong") == "seven instead of eight"


def test_surroundings_are_there_for_each_trial_and_undone_after_it(resident):
    for _ in range(2):
        assert resident.problem(TRIALS, "is_surrounded") is None
        assert "something went wrong" in resident.problem(TRIALS, "raises")


def test_an_unknown_trial_or_module_is_one_clear_error(resident):
    problem = resident.problem(TRIALS, "upside_down")
    assert problem.startswith(f"{TRIALS} has no trial 'upside_down'; it has 'right', 'wrong', ")
    assert "\n" not in problem
    assert "ModuleNotFoundError: No module named 'tests.nowhere'" in resident.problem("tests.nowhere", "right")


def test_a_trial_that_ends_the_process_fails_and_the_next_one_runs(resident):
    problem = resident.problem(TRIALS, "ends_the_process")
    assert problem == f"{TRIALS}: 'ends_the_process' ended its process (7)\nIt printed:\nlast words"
    assert resident.problem(TRIALS, "right") is None


def test_a_process_that_is_killed_between_two_trials_is_replaced(resident):
    assert resident.problem(TRIALS, "right") is None
    resident._process.kill()
    resident._process.wait()
    assert resident.problem(TRIALS, "right") is None


def test_a_trial_that_takes_too_long_is_stopped(resident, monkeypatch):
    monkeypatch.setattr(resident, "limit_s", 0.5)
    assert resident.problem(TRIALS, "never_ends") == f"{TRIALS}: 'never_ends' had no answer after 0.5 s"


def test_the_process_ends_where_nothing_more_is_asked(resident):
    assert resident.problem(TRIALS, "right") is None
    process = resident._process
    resident.close()
    assert process.returncode == 0
    resident.close()


def test_the_fixture_fails_a_test_with_what_is_wrong(on_devices):
    on_devices(TRIALS, "right")
    with pytest.raises(pytest.fail.Exception, match=r"^seven instead of eight$"):
        on_devices(TRIALS, "wrong")
