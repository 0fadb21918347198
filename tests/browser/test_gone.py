"""What an explorer does once its kernel is gone: it says so within a second, switches off what needs Python, and goes on answering."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import expect

import fusionlab as fl
from fusionlab.viz.explorer.kept import kept
from tests.browser.explorer import Explorer
from tests.browser.model import arguments, model_step
from tests.browser.notebooks import open_in_lab, write_notebook
from tests.browser.stand import stand

CELLS = [
    "import fusionlab as fl\nfrom model import arguments, model_step",
    "lab = fl.explore(model_step, *arguments(seq=32))\nlab",
]
MLP = "gemm_epilogue@layer_0/mlp#1"
SOON = 1000  # ms
BARE, REOPENED, RESTARTED, DIED, SHUT, CLOSED = "in a bare page", "reopened", "restarted", "died", "shut down", "closed"
ACTS = {
    RESTARTED: "c => { window.flRestarted = c.restartKernel(); }",
    DIED: "c => { c.session.kernel.requestExecute({ code: 'import os; os._exit(1)' }); }",
    SHUT: "c => { c.shutdown(); }",
    CLOSED: "c => { c.session.kernel.requestExecute({ code: 'lab.close()' }).done.then(() => { window.flKnown = performance.now(); }); }",
}
# Does the act, and gives the ms from when Jupyter itself knew of it to when the explorer told it.
TOLD = """async () => {
    const context = window.jupyterapp.shell.currentWidget.context.sessionContext;
    const known = () => { window.flKnown ??= performance.now(); };
    const gone = ["restarting", "autorestarting", "dead", "terminating"];
    context.statusChanged.connect((_, status) => { if (gone.includes(status)) known(); });
    context.kernelChanged.connect(known);
    (ACT)(context);
    const told = () => document.querySelector('.fl-explorer [data-fl=gone]')?.getClientRects().length;
    while (!told() || !window.flKnown) await new Promise(go => setTimeout(go, 20));
    return performance.now() - window.flKnown;
}"""
BUSY = """() => {
    const context = window.jupyterapp.shell.currentWidget.context.sessionContext;
    context.session.kernel.requestExecute({ code: 'import time; time.sleep(3)' });
}"""
STATE_IS_SAVED = "() => jupyterapp.commands.isToggled('@jupyter-widgets/jupyterlab-manager:saveWidgetState')"
KEPT = "() => document.querySelector('.fl-explorer')?.flKept()"
RECORD = "data => window.flJupyter.emit('msg:custom', { type: 'kept', side: 'before', data })"


def explorable(lab: Explorer, why: str) -> None:
    """It is told why; what needs Python is off, with the reason; picture, inspector, search and outline answer."""
    gone = lab.hook("gone")
    expect(gone).to_contain_text(re.compile(why))
    expect(gone).to_contain_text("Run the cell again")
    assert gone.get_attribute("role") == "alert"
    lab.show_sites()
    boxes = lab.root.locator("input[type=checkbox]")
    assert boxes.count() > 4
    assert all(box.is_disabled() for box in boxes.all())
    for off in (lab.toggle(MLP), lab.hook("measure"), lab.hook("undo"), lab.hook("hulls")):
        expect(off).to_be_disabled()
        assert "Run the cell again" in off.get_attribute("title")
    assert lab.root.locator("select").count()
    assert all(s.is_disabled() for s in lab.root.locator("select").all())
    expect(lab.hook("progress")).to_be_hidden()

    group = lab.picture.locator('[role=button][aria-expanded="false"]').first
    name = group.get_attribute("id")
    group.click()
    expect(lab.picture.locator(f'[id="{name}"]')).to_have_attribute("aria-current", "true")
    expect(lab.hook("inspector")).to_contain_text("py:")
    lab.page.keyboard.press("Space")
    expect(lab.picture.locator(f'[id="{name}"]')).to_have_attribute("aria-expanded", "true")
    lab.search("rsqrt").first.click()
    expect(lab.hook("inspector")).to_contain_text("rsqrt")
    lab.root.locator('[data-fl-side="outline"]').click()
    line = lab.root.locator(".fl-tree [role=treeitem]").nth(2)
    line.click()
    expect(line).to_have_attribute("aria-selected", "true")
    lab.root.locator('[data-fl-side="passes"]').click()


@pytest.mark.parametrize("case", [BARE, REOPENED, RESTARTED, DIED, SHUT, CLOSED])
def test_a_kernel_that_is_gone_is_told_and_the_picture_stays_explorable(
    case, page, problems, request, tmp_path, artifacts
):
    if case == BARE:
        lab = fl.explore(model_step, *arguments(seq=32))
        stand(page, lab)
        shown = Explorer(page)
        expect(shown.picture).to_be_visible()
        page.evaluate(RECORD, kept(lab.session))
        page.evaluate("() => { flJupyter.kernel.status = 'busy'; }")
        page.wait_for_timeout(500)
        expect(shown.hook("gone")).to_be_hidden()
        page.evaluate("() => { flJupyter.layout.comm_live = false; }")
        expect(shown.hook("gone")).to_be_visible(timeout=SOON)
        explorable(shown, "The kernel was restarted")
        return
    server = request.getfixturevalue("jupyter")
    shutil.copy(Path(__file__).with_name("model.py"), server.folder)
    book = open_in_lab(page, server, write_notebook(server.folder / f"gone_{case.split()[0]}.ipynb", CELLS))
    book.run_all()
    shown = Explorer(page)
    expect(shown.picture).to_be_visible()
    if case == REOPENED:  # with the state of its widgets, but without what the browser kept
        book.menu("Settings", "Save Widget State Automatically")
        page.wait_for_function(STATE_IS_SAVED)
        book.saved()
        server.stop_kernels()
        open_in_lab(page, server, book.path)
        expect(shown.hook("gone")).to_contain_text("This saved explorer has no kernel")
        shown.boxes.first.click()
        expect(shown.boxes.first).to_have_attribute("aria-current", "true")
        expect(shown.toggle("gemm_epilogue")).to_be_disabled()
        page.screenshot(path=artifacts / "gone-reopened.png")
        book.menu("Settings", "Save Widget State Automatically")
        server.stop_kernels()
        return
    page.wait_for_function(KEPT)
    page.evaluate(BUSY)
    page.wait_for_timeout(2000)
    expect(shown.hook("gone")).to_be_hidden()
    problems.clear()
    assert page.evaluate(TOLD.replace("ACT", ACTS[case])) < SOON
    page.screenshot(path=artifacts / f"gone-{case.split()[0]}.png")
    if case == DIED:  # JupyterLab tells it too
        page.locator(".jp-Dialog .jp-mod-accept").click()
    words = {RESTARTED: "restarted", DIED: "died|restarted", SHUT: "shut down", CLOSED: "closed from Python"}
    explorable(shown, words[case])
    page.screenshot(path=artifacts / f"gone-{case.split()[0]}-explored.png")
    if case == RESTARTED:  # a server that is still at it cannot stop it
        page.evaluate("() => window.flRestarted")
    server.stop_kernels()


def test_a_saved_explorer_without_a_kernel_says_so_at_once_and_is_a_readable_picture(page):
    lab = fl.explore(model_step, *arguments(seq=32))
    reopened = "first => { flJupyter.layout.comm_live = false; }"  # as a notebook that holds its widgets' state
    stand(page, lab, before=reopened)
    shown = Explorer(page)
    expect(shown.hook("gone")).to_contain_text("This saved explorer has no kernel")
    expect(shown.hook("gone")).to_contain_text("Run the cell again")
    box = shown.boxes.first
    box.click()
    expect(box).to_have_attribute("aria-current", "true")
    expect(shown.hook("inspector")).to_contain_text("This record holds no more about it")
    expect(shown.hook("undo")).to_be_disabled()


def test_a_connection_that_is_lost_comes_back_and_keys_undo_and_redo(page):
    lab = fl.explore(model_step, *arguments(seq=32))
    stand(page, lab)
    shown = Explorer(page)
    expect(shown.hook("undo")).to_be_disabled()
    shown.toggle("gemm_epilogue").uncheck()
    expect(shown.hook("undo")).to_be_enabled()
    sentence = shown.sentence
    page.evaluate("() => { flJupyter.kernel.connectionStatus = 'connecting'; }")
    expect(shown.hook("gone")).to_contain_text("The connection to the kernel is lost", timeout=SOON)
    expect(shown.toggle("gemm_epilogue")).to_be_disabled()
    page.evaluate("() => { flJupyter.kernel.connectionStatus = 'connected'; }")
    expect(shown.hook("gone")).to_be_hidden(timeout=SOON)
    keyboard = page.keyboard
    shown.toggle("gemm_epilogue").focus()
    keyboard.press("Control+z")
    expect(shown.toggle("gemm_epilogue")).to_be_checked()
    expect(shown.hook("redo")).to_be_enabled()
    keyboard.press("Control+Shift+z")
    expect(shown.toggle("gemm_epilogue")).not_to_be_checked()
    assert shown.sentence == sentence
    shown.hook("undo").click()
    expect(shown.hook("redo")).to_be_enabled()
    keyboard.press("Control+y")
    expect(shown.toggle("gemm_epilogue")).not_to_be_checked()
    expect(shown.hook("redo")).to_be_disabled()


def test_a_page_has_the_tabs_of_the_explorer_and_opens_on_what_it_has(page, tmp_path):
    lab = fl.explore(model_step, *arguments(seq=32))
    lab.toggles[MLP] = False
    live = [tab["name"] for tab in lab.tabs if not tab.get("empty")]
    assert {"Roofline", "Kernels", "Graph diff", "Ledger", "Code"} <= set(live)
    page.goto(lab.save(tmp_path / "page.html").as_uri())
    shown = Explorer(page)
    names = shown.root.locator("[role=tab][data-fl-tab]").evaluate_all("all => all.map(e => e.dataset.flTab)")
    assert [name for name in names if name in live] == live
    assert not {"Errors", "Memory"} & set(names)  # nothing was measured
    first = shown.root.locator('[role=tab][data-fl-tab][aria-selected="true"]')
    expect(first).to_have_attribute("data-fl-tab", live[0])
    expect(shown.open_tab("Ledger")).to_contain_text(f"{MLP} off")
    expect(shown.open_tab("Code")).to_contain_text("fl.fuse(model_step")
    expect(shown.open_tab("Graph diff")).to_contain_text("nodes")
    expect(shown.open_tab("Timing")).to_contain_text("Nothing was measured.")
    shown.hook("export").locator("summary").click()
    entries = shown.root.locator("[data-fl-export]")
    told = dict(zip([".svg", ".png", ".pdf", ".dot", ".json", ".html"], entries.all_inner_texts(), strict=True))
    assert "for documents" in told[".svg"]
    assert "fusionlab.load opens it again" in told[".json"]
    assert "needs a live kernel" in told[".json"]
