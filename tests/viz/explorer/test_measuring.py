"""What an explorer measures in the background: stages with clocks, which site is to blame, rates; and how each is cancelled."""

import dataclasses
import re
import threading
import time

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.errors import ArgumentError
from fusionlab.evidence import subsets
from fusionlab.evidence.bisection import Bisection, Cause, Trial
from fusionlab.evidence.comparison import Evidence
from fusionlab.evidence.errors.numerics import Numerics
from fusionlab.evidence.instruments import timing
from fusionlab.evidence.instruments.record import environment
from fusionlab.viz.explorer.widget import Explorer
from fusionlab.viz.html.blame import Fault, faults_of, sentence_html

STAGES = "tracing after, call 2/4", "compiling after, call 2/4", "float64 reference", "timing call"


def timed(what="call", after=2e-3):
    runs = [timing.Runs(n, (s,) * 40, 1, 0.0, 0.0, 0.0) for n, s in (("before", 1e-3), ("after", after))]
    return timing.timing_of(what, *runs)


def evidence(name="f", **parts):
    return Evidence(name, environment(), **parts)


class Leaf:
    """Stands for an output or gradient."""

    def __init__(self, kind, ok):
        self.kind, self.ok = kind, ok


def numerics(*leaves):
    return Numerics(tuple(Leaf(*leaf) for leaf in leaves), (), 1, ())


# Stages.


@pytest.fixture
def at(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("fusionlab.progress.time.perf_counter", lambda: now[0])
    return lambda seconds: now.__setitem__(0, 100.0 + seconds)


def test_each_stage_is_told_with_its_clock_its_steps_and_what_is_left(case, at):
    seen = []

    def measure(setting, told, cancel):
        at(0)
        told("compiling before, call 1/4")
        seen.append(lab.busy)
        at(60)
        told("timing call", 0, 40, 20.0)
        seen.append(lab.busy)
        at(70)
        told("timing call", 10, 40, 20.0)
        seen.append(lab.busy)

    lab = Explorer(case.graph, case.findings, measure=measure)
    for before in (None, 60.0):
        seen.clear()
        lab.measure()
        assert [(b["what"], b["done"], b["seconds"], b["left"]) for b in seen] == [
            ("compiling before, call 1/4", 0, 0.0, before),  # once it was seen, it is known how long it takes
            ("timing call", 0, 0.0, 20.0 if before is None else 10.0),
            ("timing call", 10, 10.0, 10.0),
        ]
        assert all(b["running"] and b["cancel"] for b in seen)
        assert seen[1]["began"] == seen[2]["began"] != seen[0]["began"]
    assert not lab.busy["running"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_cancel_ends_it_at_its_next_stage(case, stage):
    begun, go, told_of = threading.Event(), threading.Event(), []

    def measure(setting, told, cancel):
        for task in STAGES:
            told(task)
            told_of.append(task)
            if task == stage:
                begun.set()
                assert go.wait(20)
        told("the end")
        told_of.append("the end")

    lab = Explorer(case.graph, case.findings, measure=measure)
    thread = lab.start()
    assert begun.wait(20)
    lab.cancel()
    said = f"cancelled: the running job ({'a compilation cannot be interrupted: ' * ('compiling' in stage)}{stage}) is abandoned"
    assert lab.status.startswith(said)
    go.set()
    thread.join(20)
    assert told_of == list(STAGES[: STAGES.index(stage) + 1])
    assert lab.status.startswith(said)
    assert (lab.evidence, lab.problem) == (None, None)


def test_what_is_cancelled_elsewhere_gives_nothing_back(case):
    def measure(setting, told, cancel):
        lab.cancel()
        told("timing call")
        return "evidence"

    lab = Explorer(case.graph, case.findings, measure=measure)
    assert lab.measure() is None
    assert lab.evidence is None


def test_a_search_again_and_a_file_are_told_and_have_no_cancel(case, tmp_path):
    seen = []
    lab = Explorer(case.graph, case.findings, find=lambda s, _: seen.append(lab.busy) or case.findings)
    lab.observe(lambda change: seen.append(change["new"]), "busy")
    lab.option("lerp", "reassociate", True)
    lab.save(tmp_path / "x.txt")
    running = [b for b in seen if b["running"]]
    assert list(dict.fromkeys(b["what"] for b in running)) == ["searching again", "drawing the .txt file"]
    assert {b["cancel"] for b in running} == {False}
    assert not lab.busy["running"]


def test_an_interrupt_of_a_search_again_changes_nothing(case):
    def interrupted(strategy, progress):
        raise KeyboardInterrupt

    lab = Explorer(case.graph, case.findings, find=interrupted)
    before = lab.setting, lab.panel
    with pytest.raises(KeyboardInterrupt):
        lab.option("lerp", "reassociate", True)
    assert (lab.setting, lab.panel) == before
    assert not lab.busy["running"]
    assert len(tuple(lab.ledger)) == 1


def attend(q):
    return jax.nn.dot_product_attention(q, q, q) * 2


def small(q):
    return jnp.tanh(q[0, :8, 0] @ q[0, 0])


@pytest.mark.dear
@pytest.mark.parametrize(("fn", "positions"), [(small, 8), (attend, 1024)])
def test_a_real_measurement_is_cancelled_at_whichever_stage_it_is(fn, positions):
    lab = fl.explore(fn, jax.random.normal(jax.random.key(0), (1, positions, 2, 2)), budget_s=0.5)
    stages = []
    lab.observe(lambda change: change["new"]["running"] and stages.append(change["new"]["what"]), "busy")
    lab.measure()
    lab.unobserve_all("busy")
    stages = list(dict.fromkeys(stages))
    by_site = {"compiling a program for each site", "timing sites"} if fn is attend else set()
    assert {"searching", "float64 reference", "time of each kernel", *by_site} <= set(stages)
    assert lab.evidence is not None
    for stage in stages if fn is attend else [s for s in stages if re.fullmatch("compiling after, .* 4/4", s)]:
        lab.session.measured.clear()
        lab.session.node_times = None
        told = []

        def cancel(change, stage=stage, told=told):
            if change["new"]["running"]:
                told.append(change["new"]["what"])
                if told[-1] == stage:
                    lab.cancel()

        lab.observe(cancel, "busy")
        lab.start().join(60)
        lab.unobserve(cancel, "busy")
        assert told[-1] == stage
        assert not lab.busy["running"]
        assert lab.problem is None
        assert (lab.evidence is None) == (stages.index(stage) < stages.index("drawing the measurements")), stage
    assert told
    assert lab.measure() is lab.evidence is not None


def test_a_tab_asks_for_no_measurement_while_that_runs(case):
    seen = []

    def measure(setting, told, cancel):
        seen.append({tab["name"]: tab["html"] for tab in lab.tabs})

    lab = Explorer(case.graph, case.findings, measure=measure)
    lab.measure()
    for name in ("Timing", "Errors", "Memory", "Sites"):
        assert "Being measured" in seen[0][name]
        assert "press Measure" not in seen[0][name]
    assert "press Measure" in next(tab["html"] for tab in lab.tabs if tab["name"] == "Timing")


# Which site.


def test_what_got_worse_is_read_off_the_measurement():
    grad = timed("gradient of the call")
    fine = timed(after=1e-3)
    assert faults_of(None) == faults_of(evidence(timing=fine)) == []
    assert faults_of(evidence(timing=timed(), timing_grad=grad)) == [Fault("time", False)]
    assert faults_of(evidence(timing=fine, timing_grad=grad)) == [Fault("time", True)]
    assert faults_of(evidence(numerics=numerics(("output", True)))) == []
    both = evidence(timing=timed(), numerics=numerics(("output", False), ("gradient", True)))
    assert faults_of(both) == [Fault("time", False), Fault("error", False)]
    assert faults_of(evidence(numerics=numerics(("gradient", False)))) == [Fault("error", True)]


def test_which_site_is_found_kept_with_what_was_on_and_marked(monkeypatch, tmp_path):
    """The clock is made up: the second layer is slow."""

    def model(x, w):
        for i in range(3):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ w)
        return x

    tried, told = [], []

    def clock(what, before, after, **_):
        return timed(what, 2e-3 if "layer_1" in tried[-1] else 1e-3)

    begun = subsets.Trials._begun
    monkeypatch.setattr(subsets, "time_programs", clock)
    monkeypatch.setattr(subsets.Trials, "_begun", lambda self, sites: tried.append(str(sites)) or begun(self, sites))
    lab = fl.explore(model, jnp.ones((4, 4)), jnp.ones((4, 4)))
    with pytest.raises(ArgumentError, match=r"not measured as slower or worse.*lab\.measure\(\)"):
        lab.which_site()
    lab.session.measured[lab.setting] = evidence("model", timing=timed())
    lab.refresh()
    assert lab.head["can"]["which"] == ["time"]
    with pytest.raises(ArgumentError, match="not measured as"):
        lab.which_site("error")
    with pytest.raises(ArgumentError, match="of: got 'speed', needed None or one of 'time', 'error'"):
        lab.which_site("speed")
    lab.observe(lambda change: told.append(change["new"]["what"]), "busy")
    found = lab.which_site()
    site = "gemm_epilogue@layer_1#1"
    assert [c.sites for c in found.causes] == [(site,)]
    assert {"which site", "searching", "trial 1 of about 5, 3 sites", "trial 2: compiling after, call"} <= set(told)
    assert not any("gradient" in task for task in told)  # it is the call that is slower
    assert (lab.status, lab.head["can"]["which"]) == ("measured", [])
    shown = next(tab["html"] for tab in lab.tabs if tab["name"] == "Timing")
    assert re.search(r"Which site\?</b> .*layer_1#1.* alone makes the program slower", shown)
    assert losing(lab) == {site}
    lab.select(site)
    assert "To blame: alone, it makes the program slower" in lab.inspector["html"]
    lab.select("gemm_epilogue@layer_0#1")
    assert "To blame" not in lab.inspector["html"]
    assert '"losing": true' in lab.save(tmp_path / "x.html").read_text(encoding="utf-8")  # on the site in the page, too
    lab.toggles["gemm_epilogue@layer_0#1"] = False
    assert losing(lab) == set()
    lab.undo()
    assert losing(lab) == {site}


def losing(lab):
    return {s["id"] for p in lab.panel["passes"] for g in p["groups"] for s in g["sites"] if s["losing"]}


def test_a_search_for_the_site_that_is_cancelled_keeps_nothing(case):
    def which(setting, fault, told, cancel):
        lab.cancel()
        told("trial 2: compiling after, call")

    lab = Explorer(case.graph, case.findings, measure=lambda *_: None, which=which)
    lab.session.measured[lab.setting] = evidence(timing=timed())
    lab.start_which().join(20)
    assert lab.session.blamed == {}
    assert lab.evidence is not None
    bare = Explorer(case.graph, case.findings)
    bare.session.measured[bare.setting] = lab.evidence
    with pytest.raises(ArgumentError, match=r"fusionlab\.explore"):
        bare.which_site()


def test_what_was_found_is_a_sentence():
    sites = ("a@x#1", "b@y#1")
    trials = (Trial(sites, True, "2x"), Trial(sites[:1], False, "1x"))
    of_two = sentence_html(Bisection("f", "error", sites, (Cause(sites, "1 -> 2x <worse>"),), trials))
    assert ">a@x#1</button> with <button" in of_two
    assert "alone makes results worse against float64: 1 → 2× &lt;worse&gt; (2 trials)" in of_two
    nothing = sentence_html(Bisection("f", "time", sites, (), trials[1:]))
    assert "did not recur with all of them fused (1x); 1 trial." in nothing
    stopped = sentence_html(Bisection("f", "time", sites, (), (), "cancelled"))
    assert "was not measured; 0 trials, stopped: cancelled" in stopped


# Rates.


def test_rates_are_measured_behind_a_button_that_is_there_as_long_as_they_lack(case):
    rates = dataclasses.replace(fl.Device.of("cpu"), copy_bytes_per_s=1e10, gemm_flop_per_s=1e11)
    told = []
    found = dataclasses.replace(case.findings, candidates=())
    lab = Explorer(case.graph, found, measure=lambda *_: None, rates=lambda tell: tell("copying", 1, 2) or rates)
    ended = []

    def roof():
        return next(tab["html"] for tab in lab.tabs if tab["name"] == "Roofline")

    def see(change):
        told.append(change["new"]["what"])
        if not change["new"]["running"]:
            ended.append(roof())

    lab.observe(see, "busy")

    assert 'data-fl="rates"' in roof()
    lab._message(lab, {"type": "rates"}, [])
    for thread in threading.enumerate():
        if thread.name == "fusionlab-explorer":
            thread.join(20)
    assert "copying" in told
    assert ended
    assert not any("No roof" in html for html in ended)  # the roof is drawn before the bar says that it is done
    assert lab.session.rates == rates
    assert 'data-fl="rates"' not in roof()
    assert lab.status == "not measured"
    bare = Explorer(case.graph, case.findings)
    assert all('data-fl="rates"' not in tab["html"] for tab in bare.tabs)
    with pytest.raises(ArgumentError, match=r"fusionlab\.explore"):
        bare.measure_rates()


def test_what_a_script_waits_for_is_shown_in_a_line_as_well(case, monkeypatch):
    drawn = []

    class Line:
        def draw(self, clock):
            drawn.append(str(clock))

        def close(self):
            drawn.append("gone")

    monkeypatch.setattr("fusionlab.progress.somebody_looks", lambda: True)
    monkeypatch.setattr("fusionlab.progress.WAIT_S", 0.0)
    monkeypatch.setattr("fusionlab.progress._Bar", Line)

    def measure(setting, told, cancel):
        end = time.monotonic() + 30
        while len(drawn) < 3 and time.monotonic() < end:
            told("timing call", 3, 40)

    Explorer(case.graph, case.findings, measure=measure).measure()
    assert any(text.startswith("timing call 3/40 · 0 s") for text in drawn)
    assert drawn[-1] == "gone"


def test_kernels_that_were_asked_for_during_a_measurement_leave_the_bar_at_rest(case, monkeypatch):
    begun, go = threading.Event(), threading.Event()

    def measure(setting, told, cancel):
        begun.set()
        assert go.wait(20)

    lab = Explorer(case.graph, case.findings, measure=measure)
    monkeypatch.setattr(lab.session, "kernels", lambda: None)
    thread = lab.start()
    assert begun.wait(20)
    lab.hulls = True
    go.set()
    for one in (thread, *threading.enumerate()):
        if one.name == "fusionlab-explorer":
            one.join(20)
    assert not lab.busy["running"]
    assert lab.status == "not measured"
