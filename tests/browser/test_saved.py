"""The repository's notebooks as somebody else opens them: cells as they were saved, nothing run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.server import KERNEL

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(p.stem for p in NOTEBOOKS.glob("*.ipynb"))
WAYS = {
    "without a kernel": {"trusted": True},
    "with a new kernel": {"trusted": True, "kernel": True},
    "untrusted": {},
}
LOST = re.compile("model not found|Loading widget")  # what JupyterLab says of a widget that is not there
LONGEST = 500  # characters of a paragraph of ours; what is left of an SVG has thousands
# Every output of a picture with how it is seen, and every line of text that is seen, streams apart.
SEEN = """() => {
    const visible = e => e.checkVisibility() && e.getBoundingClientRect().height > 0;
    const outputs = [...document.querySelectorAll('.jp-OutputArea-output')].filter(visible);
    const texts = outputs.filter(e => !e.dataset.mimeType?.includes('stdout'));
    return {
        pictures: outputs.flatMap(e => [...e.querySelectorAll('img')]).map(e =>
            ({kind: e.src.slice(0, 22), natural: e.naturalWidth, width: e.clientWidth, height: e.clientHeight})),
        lines: texts.flatMap(e => e.innerText.split('\\n')),
    };
}"""


def opened(page, server, name, *, trusted=False, kernel=False):
    """One of the notebooks in JupyterLab, of which the server has never heard; its JSON."""
    import nbformat
    from nbformat.sign import NotebookNotary

    path = server.folder / f"{name}.ipynb"
    shutil.copy(NOTEBOOKS / path.name, path)
    book = nbformat.read(path, as_version=4)
    book.metadata["kernelspec"]["name"] = KERNEL if kernel else "nowhere"
    nbformat.write(book, path)
    if trusted:
        NotebookNotary(data_dir=str(server.folder.parent / "data")).sign(book)
    page.set_viewport_size({"width": 1400, "height": 5200})
    page.goto(server.lab(path))
    if not kernel:
        page.locator(".jp-Dialog").get_by_role("button", name="No Kernel").click()
    cells = page.locator(".jp-Notebook .jp-CodeCell")
    expect(cells).to_have_count(sum(c.cell_type == "code" for c in book.cells))
    expect(page.locator(".jp-Notebook .jp-OutputArea-output").last).to_be_attached()
    return json.loads(path.read_text(encoding="utf-8"))


def outputs(book):
    return [o["data"] for c in book["cells"] for o in c.get("outputs", []) if "data" in o]


def reads_well(page, book):
    """Every picture is one, and of none there are words alone. Gives the lines of text."""
    wanted = sum("image/png" in data for data in outputs(book))
    assert wanted > 0
    page.wait_for_function("[...document.querySelectorAll('.jp-OutputArea-output img')].every(e => e.complete)")
    seen = page.evaluate(SEEN)
    assert [p["kind"] for p in seen["pictures"]] == ["data:image/png;base64,"] * wanted
    for picture in seen["pictures"]:
        assert picture["natural"] > 300
        assert picture["width"] > 250
        assert picture["height"] > 100
    assert not [line for line in seen["lines"] if len(line) > LONGEST]
    assert not LOST.search("\n".join(seen["lines"]))
    return seen["lines"]


@pytest.fixture
def here(jupyter):
    yield jupyter
    jupyter.stop_kernels()


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_that_comes_back_shows_its_pictures(name, how, page, here, artifacts):
    book = opened(page, here, name, **WAYS[how])
    explored = any("application/vnd.jupyter.widget-view+json" in data for data in outputs(book))
    if explored and how != "untrusted":
        gone = page.locator(".jp-OutputArea-output", has_text=LOST)
        expect(gone).to_have_count(1)
        if how == "with a new kernel":
            expect(gone).to_have_text(re.compile("model not found"))
        expect(gone).to_be_hidden()
    lines = reads_well(page, book)
    assert explored == any("A still picture of the explorer" in line for line in lines)
    page.screenshot(path=artifacts / f"{name}-{how.replace(' ', '-')}.png")
