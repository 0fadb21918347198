"""pytester takes modules that were first imported inside a run out of `sys.modules` again; matplotlib does not bear a second import."""

from __future__ import annotations

import sys

import pytest

from fusionlab.viz.plots import figure_svg, new_axes


@pytest.fixture(scope="session", autouse=True)
def matplotlib_is_imported_before():
    figure_svg(new_axes(1, 1).figure)


@pytest.fixture(autouse=True)
def no_model_of_another_test(monkeypatch):
    """The models that these tests write are called model.py, as those of others are whose module is still there."""
    monkeypatch.delitem(sys.modules, "model", raising=False)
