"""Pictures of what the search really finds, and of what the rewriter makes of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.viz.export import album, to_svg
from fusionlab.viz.html.report import report_html
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


def cards(graph, findings=None):
    return [*album(graph, findings, ()).overview(()).cards()]


def test_three_identical_layers_found_are_one_card_times_three(found):
    assert found.counts()["gemm_epilogue"] == 3
    first, *_ = cards(found.graph, found)
    assert first.count == 3
    assert [(s.pass_name, s.state, s.count) for s in first.strips] == [("gemm_epilogue", "candidate", 3)]


def test_after_fusing_each_op_has_the_colour_of_its_pass():
    graph = fl.trace(fl.fuse(network), *ARGS)
    strips = [s for c in cards(graph) for s in c.strips]
    assert {(s.pass_name, s.state) for s in strips} == {("gemm_epilogue", "applied")}
    assert colour_of("gemm_epilogue") in to_svg(graph)


def test_the_op_of_a_pass_of_ones_own_wears_its_colour():
    cap = fl.pattern_pass("softcap", lambda x, cap: cap * jnp.tanh(x / cap), axes={"x": "m"}, scalars=["cap"])
    fl.register(cap)
    try:
        graph = fl.trace(fl.fuse(lambda x: 30.0 * jnp.tanh(x / 30.0), passes="softcap"), jnp.ones(8))
        (site,) = {c.site.pass_name for c in cards(graph) if c.site}
        assert site == "softcap"
        assert colour_of("softcap") in to_svg(graph)
    finally:
        fl.unregister(cap)
    assert pass_of_op("softcap") is None


def test_a_graph_and_findings_show_themselves(found):
    assert "<svg" in found.graph._repr_html_()
    assert "3 can be fused · 0 declined" in found._repr_html_()
    assert str(found).startswith("gemm_epilogue: 3 subgraphs can be fused, 0 declined")


@pytest.mark.parametrize("count", [3, None], ids=["the first three", "every one"])
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
    assert (
        sum(
            s.count
            for row in lab.session.stage.overview(lab.session.drawn()).rows
            for c in row.cards.values()
            for s in c.strips
        )
        == 2
    )
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
    assert max(c.count for c in cards(graph, found)) >= 46
    assert to_svg(graph, found).count('<g id="') <= 60
