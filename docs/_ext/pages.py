"""Pages that are written when the site is built: the notebooks, and the Markdown files of the repository's root."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from repository_links import ROOT

WIDGET = "application/vnd.jupyter.widget-view+json"  # of an explorer; a note and a still picture of it follow
STYLE = re.compile("<style>.*?</style>", re.DOTALL)
ROOT_FILES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


def write_notebooks(folder: Path) -> None:
    """Every notebook of the repository, with the outputs that a page can show."""
    folder.mkdir()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        book = json.loads(path.read_text(encoding="utf-8"))
        book["metadata"].pop("widgets", None)
        for cell in book["cells"]:
            if cell["cell_type"] == "code":
                _drawable(cell)
        (folder / path.name).write_text(json.dumps(book), encoding="utf-8")


def _drawable(cell: dict[str, Any]) -> None:
    """Leaves out of a cell's outputs what needs a kernel, and of an output in several types what is no picture, if it has one."""
    cell["outputs"] = [output for output in cell["outputs"] if WIDGET not in output.get("data", {})]
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            output["data"] = {"image/png": data["image/png"]}
            options = cell["metadata"].setdefault("mystnb", {}).setdefault("image", {})
            options.setdefault("alt", "".join(data.get("text/plain", "a picture")).strip("<>"))
            width = output.get("metadata", {}).get("image/png", {}).get("width")
            if width:
                options.setdefault("width", f"{width}px")
        elif "fl-still" in "".join(
            data.get("text/html", "")
        ):  # its style sheet hides it beside the explorer that is left out here
            data["text/html"] = STYLE.sub("", "".join(data["text/html"]))


def write_root_files(folder: Path) -> None:
    """What stands in the repository's root for those who look there first; its links are rewritten with all others."""
    for name, page in ROOT_FILES.items():
        (folder / page).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
