"""A browser and a Jupyter server for the tests of this folder: the distribution's Chromium, without a display or a network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Request, sync_playwright

from tests.browser.server import Server, serving

SLOW = 60_000  # milliseconds that a click's effect may take on a machine that does much else
FLAGS = [
    "--no-sandbox",  # CI runs as root
    "--disable-dev-shm-usage",  # a container's /dev/shm is small
    "--disable-gpu",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # what reaches for the network fails here as it does offline
]
FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


# Until the last test of this folder, and no longer: while it lives Playwright runs an event loop in this thread, where another
# folder's tests start loops of their own.
@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """The distribution's Chromium, headless."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("needs chromium on PATH: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def jupyter(tmp_path_factory) -> Iterator[Server]:
    """JupyterLab and Notebook 7, served to the tests of one worker, with kernels of this interpreter."""
    with serving(tmp_path_factory.mktemp("jupyter")) as server:
        yield server


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory) -> Path:
    """Where screenshots are kept: the folder that FUSIONLAB_ARTIFACTS names, or a temporary one."""
    folder = Path(os.environ.get("FUSIONLAB_ARTIFACTS") or tmp_path_factory.mktemp("artifacts"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def problems() -> list[str]:
    """What went wrong in the pages of a test: errors on the console, exceptions, requests that leave this machine."""
    return []


def watch(page: Page, problems: list[str]) -> None:
    """Adds what goes wrong in a page from now on to `problems`."""

    def requested(request: Request) -> None:
        if not request.url.startswith(("http://127.0.0.1", "ws://127.0.0.1", "file:", "data:", "blob:", "about:")):
            problems.append(f"request to {request.url}")

    page.on("console", lambda m: problems.append(f"console: {m.text} {m.location}") if m.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(f"exception: {error}"))
    page.on("request", requested)


@pytest.fixture
def page(chromium, problems, artifacts, request) -> Iterator[Page]:
    """A fresh tab, watched for `problems`; how it looked is kept where the test fails."""
    context = chromium.new_context(viewport={"width": 1600, "height": 1100}, reduced_motion="reduce")
    context.set_default_timeout(SLOW)
    tab = context.new_page()
    watch(tab, problems)
    yield tab
    if request.node.stash.get(FAILED, False):
        tab.screenshot(path=artifacts / f"failed-{request.node.name}.png")
    context.close()
