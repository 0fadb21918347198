"""Tuning that ends early, from a cancel or an error: what it had measured counts, and the explorer shows it."""

import threading

import jax
import pytest

import fusionlab as fl
from fusionlab import progress
from fusionlab.evidence.comparison import Evidence
from fusionlab.evidence.instruments.record import environment
from fusionlab.kernels.choose.plan_files import Choice, Measured, quickest, write
from fusionlab.verbs import tuning
from fusionlab.viz.explorer.widget import Explorer

CARD = fl.Device("cuda", "sm_80", "NVIDIA A100-SXM4-80GB", driver="570.1")
TIMES = {"xla": 3.0, "cuda": 2.0}
MEASURED = Evidence("two", environment())
AGAIN = "searched again with what tuning had measured"


def two(x, w, b, v, c):
    return jax.nn.relu(jax.nn.relu(x @ w + b) @ v + c)


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """An explorer of two sites that wait, and the events of its tuning: it measures some calls, then goes on as `ends` says."""
    path = tmp_path / "plans.json"
    monkeypatch.setenv("FUSIONLAB_PLAN_FILE", str(path))
    monkeypatch.setattr(fl.Device, "current", classmethod(lambda cls: CARD))
    shapes = tuple(jax.ShapeDtypeStruct(s, "bfloat16") for s in ((512, 512), (512, 512), (512,), (512, 1024), (1024,)))
    found = fl.find(two, *shapes, device=CARD)
    calls = next(tuning._calls(two, shapes, {}, None, True, {}, progress.Stages()))
    begun, go, searches = threading.Event(), threading.Event(), []

    def tune(setting, told, cancel):
        kept = [call for call in calls if call.case() and "1024" not in str(call.case())][: tune.measures]
        if kept:
            measured = {call.case(): Choice(quickest(TIMES), TIMES) for call in kept}
            write(path, CARD.arch, Measured.here(CARD, measured, {}))
        begun.set()
        assert go.wait(20)
        tune.ends(told)

    def again(strategy, told):
        searches.append(strategy)
        return fl.find(found.graph, passes=strategy, device=CARD)

    def cancelled(told):
        told("tuning", 1, len(calls))
        raise AssertionError("it was cancelled")

    tune.measures, tune.ends = len(calls), cancelled
    lab = Explorer(found.graph, found, tune=tune, find=again, measure=lambda *_: MEASURED)
    return lab, tune, begun, go, searches


def implementations(lab):
    return sorted({(c.backend.name, bool(c.waits)) for c in lab.findings.candidates})


def test_a_cancel_shows_what_was_measured_until_then(tuned):
    lab, _, begun, go, searches = tuned
    assert implementations(lab) == [("xla", True)]
    thread = lab.start_tune()
    assert begun.wait(20)
    lab.cancel()
    assert lab.status.startswith("cancelled")
    go.set()
    thread.join(60)
    assert implementations(lab) == [("cuda", False)]
    assert (lab.status, len(searches), lab.busy["running"], lab.problem) == (AGAIN, 1, False, None)
    assert [str(line).partition(":")[0] for line in lab.ledger][1:] == ["tuned"]


def test_a_cancel_before_anything_was_measured_keeps_what_is_shown(tuned):
    lab, tune, begun, go, searches = tuned
    lab.measure()
    tune.measures, found = 0, lab.findings
    thread = lab.start_tune()
    assert begun.wait(20)
    lab.cancel()
    go.set()
    thread.join(60)
    assert len(searches) == 1
    assert lab.status != AGAIN
    assert not lab.busy["running"]
    assert lab.findings is found
    assert lab.evidence is MEASURED


def test_an_error_shows_what_was_measured_until_then_and_says_what_happened(tuned):
    lab, tune, _, go, _ = tuned

    def ends(told):
        raise RuntimeError("the device fell off the bus")

    tune.ends = ends
    go.set()
    lab.start_tune().join(60)
    assert implementations(lab) == [("cuda", False)]
    assert "the device fell off the bus" in lab.problem["sentence"]
    assert not lab.busy["running"]


def test_a_job_that_waits_runs_first_and_then_the_sites_are_searched_again(tuned):
    lab, _, begun, go, searches = tuned
    first = lab.start_tune()
    assert begun.wait(20)
    second = lab.start()  # cancels tuning
    go.set()
    first.join(60)
    second.join(60)
    lab.cancel()
    assert len(searches) == 1
    assert implementations(lab) == [("cuda", False)]
