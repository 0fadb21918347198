"""Pictures that are kept give what a view made anew gives, whatever was opened, closed and switched before."""

import itertools
import json

import jax
import jax.numpy as jnp
import pytest

from fusionlab.graph.program.trace import trace
from fusionlab.viz.model.pictures import Pictures
from fusionlab.viz.model.view_model import view_model

from ..conftest import linear_nodes, mlp, mlp_args


def plain(view):
    return json.dumps({k: v for k, v in view.items() if k != "structures"})


CHANGES = {
    "folds": {"collapsed": ["layer_0"]},
    "opens all": {"expanded": "all"},
    "opens one": {"expanded": ["gemm_epilogue@layer_0#1"], "max_nodes": 3},
    "page": {"max_nodes": 3},
    "reveals": {"reveal": [5], "collapsed": ["layer_1", "layer_0"]},
    "all on": {"enabled": None},
    "one on": {"enabled": ["gemm_epilogue@layer_1#1"]},
    "nothing": {},
}


@pytest.mark.parametrize(("first", "then"), [*itertools.permutations(CHANGES, 2)])
def test_a_view_does_not_depend_on_those_before_it(case, first, then):
    pictures = Pictures(case.graph, case.findings)
    pictures.view(**CHANGES[first])
    assert plain(pictures.view(**CHANGES[then])) == plain(view_model(case.graph, case.findings, **CHANGES[then]))


def test_a_site_switched_off_breaks_the_run_of_identical_layers_and_on_again_mends_it(stack):
    pictures = Pictures(stack.graph, stack.findings)
    ids = [c.id for c in stack.findings.candidates]
    for enabled, runs in ((ids, [24]), (ids[1:], [23]), (ids, [24])):
        assert [g["count"] for g in pictures.view(enabled=enabled)["groups"] if g["count"] > 1] == runs


def test_structures_are_looked_for_only_where_asked_for(case, monkeypatch):
    asked = []
    monkeypatch.setattr(type(case.findings), "structures", property(lambda _: asked.append(1) or ()))
    assert Pictures(case.graph, case.findings).view()["structures"] == []
    assert not asked
    Pictures(case.graph, case.findings).view(structures=True)
    view_model(case.graph, case.findings)
    assert len(asked) == 2


def test_runs_inside_runs_have_no_line_back_to_their_own_start():
    def twice(x, w):
        for j in range(4):
            with jax.named_scope(f"outer{j}"):
                for i in range(5):
                    with jax.named_scope(f"inner{i}"):
                        x = jnp.tanh(x @ w + 1.0)
        return x

    graph = trace(twice, jnp.ones((4, 4)), jnp.ones((4, 4)))
    view = view_model(graph)
    assert sorted(g["count"] for g in view["groups"]) == [4, 5]
    order = {b["id"]: i for i, b in enumerate(view["boxes"]) if b["kind"] == "node"}
    assert len(order) == 3
    inner = [(order[e["from"]], order[e["to"]]) for e in view["edges"] if e["from"] in order and e["to"] in order]
    assert inner == [(0, 1), (1, 2)]
    last = list(graph.nodes())[-1]
    assert view_model(graph, reveal=[last.id])["revealed"] == {f"n{last.id}": "n2"}


def test_every_node_is_a_member_of_one_box_or_a_copy_of_one_that_is(stack):
    for options in ({}, {"expanded": "all"}, {"collapsed": ["layer_0"]}):
        view = view_model(stack.graph, stack.findings, **options)
        spans = [tuple(span) for b in view["boxes"] for span in b["members"]]
        covered = [i for first, last in spans for i in range(first, last + 1)]
        assert len(covered) == len(set(covered))
        run = next((g for g in view["groups"] if g["count"] > 1), None)
        hidden = stack.graph.node_count - len(covered)
        assert hidden == (0 if run is None else run["members"][0][1] + 1 - len(linear_nodes(stack.graph)[0]))


def test_a_graph_without_findings_has_pictures():
    graph = trace(mlp, *mlp_args(2))
    assert plain(Pictures(graph).view()) == plain(view_model(graph))
