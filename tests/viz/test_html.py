"""The static report and the notebook picture."""

import dataclasses
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from fusionlab.viz import pane
from fusionlab.viz.html import graph_html, report_html

from .conftest import candidate, findings_of, linear_nodes, rejection

HOSTILE = "<script>alert(1)</script>&\"'层"
# Attributes through which a page loads something.
LOADING = {"src", "href", "xlink:href", "srcset", "data", "action", "poster", "background"}


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.loads, self.text, self.open_tags = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [(k, v) for k, v in attrs if k in LOADING]

    def handle_data(self, data):
        self.text.append(data)


def chromium_dump(path, tmp_path):
    """The page's DOM after its scripts ran, from a headless Chromium with a profile of its own."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    flags = ["headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"]
    flags += ["disable-component-update", "disable-sync", "disable-dev-shm-usage", "window-size=1400,1000", "dump-dom"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run(
        [program, *(f"--{f}" for f in flags), profile, "--virtual-time-budget=3000", path.as_uri()],
        capture_output=True,
        timeout=60,
        check=True,
    )
    return done.stdout.decode()


@pytest.fixture
def browser(require, tmp_path):
    require(any(shutil.which(p) for p in ("chromium", "chromium-browser", "google-chrome")), "Chromium")
    return lambda path: chromium_dump(path, tmp_path)


def test_a_report_loads_nothing_from_anywhere(case):
    text = report_html(case.graph, case.findings, after=case.graph)
    page = Page(text)
    assert page.loads == []
    assert not re.search(r"https?://|@import|url\(", text)
    assert not {"link", "iframe", "img", "object"} & set(page.tags)


def test_a_report_says_everything_that_was_found(case):
    first = case.findings.candidates[0].id
    text = " ".join(
        Page(
            report_html(
                case.graph,
                case.findings,
                enabled={first},
                environment={"jax": "0.0.test"},
                formulas={"lerp": "x + w * (y - x)"},
            )
        ).text
    )
    for wanted in (
        "mlp · 12 nodes · cpu · 2 subgraphs can be fused (1 applied here) · 1 declined · not measured",
        "tanh(x @ w + b)",
        "4 nodes → 1, applied",
        "4 nodes → 1, not applied",
        "a note worth reading",
        "no CUDA device",
        "escapes (1): an inner value is also read outside the site",
        "17 of 19 matched",
        "return it only when asked",
        "x + w * (y - x)",
        "nothing found",
        "pre_activation",
        "256 B",
        "0.0.test",
        "Nothing was measured.",
        "fusionlab.explore(fn, *args)",
    ):
        assert wanted in text, wanted


def test_hostile_names_stay_text(case):
    sites = linear_nodes(case.graph)
    graph = dataclasses.replace(case.graph, name=HOSTILE)
    found = findings_of(
        graph,
        [candidate(graph, f"gemm_epilogue@{HOSTILE}#1", sites[0], HOSTILE)],
        [rejection("gemm_epilogue@x#1", sites[1], sentence=HOSTILE, edit=HOSTILE, code=HOSTILE)],
    )
    text = report_html(graph, found, title=HOSTILE, environment={HOSTILE: HOSTILE})
    assert "<script>alert" not in text
    assert Page(text).tags.count("script") == 2
    assert "alert(1)" in " ".join(Page(text).text)


def test_the_notebook_picture_needs_no_script(case):
    text = graph_html(case.graph, case.findings)
    page = Page(text)
    assert "script" not in page.tags
    assert "svg" in page.tags
    assert page.loads == []
    text = " ".join(page.text)
    assert "2 subgraphs can be fused (none applied here)" in text
    assert "%7 = add is also returned" in text
    assert "return it only when asked" in text


def test_a_graph_alone_has_a_picture_too(case):
    assert "mlp · 12 nodes" in " ".join(Page(graph_html(case.graph)).text)
    assert "Candidates" not in report_html(case.graph)


def test_a_browser_shows_the_report_and_its_inspector(case, tmp_path, browser):
    path = tmp_path / "report.html"
    node = linear_nodes(case.graph)[0][0]
    text = report_html(case.graph, case.findings)
    # A click as a reader would make it, once the page's own script has run.
    click = f'<script>document.getElementById("fl-n{node.id}").dispatchEvent(new Event("click"))</script></body>'
    path.write_text(text.replace("</body>", click))
    dom = browser(path)
    aside = re.search(r'<aside[^>]*id="fl-inspector".*?</aside>', dom, re.S).group()
    assert f"dot_general {node.outputs[0].name}" in aside
    assert "x = jnp.tanh(x @ w + b)" in aside
    assert "gemm_epilogue@layer_0#1" in aside
    assert len(re.findall(r'<g [^>]*role="button"', dom)) == 12 + 6
    assert os.path.getsize(path) < 300_000


def test_the_graph_pane_draws_zooms_and_reports_clicks_and_keys_in_a_browser(tmp_path, browser):
    """explorer.js with a stand-in for the kernel: what it sends is written into the page."""
    script = (pane._HERE / "explorer.js").read_text().replace("export default { render };", "")
    (tmp_path / "pane.html").write_text(
        """<!DOCTYPE html><meta charset="utf-8"><div id="here"></div><pre id="log"></pre><script>
        const drawn = '<g id="fl-a"><rect width="50" height="20"/></g>';
        const state = {svg: `<svg viewBox="0 0 200 100" width="9" height="9">${drawn}</svg>`,
                       labels: {"fl-a": "box a"}, selected_id: "", dimmed: false};
        const handlers = {}, sent = [];
        const model = {get: (k) => state[k], send: (m) => sent.push(m),
                       on: (k, f) => { handlers[k] = f; }, off: (k) => { delete handlers[k]; }};
        """
        + script
        + """
        const el = document.getElementById("here");
        const clean = render({model, el});
        const box = document.getElementById("fl-a"), svg = el.querySelector("svg");
        const key = (k, o = {}) => box.dispatchEvent(new KeyboardEvent("keydown", {key: k, bubbles: true, ...o}));
        box.dispatchEvent(new PointerEvent("pointerdown", {bubbles: true, clientX: 5, clientY: 5}));
        box.dispatchEvent(new PointerEvent("pointerup", {bubbles: true, clientX: 5, clientY: 5}));
        key("Enter"); key("Enter", {shiftKey: true});
        box.dispatchEvent(new MouseEvent("dblclick", {bubbles: true}));
        const before = svg.style.transform; key("+"); const after = svg.style.transform;
        state.selected_id = "fl-a"; handlers["change:selected_id"]();
        state.dimmed = true; handlers["change:dimmed"]();
        const facts = [box.getAttribute("aria-label"), box.classList.contains("selected"), before !== after,
                       el.querySelector(".fl-pane").classList.contains("dimmed")];
        clean();
        document.getElementById("log").textContent = JSON.stringify(
          {sent, facts, left: [el.children.length, Object.keys(handlers).length]});
        </script>"""
    )
    dom = browser(tmp_path / "pane.html")
    log = re.search(r'<pre id="log">(.*?)</pre>', dom, re.S).group(1)
    assert log == (
        '{"sent":[{"type":"select","id":"fl-a"},{"type":"select","id":"fl-a"},{"type":"fold","id":"fl-a"},'
        '{"type":"fold","id":"fl-a"}],"facts":["box a",true,true,true],"left":[0,0]}'
    )
