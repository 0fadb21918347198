"""The explorer in Notebook 7: the same cells, the shorter way through it."""

from __future__ import annotations

import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from playwright.sync_api import expect

from tests.browser.explorer import Explorer
from tests.browser.notebooks import open_in_notebook7, write_notebook

CELLS = [
    "import fusionlab as fl\nfrom model import arguments, model_step",
    "lab = fl.explore(model_step, *arguments(seq=32))\nlab",
]
MLP = "gemm_epilogue@layer_0/mlp#1"


@pytest.fixture
def book(page, problems, notebook_server):
    """A notebook of its own, run."""
    shutil.copy(Path(__file__).with_name("model.py"), notebook_server.folder)
    path = write_notebook(notebook_server.folder / "in_notebook7.ipynb", CELLS)
    book = open_in_notebook7(page, notebook_server, path)
    problems.clear()  # the application's own start is not ours
    book.run_all()
    yield book
    notebook_server.stop_kernels()


@pytest.mark.dear
def test_the_explorer_works_in_notebook_7(book, problems, tmp_path, artifacts):
    lab = Explorer(book.page)
    expect(lab.picture).to_be_visible()
    outputs = book.cells.nth(1).locator(".jp-OutputArea-child")
    expect(outputs).to_have_count(3)
    for hidden in (1, 2):  # the still picture
        expect(outputs.nth(hidden)).to_be_hidden()
    lab.show_sites()
    sentence, drawn = lab.sentence, lab.drawn()
    lab.toggle(MLP).uncheck()
    expect(lab.hook("sentence")).not_to_have_text(sentence)
    lab.redrawn(drawn)
    book.ask(f"lab.toggles[{MLP!r}] = True")
    expect(lab.toggle(MLP)).to_be_checked()
    lab.draws(drawn)

    lab.search("rsqrt").first.click()
    expect(lab.hook("inspector")).to_contain_text("rsqrt")
    group = lab.picture.locator('[role=button][aria-expanded="true"]').first
    name = group.get_attribute("id")
    group.focus()
    lab.page.keyboard.press("Space")
    expect(lab.picture.locator(f'[id="{name}"]')).to_have_attribute("aria-expanded", "false")
    lab.draws(drawn)  # closing gives the former picture back

    lab.page.screenshot(path=artifacts / "notebook7.png")
    svg = ElementTree.fromstring(lab.exported(".svg", tmp_path).read_text(encoding="utf-8"))
    assert svg.tag.endswith("svg")
    assert problems == []
