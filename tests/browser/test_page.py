"""The standalone page, opened from a file as a reader opens it: no server, no kernel, no network."""

from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest
from playwright.sync_api import expect

import fusionlab as fl
from fusionlab.viz.cards.album import Album
from fusionlab.viz.html.dearest import dearest_html
from fusionlab.viz.html.report import report_html
from tests.browser.explorer import Explorer

LAYERS = 6
AT_REST = "() => new Promise(go => requestAnimationFrame(() => requestAnimationFrame(go)))"


def step(params, x):
    """Layers that differ in width, so that none is folded away as a copy; the last one returns what fusing would drop."""
    for i, (w, b) in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            y = x @ w + b
            with jax.named_scope("tail"):
                x = jnp.tanh(y) * 2 + jnp.cos(y) - jnp.sin(y)
    with jax.named_scope("head"):
        z = x @ params[0][0] + params[0][1]
        return jnp.tanh(z).T, z


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A page about a program that does not fit: some groups are closed at first."""
    widths = [8 + i for i in range(LAYERS)] + [8]
    params = [(jnp.ones((n, m)), jnp.ones(m)) for n, m in itertools.pairwise(widths)]
    found = fl.find(step, params, jnp.ones((4, 8)), passes="gemm_epilogue")
    assert found.candidates
    assert found.rejections
    text = report_html(found.graph, found, enabled=None, after=found.apply())
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(text, encoding="utf-8")
    return path, found


@pytest.fixture(scope="module")
def opened(tab):
    """A tab for the page, what went wrong in it, and what it asked for."""
    problems: list[str] = []
    asked: list[str] = []
    with tab(problems) as page:
        page.on("request", lambda request: asked.append(request.url))
        yield page, problems, asked


@pytest.fixture
def shown(opened, keep, report):
    """The page's explorer, opened anew; when the test is over nothing may have gone wrong, nor anything been asked of a network."""
    page, problems, asked = opened
    for told in (problems, asked):
        told.clear()
    page.set_viewport_size({"width": 1600, "height": 1200})
    page.emulate_media(color_scheme="light")
    page.mouse.move(0, 0)
    page.goto(report[0].as_uri())
    explorer = Explorer(page)
    expect(explorer.picture).to_be_visible()
    with keep(page):
        yield explorer
    assert problems == []
    assert all(url.startswith(("file:", "blob:", "data:")) for url in asked), asked


NARROW = """() => {
    const pane = document.querySelector('[data-fl=graph]'), seen = e => e.checkVisibility();
    const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
    const meet = (a, b) => a[0] < b[2] - 1 && b[0] < a[2] - 1 && a[1] < b[3] - 1 && b[1] < a[3] - 1;
    const texts = [...pane.querySelectorAll('text')].filter(seen), marks = [...pane.querySelectorAll('.swatch, .bar-track')].filter(seen);
    const own = (card, css) => [...card.querySelectorAll(css)].filter(e => e.closest('g.card') === card && seen(e));
    return {
        scale: new DOMMatrix(getComputedStyle(pane.querySelector('svg')).transform).a,
        covered: texts.filter(t => marks.some(m => meet(box(t), box(m)))).map(t => t.textContent),
        out: [...pane.querySelectorAll('.pill')].flatMap(p => { const [l, , r] = box(p.querySelector('.pill-body'));
            return [...p.querySelectorAll('text')].filter(seen).filter(t => box(t)[0] < l || box(t)[2] > r).map(t => t.textContent); }),
        legend: texts.filter(t => t.closest('.legend')).map(t => t.textContent),
        pills: pane.querySelectorAll('.pill text').length,
        bare: [...pane.querySelectorAll('g.card')].filter(c => c.querySelector('.swatch') && !own(c, '.swatch').length).map(c => c.id),
    };
}"""


LEFT = "e => e.getBoundingClientRect().left"


def mlp(params, x):
    for i, (w, b) in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            x = jax.nn.relu(x @ w + b)
    return x


def mlp_step(params, x):
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(lambda p: mlp(p, x).sum())(params))


@pytest.mark.dear
@pytest.mark.parametrize(("function", "shrunk"), [(mlp_step, True), (mlp, False)], ids=["three lanes", "one lane"])
def test_in_a_narrow_window_what_is_drawn_is_whole_and_one_lane_keeps_its_size(function, shrunk, tab, tmp_path):
    params = [(jnp.ones((8 + i, 9 + i)), jnp.ones(9 + i)) for i in range(3)]
    fl.find(function, params, jnp.ones((4, 8))).save(tmp_path / "page.html")
    with tab([]) as page:
        page.set_viewport_size({"width": 800, "height": 900})
        page.goto((tmp_path / "page.html").as_uri())
        expect(Explorer(page).picture).to_be_visible()
        page.evaluate(AT_REST)
        seen = page.evaluate(NARROW)
        if shrunk:
            page.locator("[data-fl=graph] [aria-expanded=false]").first.dblclick(position={"x": 30, "y": 8})
            expect(page.locator("[data-fl=graph] [aria-expanded=true]")).to_have_count(1)
            page.evaluate(AT_REST)
        assert page.evaluate(NARROW)["covered"] == []
        trail = page.locator("[data-fl=trail]")
        assert trail.locator("button[aria-current]").evaluate(LEFT) >= trail.evaluate(LEFT)
    assert (seen["scale"] < 0.8) == shrunk
    assert seen["pills"]
    assert {"fused", "can be fused", "declined"} <= set(seen["legend"])
    assert [seen["covered"], seen["out"], seen["bare"]] == [[], [], []]


def test_a_long_name_is_cut_at_its_end_alone_and_a_pass_is_named_whole(shown):
    shown.page.set_viewport_size({"width": 800, "height": 900})
    crumb = shown.hook("trail").locator("button").first
    crumb.evaluate("e => { e.textContent = 'a_program_with_a_very_long_name_indeed_and_more' }")
    assert crumb.evaluate(LEFT) >= shown.hook("trail").evaluate(LEFT)
    name = shown.root.locator(".fl-pass .fl-name").first
    assert name.text_content() == "gemm_epilogue"
    assert name.evaluate("e => e.scrollWidth <= e.clientWidth")


def closed(shown):
    return shown.picture.locator('[role=button][aria-expanded="false"]')


def current(shown):
    return shown.picture.locator("[aria-current=true]")


def test_a_click_on_a_card_shows_the_inspector(shown):
    box = shown.picture.locator("g.card[role=button]").first
    box.click()
    expect(shown.hook("inspector").locator("h3")).to_have_text("layer_0")
    expect(shown.hook("inspector")).to_contain_text("test_page.py")
    expect(box).to_have_attribute("aria-current", "true")
    name = box.get_attribute("id")
    shown.hook("inspector").locator("summary", has_text="all nodes").click()
    shown.hook("inspector").locator("button[data-fl-pick^=n]").first.click()
    expect(current(shown)).not_to_have_attribute("id", name)
    expect(current(shown)).to_be_in_viewport()


def test_the_address_opens_the_page_at_a_card_a_site_a_node_or_a_line(shown, report):
    page, path, title = shown.page, report[0].as_uri(), shown.hook("inspector").locator("h3")
    site = report[1].candidates[2].id
    node = next(n for n in report[1].graph.nodes() if n.primitive == "tanh")
    value = node.outputs[0].name
    for name, told in (
        ("layer_3/tail", "gemm_epilogue@layer_3#2"),  # the part is a declined site
        (site, site),
        (value, f"tanh {value}"),
        (f"n{node.id}", f"tanh {value}"),
        (node.source.short, node.source.short),
    ):
        page.goto("about:blank")
        page.goto(f"{path}#{name}")
        expect(title).to_have_text(told)
        expect(current(shown)).to_have_count(1)
        expect(current(shown)).to_be_in_viewport()
        assert page.evaluate("location.hash") == f"#{name}"
    page.goto(f"{path}#layer_3")
    expect(title).to_have_text("layer_3")
    expect(current(shown)).to_have_attribute("aria-expanded", "true")
    page.go_back()
    expect(title).to_have_text(node.source.short)
    page.go_forward()
    expect(title).to_have_text("layer_3")

    page.goto(f"{path}#layr_3/tail")
    expect(shown.hook("problem")).to_contain_text("layr_3/tail is not in this record; nearest: layer_3/tail")
    shown.hook("problem").locator("button", has_text="layer_3/tail").first.click()
    expect(title).to_have_text("gemm_epilogue@layer_3#2")
    expect(shown.hook("problem")).to_be_hidden()

    group = shown.box("layer_4")
    group.focus()
    page.keyboard.press("Enter")
    page.wait_for_function("() => location.hash === '#layer_4'")
    shown.root.locator(f'[data-fl-pick="{site}"]').first.evaluate("e => e.click()")
    page.wait_for_function("site => location.hash === '#' + site", arg=site)
    page.keyboard.press("Escape")
    page.wait_for_function("() => location.hash === ''")


def test_names_values_and_source_lines_are_copied(shown):
    page, copy = shown.page, shown.hook("copy")
    page.evaluate(
        "() => { window.copied = []; document.addEventListener('copy', () => copied.push(getSelection().toString())); }"
    )
    for clipboard in ("{ writeText: async text => { copied.push(text); } }", "undefined"):  # there, and missing
        page.evaluate(
            f"() => Object.defineProperty(navigator, 'clipboard', {{ value: {clipboard}, configurable: true }})"
        )
        page.evaluate("() => { copied.length = 0; }")
        shown.picture.locator("g.card[role=button]").first.click()
        line = shown.hook("inspector").locator('[data-fl-pick*="test_page.py:"]').first
        line.hover()
        copy.click()
        expect(copy).to_contain_text("copied")
        shown.hook("inspector").locator("dd").first.hover()
        copy.click()
        shown.hook("inspector").locator("h3").hover()
        copy.click()
        where = line.get_attribute("data-fl-pick")
        row = shown.hook("inspector").locator("dd").first.evaluate("e => e.textContent")
        assert page.evaluate("copied") == [where, row, "layer_0"]
        page.evaluate("() => { copied.length = 0; }")
        line.focus()
        page.keyboard.press("Tab")
        expect(copy).to_be_focused()
        page.keyboard.press("Enter")
        expect(copy).to_contain_text("copied")
        expect(copy).to_be_focused()
        page.keyboard.press("Shift+Tab")
        expect(line).to_be_focused()
        page.keyboard.press("c")
        assert page.evaluate("copied") == [where, where]


def test_a_card_opens_where_it_is_and_closes_again(shown):
    group = closed(shown).first
    name, boxes = group.get_attribute("id"), shown.boxes.count()
    group.click()
    before = group.bounding_box()
    group.dblclick()
    frame = shown.picture.locator(f'[id="{name}"]')
    expect(frame).to_have_attribute("aria-expanded", "true")
    assert shown.boxes.count() > boxes
    now = frame.bounding_box()
    assert max(abs(now[side] - before[side]) for side in ("x", "y")) < 20
    frame.focus()
    shown.page.keyboard.press("Space")
    expect(shown.picture.locator(f'[id="{name}"]')).to_have_attribute("aria-expanded", "false")
    expect(shown.picture.locator(f'[id="{name}"]')).to_be_focused()
    assert shown.boxes.count() == boxes


def test_search_finds_what_is_folded_away_and_opens_the_way_to_it(shown):
    last = f"layer_{LAYERS - 1}"
    shown.hook("search").fill(f"cos {last}")
    hits = shown.hook("hits").locator("button")
    expect(hits).to_have_count(1)
    hits.first.click()
    expect(shown.hook("inspector")).to_contain_text("cos")
    expect(current(shown)).to_contain_text("tail")
    expect(current(shown)).to_be_in_viewport()
    shown.hook("search").fill("no such thing")
    expect(shown.hook("hits")).to_contain_text("0 hits")
    expect(hits).to_have_count(0)


def test_everything_is_reached_by_keyboard(shown):
    keyboard = shown.page.keyboard
    shown.hook("fit").focus()
    keyboard.press("Tab")
    focus = shown.picture.locator(":focus")
    first = focus.get_attribute("id")
    keyboard.press("ArrowDown")
    expect(focus).not_to_have_attribute("id", first)
    keyboard.press("Enter")
    expect(shown.picture.locator("[aria-current=true]:focus")).to_have_count(1)
    keyboard.press("/")
    expect(shown.hook("search")).to_be_focused()
    keyboard.type("tanh")
    shown.hook("hits").locator("button").first.wait_for()
    keyboard.press("ArrowDown")
    expect(shown.hook("hits").locator("button").first).to_be_focused()
    keyboard.press("ArrowUp")
    keyboard.press("Enter")
    expect(shown.hook("hits")).to_be_hidden()
    expect(shown.picture.locator("[aria-current=true]:focus")).to_have_count(1)
    keyboard.press("Home")
    keyboard.press("Escape")
    expect(current(shown)).to_have_count(0)  # nothing is selected, and the focus stays
    expect(shown.picture.locator(":focus")).to_have_count(1)
    keyboard.press("Escape")
    expect(shown.hook("inspector")).to_be_focused()
    tab = shown.root.locator('[role=tab][data-fl-tab][aria-selected="true"]')
    name = tab.get_attribute("data-fl-tab")
    tab.focus()
    keyboard.press("End")
    expect(tab).to_be_focused()
    expect(tab).not_to_have_attribute("data-fl-tab", name)
    keyboard.press("Home")
    expect(tab).to_have_attribute("data-fl-tab", "Timing")


def test_tabs_show_the_recorded_sections(shown):
    for name, text in (("Sites", "3 nodes → 1"), ("Declined", "escapes"), ("Timing", "Nothing was measured.")):
        shown.root.locator(f'[role=tab][data-fl-tab="{name}"]').click()
        expect(shown.root.locator(".fl-panels [role=tabpanel]:visible")).to_have_count(1)
        expect(shown.root.locator(".fl-panels [role=tabpanel]:visible")).to_contain_text(text)


def test_the_theme_is_switched_and_all_stays_readable_in_it(shown):
    shown.page.emulate_media(color_scheme="light")
    paper = "e => getComputedStyle(e).backgroundColor"
    light = shown.root.evaluate(paper)
    shown.page.emulate_media(color_scheme="dark")
    dark = shown.root.evaluate(paper)
    assert light != dark
    for theme, colour in (("light", light), ("dark", dark)):
        shown.hook("theme").click()
        expect(shown.root).to_have_attribute("data-theme", theme)
        assert shown.root.evaluate(paper) == colour
        assert shown.page.locator("body").evaluate(paper) == colour
    shown.hook("theme").click()
    assert shown.root.get_attribute("data-theme") is None
    quiet, pressed = shown.root.locator(".fl-quiet").first, shown.hook("before")
    for _ in range(3):
        assert style(shown.hook("search"), "color", "::placeholder") == style(quiet, "color")
        shown.page.mouse.move(0, 0)
        colours = [style(pressed, name) for name in ("backgroundColor", "color")]
        pressed.hover()
        assert [style(pressed, name) for name in ("backgroundColor", "color")] == colours
        shown.hook("theme").click()


def test_toggles_say_that_they_need_a_kernel(shown):
    boxes = shown.root.locator("input[type=checkbox]")
    assert boxes.count() > 2
    assert all(box.is_disabled() for box in boxes.all())
    expect(shown.root.locator(".fl-passes")).to_contain_text("fusionlab.explore(fn, *args)")
    assert shown.hook("reset").is_disabled()
    expect(shown.hook("measure")).to_be_hidden()


def test_a_site_is_selected_from_the_list_and_a_declined_one_says_why(shown, report):
    site = report[1].candidates[-1].id
    shown.root.locator(f'[data-fl-pick="{site}"]').first.evaluate("e => e.click()")
    expect(shown.hook("inspector")).to_contain_text("computes")
    declined = report[1].rejections[0]
    shown.root.locator("summary", has_text="Declined").click()
    shown.root.locator(f'.fl-passes [data-fl-pick="{declined.id}"]').click()
    expect(shown.hook("inspector")).to_contain_text(declined.edit)
    expect(current(shown)).to_have_count(1)


def test_the_fused_program_is_the_other_picture(shown):
    before = shown.drawn()
    shown.hook("after").click()
    expect(shown.picture).to_contain_text("gemm_epilogue")
    expect(shown.hook("after")).to_have_attribute("aria-pressed", "true")
    shown.picture.locator("g.card[data-pass=gemm_epilogue][role=button]").first.click()
    expect(shown.hook("inspector")).to_contain_text("gemm_epilogue")
    shown.hook("before").click()
    expect(shown.hook("before")).to_have_attribute("aria-pressed", "true")
    assert shown.drawn() == before


def test_what_is_said_of_the_fused_program_is_counted_in_it(shown, report):
    """The places that move the most, the lane and the outline; a site is one of the program as written, which it brings back."""
    fused = Album(report[1].apply(), None).overview(None)
    said = re.search(r"not measured: ([\d.]+ \w+)", dearest_html(fused, searched=False))[1]
    inspector = shown.hook("inspector")
    expect(inspector).not_to_contain_text(f"not measured: {said}")
    shown.hook("after").click()
    expect(inspector).to_contain_text(f"not measured: {said}")
    inspector.locator("button", has_text="tail").first.click()
    expect(shown.hook("after")).to_have_attribute("aria-pressed", "true")
    expect(current(shown)).to_have_count(1)
    shown.search(report[1].candidates[0].id).first.click()
    expect(shown.hook("before")).to_have_attribute("aria-pressed", "true")
    expect(inspector).to_contain_text(report[1].candidates[0].formula)


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_picture_is_saved(shown, suffix, tmp_path):
    shown.hook("export").locator("summary").click()
    with shown.page.expect_download() as download:
        shown.root.locator(f'button[data-fl-export="{suffix}"]').click()
    path = tmp_path / f"picture{suffix}"
    download.value.save_as(path)
    data = path.read_bytes()
    if suffix == ".png":
        assert data.startswith(b"\x89PNG")
        assert len(data) > 5000
    else:
        assert ElementTree.fromstring(data).tag.endswith("svg")
    assert shown.root.locator('button[data-fl-export=".pdf"]').is_disabled()


def style(locator, name, of=None):
    return locator.evaluate("(e, [name, of]) => getComputedStyle(e, of)[name]", [name, of])


def test_the_other_program_starts_at_its_top_and_the_place_in_this_one_is_kept(shown):
    shown.boxes.last.focus()
    shown.page.keyboard.press("End")
    shown.page.evaluate(AT_REST)
    moved = shown.picture.evaluate("svg => svg.style.transform")
    shown.hook("after").click()
    expect(shown.hook("after")).to_have_attribute("aria-pressed", "true")
    top = "svg => svg.getBoundingClientRect().top - svg.closest('.fl-pane').getBoundingClientRect().top"
    assert shown.picture.evaluate(top) >= 0
    shown.hook("before").click()
    expect(shown.hook("before")).to_have_attribute("aria-pressed", "true")
    assert shown.picture.evaluate("svg => svg.style.transform") == moved


def test_one_box_is_a_tab_stop_and_focus_set_by_a_screen_reader_is_where_the_keys_start(shown):
    assert shown.picture.locator('[role=button][tabindex="0"]').count() == 1
    assert shown.boxes.count() > 4
    assert not [b for b in shown.boxes.all() if not b.get_attribute("aria-label")]
    last = shown.picture.locator("g.card[role=button]").last
    last.evaluate("e => e.focus({ preventScroll: true })")
    expect(last).to_be_in_viewport()
    assert last.get_attribute("tabindex") == "0"
    assert shown.picture.locator('[role=button][tabindex="0"]').count() == 1


def test_the_nearest_miss_of_a_declined_site_comes_into_sight(shown, report):
    for _ in range(8):
        shown.hook("zoom-in").click()  # so that the site itself does not fit
    shown.root.locator("summary", has_text="Declined").click()
    shown.root.locator(f'.fl-passes [data-fl-pick="{report[1].rejections[0].id}"]').click()
    near = shown.picture.locator(".fl-near").first
    expect(near).to_be_visible()
    swatch = shown.root.locator(".fl-legend .fl-swatch.fl-near")  # it is selected too, and looks as the legend says
    assert style(near.locator("> .card-body"), "stroke") == style(swatch, "borderTopColor")
    pane, box = shown.hook("graph").bounding_box(), near.bounding_box()
    assert pane["y"] < box["y"] + box["height"] / 2 < pane["y"] + pane["height"]


@pytest.mark.parametrize("width", [700, 1000, 1600])
def test_nothing_is_wider_than_the_window(shown, width):
    shown.page.set_viewport_size({"width": width, "height": 900})
    shown.page.evaluate(AT_REST)
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= width
    for part in (".fl-passes", "[data-fl=graph]", "[data-fl=inspector]", ".fl-tablist"):
        folded = {".fl-passes": "open-left", "[data-fl=inspector]": "open-right"}.get(part)
        if folded and shown.hook(folded).is_visible():
            shown.hook(folded).click()
        box = shown.root.locator(part).bounding_box()
        assert box["width"] > 180, part
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width, part


def test_without_scripts_the_picture_and_the_tables_are_there(chromium, report):
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report[0].as_uri())
    expect(page.locator("#fl-before svg")).to_be_visible()
    expect(page.locator("#fl-after svg")).to_be_visible()
    expect(page.locator("body")).to_contain_text(re.compile("Declined.*escapes", re.S))
    context.close()


@pytest.mark.dear
def test_a_table_of_errors_breaks_no_type_in_two(tab, tmp_path):
    params = {"a_layer_of_this_name": {"kernel": jnp.ones((8, 16)), "bias": jnp.ones(16)}}
    layer = lambda p, x: jax.tree.map(lambda w: w * x, p)  # noqa: E731
    fl.compare(layer, layer, params, 2.0, samples=2, budget_s=1).save(tmp_path / "errors.html")
    with tab([]) as page:
        page.set_viewport_size({"width": 1400, "height": 900})
        page.goto((tmp_path / "errors.html").as_uri())
        types = page.locator("td.mono", has_text="float32[")
        assert types.count() >= 2
        for lines in types.evaluate_all(
            "all => all.map(e => { const r = document.createRange(); r.selectNodeContents(e); return r.getClientRects().length; })"
        ):
            assert lines == 1
        assert page.locator(".scroll").evaluate_all("all => all.every(e => e.scrollWidth <= e.clientWidth)")
