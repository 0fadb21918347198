"""The code for the browser, in one piece: the explorer's module is written in several files and served as one text."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

_PARTS = (
    "explorer.js",
    "header.js",
    "passes.js",
    "outline.js",
    "graph.js",
    "tools.js",
    "trail.js",
    "minimap.js",
    "reading.js",
    "panels.js",
    "copy.js",
    "record.js",
    "names.js",
    "gone.js",
    "measuring.js",
)


@cache
def asset(name: str) -> str:
    """The text of a file in `assets`."""
    return (files("fusionlab.viz") / "assets" / name).read_text(encoding="utf-8")


def module() -> str:
    """The explorer's module, which anywidget and the standalone page load; only `explorer.js` exports."""
    return "\n".join(map(asset, _PARTS))
