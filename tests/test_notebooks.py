"""The notebooks run from top to bottom, and the tour is committed as it ran."""

import json
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def test_there_is_a_tour():
    assert (NOTEBOOKS / "00_tour.ipynb").is_file()


@pytest.fixture(scope="module")
def tour():
    """The tour, executed now."""
    notebook = nbformat.read(NOTEBOOKS / "00_tour.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": NOTEBOOKS}})
    client.execute(env=os.environ | {"PYTHONPATH": str(NOTEBOOKS.parent)})  # the kernel runs this source tree
    return notebook


def code_cells(notebook):
    return [c for c in notebook.cells if c.cell_type == "code"]


def text_of(cell):
    parts = [o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in cell.outputs]
    return "\n".join(parts)


def test_the_tour_runs_and_shows_its_story(tour):
    cells = code_cells(tour)
    assert len(cells) == 10
    everything = "\n".join(text_of(c) for c in cells)
    assert "gemm_epilogue: " in everything
    assert "dot_product_attention: 1 subgraphs fused" in everything
    pictures = [
        o for c in cells for o in c.outputs if {"text/html", "image/png", "image/svg+xml"} & set(o.get("data", {}))
    ]
    assert len(pictures) >= 3
    widgets = [o for o in cells[-1].outputs if "application/vnd.jupyter.widget-view+json" in o.get("data", {})]
    assert len(widgets) == 1


def test_no_cell_defines_a_helper_or_reaches_outside():
    for path in NOTEBOOKS.glob("*.ipynb"):
        for cell in code_cells(nbformat.read(path, as_version=4)):
            assert not re.search(r"^\s*(def|class) (?!model\b)", cell.source, re.M), path.name
            assert "http" not in cell.source


def test_the_committed_tour_has_the_outputs_of_this_code(tour):
    """What does not depend on the machine is as committed."""
    committed = nbformat.read(NOTEBOOKS / "00_tour.ipynb", as_version=4)
    for old, new in zip(code_cells(committed), code_cells(tour), strict=True):
        assert old.outputs, old.source
        if "print(found)" in new.source:
            assert text_of(old) == text_of(new), "run: jupyter execute --inplace notebooks/00_tour.ipynb"


def test_the_committed_tour_is_small_and_names_no_folder_of_its_author():
    text = (NOTEBOOKS / "00_tour.ipynb").read_text(encoding="utf-8")
    assert len(text) < 1_000_000
    assert not re.search(r"(/home/|/root/|/tmp/|/Users/|[A-Z]:\\\\)", text)
    assert json.loads(text)["metadata"]["kernelspec"]["name"] == "python3"
