"""The static report and the notebook picture."""

import base64
import dataclasses
import gzip
import json
import os
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from importlib.resources import files

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.viz import palette
from fusionlab.viz.browser import module as browser_module
from fusionlab.viz.cards.album import Album
from fusionlab.viz.html import baked as scenes
from fusionlab.viz.html.report import graph_html, report_html
from tests.test_scale import train_step

from ..conftest import candidate, findings_of, linear_nodes, rejection

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
        "mlp · 12 nodes · cpu · 1 fused · 1 can be fused · 1 declined · not measured",
        "tanh(x @ w + b)",
        "4 nodes → 1, fused",
        "4 nodes → 1, can be fused",
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


def baked(text):
    """All HTML and SVG that a page unpacks when it is clicked through."""
    data = json.loads(re.search(r'id="fl-data">(.*?)</script>', text, re.S).group(1))
    unpack = lambda packed: json.loads(gzip.decompress(base64.b64decode(packed)))  # noqa: E731
    scenes = [unpack(scene) for scene in data["scenes"].values()]
    told = [unpack(data["inspector"]), *(scene["inspector"] for scene in scenes)]
    return [scene["svg"] for scene in scenes] + [entry["html"] for entries in told for entry in entries.values()]


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
    for html in baked(text):
        assert "script" not in Page(html).tags
    assert any("alert(1)" in html for html in baked(text))


def test_the_notebook_picture_needs_no_script(case):
    text = graph_html(case.graph, case.findings)
    page = Page(text)
    assert "script" not in page.tags
    assert "svg" in page.tags
    assert page.loads == []
    text = " ".join(page.text)
    assert "2 can be fused" in text
    assert "%7 = add is also returned" in text
    assert "return it only when asked" in text


def test_a_graph_alone_has_a_picture_too(case):
    assert "mlp · 12 nodes" in " ".join(Page(graph_html(case.graph)).text)
    assert "Candidates" not in report_html(case.graph)


def layer(x, w, b):
    return jax.nn.relu(x @ w + b)


def test_a_page_of_findings_shows_no_options_for_it_does_not_know_what_was_asked():
    found = fl.find(
        layer, jnp.ones((4, 8)), jnp.ones((8, 8)), jnp.ones(8), passes=fl.Strategy(gemm_epilogue={"strict_rank": True})
    )
    data = json.loads(re.search(r'id="fl-data">(.*?)</script>', report_html(found.graph, found), re.S).group(1))
    assert [each["options"] for each in data["panel"]["passes"]] == [[]]


def test_a_page_without_scripts_still_has_picture_legend_and_tables(case):
    text = report_html(case.graph, case.findings, after=case.graph)
    body = text[text.index("<body") : text.index("<script")]
    assert body.count("<svg") == 2
    assert 'id="fl-before"' in body
    assert "can be fused" in body
    assert "<noscript>" in body
    assert {"Sites", "Passes", "Declined", "Environment"} <= set(re.findall(r'data-fl-section="([^"]+)"', body))


def test_a_browser_shows_the_report_with_its_inspector(case, tmp_path, browser):
    path = tmp_path / "report.html"
    text = report_html(case.graph, case.findings)
    # A click as a reader would make it, once the page's own module has run.
    events = "".join(
        f"box.dispatchEvent(new PointerEvent('{e}', {{bubbles: true}}));" for e in ("pointerdown", "pointerup")
    )
    click = f'<script type="module">const box = document.querySelector("g.card");{events}</script></body>'
    path.write_text(text.replace("</body>", click))
    dom = browser(path)
    aside = re.search(r'<aside[^>]*data-fl="inspector".*?</aside>', dom, re.S).group()
    aside = re.sub(r"<[^>]+>", "", aside)
    assert "tanh(x @ w + b)" in aside
    assert "gemm_epilogue@layer_0#1" in aside
    assert len(re.findall(r'<g [^>]*role="button"', dom)) == 3
    assert os.path.getsize(path) < 300_000


# The module itself -----------------------------------------------------------------------------------------------------
STUB = """
const drawn = '<g id="fl-a"><rect width="50" height="20"/></g><g id="fl-b"><rect x="90" width="50" height="20"/></g>';
const state = {
  theme: "auto", head: {title: "f", sentence: "said", shown: "before", hulls: false, can: {measure: true, undo: true}},
  panel: {passes: [{name: "p", colour: "#000000", tint: "#eeeeee", formula: "x + y", state: "partial", applied: 1, sites: 2, declined: 0,
    options: [{name: "kind", value: 1, choices: [1, 2, null], doc: "which"}],
    groups: [{key: "k", label: "two", where: "", count: 2, ids: ["p@1", "p@2"], state: "partial", sites: [
      {id: "p@1", label: "1", on: true, note: "", losing: false}, {id: "p@2", label: "2", on: false, note: "+1.8%", losing: true}]}]}],
    declined: []},
  scene: {svg: `<svg viewBox="0 0 200 100" width="9" height="9">${drawn}</svg>`,
          items: {"fl-a": {label: "box a", closed: true, group: true}, "fl-b": {label: "box b"}}},
  marks: {}, inspector: {title: "", html: ""}, hits: {}, busy: {running: false, status: "idle"}, problem: null,
  tabs: [{name: "Timing", html: "<p>t</p>"}, {name: "Code", html: "<p>c</p>"}],
};
const handlers = {}, sent = [];
const model = {
  get: (k) => state[k], set: (k, v) => { state[k] = v; handlers[`change:${k}`]?.forEach((f) => f()); },
  save_changes: () => {}, send: (m) => sent.push(m),
  on: (k, f) => { (handlers[k] ??= new Set()).add(f); }, off: (k, f) => { handlers[k].delete(f); }};
const settle = () => new Promise((go) => setTimeout(go, 0));
const el = document.getElementById("here");
"""


def run_module(tmp_path, browser, script):
    """What a script logs that has the explorer's module, a stand-in for the kernel (`model`, `state`, `sent`) and an element `el`."""
    module = browser_module().replace("export default {", "const widget = {")
    css = (files("fusionlab.viz") / "assets" / "explorer.css").read_text(encoding="utf-8")
    page = tmp_path / "module.html"
    page.write_text(
        f'<!DOCTYPE html><meta charset="utf-8"><style>{css}</style><div id="here"></div><pre id="log"></pre>'
        f'<script type="module">{module}{STUB}'
        f"const log = {{}};{script}\ndocument.getElementById('log').textContent = JSON.stringify(log);</script>",
        encoding="utf-8",
    )
    return json.loads(unescape(re.search(r'<pre id="log">(.*?)</pre>', browser(page), re.S).group(1) or "{}"))


def test_clicks_keys_and_ticks_become_messages(tmp_path, browser):
    log = run_module(
        tmp_path,
        browser,
        """
        const clean = widget.render({model, el});
        const box = document.getElementById("fl-a");
        const key = (k, o = {}) => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key: k, bubbles: true, ...o}));
        const q = (s) => el.querySelector(s);
        box.dispatchEvent(new PointerEvent("pointerdown", {bubbles: true}));
        box.dispatchEvent(new PointerEvent("pointerup", {bubbles: true}));
        key("Enter"); key("Enter", {shiftKey: true}); key(" ");
        box.dispatchEvent(new MouseEvent("dblclick", {bubbles: true}));
        key("ArrowRight"); key("Enter");
        for (const s of ['[data-fl-toggle="p"]', '[data-fl-toggle="p@2"]', '[data-fl-group="k"]']) q(s).click();
        const option = q('[data-fl-option="p.kind"]'); log.choices = option.innerText.split("\\n");
        option.value = "2"; option.dispatchEvent(new Event("change", {bubbles: true}));
        for (const name of ["measure", "undo", "reset", "all-on", "all-off"]) q(`[data-fl="${name}"]`).click();
        q('[data-fl-pick="p@2"]').click();
        q('[data-fl-export=".svg"]').click();
        log.sent = sent;
        log.label = box.getAttribute("aria-label");
        clean();
        log.left = [el.children.length, Object.values(handlers).reduce((n, s) => n + s.size, 0)];
        """,
    )
    assert log["choices"] == ["1", "2", "automatic"]
    a, b = {"id": "fl-a"}, {"id": "fl-b"}
    assert log["sent"] == [
        {"type": "keep"},
        *(
            {"type": "select"} | a,
            {"type": "select"} | a,
            {"type": "fold"} | a,
            {"type": "fold"} | a,
            {"type": "fold"} | a,
        ),
        {"type": "select"} | b,
        {"type": "toggle", "name": "p", "on": True},
        {"type": "toggle", "name": "p@2", "on": True},
        {"type": "group", "ids": ["p@1", "p@2"], "on": True},
        {"type": "option", "pass": "p", "name": "kind", "value": 2},
        {"type": "measure"},
        {"type": "undo"},
        {"type": "reset"},
        *({"type": "all", "on": True}, {"type": "all", "on": False}),
        {"type": "pick", "name": "p@2"},
        {"type": "export", "suffix": ".svg"},
    ]
    assert log["label"] == "box a"
    assert log["left"] == [0, 0]


def test_a_change_keeps_focus_text_scroll_and_zoom(tmp_path, browser):
    log = run_module(
        tmp_path,
        browser,
        """
        widget.render({model, el});
        const q = (s) => el.querySelector(s), copy = (x) => JSON.parse(JSON.stringify(x));
        const tick = q('[data-fl-toggle="p@2"]');
        tick.focus();
        const panel = copy(state.panel);
        panel.passes[0].groups[0].sites[1].on = true; panel.passes[0].state = "on";
        panel.passes.unshift({...copy(panel.passes[0]), name: "other", groups: []});
        model.set("panel", panel); await settle();
        log.ticked = [tick.isConnected, document.activeElement === tick, tick.checked, q('[data-fl-toggle="p"]').indeterminate];
        const search = q('[data-fl="search"]');
        search.focus(); search.value = "half a wo";
        model.set("head", {...state.head, sentence: "other"}); model.set("panel", copy(panel)); await settle();
        log.typed = [document.activeElement === search, search.value, q('[data-fl="sentence"]').textContent];
        await new Promise((go) => setTimeout(go, 50));
        const key = (k) => document.getElementById("fl-a").dispatchEvent(new KeyboardEvent("keydown", {key: k, bubbles: true}));
        document.getElementById("fl-a").focus();
        key("+"); key("+");
        const at = () => document.getElementById("fl-a").getBoundingClientRect(), before = at();
        const scale = () => /scale\\(([^)]*)/.exec(q("svg").style.transform)[1], zoom = scale();
        key(" ");
        const scene = copy(state.scene);
        scene.svg = scene.svg.replace("0 0 200 100", "0 0 400 300");
        scene.svg = scene.svg.replace('width="50" height="20"', 'x="200" y="100" width="50" height="20"');
        model.set("scene", scene); await settle();
        const after = at();
        log.kept = [Math.abs(after.x - before.x) < 2, Math.abs(after.y - before.y) < 2, scale() === zoom, document.activeElement.id];
        """,
    )
    assert log["ticked"] == [True, True, True, False]
    assert log["typed"] == [True, "half a wo", "other"]
    assert log["kept"] == [True, True, True, "fl-a"]


def test_two_views_of_one_model_work_and_only_the_one_that_asked_downloads(tmp_path, browser):
    log = run_module(
        tmp_path,
        browser,
        """
        let made = 0;
        URL.createObjectURL = () => { made += 1; return "#made"; };
        const one = el.appendChild(document.createElement("div")), two = el.appendChild(document.createElement("div"));
        const first = widget.render({model, el: one}), second = widget.render({model, el: two});
        one.querySelector('[data-fl-export=".dot"]').click();
        handlers["msg:custom"].forEach((f) => f({type: "download", name: "x.dot", mime: "text/plain", text: "x"}));
        log.made = made;
        first();
        model.set("inspector", {title: "it", html: "<b>bold</b>"}); model.set("problem", {code: "E", sentence: "<i>no</i>"});
        await settle();
        const hook = (name) => two.querySelector(`[data-fl="${name}"]`);
        const said = [hook("inspector").querySelector("b").textContent, hook("problem").querySelector("span").textContent];
        log.second = [one.children.length, ...said];
        const ids = [...two.querySelectorAll("[role=tab], [role=tabpanel]")].map((e) => e.id);
        log.unique = new Set(ids).size === ids.length;
        """,
    )
    assert log == {"made": 1, "second": [0, "bold", "<i>no</i>"], "unique": True}


# Colours -------------------------------------------------------------------------------------------------------------
def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def themes():
    """The style sheet's blocks of colours; the light one and the dark one stand twice each, for the two ways they are chosen."""
    css = (files("fusionlab.viz") / "assets" / "explorer.css").read_text(encoding="utf-8")
    return [
        dict(re.findall(r"--fl-([\w-]+): ([^;]+);", block))
        for block in re.findall(r"\{([^{}]*--fl-paper:[^{}]*)\}", css)
    ]


def test_every_text_stands_out_from_what_it_stands_on_in_light_and_dark():
    light, dark, again, dark_again = themes()
    assert light == again
    assert dark == dark_again
    for colours in (light, dark):
        for text in ("ink", "quiet", "warn", "focus"):
            for paper in ("paper", "panel", "box"):
                assert contrast(colours[text], colours[paper]) >= 4.5, (text, paper)
        assert contrast(colours["ink"], colours["hover"]) >= 4.5
        assert contrast(colours["on-focus"], colours["focus"]) >= 4.5
        for line in ("focus", "strong", "found", "linked", "warn"):
            assert contrast(colours[line], colours["paper"]) >= 3, line


def over(colour, paper, share):
    mixed = (share * int(colour[i : i + 2], 16) + (1 - share) * int(paper[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(m):02x}" for m in mixed)


@pytest.mark.parametrize("name", sorted(palette._HUE_OF))
def test_borders_of_a_pass_are_seen_on_dark_cards(name):
    _, dark, *_ = themes()
    assert contrast(palette.colour_of(name), dark["box"]) >= 3


@pytest.mark.parametrize("name", sorted(palette._HUE_OF))
def test_labels_stand_out_from_a_pass_tint(name):
    light, dark, *_ = themes()
    for colours in (light, dark):
        fill = over(palette.tint_of(name), colours["paper"], float(colours["tint"]))
        assert contrast(colours["ink"], fill) >= 4.5


# Size ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layers", [4, 24])
def test_the_page_of_a_train_step_is_small_and_can_be_opened_into(layers):
    graph = train_step(layers)
    found = fl.find(graph)
    text = report_html(graph, found)
    data = json.loads(re.search(r'id="fl-data">(.*?)</script>', text, re.S).group(1))
    size = len(text.encode())
    print(f"{size:,} bytes, {len(data['scenes'])} cards can be opened")
    assert size < 1_500_000
    opening = [c.id for c in Album(graph, found).overview(()).cards() if c.children]
    assert sorted(data["scenes"]) == sorted(opening)


def test_pictures_are_baked_until_the_budget_is_used_up():
    graph = train_step(2)
    pictures = Album(graph, fl.find(graph))

    def bake(**budget):
        return scenes.bake(pictures, (), lambda: {"svg": "x" * 999, "n": sorted(pictures.opened)}, **budget)

    all_of_them = bake()
    assert len(all_of_them.packed) > 3
    assert not all_of_them.left
    assert not pictures.opened
    some = bake(max_bytes=all_of_them.size // 2)
    assert 0 < some.size <= all_of_them.size // 2
    assert some.packed.keys() < all_of_them.packed.keys()
    assert some.left
    assert not bake(max_seconds=0).packed


def test_a_node_is_found_in_the_card_that_holds_it_and_one_of_a_copy_in_its_twins():
    graph = train_step(4)
    pictures = Album(graph, fl.find(graph))
    data = scenes.index(pictures, ())
    assert len(data["nodes"]) == graph.node_count
    places = {row[0]: data["cards"][row[1]][0] for row in data["nodes"]}
    stack = next(c for c in pictures.overview(()).cards() if c.count == 3)
    inside = {c.id for c in stack.walk()}
    hidden = [nid for nid, card in places.items() if card in inside and nid not in stack.nodes]
    assert len(hidden) == 2 * len(stack.nodes)
    assert {places[nid] for nid in hidden} == {places[nid] for nid in stack.nodes}
