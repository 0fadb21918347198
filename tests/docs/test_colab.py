"""The notebook for Colab: its cells run here as they are, with a stand-in for what Colab alone has."""

from __future__ import annotations

import re
import sys
import tomllib
import types
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = nbformat.read(ROOT / "docs" / "colab.ipynb", as_version=4)


def test_it_says_that_it_was_not_tried_and_installs_the_wheel_of_this_version():
    assert "not been tried there" in NOTEBOOK.cells[0].source
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    installs = [c.source for c in NOTEBOOK.cells if c.source.startswith("%pip")]
    assert re.findall(r"fusionlab-([\d.]+)-py3", "".join(installs)) == [version]


@pytest.mark.dear
def test_its_cells_run(monkeypatch, capsys):
    allowed = []
    colab = types.ModuleType("google.colab")
    colab.output = types.SimpleNamespace(enable_custom_widget_manager=lambda: allowed.append(True))
    monkeypatch.setitem(sys.modules, "google", types.ModuleType("google"))
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    names = {}
    for cell in NOTEBOOK.cells:
        if cell.cell_type == "code" and not cell.source.startswith("%"):
            exec(compile(cell.source, "colab.ipynb", "exec"), names)
    assert allowed == [True]
    assert list(names["lab"].sites) == ["dot_product_attention@#1"]
    printed = capsys.readouterr().out
    assert "attention: " in printed
    assert "of its tolerance" in printed
    names["lab"].close()
