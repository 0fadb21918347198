"""README's picture of the explorer: `FUSIONLAB_ARTIFACTS=docs python -m pytest -m "" tests/browser/test_picture.py` draws it again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.explorer import Explorer
from tests.browser.notebooks import open_in_lab, write_notebook

CELLS = [
    "import fusionlab as fl\nfrom model import arguments, model_step",
    "lab = fl.explore(model_step, *arguments())\nlab",
]


@pytest.mark.dear
def test_the_picture_in_readme(page, jupyter, artifacts):
    shutil.copy(Path(__file__).with_name("model.py"), jupyter.folder)
    book = open_in_lab(page, jupyter, write_notebook(jupyter.folder / "picture.ipynb", CELLS))
    page.keyboard.press("Control+b")  # the folder's list goes away
    book.run_all()
    lab = Explorer(page)
    lab.hook("measure").click()
    timing = lab.open_tab("Timing")
    expect(timing.locator("svg").first).to_be_visible(timeout=300_000)
    lab.idle()
    lab.search("dot_product_attention").first.click()
    expect(lab.hook("inspector")).to_contain_text("dot_product_attention")
    lab.hook("search").fill("")
    page.set_viewport_size({"width": 1500, "height": 2000})  # all of it at once
    lab.root.scroll_into_view_if_needed()
    expect(lab.picture.locator(".fl-found")).to_have_count(0)
    lab.hook("search").blur()
    page.mouse.move(0, 0)
    lab.root.screenshot(path=artifacts / "explorer.png")
    jupyter.stop_kernels()
