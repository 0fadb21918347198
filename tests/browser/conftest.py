"""A browser and a Jupyter server for the tests of this folder: the distribution's Chromium, without a display or a network.

What stays open is open for one worker and as long as tests of this folder run there: a Chromium and one server for all of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

from tests.browser.server import Server, serving

SLOW = 60_000  # milliseconds that a click's effect may take on a machine that does much else
FLAGS = [
    "--no-sandbox",  # CI runs as root
    "--disable-dev-shm-usage",  # a container's /dev/shm is small
    "--disable-gpu",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # what reaches for the network fails here as it does offline
]
OURS = ("http://127.0.0.1", "ws://127.0.0.1", "file:", "data:", "blob:", "about:")
FAILED = pytest.StashKey[bool]()

Problems = list[str]
Tab = Callable[[Problems], contextlib.AbstractContextManager[Page]]


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
    expect.set_options(timeout=SLOW)
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
def notebook_server(jupyter) -> Server:
    """The same server: `notebook` has its pages there beside JupyterLab's."""
    return jupyter


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory) -> Path:
    """Where screenshots are kept: the folder that FUSIONLAB_ARTIFACTS names, or a temporary one."""
    folder = Path(os.environ.get("FUSIONLAB_ARTIFACTS") or tmp_path_factory.mktemp("artifacts")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _watch(page: Page, problems: Problems) -> None:
    """Adds what goes wrong in a page from now on to `problems`: exceptions, errors on the console, requests that leave the machine."""

    def said(message) -> None:
        # A server that refuses one of its own files is no doing of what a notebook shows.
        if message.type == "error" and "/static/" not in message.location.get("url", ""):
            problems.append(f"console: {message.text} {message.location}")

    def requested(request: Request) -> None:
        if not request.url.startswith(OURS):
            problems.append(f"request: {request.url}")

    page.on("console", said)
    page.on("pageerror", lambda error: problems.append(f"exception: {error.message}\n{error.stack}"))
    page.on("request", requested)


@pytest.fixture(scope="package")
def tab(chromium) -> Tab:
    """`with tab(problems) as page`: a fresh tab, which shares nothing with others; `problems` receives what goes wrong in it."""

    @contextlib.contextmanager
    def opened(problems: Problems) -> Iterator[Page]:
        context = chromium.new_context(viewport={"width": 1600, "height": 1200}, reduced_motion="reduce")
        context.set_default_timeout(SLOW)
        page = context.new_page()
        _watch(page, problems)
        try:
            yield page
        finally:
            context.close()

    return opened


@pytest.fixture
def problems() -> Problems:
    """What went wrong in the `page` of a test."""
    return []


@pytest.fixture
def keep(artifacts, request) -> Callable[[Page], contextlib.AbstractContextManager[None]]:
    """`with keep(page)` keeps how the page looks where the test fails."""

    @contextlib.contextmanager
    def looked_after(page: Page) -> Iterator[None]:
        yield
        if request.node.stash.get(FAILED, False):
            page.screenshot(path=artifacts / f"failed-{request.node.name}.png")

    return looked_after


@pytest.fixture
def page(tab, problems, keep) -> Iterator[Page]:
    """A fresh tab, watched for `problems`."""
    with tab(problems) as page, keep(page):
        yield page
