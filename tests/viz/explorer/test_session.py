"""The explorer without a screen: decisions, undo, options, and what it gives as plain data."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.errors import ArgumentError, UnknownNameError
from fusionlab.fusers import Strategy
from fusionlab.viz.explorer.session import Session
from fusionlab.viz.explorer.widget import Explorer
from fusionlab.viz.model.setting import Setting

from ..conftest import candidate, findings_of, linear_nodes


@pytest.fixture
def session(case):
    return Session(case.graph, case.findings)


@pytest.fixture(scope="module")
def mixed():
    """A lerp that is one only when reassociated, and two equal linear layers."""

    def model(x, y, w, v, b):
        h = jax.nn.relu(jax.nn.relu(x @ v + b) @ v + b)
        return h, x * (1 - w) + y * w

    args = (jnp.ones((8, 16)), jnp.ones((8, 16)), jnp.ones((8, 16)), jnp.ones((16, 16)), jnp.ones(16))
    graph = fl.trace(model, *args)
    return graph, fl.find(graph)


def live(mixed, **options):
    graph, found = mixed
    return Session(graph, found, find=lambda strategy, _: fl.find(graph, passes=strategy), **options)


def words(session):
    return [d.what for d in session.ledger]


def test_every_decision_is_a_line_of_the_ledger_and_can_be_undone(session, case):
    first, second = (c.id for c in case.findings.candidates)
    session.toggles[first] = False
    session.toggles["gemm_epilogue"] = False
    session.group([first, second], True)
    assert words(session) == ["opened", f"{first} off", f"{second} off", "gemm_epilogue on (2 sites)"]
    assert [session.undo() for _ in range(4)] == [True, True, True, False]
    assert session.setting == session.opened
    assert words(session)[4:] == ["undone: gemm_epilogue off (2 sites)", f"undone: {second} on", f"undone: {first} on"]
    assert session.toggles[first] is True
    session.toggles["gemm_epilogue"] = False
    assert session.reset()
    assert not session.reset()
    assert session.undo()
    assert session.enabled == frozenset()


def test_before_and_after_beside_each_other_have_one_selection(session, mixed):
    with pytest.raises(ArgumentError, match="only findings"):
        session.show("both")
    assert not session.head()["can"]["both"]
    session = live(mixed, after=lambda setting, findings: findings.apply(setting.enabled))
    session.show("both")
    site = session.findings.candidates[0].id
    session.select(site)
    marked = session.marks()["selected"]
    assert len(marked) == 2
    assert set(marked) <= session.scene()["items"].keys()
    assert [session.clicked(name) for name in marked] == [site, site]
    session.show("before")
    assert session.selected == site
    assert len(session.marks()["selected"]) == 1


def test_the_screen_is_told_what_can_act_and_what_selects_again(session, case, monkeypatch):
    assert not session.head()["can"]["reset"]
    assert {".svg", ".json", ".html"} <= set(session.head()["can"]["export"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert ".pdf" not in session.head()["can"]["export"]  # PNG needs no extra
    session.toggles["gemm_epilogue"] = False
    assert session.head()["can"]["reset"]
    turns = []
    for name in (case.findings.candidates[0].id, "n3", "n3"):
        session.select(name)
        told = session.inspector()
        turns.append(told["turn"])
        session.select(told["name"])
        assert session.inspector()["name"] == told["name"]
    assert turns == [1, 3, 5]  # selecting the same again is told too


def test_what_was_undone_is_redone_until_another_change_is_made(session, case):
    first, second = (c.id for c in case.findings.candidates)
    session.toggles[first] = False
    session.toggles[second] = False
    assert not session.redo()
    assert session.undo()
    assert session.undo()
    assert session.head()["can"]["redo"]
    assert session.redo()
    assert session.enabled == {second}
    assert words(session)[-1] == f"redone: {first} off"
    assert session.undo()
    assert [session.redo(), session.redo(), session.redo()] == [True, True, False]
    assert session.enabled == frozenset()
    assert session.undo()
    session.toggles[first] = True
    assert not session.can_redo
    assert not session.redo()


def test_what_changes_nothing_is_no_decision(session):
    session.toggles["gemm_epilogue"] = True
    assert words(session) == ["opened"]
    assert not session.can_undo


def test_switching_a_pass_names_it(session):
    session.toggles["gemm_epilogue"] = False
    assert words(session)[-1] == "gemm_epilogue off (2 sites)"
    session.toggles["gemm_epilogue"] = True
    assert words(session)[-1] == "gemm_epilogue on (2 sites)"


def test_an_option_searches_again_and_keeps_what_was_on(mixed):
    session = live(mixed)
    on = session.enabled
    assert not any(c.pass_name == "lerp" for c in session.findings.candidates)
    session.toggles["gemm_epilogue"] = False
    session.option("lerp", "reassociate", True)
    (lerp,) = (c.id for c in session.findings.candidates if c.pass_name == "lerp")
    assert session.enabled == {lerp}  # the new site is on, what was off stays off
    assert session.setting.strategy["lerp"] == {"reassociate": True}
    assert words(session)[-1] == "lerp: reassociate=True"
    (option,) = next(p["options"] for p in session.panel()["passes"] if p["name"] == "lerp")
    assert (option["value"], option["choices"]) == (True, [False, True])
    session.undo()
    session.undo()
    assert (session.enabled, session.setting.strategy) == (on, None)
    assert lerp not in session.toggles


def test_an_option_that_is_none_is_refused_and_changes_nothing(mixed, session):
    there = live(mixed)
    with pytest.raises(UnknownNameError, match=r"unknown option of lerp 'reasociate'.*reassociate"):
        there.option("lerp", "reasociate", True)
    with pytest.raises(ArgumentError, match=r"lerp\.reassociate: got 1, needed one of False, True"):
        there.option("lerp", "reassociate", 1)
    with pytest.raises(ArgumentError, match=r"fusionlab\.explore"):
        session.option("gemm_epilogue", "strict_rank", True)
    assert words(there) == words(session) == ["opened"]


def test_identical_sites_are_one_group_that_is_switched_as_one(stack):
    session = Session(stack.graph, stack.findings) if stack.findings.candidates else None
    assert session is not None
    (group,) = next(p["groups"] for p in session.panel()["passes"] if p["name"] == "gemm_epilogue")
    assert (group["count"], group["state"]) == (24, "on")
    session.group(group["ids"][:3], False)
    (group,) = next(p["groups"] for p in session.panel()["passes"] if p["name"] == "gemm_epilogue")
    assert group["state"] == "partial"
    assert words(session)[-1] == "gemm_epilogue: 3 of 24 sites off"
    session.group(group["ids"], False)
    assert session.enabled == frozenset()
    with pytest.raises(UnknownNameError):
        session.group([*group["ids"], "nothing@x#1"], True)
    assert session.enabled == frozenset()


def test_sites_that_differ_are_not_one_group(case):
    graph, nodes = case.graph, linear_nodes(case.graph)
    two = [candidate(graph, f"gemm_epilogue@layer_{i}#1", nodes[i], f"formula {i}") for i in (0, 1)]
    session = Session(graph, findings_of(graph, two))
    groups = next(p["groups"] for p in session.panel()["passes"] if p["name"] == "gemm_epilogue")
    assert [g["label"] for g in groups] == ["formula 0", "formula 1"]
    assert [g["names"] for g in groups] == ["", ""]


def test_groups_of_one_formula_are_told_apart_by_their_modules(case):
    graph, nodes = case.graph, linear_nodes(case.graph)
    two = [candidate(graph, f"gemm_epilogue@layer_{i}/{n}#1", nodes[i]) for i, n in enumerate(("query", "out"))]
    two[1] = dataclasses.replace(two[1], nodes_after=4)
    groups = Session(graph, findings_of(graph, two)).panel()["passes"][0]["groups"]
    assert [(g["label"], g["names"]) for g in groups] == [("x @ w + b", "query"), ("x @ w + b", "out")]


def test_a_site_in_no_module_is_named_by_its_line(case):
    graph, nodes = case.graph, linear_nodes(case.graph)
    session = Session(graph, findings_of(graph, [candidate(graph, "gemm_epilogue@#1", nodes[0])]))
    (group,) = session.panel()["passes"][0]["groups"]
    assert group["sites"][0]["label"] == f"{nodes[0][0].source.short} #1"


def test_the_picture_is_drawn_again_only_when_it_changes(session, case, monkeypatch):
    from fusionlab.viz.cards import album

    drawn = []
    real = album.svg
    monkeypatch.setattr(album, "svg", lambda *a: drawn.append(1) or real(*a))
    session.scene()
    session.select("n1")
    session.search("tanh")
    session.scene()
    assert len(drawn) == 1
    session.toggles["gemm_epilogue"] = False
    session.scene()
    assert len(drawn) == 2


def test_the_setting_and_the_ledger_are_plain_data():
    setting = Setting(frozenset({"b", "a"}), Strategy(lerp={"reassociate": True}))
    assert Setting.from_dict(setting.to_dict()) == setting
    assert hash(Setting.from_dict(setting.to_dict())) == hash(setting)
    for bad in (None, [], {"enabled": "a", "strategy": None}, {"enabled": [1], "strategy": None}, {"enabled": []}):
        with pytest.raises(ArgumentError):
            Setting.from_dict(bad)


def test_plots_are_drawn_again_only_when_something_was_measured(session, case, monkeypatch):
    from fusionlab.viz.explorer import below as module

    drawn = []
    real = module.evidence_tabs
    monkeypatch.setattr(module, "evidence_tabs", lambda *a, **k: drawn.append(1) or real(*a, **k))
    names = [t["name"] for t in session.tabs("print()")]
    assert names == ["Timing", "Errors", "Sites", "Memory", "Roofline", "Kernels", "Graph diff", "Ledger", "Code"]
    session.select("n1")
    session.tabs()
    assert len(drawn) == 1
    session.toggles["gemm_epilogue"] = False
    assert "gemm_epilogue off" in next(t["html"] for t in session.tabs() if t["name"] == "Ledger")
    assert len(drawn) == 2


def test_a_search_again_is_seen_while_it_lasts_and_no_longer(mixed):
    graph, found = mixed
    said = []
    lab = Explorer(
        graph,
        found,
        find=lambda strategy, _: said.append((lab.status, lab.busy["running"])) or fl.find(graph, passes=strategy),
    )
    lab.option("lerp", "reassociate", True)
    assert said == [("searching again", True)]
    assert (lab.status, lab.busy["running"]) == ("not measured", False)
    with pytest.raises(ArgumentError):
        lab.option("lerp", "reassociate", "perhaps")
    assert not lab.busy["running"]
