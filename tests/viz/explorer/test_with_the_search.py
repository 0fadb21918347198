"""Pictures of what the search really finds, and of what the rewriter makes of it."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.viz.draw.dot import to_dot
from fusionlab.viz.draw.render import to_svg
from fusionlab.viz.html.report import report_html
from fusionlab.viz.model.view_model import view_model
from fusionlab.viz.palette import colour_of, pass_of_op


def network(params, x):
    for i, (w, b) in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            x = jax.nn.gelu(x @ w + b)
    return x


ARGS = ([(jnp.ones((16, 16)), jnp.ones(16))] * 3, jnp.ones((4, 16)))


@pytest.fixture(scope="module")
def found():
    return fl.find(network, *ARGS)


def test_three_identical_layers_found_are_one_filled_group_times_three(found):
    assert found.counts()["gemm_epilogue"] == 3
    view = view_model(found.graph, found)
    assert [(g["kind"], g["count"]) for g in view["groups"]] == [("scope", 3), ("site", 1)]
    assert view["groups"][1]["state"] == "candidate"


def test_after_fusing_each_op_is_one_bold_node_of_its_passes_colour():
    graph = fl.trace(fl.fuse(network), *ARGS)
    fused = [b for b in view_model(graph)["boxes"] if b["fused"]]
    assert [b["pass"] for b in fused] == ["gemm_epilogue"] * 3
    assert re.search(
        r'label="gemm_epilogue\\n.*color="#e69f00", penwidth=2.5, fontname="Helvetica-Bold"', to_dot(graph)
    )


def test_the_op_of_a_pass_of_ones_own_wears_its_colour():
    cap = fl.pattern_pass("softcap", lambda x, cap: cap * jnp.tanh(x / cap), axes={"x": "m"}, scalars=["cap"])
    fl.register(cap)
    try:
        graph = fl.trace(fl.fuse(lambda x: 30.0 * jnp.tanh(x / 30.0), passes="softcap"), jnp.ones(8))
        (box,) = (b for b in view_model(graph)["boxes"] if b["fused"])
        assert (box["pass"], box["colour"]) == ("softcap", colour_of("softcap"))
    finally:
        fl.unregister(cap)
    assert pass_of_op("softcap") is None


def test_a_graph_and_findings_show_themselves(found):
    assert "<svg" in found.graph._repr_html_()
    assert "3 subgraphs can be fused (none applied here) · 0 declined" in found._repr_html_()
    assert str(found).startswith("gemm_epilogue: 3 subgraphs fused, 0 declined")


@pytest.mark.parametrize("count", [3, None], ids=["the first three", "all"])
def test_every_pass_of_the_catalogue_has_pictures(count):
    passes = dataclasses.replace(fl.passes(), passes=fl.passes().passes[:count])
    html = passes._repr_html_()
    assert html.count("<svg") == 2 * len(passes) > 0


def test_the_explorer_is_made_measures_when_asked_and_draws_the_fused_graph(monkeypatch):
    monkeypatch.setattr("fusionlab.viz.html.tabs._figures", lambda evidence: {})  # the report has the same plots
    params = jax.tree.map(lambda a: jnp.asarray(np.random.default_rng(0).normal(size=a.shape), jnp.float32), ARGS)
    lab = fl.explore(network, *params, budget_s=0.5)
    assert lab.evidence is None
    lab.toggles["gemm_epilogue@layer_1#1"] = False
    lab.shown = "after"
    assert len([b for b in lab.session.view()["boxes"] if b["fused"]]) == 2
    evidence = lab.measure()
    assert lab.evidence is evidence
    assert "against float64" in lab.head["sentence"]
    report = report_html(lab.graph, lab.findings, enabled=lab.enabled, evidence=evidence)
    assert "gradient params[0][0]" in report


def test_a_train_step_of_many_layers_is_a_page():
    def step(params, x):
        return jax.value_and_grad(lambda p: (network(p, x) ** 2).mean())(params)

    graph = fl.trace(step, [(jnp.ones((16, 16)), jnp.ones(16))] * 48, jnp.ones((4, 16)))
    assert len(graph) > 1000
    found = fl.find(graph)
    view = view_model(graph, found)
    assert len(view["boxes"]) <= 65
    assert any(g["count"] >= 46 for g in view["groups"])
    to_svg(to_dot(graph, found))
