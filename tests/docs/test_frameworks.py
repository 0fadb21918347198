"""The pages of docs/frameworks: each trains, is searched, compared, saved and switched off as it says."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .pages import NUMBER, blocks, run

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "frameworks"


@pytest.mark.whole
@pytest.mark.parametrize("page", ["nnx", "equinox"])
def test_a_page_does_what_it_says(page):
    run(FOLDER / f"{page}.md")


@pytest.mark.dear
@pytest.mark.parametrize("page", ["linen", "haiku", "keras", "maxtext"])
def test_a_page_does_what_it_says_in_a_process_of_its_own(page, require):
    require(page != "keras" or importlib.util.find_spec("keras"), "Keras (pip install 'fusionlab[zoo]')")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "tests.docs.pages", str(FOLDER / f"{page}.md")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_page_is_run_and_listed():
    pages = {path.stem for path in FOLDER.glob("*.md")} - {"index"}
    assert pages == {"nnx", "equinox", "linen", "haiku", "keras", "maxtext"}
    index = (FOLDER / "index.md").read_text("utf-8")
    assert {page for page in pages if f"({page}.md)" not in index} == set()


def test_a_number_stands_for_any_other_and_a_word_for_itself(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nx = 41\nprint(x, 'nodes')\n```\n\n```text\n7 nodes\n```\n\n```python\nassert x == 41\n```\n"
    )
    assert [block.prints for block in blocks(page)] == ["7 nodes\n", None]
    run(page)
    page.write_text("```python\nprint(41, 'nodes')\n```\n\n```text\n41 sites\n```\n")
    with pytest.raises(AssertionError, match="printed\n41 nodes\n\nnot\n41 sites"):
        run(page)
    assert NUMBER.sub("0", "1,234 -> 5.6e-07 MiB") == "0 -> 0 MiB"
