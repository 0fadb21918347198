"""The explorer widget's Python side: what it hands to the browser, and what clicks do."""

import base64
import json
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from fusionlab.errors import ArgumentError, BackendError, UnknownNameError
from fusionlab.graph.program.trace import trace
from fusionlab.viz.explorer import kept
from fusionlab.viz.explorer.widget import Explorer

from ..conftest import Case, candidate, findings_of, linear_nodes


class Meter:
    """Stands for the measuring function; remembers what it was asked."""

    def __init__(self):
        self.calls = []

    def __call__(self, setting, progress, cancel):
        self.calls.append(setting.enabled)
        progress("timing", 1, 2)


@pytest.fixture
def meter():
    return Meter()


@pytest.fixture
def lab(case, meter):
    return Explorer(case.graph, case.findings, measure=meter, after=lambda s, f: case.graph)


def ids(case):
    return [c.id for c in case.findings.candidates]


def card_of(lab, name):
    """The id in the picture of the first card whose spoken label begins so."""
    return next(card for card, item in lab.scene["items"].items() if item["label"].startswith(name))


@pytest.fixture(scope="module")
def deep():
    """Three equal layers of two products."""

    def layers(params, x):
        for i, (w, v) in enumerate(params):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ w) @ v
        return x

    graph = trace(layers, [(jnp.ones((8, 16)), jnp.ones((16, 8)))] * 3, jnp.ones((4, 8)))
    return Case(graph, findings_of(graph))


def click(lab, kind, **content):
    """What the browser sends."""
    lab._message(lab, {"type": kind, **content}, [])


def checks(lab):
    """site or pass -> what its box shows."""
    shown = {p["name"]: p["state"] for p in lab.panel["passes"]}
    sites = [s for p in lab.panel["passes"] for g in p["groups"] for s in g["sites"]]
    return shown | {s["id"]: s["on"] for s in sites}


def test_everything_is_on_at_the_start_and_nothing_is_measured(lab, case, meter):
    assert lab.enabled == frozenset(ids(case))
    assert dict(lab.toggles) == {
        "gemm_epilogue": True,
        "dot_product_attention": False,
        "lerp": False,
        ids(case)[0]: True,
        ids(case)[1]: True,
    }
    assert meter.calls == []
    assert lab.status == "not measured"


def test_a_pass_switches_all_its_sites_and_a_site_itself(lab, case):
    first, second = ids(case)
    lab.toggles["gemm_epilogue"] = False
    assert lab.enabled == frozenset()
    lab.toggles[second] = True
    assert lab.enabled == {second}
    assert lab.toggles["gemm_epilogue"] is None
    shown = checks(lab)
    assert (shown["gemm_epilogue"], shown[first], shown[second]) == ("partial", False, True)
    assert "partly on" in repr(lab.toggles)


def test_a_click_is_the_same_as_scripting(lab, case):
    first, second = ids(case)
    seen = []
    lab.observe(lambda change: seen.append(change["new"]), "enabled")
    click(lab, "toggle", name=first, on=False)
    assert lab.enabled == {second}
    click(lab, "toggle", name="gemm_epilogue", on=False)
    click(lab, "group", ids=[first, second], on=True)
    click(lab, "all", on=False)
    assert seen == [{second}, frozenset(), {first, second}, frozenset()]
    assert checks(lab)["lerp"] == "none"
    click(lab, "undo")
    assert lab.enabled == {first, second}
    click(lab, "reset")
    assert lab.enabled == {first, second}


def test_setting_the_trait_moves_boxes_and_toggles_and_can_be_observed(lab, case):
    seen = []
    lab.observe(lambda change: seen.append(change["new"]), "enabled")
    lab.enabled = frozenset(ids(case)[:1])
    assert seen == [frozenset(ids(case)[:1])]
    assert lab.toggles.enabled == lab.enabled
    assert checks(lab)[ids(case)[1]] is False
    with pytest.raises(UnknownNameError, match="unknown site 'lerp@nowhere#1'"):
        lab.enabled = frozenset({"lerp@nowhere#1"})
    assert lab.enabled == lab.toggles.enabled == frozenset(ids(case)[:1])


def test_a_misspelt_name_lists_the_valid_ones_and_changes_nothing(lab, case):
    with pytest.raises(UnknownNameError, match="Did you mean 'gemm_epilogue'"):
        lab.toggles["gemm_epilog"] = False
    with pytest.raises(ArgumentError, match="needed True or False"):
        lab.toggles["gemm_epilogue"] = "off"
    assert lab.enabled == frozenset(ids(case))


def test_an_error_behind_a_click_is_shown_and_the_widget_goes_on(lab, case):
    def fails(change):
        raise BackendError("no such luck")

    lab.observe(fails, "enabled")
    click(lab, "toggle", name=ids(case)[0], on=False)
    assert lab.problem == {"code": "BackendError", "sentence": "no such luck"}
    assert checks(lab)[ids(case)[0]] is False  # what was clicked is done, and shown
    lab.unobserve(fails, "enabled")
    click(lab, "dismiss")
    assert lab.problem is None
    click(lab, "toggle", name=ids(case)[1], on=False)
    assert (lab.enabled, lab.problem) == (frozenset(), None)
    for message in ({"type": "nonsense"}, {}, {"type": "toggle"}, {"type": "pick", "name": "%999"}):
        lab._message(lab, message, [])
        assert lab.problem["sentence"]
        click(lab, "dismiss")


def test_the_picture_follows_the_toggles(lab, case):
    first = ids(case)[0]
    card = card_of(lab, "layer_0")
    assert f'id="{card}" class="card site applied"' in lab.scene["svg"]
    lab.toggles[first] = False
    assert f'id="{card}" class="card site candidate"' in lab.scene["svg"]


def test_all_that_goes_to_the_browser_is_json(lab):
    names = [name for name, trait in lab.traits(sync=True).items() if not name.startswith("_")]
    assert {"head", "panel", "scene", "marks", "inspector", "tabs", "hits", "busy", "problem", "theme"} <= set(names)
    for name in ("head", "panel", "scene", "marks", "inspector", "tabs", "hits", "busy", "problem", "theme"):
        json.dumps(getattr(lab, name))


# Measuring ---------------------------------------------------------------------------------------------------------------------


def test_measuring_happens_when_asked_and_belongs_to_its_sites(lab, case, meter):
    lab.toggles[ids(case)[0]] = False
    lab.select("n3")
    assert meter.calls == []
    lab.measure()
    assert meter.calls == [frozenset(ids(case)[1:])]


def test_a_failed_measurement_says_so_and_raises(case):
    def fails(setting, progress, cancel):
        raise ValueError("no such luck")

    lab = Explorer(case.graph, case.findings, measure=fails)
    with pytest.raises(ValueError, match="no such luck"):
        lab.measure()
    assert lab.status == "measurement failed: ValueError: no such luck"
    lab.start().join(10)
    assert lab.status == "measurement failed: ValueError: no such luck"
    assert lab.problem == {"code": "ValueError", "sentence": "no such luck"}
    assert not lab.busy["running"]


def test_without_something_to_measure_with_measuring_is_refused(case):
    lab = Explorer(case.graph, case.findings)
    assert not lab.head["can"]["measure"]
    with pytest.raises(ArgumentError, match=r"fusionlab\.explore"):
        lab.measure()
    for verb in (
        lab.code,
        lambda: setattr(lab, "shown", "after"),
        lambda: lab.option("gemm_epilogue", "strict_rank", True),
    ):
        with pytest.raises(ArgumentError, match=r"fusionlab\.explore"):
            verb()
    assert lab.shown == "before"


def test_a_running_measurement_shows_progress_and_can_be_cancelled(case):
    running, release, stopped = threading.Event(), threading.Event(), []

    def slow(setting, progress, cancel):
        progress("timing", 14, 40)
        running.set()
        release.wait(10)
        stopped.append(cancel())
        progress("timing", 15, 40)
        return "late evidence"

    lab = Explorer(case.graph, case.findings, measure=slow)
    click(lab, "measure")
    assert running.wait(10)
    assert lab.status == "timing 14/40"
    shown = {"running": True, "what": "timing", "done": 14, "total": 40, "status": "timing 14/40"}
    assert shown.items() <= lab.busy.items()
    thread = next(t for t in threading.enumerate() if t.name == "fusionlab-explorer")
    click(lab, "cancel")
    assert lab.status.startswith("cancelled: the running job")
    assert "abandoned" in lab.status
    assert not lab.busy["running"]
    release.set()
    thread.join(10)
    assert stopped == [True]
    assert lab.evidence is None
    assert lab.status.startswith("cancelled")


def test_two_explorers_measure_one_after_the_other(case):
    begun, go, seen = threading.Event(), threading.Event(), []

    def first(setting, progress, cancel):
        begun.set()
        assert go.wait(30)
        seen.append("first")

    one, two = (
        Explorer(case.graph, case.findings, measure=measure) for measure in (first, lambda *a: seen.append("second"))
    )
    threads = [one.start()]
    assert begun.wait(30)
    threads.append(two.start())
    assert two.status == "waiting for another explorer to end"
    threads[1].join(0.3)
    assert seen == []
    go.set()
    for thread in threads:
        thread.join(30)
    assert seen == ["first", "second"]


def test_closing_it_cancels_what_is_measured(case):
    begun, ended = threading.Event(), threading.Event()

    def measure(setting, progress, cancel):
        begun.set()
        assert cancel.wait(30)
        ended.set()

    lab = Explorer(case.graph, case.findings, measure=measure)
    thread = lab.start()
    assert begun.wait(30)
    lab.close()
    thread.join(30)
    assert ended.is_set()
    assert not thread.is_alive()


def test_a_new_tick_cancels_the_running_measurement_and_the_latest_wins(case, meter):
    running, release, seen = threading.Event(), threading.Event(), []

    def slow(setting, progress, cancel):
        seen.append(setting.enabled)
        running.set()
        if len(seen) == 1:
            assert release.wait(10)
            assert cancel()

    lab = Explorer(case.graph, case.findings, measure=slow)
    first = lab.start()
    assert running.wait(10)
    lab.toggles[ids(case)[0]] = (
        False  # two ticks while the first is under way: what lies between them is never measured
    )
    lab.toggles["gemm_epilogue"] = False
    release.set()
    first.join(10)
    for thread in threading.enumerate():
        if thread.name == "fusionlab-explorer":
            thread.join(10)
    assert seen == [frozenset(ids(case)), frozenset()]
    assert lab.measuring
    lab.cancel()
    lab.toggles["gemm_epilogue"] = True
    assert len(seen) == 2  # cancelled: nothing is measured until asked again


def test_a_measurement_says_that_it_waits_for_one_that_was_abandoned(case):
    begun, go = threading.Event(), threading.Event()

    def deaf(setting, progress, cancel):
        begun.set()
        assert go.wait(30)

    lab = Explorer(case.graph, case.findings, measure=deaf)
    threads = [lab.start()]
    assert begun.wait(30)
    lab.cancel()
    threads.append(lab.start())
    assert lab.status == "waiting for the abandoned job to end"
    go.set()
    for thread in threads:
        thread.join(30)
    assert lab.status in ("measured", "not measured")


def test_two_measurements_never_run_side_by_side(case):
    inside, most, release = [0], [], threading.Event()

    def slow(setting, progress, cancel):
        inside[0] += 1
        most.append(inside[0])
        release.wait(0.05)  # deaf to `cancel`, as a compilation is
        inside[0] -= 1

    lab = Explorer(case.graph, case.findings, measure=slow)
    threads = [lab.start() for _ in range(4)]
    for thread in threads:
        thread.join(10)
    assert set(most) == {1}


def test_an_observer_of_a_measurement_may_measure(case):
    calls = []

    def measure(setting, progress, cancel):
        calls.append(setting.enabled)

    lab = Explorer(case.graph, case.findings, measure=measure)

    def again(change):
        if len(calls) == 1 and change["new"] == "measured":
            lab.measure()

    lab.observe(again, "status")
    thread = lab.start()
    thread.join(20)
    assert not thread.is_alive()
    assert len(calls) == 2


# Selecting ---------------------------------------------------------------------------------------------------------------------


def test_selecting_from_python_and_by_click_is_the_same(lab, case):
    node = linear_nodes(case.graph)[1][0]
    card = card_of(lab, "layer_1")
    info = lab.select(node.outputs[0].name)
    assert info["primitive"] == "dot_general"
    assert (lab.selected, lab.marks["selected"]) == (node.outputs[0].name, [card])
    assert "x = jnp.tanh(x @ w + b)" in lab.inspector["html"]
    lab.select(ids(case)[0])
    assert "tanh(x @ w + b)" in lab.inspector["html"]
    click(lab, "select", id=card)
    assert (lab.selected, lab.marks["selected"]) == (ids(case)[1], [card])
    click(lab, "pick", name=ids(case)[0])
    assert lab.selected == ids(case)[0]


def test_a_source_line_selects_its_equations(lab, case):
    node = linear_nodes(case.graph)[0][0]
    info = lab.select(node.source.short)
    assert len(info["nodes"]) == 12
    assert lab.marks["selected"] == [card_of(lab, f"layer_{i}") for i in range(3)]


def test_selecting_what_is_not_there_is_refused(lab):
    with pytest.raises(ArgumentError, match=r"'%999'.*needed a value"):
        lab.select("%999")
    click(lab, "pick", name="%998")
    assert "%998" in lab.problem["sentence"]


def test_searching_marks_what_is_found(lab, case):
    rows = lab.search("dot_general")
    assert [r["id"] for r in rows] == [f"n{nodes[0].id}" for nodes in linear_nodes(case.graph)]
    assert lab.marks["found"] == [card_of(lab, f"layer_{i}") for i in range(3)]
    click(lab, "search", text="")
    assert (lab.hits["rows"], lab.marks["found"]) == ([], [])


def test_a_card_opens_where_it_stands_and_closing_it_gives_the_former_picture_back(deep):
    lab = Explorer(deep.graph, deep.findings)
    first = lab.scene
    card = card_of(lab, "layer_0")
    assert lab.scene["items"][card] == lab.scene["items"][card] | {"group": True, "closed": True}
    click(lab, "fold", id=card)
    assert not lab.scene["items"][card]["closed"]
    assert {k for k, v in lab.scene["items"].items() if v["group"] and not v["closed"]} == {card}
    click(lab, "fold", id=card)
    assert lab.scene == first
    click(lab, "fold", id="nonsense")
    assert lab.problem is None


def test_selecting_a_node_opens_the_cards_around_it_and_shows_its_copy(deep):
    lab = Explorer(deep.graph, deep.findings)
    card = card_of(lab, "layer_0")
    products = [n for n in deep.graph.nodes() if n.primitive == "dot_general"]
    lab.select(f"n{products[-1].id}")
    assert lab.scene["items"][card]["label"].startswith("layer_2, 3 of 3")
    (seen,) = lab.marks["selected"]
    assert seen != card
    assert "x @ " in lab.scene["items"][seen]["label"]
    click(lab, "step", id=card, by=1)
    assert lab.scene["items"][card]["label"].startswith("layer_0, 1 of 3")


def test_a_site_in_a_copy_that_is_not_drawn_is_marked_where_its_block_is(stack):
    lab = Explorer(stack.graph, stack.findings)
    last = [c.id for c in stack.findings.candidates][-1]
    lab.select(last)
    assert lab.marks["selected"]
    assert set(lab.marks["selected"]) <= set(lab.scene["items"])


def test_a_click_on_a_closed_card_selects_it_and_leaves_it_closed(deep):
    lab = Explorer(deep.graph, deep.findings)
    card = card_of(lab, "layer_0")
    click(lab, "select", id=card)
    assert lab.marks["selected"] == [card]
    assert lab.scene["items"][card]["closed"]
    assert lab.inspector["title"] == "layer_0, 1 of 3"


def test_what_is_selected_follows_the_copy_that_is_shown_and_the_card_that_holds_it(deep):
    lab = Explorer(deep.graph, deep.findings)
    card = card_of(lab, "layer_0")
    click(lab, "fold", id=card)
    child = next(k for k in lab.scene["items"] if k != card and k.startswith(card))
    click(lab, "select", id=child)
    assert lab.marks["selected"] == [child]
    click(lab, "step", id=card, by=1)
    assert set(lab.marks["selected"]) <= set(lab.scene["items"])
    click(lab, "fold", id=card)
    assert lab.marks["selected"] == [card]


def test_a_selection_in_the_fused_program_is_dropped_when_it_is_fused_otherwise(deep):
    graphs = [deep.graph, trace(jnp.sin, jnp.ones(3))]

    def after(setting, findings):
        return graphs[len(setting.enabled) % 2]

    nodes = [n for n in deep.graph.nodes() if n.primitive == "dot_general"]
    found = findings_of(deep.graph, [candidate(deep.graph, "gemm_epilogue@layer_0#1", nodes[:1])])
    lab = Explorer(deep.graph, found, after=after, enabled=frozenset())
    lab.shown = "after"
    click(lab, "select", id=card_of(lab, "layer_0"))
    assert lab.selected
    lab.toggles["gemm_epilogue"] = True
    assert (lab.selected, lab.problem) == ("", None)
    lab.select("n0")
    lab.toggles["gemm_epilogue"] = False
    assert lab.selected == ""


def test_a_pane_of_another_size_gets_a_picture_of_that_size(lab):
    click(lab, "pane", width=640, height=500)
    assert 'width="640"' in lab.scene["svg"]
    before = lab.scene
    click(lab, "pane", width=640, height=500)
    assert lab.scene is before


def test_after_shows_the_graph_with_the_enabled_sites_fused(case):
    asked = []

    def after(setting, findings):
        asked.append(setting.enabled)
        return case.graph

    lab = Explorer(case.graph, case.findings, after=after)
    lab.shown = "after"
    assert set(asked) == {lab.enabled}
    assert "declined" not in lab.scene["svg"].partition("legend")[0]
    click(lab, "shown", value="before")
    assert lab.shown == "before"
    assert "declined" in lab.scene["svg"].partition("legend")[0]


# Showing and saving -----------------------------------------------------------------------------------------------------------


def test_the_bundle_has_the_widget_and_a_static_picture(lab):
    bundle, metadata = lab._repr_mimebundle_()
    assert set(bundle) == {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"}
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
    assert set(metadata) == {"image/png"}
    assert bundle["text/plain"] == str(lab)


def test_declined_sites_are_listed(lab):
    (group,) = lab.panel["declined"]
    assert group["code"] == "escapes"
    assert group["rows"][0]["edit"] == "return it only when asked"
    assert (group["rows"][0]["matched"], group["rows"][0]["total"]) == (17, 19)


@pytest.mark.parametrize("suffix", [".svg", ".html", ".json", ".dot", ".txt", ".png", ".pdf"])
def test_save_goes_by_the_suffix_and_an_export_is_the_same(lab, tmp_path, suffix):
    sent = []
    lab.send = lambda message, buffers=None: sent.append(message)
    path = lab.save(tmp_path / f"x{suffix}")
    assert path.stat().st_size > 100
    click(lab, "export", suffix=suffix)
    assert lab.problem is None
    (message,) = sent
    assert (message["type"], message["name"]) == ("download", f"mlp{suffix}")
    if "text" in message and suffix != ".html":
        assert message["text"] == path.read_text()


def test_an_unknown_suffix_lists_the_known_ones_and_writes_nothing(lab, tmp_path):
    with pytest.raises(ArgumentError, match=r"'\.doc'.*needed one of \.dot, \.html, \.json"):
        lab.save(tmp_path / "x.doc")
    assert not list(tmp_path.iterdir())


def test_a_record_is_sent_once_it_is_asked_for_and_at_rest_and_again_after_a_change(lab, case, monkeypatch):
    monkeypatch.setattr(kept, "REST", 0.05)
    sent = []
    lab.send = sent.append
    keeper = kept.Keeper(lab.session, lambda: lab.status.startswith("busy"), sent.append)
    lab._keeper = keeper

    def waited(n):
        until = time.monotonic() + 20
        while len(sent) < n and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.2)
        return len(sent)

    lab.refresh()
    assert waited(0) == 0  # no browser shows it
    lab.status = "busy measuring"
    click(lab, "keep")
    assert waited(0) == 0  # nor beside a measurement
    lab.status = "measured"
    assert waited(1) == 1
    assert (sent[0]["type"], sent[0]["side"], sent[0]["data"]["decided"]) == ("kept", "before", lab.head["decided"])
    assert set(sent[0]["data"]["scene"]["items"]) <= set(lab.scene["items"])
    lab.select(ids(case)[0])
    assert waited(1) == 1  # what is selected is no change of what is shown
    click(lab, "toggle", name=ids(case)[0], on=False)
    assert waited(2) == 2
    assert sent[1]["data"]["decided"] == lab.head["decided"] == 2
    lab.close()
    click(lab, "undo")
    assert waited(2) == 2
