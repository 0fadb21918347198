"""The pane that holds the picture, what is around it, over a picture of cards written by hand and a stand-in for the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from fusionlab.viz.browser import asset, module
from tests.browser.explorer import Explorer

LEAST = 9  # px on screen of a text
SHOWN = """() => {
    const pane = document.querySelector('[data-fl=graph]').getBoundingClientRect();
    const scale = new DOMMatrix(getComputedStyle(document.querySelector('[data-fl=graph] svg')).transform).a;
    const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
    const px = e => parseFloat(getComputedStyle(e).fontSize) * scale;
    const told = e => ({text: e.textContent, line: Number(e.dataset.line ?? -1), box: box(e), px: px(e)});
    const seen = e => getComputedStyle(e).display !== 'none';
    const cards = [...document.querySelectorAll('g.card')].map(card => ({
        id: card.id, body: box(card.querySelector('.card-body')),
        texts: [...card.querySelectorAll('text[data-line]')].filter(t => t.closest('g.card') === card && seen(t)).map(told)}));
    const loose = [...document.querySelectorAll('[data-fl=graph] svg > text')].filter(seen).map(told);
    return {scale, cards, loose, pane: [pane.left, pane.top, pane.right, pane.bottom]};
}"""


@pytest.fixture(scope="module")
def opened(tab, tmp_path_factory):
    """A tab for the picture of cards, the picture's address, and what went wrong in the tab."""
    text = Path(__file__).with_name("cards.html").read_text(encoding="utf-8")
    text = text.replace("</style>", asset("explorer.css") + "</style>", 1).replace("/* MODULE */", module(), 1)
    path = tmp_path_factory.mktemp("pane") / "cards.html"
    path.write_text(text, encoding="utf-8")
    problems: list[str] = []
    with tab(problems) as page:
        page.set_viewport_size({"width": 1440, "height": 900})
        yield page, path.as_uri(), problems


@pytest.fixture
def shown(opened, keep):
    """The explorer over a picture of cards, opened anew; nothing may have gone wrong when the test is over."""
    page, address, problems = opened
    problems.clear()
    page.goto(address)
    explorer = Explorer(page)
    expect(explorer.picture).to_be_visible()
    explorer.root.scroll_into_view_if_needed()
    with keep(page):
        yield explorer
    assert problems == []


def meet(one, other):
    slack = 0.6  # glyphs of neighbours may touch
    return (
        one[0] < other[2] - slack
        and other[0] < one[2] - slack
        and one[1] < other[3] - slack
        and other[1] < one[3] - slack
    )


def overlapping(told):
    """Pairs of texts, and of texts beside cards with cards, that lie on one another."""
    texts = [t for card in told["cards"] for t in card["texts"]] + told["loose"]
    pairs = [(a["text"], b["text"]) for k, a in enumerate(texts) for b in texts[:k] if meet(a["box"], b["box"])]
    return pairs + [(t["text"], c["id"]) for t in told["loose"] for c in told["cards"] if meet(t["box"], c["body"])]


def outside(card):
    left, top, right, bottom = card["body"]
    slack = 2.5
    return [
        t["text"]
        for t in card["texts"]
        if t["box"][0] < left - slack
        or t["box"][2] > right + slack
        or t["box"][1] < top - slack
        or t["box"][3] > bottom + slack
    ]


def test_text_is_never_too_small_and_cards_drop_lines_that_have_no_room(shown):
    shown.hook("fit").click()
    whole = shown.page.evaluate(SHOWN)
    markup = shown.picture.inner_html()
    lines = {c["id"]: sorted({t["line"] for t in c["texts"]}) for c in whole["cards"]}
    assert lines["fl-c0"] == [0, 1, 2, 3, 4]
    dropped, cut, rows = set(), 0, set()
    for _ in range(12):
        shown.hook("zoom-out").click()
        now = shown.page.evaluate(SHOWN)
        for card in now["cards"]:
            left = sorted({t["line"] for t in card["texts"]})
            assert set(left) <= set(lines[card["id"]])
            assert not left or left[0] == 0  # the title goes last
            rows |= {tuple(left)} if card["id"] == "fl-c0" else set()
            dropped.add((card["id"], len(left)))
            assert not outside(card), (now["scale"], card)
        texts = [t for c in now["cards"] for t in c["texts"]] + now["loose"]
        assert min((t["px"] for t in texts), default=LEAST) >= LEAST - 0.01, now["scale"]
        assert not overlapping(now), now["scale"]
        cut += sum(t["text"].endswith("…") for t in texts)
    assert cut
    assert (0, 2, 3, 4) in rows  # the numbers lie closest to the title: where they have no room, the passes still do
    assert {("fl-c0", n) for n in (1, 5)} <= dropped
    for _ in range(12):
        shown.hook("zoom-in").click()
    shown.hook("fit").click()
    assert shown.page.evaluate(SHOWN)["scale"] == pytest.approx(whole["scale"])
    assert shown.picture.inner_html().replace(' style=""', "") == markup.replace(' style=""', "")


def test_the_wheel_scrolls_the_page_and_zooms_with_a_key(shown):
    page, pane = shown.page, shown.hook("graph")
    place = "svg => svg.style.transform"
    for _ in range(4):
        shown.hook("zoom-in").click()
    box = pane.bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 200)
    before, top = shown.picture.evaluate(place), page.evaluate("scrollY")
    page.mouse.wheel(0, 40)
    page.wait_for_function("top => scrollY !== top", arg=top)
    assert shown.picture.evaluate(place) == before
    hint = pane.locator(".fl-hint")
    expect(hint).to_have_text("Ctrl + scroll zooms, drag moves")
    expect(hint).to_be_hidden(timeout=10_000)
    page.mouse.wheel(0, -40)
    page.wait_for_function("top => scrollY === top", arg=top)
    expect(hint).to_be_hidden()
    for key in ("Control", "Shift", "Meta"):
        before, top = page.evaluate(SHOWN)["scale"], page.evaluate("scrollY")
        page.keyboard.down(key)
        page.mouse.wheel(0, 60)
        page.keyboard.up(key)
        page.wait_for_function(f"before => ({SHOWN})().scale !== before", arg=before)
        assert page.evaluate("scrollY") == top
    before = shown.picture.evaluate(place)
    page.mouse.down()
    page.mouse.move(box["x"] + 260, box["y"] + 240)
    page.mouse.up()
    assert shown.picture.evaluate(place) != before


def test_panels_are_dragged_folded_and_always_within_reach(shown):
    page, keyboard = shown.page, shown.page.keyboard
    grip, passes, inspector = shown.hook("grip-left"), shown.root.locator(".fl-passes"), shown.hook("inspector")
    wide = passes.bounding_box()["width"]
    at = grip.bounding_box()
    page.mouse.move(at["x"] + 3, at["y"] + 100)
    page.mouse.down()
    page.mouse.move(at["x"] + 63, at["y"] + 100)
    page.mouse.up()
    assert passes.bounding_box()["width"] == pytest.approx(wide + 60, abs=2)
    grip.press("ArrowLeft")
    assert passes.bounding_box()["width"] == pytest.approx(wide + 44, abs=2)
    assert int(grip.get_attribute("aria-valuenow")) == pytest.approx(wide + 44, abs=2)
    shown.hook("grip-right").press("ArrowLeft")  # the line moves left: the inspector grows
    assert int(shown.hook("grip-right").get_attribute("aria-valuenow")) > 230

    shown.boxes.first.focus()
    keyboard.press("[")
    expect(passes).to_be_hidden()
    keyboard.press("]")
    expect(inspector).to_be_hidden()
    shown.hook("open-left").click()
    expect(passes).to_be_visible()
    shown.hook("open-right").click()
    expect(inspector).to_be_visible()
    shown.hook("fold-right").click()
    expect(shown.hook("open-right")).to_be_focused()
    shown.hook("open-right").click()

    pane = shown.hook("graph")
    for width, folded in ((1200, ()), (900, ("right",)), (660, ("left", "right"))):
        page.evaluate("width => { document.getElementById('here').style.width = `${width}px`; }", width)
        for side, panel in (("left", passes), ("right", inspector)):
            expect(shown.hook(f"open-{side}")).to_be_visible(visible=side in folded)
            expect(panel).to_be_visible(visible=side not in folded)
            if side in folded:
                room = pane.bounding_box()
                shown.hook(f"open-{side}").click()
                expect(panel).to_be_visible()
                assert pane.bounding_box() == room  # it lies over the graph
                assert panel.bounding_box()["width"] >= 200
                keyboard.press("Escape")
                expect(panel).to_be_hidden()
                expect(shown.hook(f"open-{side}")).to_be_focused()
        tabs = shown.root.locator(".fl-tabbar").bounding_box()
        assert tabs["height"] < 45
        box = shown.root.bounding_box()
        assert tabs["y"] + tabs["height"] - box["y"] < 900 - 40  # with the sentence, in a window of this height
        assert shown.root.evaluate("e => e.scrollWidth <= e.clientWidth")
        sentence = shown.hook("sentence")
        assert sentence.bounding_box()["height"] < 60  # three lines
        assert sentence.get_attribute("title") == shown.page.evaluate("state.head.sentence")


def test_keys_frame_step_through_hits_and_go_back(shown):
    page, keyboard = shown.page, shown.page.keyboard
    expect(shown.hook("back")).to_be_disabled()
    shown.search("c")
    expect(shown.hook("hit-count")).to_have_text("3 hits")
    shown.hook("search").press("Enter")
    expect(shown.hook("hit-count")).to_have_text("1 of 3")
    current = shown.picture.locator("[aria-current=true]")
    expect(current).to_have_attribute("id", "fl-c0")
    expect(current).to_be_focused()
    for key, count, name in (
        ("n", "2 of 3", "fl-c1"),
        ("n", "3 of 3", "fl-c2"),
        ("n", "1 of 3", "fl-c0"),
        ("N", "3 of 3", "fl-c2"),
    ):
        keyboard.press(key)
        expect(shown.hook("hit-count")).to_have_text(count)
        expect(current).to_have_attribute("id", name)
    shown.hook("previous-hit").click()
    expect(shown.hook("hit-count")).to_have_text("2 of 3")

    shown.boxes.first.focus()
    keyboard.press("f")
    now = page.evaluate(SHOWN)
    card = next(c for c in now["cards"] if c["id"] == "fl-c1")
    pane = now["pane"]
    assert card["body"][2] - card["body"][0] <= (pane[2] - pane[0]) / 2 + 1
    assert card["body"][3] - card["body"][1] <= (pane[3] - pane[1]) / 2 + 1
    assert {t["line"] for t in card["texts"]} == {0, 1, 2, 3, 4}
    assert (card["body"][0] + card["body"][2]) / 2 == pytest.approx((pane[0] + pane[2]) / 2, abs=2)
    keyboard.press("0")
    svg = shown.picture.bounding_box()
    assert svg["x"] >= pane[0]
    assert svg["y"] + svg["height"] <= pane[3]
    for _ in range(9):  # far out: Enter on a hit makes it readable again
        shown.hook("zoom-out").click()
    shown.hook("search").focus()
    shown.hook("search").press("Enter")
    expect(current).to_have_attribute("id", "fl-c0")
    page.wait_for_function(f"() => ({SHOWN})().scale >= 0.89")

    page.evaluate("sent.length = 0")
    keyboard.press("Alt+ArrowLeft")
    expect(current).to_have_attribute("id", "fl-c1")
    shown.hook("back").click()
    expect(current).to_have_attribute("id", "fl-c2")
    keyboard.press("Alt+ArrowRight")
    expect(current).to_have_attribute("id", "fl-c1")
    shown.hook("forward").click()
    expect(current).to_have_attribute("id", "fl-c0")
    expect(shown.hook("forward")).to_be_disabled()
    assert [m["name"] for m in page.evaluate("sent")] == ["c1", "c2", "c1", "c0"]


def test_what_cannot_act_says_why(shown):
    titles = {
        "after": "there are only findings",
        "undo": "no change to undo",
        "reset": "nothing has changed since it was opened",
        "all-on": "every site is on",
        "fold": "select a group",
        "back": "there is no previous selection",
        "frame": "the selection is not in the picture",
    }
    for hook, words in titles.items():
        expect(shown.hook(hook)).to_be_disabled()
        assert words in shown.hook(hook).get_attribute("title"), hook
    pdf = shown.root.locator('button[data-fl-export=".pdf"]')
    assert pdf.evaluate("e => e.disabled")
    assert "fusionlab[pdf]" in pdf.get_attribute("title")
    measure = shown.hook("measure")
    expect(measure).to_be_enabled()
    for head, words in (("{counts: {applied: 0}}", "no site is on"), ("{can: {}}", "there is only a graph here")):
        shown.page.evaluate(f"set('head', {{...state.head, ...{head}}})")
        expect(measure).to_be_disabled()
        assert words in measure.get_attribute("title")


def test_the_minimap_is_there_only_where_it_tells_something_and_covers_no_card(shown):
    minimap = shown.root.locator(".fl-minimap")
    shown.hook("fit").click()
    expect(minimap).to_be_hidden()
    seen = 0
    shown.boxes.first.focus()
    for key in ["+"] * 3 + ["Shift+ArrowLeft"] * 8 + ["Shift+ArrowDown"] * 8 + ["Shift+ArrowRight"] * 8:
        shown.page.keyboard.press(key)
        if not minimap.is_visible():
            continue
        seen += 1
        at = minimap.bounding_box()
        corner = [at["x"], at["y"], at["x"] + at["width"], at["y"] + at["height"]]
        assert not [c["id"] for c in shown.page.evaluate(SHOWN)["cards"] if meet(corner, c["body"])]
    assert seen


def test_the_outline_is_a_tree_with_the_selection_of_the_picture(shown):
    page, keyboard = shown.page, shown.page.keyboard
    passes, tree = shown.root.locator("[data-fl-side=passes]"), shown.hook("outline")
    expect(tree).to_be_hidden()
    passes.focus()
    keyboard.press("ArrowRight")
    expect(tree).to_be_visible()
    expect(shown.root.locator("[data-fl-side=outline]")).to_be_focused()
    lines = tree.locator("[role=treeitem]")
    assert lines.evaluate_all("all => all.map(e => e.dataset.line)")[:4] == ["", "fl-forward", "fl-c0", "fl-c1"]
    stack = tree.locator("[data-line=fl-c1]")
    expect(stack).to_have_attribute("aria-level", "3")
    expect(stack).to_contain_text("×3")
    assert "48 layer_norm fused; 2 layer_norm can be fused; 24 layer_norm declined" in stack.get_attribute("aria-label")
    assert stack.locator(".fl-swatch").count() == 3
    texts = tree.locator("span").evaluate_all("all => all.map(e => parseFloat(getComputedStyle(e).fontSize))")
    assert min(texts) >= LEAST
    shown.hook("outline-scale").click()
    expect(stack.locator(".fl-part")).to_have_text("20 %")

    lines.first.focus()
    for key in ("ArrowDown", "ArrowDown", "Enter"):
        keyboard.press(key)
    chosen, current = tree.locator('[aria-selected="true"]'), shown.picture.locator("[aria-current=true]")
    expect(chosen).to_have_attribute("data-line", "fl-c0")
    expect(chosen).to_be_focused()
    expect(current).to_have_attribute("id", "fl-c0")
    keyboard.press("ArrowLeft")
    keyboard.press("ArrowLeft")
    expect(tree.locator("[data-line=fl-forward]")).to_have_attribute("aria-expanded", "false")
    page.evaluate("pick('fl-c2')")
    expect(chosen).to_have_attribute("data-line", "fl-c2")

    page.evaluate("pick('fl-inner')")  # not told yet: it is asked for
    expect(chosen).to_have_attribute("data-line", "fl-inner")
    assert {"type": "outline", "id": "fl-b2"} in page.evaluate("sent")
    tree.locator("[data-line=fl-b2] .fl-turn").click()
    expect(tree.locator("[data-line=fl-inner]")).to_have_count(0)
    page.reload()
    expect(tree).to_be_visible()  # it is remembered
    passes.click()
    expect(tree).to_be_hidden()


def test_the_path_leads_to_what_is_around_and_steps_through_equal_parts(shown):
    page, keyboard = shown.page, shown.page.keyboard
    crumbs, current = shown.root.locator("[data-crumb]"), shown.picture.locator("[aria-current=true]")
    expect(crumbs).to_have_text(["train_step"])
    page.evaluate("pick('fl-c1')")
    expect(crumbs).to_have_text(["train_step", "forward", "layer 1 of 3"])
    expect(crumbs.last).to_have_attribute("aria-current", "location")
    shown.hook("copy-on").press("Enter")
    expect(crumbs.last).to_have_text("layer 2 of 3")
    shown.hook("copy-back").click()
    expect(crumbs.last).to_have_text("layer 1 of 3")
    shown.boxes.first.focus()
    page.evaluate("sent.length = 0")
    keyboard.press(".")
    keyboard.press(",")
    assert page.evaluate("sent") == [{"type": "step", "id": "fl-c0", "by": by} for by in (1, -1)]
    crumbs.nth(1).click()
    assert page.evaluate("sent").pop() == {"type": "select", "id": "fl-forward", "reveal": True}
    crumbs.first.click()
    expect(current).to_have_count(0)
    expect(crumbs).to_have_text(["train_step"])


def test_every_hit_is_reached_and_the_list_grows(shown):
    page, keyboard = shown.page, shown.page.keyboard
    shown.search("many")
    hits = shown.root.locator("[data-fl-hit]")
    expect(shown.hook("more-hits")).to_contain_text("and 137 more")
    shown.hook("more-hits").press("Enter")
    expect(hits).to_have_count(6)
    shown.hook("search").press("Enter")
    for key, count in (("N", "140 of 140"), ("N", "139 of 140"), ("n", "140 of 140"), ("n", "1 of 140")):
        keyboard.press(key)
        expect(shown.hook("hit-count")).to_have_text(count)
    asked = [m["index"] for m in page.evaluate("sent") if m["type"] == "hit"]
    assert asked == [139, 138, 139]
