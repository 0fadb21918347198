"""The pages of docs/frameworks: each trains, is searched, compared, saved and switched off as it says."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .snippets import outputs

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "frameworks"


@pytest.mark.whole
@pytest.mark.parametrize("page", ["nnx", "equinox"])
def test_a_page_does_what_it_says(page):
    wrong = [shown.difference for shown in outputs((FOLDER / f"{page}.md").read_text("utf-8")) if not shown.is_right]
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.dear
@pytest.mark.parametrize("page", ["linen", "haiku", "keras", "maxtext"])
def test_a_page_does_what_it_says_in_a_process_of_its_own(page, require):
    require(page != "keras" or importlib.util.find_spec("keras"), "Keras (pip install 'fusionlab[zoo]')")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "tests.docs.snippets", str(FOLDER / f"{page}.md")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


def test_every_page_is_run_and_listed():
    pages = {path.stem for path in FOLDER.glob("*.md")} - {"index"}
    assert pages == {"nnx", "equinox", "linen", "haiku", "keras", "maxtext"}
    index = (FOLDER / "index.md").read_text("utf-8")
    assert {page for page in pages if f"({page}.md)" not in index} == set()
