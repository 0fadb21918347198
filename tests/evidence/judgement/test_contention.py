"""What else ran on the machine: from the scheduler's counters, made up and real."""

from __future__ import annotations

import os
import time

import pytest

from benchmarks.method.timing_method import busy_core, wrong_verdicts
from fusionlab.evidence.instruments.contention import Contention, Watching

TICK = os.sysconf("SC_CLK_TCK")


def written(folder, busy_s, threads):
    """Counters as Linux writes them: seconds that cores were at work, and (ran, waited) of each thread."""
    fields = [int(busy_s * TICK), 0, 0, 10**9, 10**6, 0, 0, 0, 0, 0]
    (folder / "stat").write_text(f"cpu  {' '.join(map(str, fields))}\ncpu0 1 2\n")
    for i, (ran, waited) in enumerate(threads):
        (folder / "self" / "task" / str(i)).mkdir(parents=True, exist_ok=True)
        (folder / "self" / "task" / str(i) / "schedstat").write_text(f"{int(ran * 1e9)} {int(waited * 1e9)} 7\n")
    return folder


@pytest.fixture
def clock(monkeypatch):
    now = {"wall": 100.0, "own": 50.0}
    monkeypatch.setattr(time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(time, "process_time", lambda: now["own"])
    return now


def test_what_others_took_and_what_this_process_waited(tmp_path, clock):
    watching = Watching(written(tmp_path, 1000.0, [(10.0, 1.0), (5.0, 0.0)]))
    clock["wall"], clock["own"] = 102.0, 53.0
    seen = Watching.seen(watching)
    assert seen is None  # none of its threads ran
    written(tmp_path, 1005.0, [(12.0, 1.5), (6.0, 0.1)])
    seen = watching.seen()
    assert seen.others == pytest.approx((5 - 3 - 2 / TICK) / 2)
    assert seen.waited == pytest.approx(0.6 / 3)
    assert (seen.is_busy, seen.is_too_much) == (True, False)


def test_a_system_without_the_counters_has_no_say(tmp_path, clock):
    assert Watching(tmp_path).seen() is None
    watching = Watching(written(tmp_path, 10.0, [(1.0, 0.0)]))
    written(tmp_path, 11.0, [(2.0, 0.0)])
    assert watching.seen() is None  # no time has passed
    clock["wall"] += 1
    assert watching.seen() is not None
    (tmp_path / "stat").write_text("nothing that is known")
    assert watching.seen() is None


@pytest.mark.parametrize(
    ("others", "waited", "busy", "too_much"),
    [
        (1.0, 0.3, True, False),
        (1.8, 3.0, True, True),
        (0.1, 3.0, False, False),  # its own threads waited for each other
        (30.0, 0.0, False, False),  # the others left it cores enough
    ],
)
def test_a_machine_is_busy_where_others_make_this_process_wait(others, waited, busy, too_much):
    seen = Contention(others, waited, 32)
    assert (seen.is_busy, seen.is_too_much) == (busy, too_much)


@pytest.mark.dear
@pytest.mark.skipif(Watching().start is None, reason="this system does not count what the scheduler does")
def test_a_process_that_computes_is_seen():
    with busy_core():
        watching, until = Watching(), time.perf_counter() + 1.0
        while time.perf_counter() < until:
            pass
        seen = watching.seen()
    assert 0.3 < seen.others <= seen.cores


def test_a_verdict_is_wrong_beside_a_busy_process_where_it_says_what_is_not_so():
    same = {"no difference": 50, "undecided: the machine is busy": 47, "faster": 2, "slower": 1}
    planted = {"slower": 60, "undecided: the machine is busy": 35, "no difference": 4, "faster": 1}
    assert wrong_verdicts({"A/A": {"verdicts": same}, "A/B": {"verdicts": planted}}) == 3 + 5
