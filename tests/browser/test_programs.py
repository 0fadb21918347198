"""The ten programs in JupyterLab, as a reader sees them: in two sizes of the window, with the file browser open and closed, at first, after
`fit`, and with cards opened. Everything is measured in the browser, in px of the window."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from playwright.sync_api import expect

import fusionlab as fl
from tests.browser.explorer import DRAWN, Explorer
from tests.browser.notebooks import open_in_lab, write_notebook
from tests.browser.stand import stand
from tests.viz.cards.geometry import ANYWHERE, NOBODY
from tests.viz.cards.test_programs import NAMES, built

LOOK = Path(__file__).with_name("look.js").read_text(encoding="utf-8")
SIZES = ((1440, 900), (1100, 700))
TWO = ("transformer of 2 layers", "MLP without scopes")
BARE = "two programs in a bare page"
CELL = """import sys
sys.path.insert(0, {root!r})
import fusionlab as fl
from tests.viz.cards.programs import PROGRAMS
fn, args = dict(PROGRAMS)[{name!r}]()
lab = fl.explore(fn, *args, device="h100")
lab"""
ASKED = "import json; print(json.dumps([lab.graph.node_count, lab.panel]))"
LEAST_TEXT, MOST_BOXES, MOST_OPENED, MOVED = 9.0, 60, 20, 20.0
AT_REST = "() => new Promise(go => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(go)), 150))"
SETTLED = """() => new Promise(go => { // once the picture has been the same for a while
    const pane = document.querySelector('.fl-explorer [data-fl=graph]');
    const look = () => pane.innerHTML + pane.querySelector('svg')?.style.transform;
    let last = look(), since = performance.now();
    const again = () => { const now = look(); if (now !== last) [last, since] = [now, performance.now()];
      performance.now() - since > 500 ? go() : setTimeout(again, 50); };
    again(); })"""


def meet(one, other, slack=1.0):
    """Whether two rectangles (left, top, right, bottom) share more than `slack` px in both directions."""
    across = min(one[2], other[2]) - max(one[0], other[0])
    return across > slack and min(one[3], other[3]) - max(one[1], other[1]) > slack


def holds(outer, inner, slack=1.5):
    return (
        outer[0] - slack <= inner[0]
        and outer[1] - slack <= inner[1]
        and inner[2] <= outer[2] + slack
        and inner[3] <= outer[3] + slack
    )


def faults(seen, whole=True):
    """What a strict reader finds wrong; `whole`: of a picture that has to lie in the pane."""
    boxes, texts = seen["boxes"], seen["texts"]
    found = [f"outside the pane: {r}" for r in seen["drawn"] if not holds(seen["pane"], r)] if whole else []
    found += [f"{t['px']:.2f} px: {t['text']!r}" for t in texts if t["px"] < LEAST_TEXT - 0.01]
    cards = [b for b in boxes if not b["pill"]]
    found += [f"{len(cards)} boxes"] if whole and len(cards) > MOST_BOXES else []
    found += [f"without a name: {b['id']} {b['title']!r}" for b in cards if NOBODY.fullmatch(b["title"].strip())]
    found += [f"written: {t['text']!r}" for t in texts if ANYWHERE.search(t["text"])]
    return [*found, *_overlaps(boxes, texts), *_crossed(seen)]


def _overlaps(boxes, texts):
    for k, one in enumerate(boxes):
        for other in boxes[:k]:
            nested = any(a["open"] and holds(a["box"], b["box"]) for a, b in ((one, other), (other, one)))
            if meet(one["box"], other["box"]) and not nested:
                yield f"{one['title'] or one['id']} over {other['title'] or other['id']}"
    for k, one in enumerate(texts):
        yield from (f"{one['text']!r} over {o['text']!r}" for o in texts[:k] if meet(one["box"], o["box"]))
    bodies = {b["id"]: b["box"] for b in boxes}
    for t in texts:
        if t["card"] in bodies and not holds(bodies[t["card"]], t["box"], 2.5):
            yield f"{t['text']!r} out of {t['card']}"
        elif t["label"] and any(meet(t["box"], b["box"]) and not b["open"] for b in boxes):
            yield f"the label {t['text']!r} over a box"


def _crossed(seen):
    inner = lambda box, by: (box[0] + by, box[1] + by, box[2] - by, box[3] - by)  # noqa: E731
    for edge in seen["edges"]:
        ends = {f"fl-{edge[end]}" for end in ("start", "end")}
        name = f"{edge['start']} → {edge['end']}"
        closed = [b for b in seen["boxes"] if not b["open"] and b["id"] not in ends]
        at = lambda box: any(box[0] < x < box[2] and box[1] < y < box[3] for x, y in edge["points"])  # noqa: B023, E731
        yield from (f"{name} crosses {b['title'] or b['id']}" for b in closed if at(inner(b["box"], 3)))
        yield from (f"{name} crosses {t['text']!r}" for t in seen["texts"] if at(inner(t["box"], 1)))


@pytest.mark.dear
@pytest.mark.parametrize("case", [BARE, *NAMES])
def test_what_a_reader_sees_of_a_program(case, tab, request, artifacts):
    """In JupyterLab; by default two programs in a bare page alone, which takes a tenth of the time."""
    for name in TWO if case == BARE else (case,):
        function, args = built(name)  # skips where its library is missing
        with tab([]) as page:
            if case == BARE:
                found = fl.explore(function, *args, device="h100")
                page.set_viewport_size({"width": 1440, "height": 900})
                stand(page, found)
                _reads(page, Explorer(page), name, found.graph.node_count, _with_sites(found.panel), SIZES[:1], (None,))
                continue
            jupyter = request.getfixturevalue("jupyter")
            lab, book = _opened(page, jupyter, name)
            nodes, panel = json.loads(book.ask(ASKED))
            _reads(page, lab, name, nodes, _with_sites(panel), SIZES, (True, False), artifacts)
            jupyter.stop_kernels()


def _reads(page, lab, name, nodes, passes, sizes, browsers, artifacts=None):
    """All of it, in windows of these sizes, with the file browser open and closed."""
    rows = []
    for size in sizes:
        for has_browser in browsers:
            _arrange(page, lab, size, has_browser)
            first = page.evaluate(LOOK)
            if artifacts is not None:
                page.screenshot(path=artifacts / f"{name.replace(' ', '_')}-{size[0]}{'-files' * has_browser}.png")
            lab.hook("fit").click()
            page.evaluate(SETTLED)
            fitted = page.evaluate(LOOK)
            for seen in (first, fitted):
                assert faults(seen) == [], (name, size, has_browser)
                assert holds(seen["window"], seen["measure"]), "Measure is out of sight"
                assert holds(seen["window"], seen["sentence"]), "the sentence is out of sight"
                assert set(seen["passes"]) >= passes, "a pass has a site and shows no colour"
            smallest = min(t["px"] for t in (*first["texts"], *fitted["texts"]))
            files = "beside files " if has_browser else ""
            rows.append(f"{size[0]}x{size[1]} {files}{len(first['boxes'])} boxes {smallest:.2f} px")
    _after_and_both(page, lab)
    print(f"\n{name} ({nodes:,} nodes): {'; '.join(rows)}; {_open_and_close(page, lab, sizes[0])}")


def _with_sites(panel):
    return {p["name"] for p in panel["passes"] if p["sites"] or p["declined"]}


def _opened(page, jupyter, name):
    root = str(Path(__file__).parents[2])
    path = jupyter.folder / f"{name.replace(' ', '_')}.ipynb"
    page.set_viewport_size({"width": 1440, "height": 900})
    book = open_in_lab(page, jupyter, write_notebook(path, [CELL.format(root=root, name=name)]))
    book.run_all()
    lab = Explorer(page)
    expect(lab.picture).to_be_visible()
    return lab, book


def _arrange(page, lab, size, has_browser):
    page.set_viewport_size({"width": size[0], "height": size[1]})
    if has_browser is not None:
        page.evaluate("open => window.jupyterapp.shell[open ? 'expandLeft' : 'collapseLeft']()", has_browser)
    page.evaluate(AT_REST)
    lab.root.evaluate("e => e.scrollIntoView({ block: 'start' })")
    page.evaluate(SETTLED)


def _after_and_both(page, lab):
    """The other two settings are drawn as well; what is clicked on one side of both is marked on each."""
    for side in ("after", "both"):
        drawn = lab.drawn()
        lab.hook(side).click()
        lab.redrawn(drawn)
        page.evaluate(SETTLED)
        expect(lab.hook(side)).to_have_attribute("aria-pressed", "true")
        assert faults(page.evaluate(LOOK)) == [], side
    lab.picture.locator("g.card[data-lane=after][role=button]").first.click()
    expect(lab.picture.locator("[aria-current=true]")).to_have_count(2)
    lab.hook("before").click()
    expect(lab.hook("before")).to_have_attribute("aria-pressed", "true")


def _open_and_close(page, lab, size):
    """Opens and closes up to twenty cards at random, each alone; how many, and how far one moved at most."""
    _arrange(page, lab, size, None)
    lab.hook("fit").click()
    page.evaluate(SETTLED)
    closed = lab.picture.locator('g.card[aria-expanded="false"]').evaluate_all("cards => cards.map(c => c.id)")
    chosen = random.Random(0).sample(closed, min(MOST_OPENED, len(closed)))
    drawn, most = page.evaluate(DRAWN), 0.0
    for name in chosen:
        card = lab.picture.locator(f'[id="{name}"]')
        card.evaluate("e => e.focus({ preventScroll: true })")
        was = _corner(lab, name)
        page.keyboard.press("Space")
        expect(card).to_have_attribute("aria-expanded", "true")
        page.evaluate(SETTLED)
        now = _corner(lab, name)
        most = max(most, abs(now[0] - was[0]), abs(now[1] - was[1]))
        assert most <= MOVED, name
        assert faults(page.evaluate(LOOK), whole=False) == [], name
        opened = lab.picture.locator('g.card[aria-expanded="true"]').evaluate_all("cards => cards.map(c => c.id)")
        assert opened == [name]
        page.keyboard.press("Space")
        expect(card).to_have_attribute("aria-expanded", "false")
        lab.draws(drawn)
    return f"{len(chosen)} cards opened and closed, none moved more than {most:.0f} px"


def _corner(lab, name):
    return lab.picture.locator(f'[id="{name}"] > .card-body').evaluate(
        "e => { const r = e.getBoundingClientRect(); return [r.left, r.top]; }"
    )
