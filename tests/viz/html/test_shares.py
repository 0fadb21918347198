"""What each site is worth, in the explorer: bars, table, the panel's warning, and the rates behind the roofline."""

import dataclasses

import numpy as np
import pytest

from fusionlab.device import Device
from fusionlab.evidence.attribution import SiteShare, SiteShares
from fusionlab.evidence.instruments.timing import Runs
from fusionlab.viz.explorer.widget import Explorer
from fusionlab.viz.html.shares import plot_shares, shares_html


def runs(name, median):
    return Runs(samples_s=(median,) * 5, name=name, repeats=1, trace_s=0.0, lower_s=0.0, compile_s=0.0)


@pytest.fixture
def shares(case):
    first, second = (c.id for c in case.findings.candidates)
    faster = SiteShare(first, runs(first, 1.2e-3), 2e-4, (1.1, 1.3))
    slower = SiteShare(second, runs(second, 0.9e-3), -1e-4, (0.85, 0.95))
    return SiteShares((faster, slower), runs("(all)", 1e-3), runs("(none)", 1.1e-3), "a machine")


def test_bars_point_to_what_is_saved_and_lost(shares):
    ax = plot_shares(shares)
    np.testing.assert_allclose(sorted(bar.get_width() for bar in ax.patches), [-100, 200])
    assert [t.get_text() for t in ax.get_yticklabels()] == [s.site for s in reversed(shares.sites)]
    assert not any(bar.get_hatch() for bar in ax.patches)
    assert plot_shares(shares, ax=ax) is ax


def test_what_is_not_clear_is_hatched_and_said(shares):
    unclear = SiteShares((SiteShare("lerp@x#1", runs("x", 1e-3), 1e-6, (0.9, 1.1)),), shares.fused, shares.unfused, "m")
    assert plot_shares(unclear).patches[0].get_hatch() == "///"
    assert "no clear difference" in shares_html(unclear, 1)


@pytest.mark.parametrize(("sites", "why"), [(0, "nothing to time"), (12, "press Measure"), (13, "13 sites")])
def test_why_sites_are_not_timed_is_true_before_and_after_measuring(sites, why):
    told = shares_html(None, sites)
    assert why in told
    assert ("press Measure" in told) == (sites == 12)  # it would do nothing


def test_the_explorer_times_sites_after_the_whole_and_warns_of_a_losing_one(case, shares):
    asked = []

    def told(setting, findings, progress, cancel):
        asked.append((setting.enabled, findings))
        return shares

    lab = Explorer(case.graph, case.findings, measure=lambda *a: None, shares=told)
    assert asked == []
    lab.measure()
    assert asked == [(lab.enabled, case.findings)]
    sites = {s["id"]: s for p in lab.panel["passes"] for g in p["groups"] for s in g["sites"]}
    first, second = (c.id for c in case.findings.candidates)
    assert (sites[first]["losing"], sites[second]["losing"]) == (False, True)
    assert sites[second]["note"].startswith("saves -100 µs")
    html = next(t["html"] for t in lab.tabs if t["name"] == "Sites")
    assert "slower: the program is faster without it" in html
    lab.toggles[second] = False  # what was told belongs to the sites that were on
    assert "press Measure" in next(t["html"] for t in lab.tabs if t["name"] == "Sites")


def roof(lab):
    return next(t["html"] for t in lab.tabs if t["name"] == "Roofline")


@pytest.mark.parametrize("at_once", [False, True])
def test_rates_are_measured_once_and_only_when_asked_unless_told_otherwise(case, at_once):
    measured = []

    def rates(progress):
        measured.append(1)
        return dataclasses.replace(Device.of("cpu"), copy_bytes_per_s=1e10, gemm_flop_per_s=1e11)

    found = dataclasses.replace(case.findings, candidates=())
    lab = Explorer(case.graph, found, measure=lambda *a: None, rates=rates, rates_at_once=at_once)
    assert 'data-fl="rates"' in roof(lab)
    assert "lab.measure_rates()" not in roof(lab)  # the button is there
    for _ in range(2):
        lab.measure()
    if not at_once:
        assert measured == []
        lab.measure_rates()
    assert measured == [1]
    assert "<svg" in roof(lab)
