"""What runs, told in the browser: its stage, its clock and its steps, from the click on; and the ways out of it."""

from __future__ import annotations

import dataclasses
import itertools
import re
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from playwright.sync_api import expect

import fusionlab as fl
from fusionlab import progress
from fusionlab.evidence.bisection import Bisection, Cause, Trial
from fusionlab.evidence.comparison import Evidence
from fusionlab.evidence.instruments import timing
from fusionlab.evidence.instruments.record import environment
from fusionlab.kernels.choose.plan_files import Choice, Measured, quickest, write
from fusionlab.models import gpt
from fusionlab.verbs import tuning
from fusionlab.viz.explorer.widget import Explorer as Lab
from tests.browser.explorer import Explorer
from tests.browser.notebooks import open_in_lab, write_notebook
from tests.browser.stand import stand

CLOCK = re.compile(r"\d+ s")
# Writes down what the bar says whenever it says something else, and when; the time is the machine's, as Python's is.
WATCH = """() => {
    const said = window.flSaid = [], bar = document.querySelector('.fl-run');
    const look = () => {
        const text = ['status', 'clock'].map(name => bar.querySelector(`[data-fl=${name}]`).textContent).join(' · ');
        if (text !== said.at(-1)?.[1]) said.push([Date.now() / 1000, text]);
    };
    new MutationObserver(look).observe(bar, { subtree: true, childList: true, characterData: true });
    look();
}"""
GAP_S = 5.0
STAGES = "compiling before, call 1/4", "float64 reference", "timing call"


class Steps:
    """A measurement whose stages last as long as the test wants."""

    def __init__(self):
        self.go, self.cancelled = threading.Event(), []

    def __call__(self, setting, told, cancel):
        for stage in STAGES:
            told(stage, 0, 40 if stage.startswith("timing") else 0)
            while not self.go.wait(0.01):
                if cancel() and "compiling" not in stage:  # which nothing interrupts
                    self.cancelled.append(stage)
                    told(stage)
            self.go.clear()

    def search(self, told):
        for site in range(4):
            told("searching again", site, 4)
            while not self.go.wait(0.01):
                told("searching again", site, 4)  # ends it where it was cancelled
        self.go.clear()


def linear(x, w, b):
    with jax.named_scope("first"):
        x = jax.nn.relu(x @ w + b)
    with jax.named_scope("second"):
        return jax.nn.relu(x @ w + b)


@pytest.fixture
def lab(page):
    """An explorer whose measurement waits for the test, shown in a page."""
    found = fl.find(linear, jnp.ones((8, 8)), jnp.ones((8, 8)), jnp.ones(8))
    steps = Steps()
    lab = Lab(
        found.graph,
        found,
        measure=steps,
        after=lambda setting, f: f.apply(sorted(setting.enabled)),
        find=lambda s, progress: steps.search(progress) or fl.find(found.graph, passes=s),
    )
    lab.steps = steps
    stand(page, lab, live=True)
    yield lab
    lab.cancel()
    steps.go.set()


def test_a_stage_has_a_clock_that_ticks_by_itself_and_can_be_cancelled(lab, page, problems):
    shown = Explorer(page)
    for k, stage in enumerate(STAGES):
        shown.hook("measure").click()
        for _ in range(k):
            lab.steps.go.set()
            while lab.steps.go.is_set():
                time.sleep(0.01)
        status = f"{stage} 0/40" if stage.startswith("timing") else stage
        expect(shown.hook("status")).to_have_text(status)
        told = lab.busy
        expect(shown.hook("clock")).to_have_text(re.compile(r"[1-9]\d* s"))
        assert lab.busy is told  # the browser counts: nothing came from Python
        shown.hook("cancel").click()
        expect(shown.hook("status")).to_contain_text("cancelled")
        expect(shown.hook("clock")).to_be_empty()
        expect(shown.hook("cancel")).to_be_hidden()
        if "compiling" in stage:
            expect(shown.hook("status")).to_contain_text("a compilation cannot be interrupted")
            shown.hook("measure").click()
            expect(shown.hook("status")).to_have_text("waiting for the abandoned job to end")
            shown.hook("cancel").click()
            lab.steps.go.set()
        _ended(lab)
    assert lab.steps.cancelled == ["float64 reference", "timing call"]
    assert problems == []


def test_an_option_is_searched_for_beside_the_screen_and_a_cancel_leaves_it_as_it_was(lab, page, problems):
    shown = Explorer(page)
    option = shown.root.locator("[data-fl-option]").first
    was, other = option.input_value(), option.locator("option").nth(1).get_attribute("value")
    option.select_option(index=1)
    expect(shown.hook("status")).to_have_text("searching again 0/4")
    shown.boxes.first.click()  # is answered meanwhile
    expect(shown.picture.locator("[aria-current=true]")).to_have_count(1)
    shown.hook("cancel").click()
    expect(shown.hook("status")).to_contain_text("cancelled")
    _ended(lab)
    expect(option).to_have_value(was)
    assert len(tuple(lab.ledger)) == 1
    option.select_option(index=1)
    expect(shown.hook("status")).to_have_text("searching again 0/4")
    lab.steps.go.set()
    expect(shown.hook("status")).to_have_text("not measured")
    expect(option).to_have_value(other)
    assert len(tuple(lab.ledger)) == 2
    assert problems == []


def _ended(lab):
    for thread in threading.enumerate():
        if thread.name == "fusionlab-explorer":
            thread.join(20)
    lab.steps.go.clear()


def test_a_click_during_a_long_compilation_is_answered_at_once(lab, page, problems):
    shown = Explorer(page)
    shown.hook("measure").click()
    expect(shown.hook("status")).to_have_text("compiling before, call 1/4")
    asked = time.perf_counter()
    shown.boxes.first.click()
    expect(shown.picture.locator("[aria-current=true]")).to_have_count(1)
    drawn = shown.drawn()
    shown.toggle("gemm_epilogue").click()
    shown.redrawn(drawn)
    expect(shown.hook("sentence")).to_contain_text("2 can be fused")
    assert time.perf_counter() - asked < 5
    expect(shown.hook("status")).to_have_text("waiting for the abandoned job to end")
    assert lab.enabled == frozenset()
    assert problems == []


def slower(found):
    """What a measurement of a slower program gives."""
    runs = [timing.Runs(n, (s,) * 40, 1, 0.0, 0.0, 0.0) for n, s in (("before", 1e-3), ("after", 2e-3))]
    return Evidence(found.graph.name, environment(), timing=timing.timing_of("call", *runs))


def test_which_site_is_asked_by_a_button_and_marked_where_it_stands(page, problems):
    found = fl.find(linear, jnp.ones((8, 8)), jnp.ones((8, 8)), jnp.ones(8))
    sites = tuple(c.id for c in found.candidates)
    begun, go = threading.Event(), threading.Event()

    def which(setting, fault, told, cancel):
        told("trial 2: timing call", 3, 40)
        begun.set()
        assert go.wait(30)
        told("trial 2: timing call", 4, 40)
        trials = (Trial(sites, True, "2.00× slower"), Trial(sites[1:], True, "2.00x slower"))
        return Bisection(found.graph.name, fault.of, sites, (Cause(sites[1:], "2.00x slower"),), trials)

    lab = Lab(
        found.graph, found, measure=lambda *_: slower(found), which=which, after=lambda s, f: f.apply(sorted(s.enabled))
    )
    stand(page, lab, live=True)
    shown = Explorer(page)
    expect(shown.hook("which")).to_have_count(0)
    shown.hook("measure").click()
    shown.hook("which").click()
    assert begun.wait(30)
    expect(shown.hook("status")).to_have_text("trial 2: timing call 3/40")
    expect(shown.hook("which")).to_be_disabled()
    shown.hook("cancel").click()
    go.set()
    expect(shown.hook("status")).to_have_text("measured")  # what was measured is still there
    expect(shown.hook("which")).to_be_enabled()
    assert lab.session.blamed == {}
    shown.hook("which").click()
    expect(shown.open_tab("Timing").locator("[data-fl=blamed]")).to_contain_text(
        f"{sites[1]} alone makes the program slower: 2.00× slower (2 trials)"
    )
    expect(shown.hook("which")).to_have_count(0)
    row = shown.root.locator(".fl-site.fl-losing")
    if shown.groups().count():  # a group of identical sites warns as well
        expect(shown.root.locator(".fl-group > .fl-losing")).to_contain_text("⚠")
        shown.show_sites()
    expect(row).to_have_count(1)
    expect(row).to_contain_text("⚠")
    row.locator(".fl-link").click()
    expect(shown.hook("inspector")).to_contain_text("To blame: alone, it makes the program slower: 2.00× slower")
    lab.toggles[sites[0]] = False
    assert not lab.session.panel()["passes"][0]["groups"][0]["sites"][0]["losing"]
    lab.undo()
    expect(row).to_have_count(1)  # it stays with what was on
    assert problems == []


def test_the_rates_of_the_device_have_a_button(page, problems):
    found = fl.find(linear, jnp.ones((8, 8)), jnp.ones((8, 8)), jnp.ones(8))
    go = threading.Event()

    def rates(told):
        told("rates of this device: copying", 2, 10)
        assert go.wait(30)
        return dataclasses.replace(fl.Device.of("cpu"), copy_bytes_per_s=1e10, gemm_flop_per_s=1e11)

    lab = Lab(found.graph, found, measure=lambda *_: None, rates=rates)
    stand(page, lab, live=True)
    shown = Explorer(page)
    shown.open_tab("Roofline")
    shown.hook("rates").click()
    expect(shown.hook("status")).to_have_text("rates of this device: copying 2/10")
    expect(shown.hook("rates")).to_be_disabled()
    go.set()
    expect(shown.hook("rates")).to_have_count(0)
    expect(shown.root.locator("[role=tabpanel]:visible svg").first).to_be_visible()
    assert problems == []


@pytest.mark.dear
def test_sites_that_wait_are_tuned_by_a_button_which_searches_again(page, problems, monkeypatch, tmp_path):
    """On a card that is there, without a table. Cancelled, what was measured is kept, and the button is there again."""
    monkeypatch.setenv("FUSIONLAB_PLAN_FILE", str(tmp_path / "plans.json"))
    card = fl.Device("cuda", "sm_80", "NVIDIA A100-SXM4-80GB", driver="570.1")
    shapes = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((512, 512), (512, 512), (512,))]
    found, go, cancelled = fl.find(linear, *shapes, device=card), threading.Event(), []
    monkeypatch.setattr(fl.Device, "current", classmethod(lambda cls: card))
    calls = next(tuning._calls(linear, tuple(shapes), {}, None, True, {}, progress.Stages()))

    def tune(setting, told, cancel):
        told("tuning", 0, len(calls), expected_s=80.0)
        while not go.wait(0.01):
            if cancel():
                cancelled.append(setting)
                told("tuning", 1, len(calls))
        times = {"xla": 3.0, "cuda": 2.0}
        measured = {call.case(): Choice(quickest(times), times) for call in calls}
        write(tmp_path / "plans.json", card.arch, Measured.here(card, measured, {}))

    def again(strategy, progress):
        return fl.find(found.graph, passes=strategy, device=card)

    lab = Lab(found.graph, found, tune=tune, find=again, after=lambda s, f: f.apply(sorted(s.enabled)))
    stand(page, lab, live=True)
    shown = Explorer(page)
    row = shown.root.locator(".fl-site, .fl-group").first
    expect(row).to_contain_text("not measured here")
    tab = shown.open_tab("Sites")
    expect(tab).to_contain_text("2 sites wait for fl.tune: at most ")
    assert fits(page, '[data-fl="tune"]')
    fused = lab.session.fused_graph()
    for end in ("cancel", "done"):
        shown.hook("tune").click()
        expect(shown.hook("status")).to_have_text(f"tuning 0/{len(calls)}")
        expect(shown.hook("clock")).to_have_text(re.compile(r"\d+ s, about 1 min \d+ s left"))
        expect(shown.hook("tune")).to_be_disabled()
        if end == "cancel":
            shown.hook("cancel").click()
            expect(shown.hook("status")).to_contain_text("cancelled")
            expect(shown.hook("tune")).to_be_enabled()
    assert len(cancelled) == 1
    go.set()
    expect(shown.hook("tune")).to_have_count(0)
    expect(tab).not_to_contain_text("fl.tune")
    expect(row).not_to_contain_text("not measured")
    assert {c.backend.name for c in lab.findings.candidates} == {"cuda"}
    assert lab.session.fused_graph() is not fused
    assert [str(line).partition(":")[0] for line in lab.ledger][1:] == ["tuned"]
    assert not lab.session.can_undo  # to implementations that are no longer chosen
    assert problems == []


def test_on_another_machine_what_waits_has_no_button(page, problems):
    shapes = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((512, 512), (512, 512), (512,))]
    found = fl.find(linear, *shapes, device="a100")
    stand(page, Lab(found.graph, found, tune=lambda *_: None, after=lambda s, f: f.apply(sorted(s.enabled))))
    shown = Explorer(page)
    expect(shown.open_tab("Sites")).to_contain_text("by the roofline, on that device.")
    expect(shown.hook("tune")).to_have_count(0)
    assert problems == []


def fits(page, hook):
    """Whether an element is inside the window, and nothing lies over its middle."""
    return page.evaluate(
        """hook => { const e = document.querySelector(hook), r = e.getBoundingClientRect();
        return r.left >= 0 && r.right <= innerWidth && r.bottom <= innerHeight
            && document.elementFromPoint((r.left + r.right) / 2, (r.top + r.bottom) / 2) === e; }""",
        hook,
    )


@pytest.mark.dear
def test_the_time_of_scopes_after_fusing_has_a_button(page, problems):
    args = jnp.ones((8, 8)), jnp.ones((8, 8)), jnp.ones(8)
    found = fl.find(linear, *args)
    before, go = fl.time_by_scope(linear, *args, runs=1).before, threading.Event()

    def scopes(setting, findings, told):
        told("time of each kernel, fused", 2, 10)
        assert go.wait(30)
        return before

    lab = Lab(found.graph, found, measure=lambda *_: None, times=lambda _: before, scopes=scopes)
    lab.measure()
    stand(page, lab, live=True)
    shown = Explorer(page)
    tab = shown.open_tab("Scopes")
    expect(tab).to_contain_text("whole run")
    shown.hook("scopes").click()
    expect(shown.hook("status")).to_have_text("time of each kernel, fused 2/10")
    expect(shown.hook("scopes")).to_be_disabled()
    go.set()
    expect(shown.hook("scopes")).to_have_count(0)
    expect(tab).to_contain_text("with sites fused")
    assert problems == []


CELL = """import time, jax.numpy as jnp, fusionlab as fl
def slow(x):
    print("traced")
    time.sleep(SECONDS)
    return jnp.tanh(x @ x)
lab = fl.explore(slow, jnp.ones((4, 4)))"""


@pytest.mark.parametrize("where", ["a cell that is not there", "JupyterLab"])
def test_a_cell_says_what_is_done_until_it_is_done(where, tab, request, monkeypatch, artifacts):
    """What stays behind in the notebook is empty: no widget that a saved one would look for in vain."""
    if where != "JupyterLab":
        return _a_cell_that_is_not_there(monkeypatch)
    jupyter = request.getfixturevalue("jupyter")
    path = write_notebook(jupyter.folder / "slow.ipynb", [CELL.replace("SECONDS", "6"), CELL.replace("SECONDS", "0")])
    with tab([]) as page:
        book = open_in_lab(page, jupyter, path)
        book.menu("Run", "Run All Cells")
        output = book.cells.first.locator(".jp-OutputArea-output")
        for clock in ("[1-3] s", "[4-9] s"):
            expect(output.get_by_text(re.compile(f"tracing · {clock}"))).to_be_visible(timeout=120_000)
        page.screenshot(path=artifacts / "a-cell-that-traces.png")
        book.wait_until_idle()
        assert book.output(0).split() == ["traced"]
        kept = [c.outputs for c in book.saved().cells]
        assert [o.output_type for o in kept[1]] == ["stream"]
        assert [o.data for o in kept[0] if o.output_type != "stream"] == [{"text/plain": ""}]
        jupyter.stop_kernels()
    return None


def _a_cell_that_is_not_there(monkeypatch):
    shown = []

    class Handle:
        def update(self, data, raw):
            shown.append(data)

    monkeypatch.setattr(progress, "somebody_looks", lambda: True)
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    monkeypatch.setattr(progress, "WAIT_S", 0.0)
    monkeypatch.setattr("IPython.display.display", lambda data, raw, display_id: shown.append(data) or Handle())
    with progress.Line() as line:
        while len(shown) < 2:
            line("tracing")
            time.sleep(0.01)
    assert shown[0] == shown[-1] == {"text/plain": ""}
    assert shown[1] == {"text/plain": "tracing · 0 s"}


@pytest.mark.dear
@pytest.mark.parametrize("layers", [1, 24])
def test_no_five_seconds_without_a_change_from_the_click_on(layers, page, problems, monkeypatch):
    """From the call of `explore` to the end of the first measurement: a stage, a step or a clock changes before anybody wonders."""
    config = gpt.Config(layers=layers, embed=32, heads=2, vocab=64, longest=32)
    args = gpt.init(jax.random.key(0), config), jnp.zeros((1, 32), jnp.int32), gpt.init_cache(1, config)
    seen = []

    class Drawn:
        def draw(self, clock):
            seen.append((time.time(), str(clock)))

        def close(self):
            pass

    monkeypatch.setattr(progress, "somebody_looks", lambda: True)
    monkeypatch.setattr(progress, "_Bar", Drawn)
    began = time.time()
    lab = fl.explore(lambda *a: gpt.prefill(*a, config=config)[0], *args, budget_s=4.0, progress=True)
    opened = time.time()
    stand(page, lab, live=True)
    shown = Explorer(page)
    page.evaluate(WATCH)
    shown.hook("measure").click()
    expect(shown.hook("status")).to_have_text("measured", timeout=1_500_000)
    said = [(at, text) for at, text in page.evaluate("window.flSaid")]
    changes = [began, *(at for at, _ in seen if at < opened), *(at for at, _ in said)]
    longest = max(b - a for a, b in itertools.pairwise(changes))
    stages = list(dict.fromkeys(re.sub(r"( \d+/\d+)? ·.*", "", text) for _, text in said))
    took = f"{layers} layers: {changes[-1] - began:.0f} s, {len(changes)} changes"
    print(f"\n{took}, {longest:.1f} s the longest without one; stages: {', '.join(stages)}")
    assert longest < GAP_S
    assert any("compiling after, gradient" in text for text in stages)
    assert any(CLOCK.search(text) for _, text in said)
    assert problems == []
