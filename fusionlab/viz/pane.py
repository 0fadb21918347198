"""The graph pane: the one widget with JavaScript of its own. Python computes the SVG, the browser shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anywidget
import traitlets

_HERE = Path(__file__).parent


class GraphPane(anywidget.AnyWidget):
    """Shows an SVG; pans, zooms, and reports what was clicked.

    Attributes:
      svg: the picture.
      labels: SVG id -> spoken label of everything that can be selected.
      selected_id: SVG id of what is selected, "" for nothing.
      dimmed: True while the picture is out of date.
    """

    _esm = _HERE / "explorer.js"
    _css = _HERE / "explorer.css"
    svg = traitlets.Unicode("").tag(sync=True)
    labels: Any = traitlets.Dict().tag(sync=True)
    selected_id = traitlets.Unicode("").tag(sync=True)
    dimmed = traitlets.Bool(False).tag(sync=True)
