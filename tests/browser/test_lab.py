"""The explorer in JupyterLab: a reader opens a notebook, runs it, and works with what it shows.

One notebook stays open for the whole file; every test sets back what it changed.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from playwright.sync_api import expect

from tests.browser.explorer import Explorer
from tests.browser.notebooks import open_in_lab, write_notebook

CELLS = [
    "import fusionlab as fl\nfrom model import arguments, model_step",
    "lab = fl.explore(model_step, *arguments(), budget_s=1)\nlab",
    "import ipywidgets\nseen = ipywidgets.Output()\nseen",
]
MLP = "gemm_epilogue@layer_0/mlp#1"
CHOOSE_AND_TYPE_ON = """(row, text) => {  // before the answer to the choice is there
    const input = row.closest(".fl-search").querySelector("input");
    row.click();
    input.focus();
    input.value = text;
    input.dispatchEvent(new Event("input", { bubbles: true }));
}"""
LONG = 120_000  # milliseconds that compiling and timing may take beside other tests


@pytest.fixture(scope="module")
def notebook(tab, jupyter):
    """The notebook, open and run; and what went wrong in its page since."""
    shutil.copy(Path(__file__).with_name("model.py"), jupyter.folder)
    problems: list[str] = []
    with tab(problems) as page:
        book = open_in_lab(page, jupyter, write_notebook(jupyter.folder / "in_lab.ipynb", CELLS))
        problems.clear()  # JupyterLab's own start is not ours
        book.run_all()
        yield book, problems
    jupyter.stop_kernels()


@pytest.fixture
def book(notebook, keep):
    """The open notebook; nothing may have gone wrong in its page when the test is over."""
    book, problems = notebook
    problems.clear()
    with keep(book.page):
        yield book
    assert problems == []


@pytest.fixture
def lab(book):
    """The explorer in it, as it was when it was opened."""
    lab = Explorer(book.page)
    expect(lab.picture).to_be_visible()
    if lab.hook("reset").is_enabled():
        lab.hook("reset").click()
    lab.show_sites()
    expect(lab.toggle(MLP)).to_be_checked()
    return lab


def enabled(book):
    return int(book.ask("print(len(lab.enabled))"))


def test_opening_it_shows_the_graph_and_measures_nothing(lab, artifacts):
    assert lab.boxes.count() >= 2
    expect(lab.hook("status")).to_have_text(re.compile("not measured"))
    expect(lab.hook("progress")).to_be_hidden()
    expect(lab.open_tab("Timing").locator("svg")).to_have_count(0)
    expect(lab.hook("sentence")).to_contain_text("declined")
    lab.page.screenshot(path=artifacts / "jupyterlab.png")


def test_unticking_a_site_changes_the_sentence_and_the_picture(lab, book):
    sentence, drawn, on = lab.sentence, lab.drawn(), enabled(book)
    lab.toggle(MLP).uncheck()
    expect(lab.hook("sentence")).not_to_have_text(sentence)
    lab.redrawn(drawn)
    assert enabled(book) == on - 1
    expect(lab.toggle("gemm_epilogue")).to_have_js_property("indeterminate", True)
    lab.toggle(MLP).check()
    expect(lab.hook("sentence")).to_have_text(sentence)
    assert enabled(book) == on


def test_a_line_of_python_does_what_the_click_does(lab, book):
    lab.toggle(MLP).uncheck()
    expect(lab.toggle("gemm_epilogue")).to_have_js_property("indeterminate", True)
    clicked = lab.sentence, lab.drawn()
    lab.hook("undo").click()
    expect(lab.toggle(MLP)).to_be_checked()
    book.ask(f"lab.toggles[{MLP!r}] = False")
    expect(lab.toggle(MLP)).not_to_be_checked()
    expect(lab.hook("sentence")).to_have_text(clicked[0])
    lab.draws(clicked[1])
    book.ask("lab.toggles['gemm_epilogue'] = False")
    expect(lab.toggle("gemm_epilogue")).not_to_be_checked()
    expect(lab.toggle("gemm_epilogue")).to_have_js_property("indeterminate", False)


def test_identical_sites_are_switched_together_and_undo_takes_it_back(lab, book):
    on, sentence = enabled(book), lab.sentence
    together = lab.groups().first
    key = together.get_attribute("data-fl-group")
    together.uncheck()
    expect(lab.hook("sentence")).not_to_have_text(sentence)
    assert enabled(book) <= on - 2, key
    lab.hook("undo").click()
    expect(lab.hook("sentence")).to_have_text(sentence)
    assert enabled(book) == on


def test_all_off_leaves_nothing_and_reset_brings_it_back(lab, book):
    on = enabled(book)
    lab.hook("all-off").click()
    expect(lab.toggle(MLP)).not_to_be_checked()
    assert enabled(book) == 0
    lab.hook("reset").click()
    expect(lab.toggle(MLP)).to_be_checked()
    assert enabled(book) == on


@contextlib.contextmanager
def handler(book, source):
    """While it lasts, `handler` of this source observes what is on."""
    book.ask(f"{source}\nlab.observe(handler, 'enabled')")
    try:
        yield
    finally:
        book.ask("lab.unobserve(handler, 'enabled')\nseen.clear_output()")


def test_a_handler_sees_what_is_clicked(lab, book):
    on = enabled(book)
    with handler(book, "handler = lambda change: seen.append_stdout(f'{len(change.new)} on; ')"):
        lab.toggle(MLP).uncheck()
        expect(book.cells.nth(2)).to_contain_text(f"{on - 1} on")


@pytest.mark.dear
def test_an_exception_in_a_handler_is_told_and_the_explorer_goes_on(lab, book):
    on, problem = enabled(book), lab.hook("problem")
    with handler(book, "def handler(change):\n    raise ValueError('no <such> luck')"):
        lab.toggle(MLP).click()
        expect(problem).to_contain_text("ValueError")
        expect(problem).to_contain_text("no <such> luck")
        expect(problem).to_have_attribute("role", "alert")
        # What is shown is what is so: the site is off, whatever became of the handler.
        assert enabled(book) == on - 1
        expect(lab.toggle(MLP)).not_to_be_checked()
        lab.hook("dismiss").click()
        expect(problem).to_be_hidden()
    lab.hook("reset").click()
    expect(lab.toggle(MLP)).to_be_checked()
    sentence = lab.sentence
    lab.toggle(MLP).uncheck()
    expect(lab.hook("sentence")).not_to_have_text(sentence)
    expect(problem).to_be_hidden()


def test_a_click_selects_a_group_and_a_double_click_opens_it(lab):
    name, drawn = lab.picture.locator('[aria-expanded="false"]').first.get_attribute("id"), lab.drawn()
    group = lab.picture.locator(f'[id="{name}"]')
    group.click()
    expect(group).to_have_attribute("aria-current", "true")
    expect(group).to_have_attribute("aria-expanded", "false")
    group.dblclick()
    expect(group).to_have_attribute("aria-expanded", "true")
    lab.redrawn(drawn)
    group.focus()
    lab.page.keyboard.press("Space")
    expect(group).to_have_attribute("aria-expanded", "false")
    lab.draws(drawn)


def test_search_finds_by_operation_and_by_source_line(lab):
    hits = lab.search("rsqrt")
    expect(hits.first).to_contain_text("rsqrt")
    hits.first.click()
    expect(lab.hook("inspector")).to_contain_text("rsqrt")
    expect(lab.hook("inspector")).to_contain_text("layers.py")
    expect(lab.picture.locator("[aria-current=true]").first).to_be_visible()
    expect(lab.search("model.py:12").first).to_contain_text("model.py")
    lab.search("rsqrt").first.evaluate(CHOOSE_AND_TYPE_ON, "model.py:12")
    expect(lab.hook("hits").locator("button").first).to_contain_text("model.py")
    expect(lab.hook("hits").locator("button").first).to_be_visible()
    expect(lab.hook("search")).to_be_focused()
    lab.hook("search").fill("no_such_thing")
    expect(lab.hook("hits").locator("button")).to_have_count(0)
    lab.hook("search").fill("")


def test_everything_is_reached_by_keyboard(lab):
    keyboard = lab.page.keyboard
    lab.boxes.first.focus()
    keyboard.press("/")
    expect(lab.hook("search")).to_be_focused()
    keyboard.type("softmax")
    lab.hook("hits").locator("button").first.wait_for()
    keyboard.press("ArrowDown")
    expect(lab.hook("hits").locator("button").first).to_be_focused()
    keyboard.press("Enter")
    expect(lab.picture.locator("[aria-current=true]").first).to_be_focused()
    first = lab.picture.locator(":focus").get_attribute("id")
    keyboard.press("Home")
    keyboard.press("ArrowDown")
    second = lab.picture.locator(":focus")
    assert second.get_attribute("id") != first
    name = second.get_attribute("aria-label")
    assert name
    keyboard.press("Enter")
    expect(lab.picture.locator("[aria-current=true]:focus")).to_have_attribute("aria-label", name)
    lab.toggle(MLP).focus()
    sentence = lab.sentence
    keyboard.press("Space")
    expect(lab.toggle(MLP)).not_to_be_checked()
    expect(lab.hook("sentence")).not_to_have_text(sentence)
    expect(lab.toggle(MLP)).to_be_focused()
    lab.root.locator('[role=tab][data-fl-tab="Timing"]').focus()
    keyboard.press("ArrowRight")
    expect(lab.root.locator('[role=tab][data-fl-tab][aria-selected="true"]')).to_be_focused()
    expect(lab.root.locator('[role=tab][data-fl-tab][aria-selected="true"]')).not_to_have_attribute(
        "data-fl-tab", "Timing"
    )


def test_escape_selects_nothing_and_then_leads_back_to_the_notebook(lab):
    lab.boxes.first.focus()
    lab.page.keyboard.press("Enter")
    expect(lab.picture.locator("[aria-current=true]")).to_have_count(1)
    lab.open_tab("Ledger")
    lab.page.keyboard.press("Escape")
    expect(lab.picture.locator("[aria-current=true]")).to_have_count(0)
    expect(lab.root.locator('[data-fl-tab="Ledger"]')).to_be_focused()
    lab.page.keyboard.press("Escape")
    focused = "selector => document.activeElement.closest(selector) !== null"
    assert lab.page.evaluate(focused, ".jp-Notebook")
    assert not lab.page.evaluate(focused, ".fl-explorer")


def test_a_press_on_a_cell_takes_the_keys_back_to_the_notebook(lab, book):
    lab.open_tab("Errors")
    expect(lab.root.locator('[data-fl-tab="Errors"]')).to_be_focused()
    # The prompt of the cell that has the explorer: it is the active one, and JupyterLab moves no focus that is within it.
    book.cells.nth(1).locator(".jp-InputPrompt").click()
    lab.page.wait_for_function("() => !document.querySelector('.fl-explorer').contains(document.activeElement)")
    before = book.cells.count()
    lab.page.keyboard.press("b")
    expect(book.cells).to_have_count(before + 1)
    lab.page.keyboard.type("dd")
    expect(book.cells).to_have_count(before)


def test_jupyterlab_does_not_narrow_the_terms_of_the_inspector(lab):
    lab.boxes.first.focus()
    lab.page.keyboard.press("End")
    lab.page.keyboard.press("Enter")
    term = lab.hook("inspector").locator("dt").first
    assert term.evaluate("e => [getComputedStyle(e).float, e.scrollWidth <= e.clientWidth]") == ["none", True]


def test_a_declined_site_says_why_and_what_to_edit(lab):
    declined = lab.root.locator(".fl-declined button[data-fl-pick]", has_text="model.py").last
    lab.root.locator("summary", has_text="Declined").click()
    declined.click()
    inspector = lab.hook("inspector")
    expect(inspector).to_contain_text("escapes")
    expect(inspector).to_contain_text("also returned")
    expect(inspector).to_contain_text("let the activation be the only reader")
    lab.root.locator("summary", has_text="Declined").click()


def test_before_and_after_are_two_pictures(lab):
    for which, other in (("after", "before"), ("before", "after")):
        drawn = lab.drawn()
        lab.hook(which).click()
        lab.redrawn(drawn)
        expect(lab.hook(which)).to_have_attribute("aria-pressed", "true")
        expect(lab.hook(other)).to_have_attribute("aria-pressed", "false")
    assert lab.picture.locator(".applied").count() > 0  # the sites are marked on the program as written


def test_an_option_is_set_and_searched_again(lab, book):
    option = lab.root.locator('[data-fl-option="gemm_epilogue.grouping"]')
    expect(option).to_be_visible()
    value = option.input_value()
    other = next(v for v in option.locator("option").evaluate_all("all => all.map(o => o.value)") if v != value)
    option.select_option(other)
    expect(lab.open_tab("Ledger")).to_contain_text(f"grouping={other!r}")
    assert other in book.ask("print(lab.setting.strategy)")
    lab.hook("undo").click()
    expect(option).to_have_value(value)


def test_xlas_kernels_are_told_in_the_boxes(lab):
    card = lab.picture.locator('[aria-expanded="false"]').first.get_attribute("id")
    lab.picture.locator(f'[id="{card}"]').dblclick()
    expect(lab.picture.locator(f'[id="{card}"]')).to_have_attribute("aria-expanded", "true")
    lab.hook("hulls").click()
    expect(lab.hook("hulls")).to_have_attribute("aria-pressed", "true", timeout=LONG)
    told = lab.picture.locator("text", has_text=re.compile(r"fusion|kernels"))
    expect(told.first).to_be_attached(timeout=LONG)
    lab.hook("hulls").click()
    expect(told).to_have_count(0)
    lab.picture.locator(f'[id="{card}"]').focus()
    lab.page.keyboard.press("Space")


def test_the_sentence_and_measure_are_in_sight_beside_the_file_browser(lab):
    page = lab.page
    whole = page.viewport_size
    for width, height in ((1440, 900), (1100, 700)):
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_timeout(500)  # the panels fold, and the graph takes the height that is left
        lab.root.evaluate("e => e.scrollIntoView({ block: 'start' })")
        shown = page.locator(".jp-WindowedPanel-outer").bounding_box()
        for hook in ("sentence", "search", "measure", "status"):
            box = lab.hook(hook).bounding_box()
            assert box["y"] >= shown["y"] - 1, hook
            assert box["y"] + box["height"] <= shown["y"] + shown["height"], (hook, width)
            assert box["x"] + box["width"] <= shown["x"] + shown["width"], (hook, width)
    page.set_viewport_size(whole)


def test_the_theme_is_chosen(lab):
    for theme in ("light", "dark"):
        lab.hook("theme").click()
        expect(lab.root).to_have_attribute("data-theme", theme)
    lab.hook("theme").click()
    expect(lab.root).not_to_have_attribute("data-theme", re.compile("."))


@pytest.mark.dear
def test_measuring_shows_times_and_follows_the_ticks(lab, book, artifacts):
    lab.hook("measure").click()
    timing = lab.open_tab("Timing")
    expect(timing.locator("svg").first).to_be_visible(timeout=LONG)
    # Never without its interval.
    expect(lab.hook("sentence")).to_contain_text(re.compile(r"\[[\d.]+, [\d.]+\]"), timeout=LONG)
    lab.idle()
    first = timing.inner_html()
    errors = lab.open_tab("Errors")
    expect(errors.locator("svg").first).to_be_visible()
    expect(errors).to_contain_text("float64")
    lab.open_tab("Timing")
    lab.page.screenshot(path=artifacts / "measured.png")

    book.ask("lab.measuring = False")
    lab.toggle("dot_product_attention").uncheck()
    expect(timing).to_contain_text(re.compile("(not|nothing) measured", re.I))
    expect(timing.locator("svg")).to_have_count(0)
    lab.hook("measure").click()
    expect(timing.locator("svg").first).to_be_visible(timeout=LONG)
    lab.idle()
    assert timing.inner_html() != first
    lab.toggle("dot_product_attention").check()  # measured before: its plot comes back
    expect(timing.locator("svg").first).to_be_visible(timeout=LONG)
    expect(lab.open_tab("Ledger")).to_contain_text("dot_product_attention")
    lab.idle()
    book.ask("lab.cancel()")  # measures no more


def test_a_measurement_is_cancelled(lab, book):
    lab.toggle("gemm_epilogue").uncheck()
    lab.hook("measure").click()
    expect(lab.hook("cancel")).to_be_enabled()
    lab.hook("cancel").click()
    expect(lab.hook("status")).to_contain_text("cancelled")
    expect(lab.hook("progress")).to_be_hidden()


def test_what_is_exported_is_what_it_says(lab, tmp_path):
    svg = ElementTree.fromstring(lab.exported(".svg", tmp_path).read_text(encoding="utf-8"))
    assert svg.tag.endswith("svg")
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}g"))) > 5
    assert lab.exported(".dot", tmp_path).read_text(encoding="utf-8").lstrip().startswith("digraph")
    assert "gemm_epilogue" in json.dumps(json.loads(lab.exported(".json", tmp_path).read_text(encoding="utf-8")))
    assert lab.exported(".png", tmp_path).read_bytes().startswith(b"\x89PNG")
    assert lab.exported(".pdf", tmp_path).read_bytes().startswith(b"%PDF")


@pytest.mark.dear
def test_the_exported_page_works_without_a_server(lab, tab, tmp_path, artifacts):
    path = lab.exported(".html", tmp_path)
    problems: list[str] = []
    with tab(problems) as page:
        page.goto(path.as_uri())
        alone = Explorer(page)
        expect(alone.picture).to_be_visible()
        alone.search("rsqrt").first.click()
        expect(alone.hook("inspector")).to_contain_text("rsqrt")
        page.screenshot(path=artifacts / "exported.png")
    assert problems == []


def test_the_saved_notebook_has_the_picture_which_the_live_explorer_hides(lab, book):
    live, note, still = (o["data"] for o in book.saved().cells[1].outputs)
    assert "application/vnd.jupyter.widget-view+json" in live
    assert "A still picture of the explorer, saved with the notebook" in note["text/html"]
    assert still["image/png"]
    outputs = book.cells.nth(1).locator(".jp-OutputArea-child")
    expect(outputs).to_have_count(3)
    for hidden in (1, 2):
        expect(outputs.nth(hidden)).to_be_attached()
        expect(outputs.nth(hidden)).to_be_hidden()
