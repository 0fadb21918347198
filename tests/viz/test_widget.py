"""The explorer's Python side: a plain object with traits."""

import threading

import pytest

from fusionlab.errors import ArgumentError, UnknownNameError
from fusionlab.viz.dot import dom_id
from fusionlab.viz.html import graph_html
from fusionlab.viz.widget import Explorer

from .conftest import linear_nodes


class Meter:
    """Stands for the measuring function; remembers what it was asked."""

    def __init__(self):
        self.calls = []

    def __call__(self, enabled, progress, cancel):
        self.calls.append(enabled)
        progress("timing", 1, 2)


@pytest.fixture
def meter():
    return Meter()


@pytest.fixture
def lab(case, meter):
    return Explorer(case.graph, case.findings, measure=meter, after=lambda enabled: case.graph, engine="builtin")


def ids(case):
    return [c.id for c in case.findings.candidates]


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
    assert (lab._boxes[first].value, lab._boxes[second].value) == (False, True)
    assert "partly on" in repr(lab.toggles)


def test_ticking_a_box_is_the_same_as_scripting(lab, case):
    first, second = ids(case)
    lab._boxes[first].value = False
    assert lab.enabled == {second}
    lab._boxes["gemm_epilogue"].value = False
    assert lab.enabled == frozenset()
    assert lab._boxes["lerp"].disabled


def test_setting_the_trait_moves_boxes_and_toggles_and_can_be_observed(lab, case):
    seen = []
    lab.observe(lambda change: seen.append(change["new"]), "enabled")
    lab.enabled = frozenset(ids(case)[:1])
    assert seen == [frozenset(ids(case)[:1])]
    assert lab.toggles.enabled == lab.enabled
    assert lab._boxes[ids(case)[1]].value is False


def test_a_misspelt_name_lists_the_valid_ones_and_changes_nothing(lab, case):
    with pytest.raises(UnknownNameError, match="Did you mean 'gemm_epilogue'"):
        lab.toggles["gemm_epilog"] = False
    with pytest.raises(ArgumentError, match="needed True or False"):
        lab.toggles["gemm_epilogue"] = "off"
    assert lab.enabled == frozenset(ids(case))


def test_the_picture_follows_the_toggles(lab, case):
    first = ids(case)[0]
    assert f'id="fl-{dom_id(first)}-inner"' in lab._pane.svg
    lab.toggles[first] = False
    assert f'id="fl-{dom_id(first)}-inner"' not in lab._pane.svg


def test_measuring_happens_when_asked_and_belongs_to_its_sites(case):
    measured = []

    def measure(enabled, progress, cancel):
        measured.append(enabled)

    lab = Explorer(case.graph, case.findings, measure=measure, engine="builtin")
    lab.toggles[ids(case)[0]] = False
    lab.select("n3")
    assert measured == []
    lab.measure()
    assert measured == [frozenset(ids(case)[1:])]


def test_a_failed_measurement_says_so_and_raises(case):
    def fails(enabled, progress, cancel):
        raise ValueError("no such luck")

    lab = Explorer(case.graph, case.findings, measure=fails, engine="builtin")
    with pytest.raises(ValueError, match="no such luck"):
        lab.measure()
    assert lab.status == "measurement failed: ValueError: no such luck"
    lab.start().join(10)
    assert lab.status == "measurement failed: ValueError: no such luck"
    assert lab._cancel_button.disabled


def test_without_something_to_measure_with_measuring_is_refused(case):
    lab = Explorer(case.graph, case.findings, engine="builtin")
    assert lab._measure_button.disabled
    with pytest.raises(ArgumentError, match=r"fusionlab\.explore"):
        lab.measure()


def test_a_running_measurement_shows_progress_and_can_be_cancelled(case):
    running, release, stopped = threading.Event(), threading.Event(), []

    def slow(enabled, progress, cancel):
        progress("timing", 14, 40)
        running.set()
        release.wait(10)
        stopped.append(cancel())
        progress("timing", 15, 40)
        return "late evidence"

    lab = Explorer(case.graph, case.findings, measure=slow, engine="builtin")
    lab._measure_button.click()
    assert running.wait(10)
    assert lab.status == "timing 14/40"
    assert (lab._bar.value, lab._bar.max, lab._pane.dimmed) == (14, 40, True)
    thread = next(
        t for t in threading.enumerate() if t is not threading.main_thread() and t.daemon and "_background" in t.name
    )
    lab._cancel_button.click()
    assert (lab.status, lab._pane.dimmed) == ("cancelled", False)
    release.set()
    thread.join(10)
    assert stopped == [True]
    assert lab.evidence is None
    assert lab.status == "cancelled"


def test_a_new_tick_cancels_the_running_measurement(case):
    running, seen = threading.Event(), []

    def slow(enabled, progress, cancel):
        running.set()
        seen.append(cancel.wait(10))

    lab = Explorer(case.graph, case.findings, measure=slow, engine="builtin")
    thread = lab.start()
    assert running.wait(10)
    lab.toggles["gemm_epilogue"] = False
    thread.join(10)
    assert seen == [True]
    assert lab.status == "cancelled"


def test_selecting_from_python_and_by_click_is_the_same(lab, case):
    node = linear_nodes(case.graph)[1][0]
    info = lab.select(node.outputs[0].name)
    assert info["primitive"] == "dot_general"
    assert (lab.selected, lab._pane.selected_id) == (node.outputs[0].name, f"fl-n{node.id}")
    assert "x = jnp.tanh(x @ w + b)" in lab._inspector.value
    lab.select(ids(case)[0])
    assert "tanh(x @ w + b)" in lab._inspector.value
    lab._message(lab._pane, {"type": "select", "id": f"fl-n{node.id}"})
    assert lab.selected == node.outputs[0].name


def test_selecting_what_is_not_there_is_refused(lab):
    with pytest.raises(ArgumentError, match=r"'%999'.*needed a value"):
        lab.select("%999")
    lab._search.value = "%998"
    assert "%998" in lab._inspector.value


def test_groups_close_and_open_by_double_click(lab):
    frame = "fl-" + dom_id("layer_0")
    assert lab._pane.labels[frame] == "layer_0"
    lab._message(lab._pane, {"type": "fold", "id": frame})
    assert lab._pane.labels[frame].startswith("layer_0 4 nodes")
    lab._message(lab._pane, {"type": "fold", "id": frame})
    assert lab._pane.labels[frame] == "layer_0"
    lab._message(lab._pane, {"type": "fold", "id": "nonsense"})


def test_selecting_a_folded_node_unfolds_what_is_around_it(lab, case):
    lab._message(lab._pane, {"type": "fold", "id": "fl-" + dom_id("layer_0")})
    node = linear_nodes(case.graph)[0][0]
    lab.select(f"n{node.id}")
    assert lab._pane.selected_id == f"fl-n{node.id}"
    assert f'id="fl-n{node.id}"' in lab._pane.svg


def test_after_shows_the_graph_with_the_enabled_sites_fused(case):
    asked = []

    def after(enabled):
        asked.append(enabled)
        return case.graph

    lab = Explorer(case.graph, case.findings, after=after, engine="builtin")
    assert asked == []
    lab.shown = "after"
    assert asked
    assert set(asked) == {lab.enabled}
    assert "dashed" not in lab._pane.svg
    lab._shown_buttons.value = "before"
    assert lab.shown == "before"


def test_the_bundle_has_the_widget_and_a_static_picture(lab, case):
    bundle = lab._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["text/html"] == graph_html(case.graph, case.findings, enabled=lab.enabled, engine="builtin")
    assert bundle["text/plain"] == "Explorer('mlp', 2 of 2 sites on, not measured)"


def test_declined_sites_are_listed_folded(lab):
    accordion = next(w for w in lab.children[4].children[0].children if hasattr(w, "titles"))
    assert (accordion.titles, accordion.selected_index) == (("Declined (1)",), None)
    assert "return it only when asked" in accordion.children[0].value
