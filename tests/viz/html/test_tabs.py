"""The tabs below the graph, and the diff of nodes before and after."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.device import Device
from fusionlab.viz.html import tabs as module
from fusionlab.viz.html.diff import diff_html
from fusionlab.viz.html.tabs import evidence_tabs

from ..conftest import candidate, findings_of, linear_nodes
from .test_inspecting import Parsed

NAMES = ["Timing", "Errors", "Memory", "Roofline", "Kernels", "Graph diff"]
DEVICE = dataclasses.replace(Device.of("sm_90"), copy_bytes_per_s=4e12, gemm_flop_per_s=8e14)


def by_name(*args, **options):
    found = evidence_tabs(*args, **options)
    assert [tab["name"] for tab in found] == NAMES
    assert all(tab["html"] for tab in found)
    return {tab["name"]: tab["html"] for tab in found}


def plain(html):
    return re.sub(r"\s+", " ", Parsed(html).text)


@pytest.fixture(scope="module")
def measured():
    def layer(params, x):
        return jax.nn.gelu(x @ params["w"] + params["b"])

    args = {"w": jnp.ones((16, 8)), "b": jnp.ones(8)}, jnp.ones((4, 16))
    found = fl.find(layer, *args, passes="gemm_epilogue")
    assert found.candidates
    return found, fl.compare(layer, lambda *a: layer(*a) + 0.0, *args, samples=4, budget_s=10.0)


def test_without_a_measurement_every_tab_says_what_it_would_need(case):
    tabs = by_name(None, case.findings)
    for name in ("Timing", "Errors", "Memory"):
        assert "press Measure" in tabs[name]
    assert "lab.measure_rates()" in tabs["Roofline"]
    assert "were not counted" in tabs["Kernels"]
    assert "was not made" in tabs["Graph diff"]
    assert "only a measurement" in by_name(None, None)["Roofline"]


def test_costs_are_shown_without_any_device(case):
    text = plain(by_name(None, case.findings)["Roofline"])
    total = case.findings.cost().total
    assert f"total {total.flops / 1e3:.3g} k" in text
    assert "layer_1" in text


@pytest.mark.dear
def test_a_device_with_rates_has_a_roof_and_predictions(measured):
    found, _ = measured
    tab = by_name(None, found, device=DEVICE)["Roofline"]
    assert tab.count("<svg") == 2
    assert found.candidates[0].id in tab
    tab = by_name(None, found, device=Device.of("sm_90"))["Roofline"]
    assert 0 < tab.index("<table") < tab.index("No roof")


def test_gains_of_a_large_program_are_not_predicted_while_one_waits(measured, monkeypatch):
    found, _ = measured
    monkeypatch.setattr(module, "_PREDICTED_NODES", 1)
    tab = by_name(None, found, device=DEVICE)["Roofline"]
    assert tab.count("<svg") == 1
    assert "Gains are not predicted here" in tab
    known = module.roofline(found, DEVICE)
    assert by_name(None, found, under=known)["Roofline"].count("<svg") == 2


def test_what_was_measured_is_plotted_and_tabled(measured):
    found, evidence = measured
    tabs = by_name(evidence, found, enabled=None, after=found.apply())
    for name in ("Timing", "Errors"):
        assert "<svg" in tabs[name] or evidence.same_code
        assert evidence.environment.hardware in plain(tabs[name])
    assert "in ulp" in tabs["Errors"]
    assert "largest ulp before" in plain(tabs["Errors"])
    assert "peak" in plain(tabs["Memory"])
    before, after = evidence.kernels.total
    assert f"together {before} {after}" in plain(tabs["Kernels"])


def test_the_kernels_of_the_applied_sites_ops_are_told_once_each(measured):
    found, _ = measured
    on, off, bare = (
        by_name(None, found, **o)["Kernels"]
        for o in ({"enabled": None}, {"enabled": ()}, {"enabled": None, "sources": False})
    )
    assert on.count('extern "C"'.replace('"', "&quot;")) >= 3
    assert "1 site, run by" in plain(on)
    assert "__global__" not in off
    assert "No site is fused" in plain(off)
    assert "No site is fused" not in by_name(measured[1], None)["Kernels"], "of a measurement alone it is not known"
    assert "__global__" not in bare


# The diff -----------------------------------------------------------------------------------------------------------
def test_nodes_are_counted_by_primitive_and_by_site(measured):
    found, _ = measured
    after = found.apply()
    html = diff_html(found.graph, after, found, None)
    text = plain(html)
    assert f"{found.graph.node_count} → {after.node_count} nodes" in text
    assert "gemm_epilogue 0 1 +1 fused op" in text
    assert "dot_general 1 0 -1 all gone" in text
    assert {*Parsed(html).picks} == {found.candidates[0].id}
    assert len(Parsed(html).picks) > 2, "rows of primitives point to it too"
    gone = sum(int(n) for n in re.findall(r" (-\d+) ", text))
    assert after.node_count - found.graph.node_count == gone + 1


def test_the_same_program_has_no_diff(case):
    text = plain(diff_html(case.graph, case.graph, case.findings, ()))
    assert "nothing is fused" in text
    assert "No site is fused" in text


def test_alike_sites_share_a_line(stack):
    html = diff_html(stack.graph, stack.graph, stack.findings, None)
    assert html.count("<li>") == 1
    assert "24 sites" in plain(html)
    assert len(Parsed(html).picks) == 24


def test_a_site_that_differs_has_a_line_of_its_own(case):
    sites = linear_nodes(case.graph)
    found = findings_of(
        case.graph, [candidate(case.graph, "lerp@a#1", sites[0]), candidate(case.graph, "lerp@b#1", sites[1][:2])]
    )
    assert diff_html(case.graph, case.graph, found, ("lerp@a#1", "lerp@b#1")).count("<li>") == 2
    assert Parsed(diff_html(case.graph, case.graph, found, ("lerp@b#1",))).picks == ["lerp@b#1"]
