"""Notebooks as a reader works with them: written from cells, opened, run from the menu, read cell by cell."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect
from playwright.sync_api import TimeoutError as TookTooLong

from tests.browser.server import KERNEL, Server

SLOW = 120_000  # milliseconds that running cells may take: the first one imports JAX

CONNECTED = """() => {
    const session = window.jupyterapp?.shell?.currentWidget?.context?.sessionContext?.session;
    return session?.kernel?.connectionStatus === 'connected' && session.kernel.status === 'idle';
}"""
# Once the kernel is idle and every cell has run, or one has failed: then those below it never run. Gives what failed.
SETTLED = """() => {
    const book = window.jupyterapp.shell.currentWidget;
    const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(e => e.textContent.trim());
    if (book.context.sessionContext.session.kernel.status !== 'idle' || prompts.includes('[*]:')) return null;
    const outputs = book.content.model.toJSON().cells.flatMap(c => c.outputs ?? []);
    const failed = outputs.filter(o => o.output_type === 'error').map(o => o.traceback.join('\\n'));
    return failed.length || prompts.every(p => /^\\[\\d+\\]:$/.test(p)) ? {failed} : null;
}"""
COLOURS = re.compile("\x1b\\[[0-9;]*m")  # of a traceback


def write_notebook(path: Path, cells: list[str]) -> Path:
    """A notebook of code cells for the kernel of this very interpreter."""
    import nbformat  # takes a second or three, which collection does without

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    notebook.metadata["kernelspec"] = {"name": KERNEL, "display_name": "FusionLab's tests", "language": "python"}
    nbformat.write(notebook, path)
    return path


@dataclass(frozen=True)
class OpenNotebook:
    """A notebook open in a browser tab, in JupyterLab or Notebook 7: both draw cells alike."""

    page: Page
    path: Path

    @property
    def cells(self) -> Locator:
        return self.page.locator(".jp-Notebook .jp-CodeCell")

    def menu(self, menu: str, item: str) -> None:
        """Clicks an item of the menu bar."""
        self.page.locator(".lm-MenuBar-itemLabel", has_text=menu).first.click()
        self.page.locator(".lm-Menu .lm-Menu-itemLabel").get_by_text(item, exact=True).click()

    def run_all(self) -> None:
        """Runs every cell from the Run menu and waits for the last; a cell that fails fails the test with what it printed."""
        self.menu("Run", "Run All Cells")
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        """Until the kernel has nothing left to do; a cell that failed fails the test."""
        try:
            failed = self.page.wait_for_function(SETTLED, timeout=SLOW).evaluate("settled => settled.failed")
        except TookTooLong:
            shown = [self.cells.nth(i).inner_text() for i in range(self.cells.count())]
            pytest.fail(f"cells still run after {SLOW / 1000:.0f} s:\n" + "\n".join(shown), pytrace=False)
        if failed:
            pytest.fail("a cell failed:\n" + COLOURS.sub("", "\n".join(failed)), pytrace=False)

    def ask(self, source: str) -> str:
        """Runs a line in a cell of its own below the last one, as a reader would, takes the cell away, and gives what it printed."""
        self.cells.last.locator(".jp-InputPrompt").click()
        before = self.cells.count()
        self.page.keyboard.press("b")
        expect(self.cells).to_have_count(before + 1)
        self.cells.last.locator(".cm-content").click()
        self.page.keyboard.insert_text(source)
        self.page.keyboard.press("Control+Enter")
        self.wait_until_idle()
        told = self.output(-1)
        self.cells.last.locator(".jp-InputPrompt").click()
        self.page.keyboard.type("dd")
        expect(self.cells).to_have_count(before)
        return told

    def output(self, cell: int) -> str:
        """What a cell shows below it, as text."""
        return "\n".join(self.cells.nth(cell).locator(".jp-OutputArea-output").all_inner_texts())

    def saved(self) -> Any:
        """The notebook as Jupyter saves it now."""
        import nbformat

        self.page.keyboard.press("Escape")
        before = self.path.stat().st_mtime_ns
        self.page.keyboard.press("Control+s")
        until = time.monotonic() + 30
        while True:
            assert time.monotonic() < until, f"{self.path.name} was not saved"
            self.page.wait_for_timeout(50)
            if self.path.stat().st_mtime_ns != before:
                with contextlib.suppress(nbformat.reader.NotJSONError):  # Jupyter is still writing it
                    return nbformat.read(self.path, as_version=4)


def open_in_lab(page: Page, server: Server, path: Path) -> OpenNotebook:
    """A notebook in JupyterLab, once its kernel is there."""
    return _opened(page, server.lab(path), path)


def open_in_notebook7(page: Page, server: Server, path: Path) -> OpenNotebook:
    """A notebook in Notebook 7, once its kernel is there."""
    return _opened(page, server.notebook(path), path)


def _opened(page: Page, address: str, path: Path) -> OpenNotebook:
    page.goto(address)
    page.wait_for_function(CONNECTED, timeout=SLOW)
    return OpenNotebook(page, path)
