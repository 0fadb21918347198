"""The explorer on screen, as its reader finds it: by the hooks that its elements carry."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Download, Locator, Page, expect

# What is drawn, apart from the marks on it that say where the reader is.
DRAWN = """() => [...document.querySelectorAll('.fl-explorer [data-fl=graph] svg :is(path, polygon, polyline, ellipse, text)')]
    .map(e => e.getAttribute('d') ?? e.getAttribute('points') ?? e.textContent).join('\\n')"""


class Explorer:
    """The explorer in a page, whatever shows it: a notebook's output, or the page it exports."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.root = page.locator(".fl-explorer")

    def hook(self, name: str) -> Locator:
        """The element with this hook."""
        return self.root.locator(f'[data-fl="{name}"]')

    def toggle(self, name: str) -> Locator:
        """The check box of a pass or a site."""
        return self.root.locator(f'input[data-fl-toggle="{name}"]')

    def groups(self) -> Locator:
        """The check boxes of identical sites."""
        return self.root.locator("input[data-fl-group]")

    def show_sites(self) -> None:
        """Opens every list of identical sites that is closed."""
        closed = self.root.locator('button[aria-expanded="false"][data-open]')
        while closed.count():
            closed.first.click()

    @property
    def sentence(self) -> str:
        """The sentence on top."""
        return self.hook("sentence").inner_text()

    @property
    def picture(self) -> Locator:
        """The drawing of the graph."""
        return self.hook("graph").locator("svg").first

    @property
    def boxes(self) -> Locator:
        """What can be selected in the drawing."""
        return self.picture.locator("[role=button]")

    def drawn(self) -> str:
        """The drawing as plain text, to compare with another."""
        return self.page.evaluate(DRAWN)

    def redrawn(self, before: str) -> str:
        """Waits until the drawing is another than `before`, and gives it."""
        self.page.wait_for_function(f"before => ({DRAWN})() !== before", arg=before)
        return self.drawn()

    def draws(self, expected: str) -> None:
        """Waits until the drawing is this one."""
        self.page.wait_for_function(f"expected => ({DRAWN})() === expected", arg=expected)

    def box(self, label: str) -> Locator:
        """The first box whose spoken label has this text."""
        return self.picture.locator(f'[role=button][aria-label*="{label}"]').first

    def open_tab(self, name: str) -> Locator:
        """Chooses a tab below and gives its panel."""
        self.root.locator(f'[role=tab][data-fl-tab="{name}"]').click()
        panel = self.root.locator(".fl-panels [role=tabpanel]:visible")
        expect(panel).to_have_count(1)
        return panel

    def search(self, text: str) -> Locator:
        """Types into the search box and gives the hits of this text, once they are there."""
        self.hook("search").fill(text)
        hits = self.root.locator(f'[data-fl="hits"][data-fl-query="{text}"] button')
        hits.first.wait_for()
        return hits

    def export(self, suffix: str) -> Download:
        """Chooses a kind of file from the export menu and waits for it."""
        self.hook("export").locator("summary").click()
        with self.page.expect_download() as download:
            self.root.locator(f'button[data-fl-export="{suffix}"]').click()
        return download.value

    def exported(self, suffix: str, folder: Path) -> Path:
        """The file that an export leaves on the reader's disk."""
        download = self.export(suffix)
        path = folder / download.suggested_filename
        download.save_as(path)
        return path

    def idle(self) -> None:
        """Waits until nothing is measured or compiled."""
        expect(self.hook("progress")).to_be_hidden(timeout=180_000)
