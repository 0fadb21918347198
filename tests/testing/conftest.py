"""pytester takes modules that were first imported inside a run out of `sys.modules` again; matplotlib does not bear a second import."""

from __future__ import annotations

import pytest

from fusionlab.viz.plots import figure_svg, new_axes


@pytest.fixture(scope="session", autouse=True)
def matplotlib_is_imported_before():
    figure_svg(new_axes(1, 1).figure)
