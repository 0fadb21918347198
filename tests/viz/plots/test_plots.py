"""Timing and error plots, and what the header makes of a measurement."""

import dataclasses
import io
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from PIL import Image

from fusionlab.errors import ArgumentError
from fusionlab.evidence.comparison import Evidence
from fusionlab.evidence.errors.numerics import Numerics, leaf_numerics
from fusionlab.evidence.errors.reduction_sizes import ReductionSizes
from fusionlab.evidence.instruments.record import environment
from fusionlab.evidence.instruments.timing import Runs, timing_of
from fusionlab.viz.explorer.widget import Explorer
from fusionlab.viz.html.report import evidence_html, report_html
from fusionlab.viz.model.evidence_view import environment_dict, evidence_dict, evidence_tables, headline
from fusionlab.viz.model.setting import Decision, Ledger, Setting
from fusionlab.viz.model.summaries import summary
from fusionlab.viz.plots import BEFORE, figure_svg, plot_errors, plot_timing, plot_ulps


def runs(name, centre, n=40):
    samples = centre * (1 + 0.02 * np.sin(np.arange(n)))
    return Runs(name, tuple(samples), 3, 0.01, 0.02, 0.5)


@pytest.fixture(scope="module")
def timing():
    return timing_of("call", runs("before", 21.5e-3), runs("after", 11.4e-3))


@pytest.fixture(scope="module")
def numerics():
    want = [np.linspace(1, 2, 8), np.linspace(0, 1, 8), np.linspace(3, 4, 8)]
    before = [np.float32(w) for w in want]
    after = [before[0], np.float32(want[1] + 0.25), before[2]]
    leaves = leaf_numerics("output", ["out['y']"], before[:1], after[:1], want[:1], ReductionSizes(64))
    leaves += leaf_numerics("gradient", ["w", "b"], before[1:], after[1:], want[1:], ReductionSizes(64))
    return Numerics(tuple(leaves), (), 64)


@pytest.fixture(scope="module")
def evidence(timing, numerics):
    return Evidence("mlp", environment(), timing=timing, numerics=numerics, notes=("a note on the measurement",))


def test_the_timing_plot_shows_every_sample_and_both_medians(timing):
    ax = plot_timing(timing)
    dots = [line.get_xdata() for line in ax.lines if len(line.get_xdata()) == 40]
    assert [np.median(d) for d in dots] == pytest.approx([21.5, 11.4], rel=0.01)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["before", "after"]
    assert ax.lines[0].get_color() == BEFORE
    title = ax.get_title(loc="left")
    low, high = timing.interval
    assert f"{timing.ratio:.2f}× [{low:.2f}, {high:.2f}], faster" in title
    assert timing.hardware in title


def test_the_timing_plot_grows_with_the_calls_that_were_timed(evidence, timing):
    assert len(evidence.timings) == 1
    several = dataclasses.replace(evidence, timing_grad=timing)
    one, two = (plot_timing(e).figure.get_size_inches() for e in (evidence, several))
    assert one[0] == two[0]
    assert two[1] > one[1] + 1  # inches, for two more rows


def test_the_error_plot_has_both_versions_and_the_tolerance(numerics):
    ax = plot_errors(numerics)
    lines = {line.get_label(): np.asarray(line.get_xdata()) for line in ax.lines}
    assert lines["after"][0] == pytest.approx(0.25, rel=1e-3)  # the worst on top
    assert (lines["before"] < 1e-6).all()
    assert lines["tolerance"] == pytest.approx([leaf.atol for leaf in numerics.ranked])
    assert ax.get_xscale() == "log"
    assert ax.get_yticklabels()[0].get_text() == "∂ w"


def test_the_worst_leaves_are_kept_when_there_are_many(numerics):
    many = Numerics((*numerics.leaves[:1] * 30, numerics.leaves[1]), (), 64)
    ax = plot_errors(many, measure="rel_l2")
    assert ax.get_yticklabels()[0].get_text() == "∂ w"
    assert "7 smaller ones not shown" in ax.get_title(loc="left")


def test_the_ulp_plot_counts_every_element_of_both_versions(numerics):
    ax = plot_ulps(numerics, kind="gradient")
    counted = {bars.get_label(): sum(bar.get_height() for bar in bars) for bars in ax.containers}
    gradients = [leaf for leaf in numerics.leaves if leaf.kind == "gradient"]
    assert counted == dict.fromkeys(("before", "after"), sum(leaf.size for leaf in gradients))
    assert [t.get_text() for t in ax.get_xticklabels()][::10] == ["exact", "> 1024"]
    assert ax.get_title(loc="left") == "2 gradients, float32"
    with pytest.raises(ArgumentError, match="'output' or 'gradient'"):
        plot_ulps(numerics, kind="outputs")
    with pytest.raises(ArgumentError, match="no errors of outputs were counted"):
        plot_ulps(Numerics((), (), 1))


def test_an_axes_given_is_drawn_into_and_keywords_reach_the_points(timing, numerics):
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    assert plot_timing(timing, ax=ax, markersize=7) is ax
    assert ax.lines[0].get_markersize() == 7
    ax = Figure().subplots()
    assert plot_errors(numerics, ax=ax) is ax


def test_plots_show_themselves_and_are_the_same_every_time(timing):
    ax = plot_timing(timing)
    png, shown = ax._repr_png_()
    drawn = Image.open(io.BytesIO(png))
    assert drawn.mode == "P"  # half the bytes
    assert shown == {"width": drawn.width // 2}
    assert (png, shown) == plot_timing(timing)._repr_png_()
    svg = figure_svg(ax.figure)
    ET.fromstring(svg)
    assert svg == figure_svg(plot_timing(timing).figure)


def test_nothing_measured_is_an_error_that_says_so():
    nothing = Evidence("mlp", environment(), same_code=True)
    with pytest.raises(ArgumentError, match=r"nothing was timed \(same code\)"):
        plot_timing(nothing)
    cancelled = Evidence("mlp", environment(), notes=("cancelled before: timing",))
    with pytest.raises(ArgumentError, match=r"nothing was timed \(not timed: cancelled before: timing\)"):
        plot_timing(cancelled)
    with pytest.raises(ArgumentError, match="no errors were measured"):
        plot_errors(nothing)
    with pytest.raises(ArgumentError, match="'max_abs' or 'rel_l2'"):
        plot_errors(nothing, measure="ulp")


def test_the_header_never_shows_a_ratio_without_its_interval(case, evidence, timing):
    header = summary(case.graph, case.findings, enabled=None, evidence=evidence)["header"]
    low, high = timing.interval
    assert f"21.5 ms → 11.4 ms, {timing.ratio:.2f}× [{low:.2f}, {high:.2f}], faster ·" in header
    assert "2.50e-01 in gradient w, against float64 · 1 result WORSE than before and over tolerance" in header


def test_the_same_code_is_said_and_not_timed(case):
    same = Evidence("mlp", environment(), same_code=True)
    assert summary(case.graph, case.findings, enabled=None, evidence=same)["header"].endswith(" · same code")


def test_a_report_holds_plots_and_tables_of_the_measurement(case, evidence):
    for text in (report_html(case.graph, case.findings, enabled=None, evidence=evidence), evidence_html(evidence)):
        assert text.count("<figure") == 4  # of errors those in units of the last place too, as in the explorer
        assert "WORSE" in text
        assert "40 × 3" in text
        assert "a note on the measurement" in text
        assert "http" not in text
        assert f"Measured on {evidence.environment.hardware}." in text
        assert text.count(f"<td>{evidence.environment.hardware}</td>") == 1, "once, under Environment"


@pytest.mark.parametrize("plot", [plot_errors, plot_ulps])
def test_a_legend_covers_neither_a_point_nor_the_title(numerics, plot):
    ax = plot(numerics)
    ax.figure.canvas.draw()
    legend = ax.get_legend().get_window_extent()
    assert legend.y0 >= ax.get_window_extent().y1
    assert ax._left_title.get_window_extent().y0 >= legend.y1


def test_parameters_of_deep_modules_are_told_apart(numerics):
    names = [f"params['params']['encoder']['block_0']['attention']['{n}']['kernel']" for n in ("query", "key")]
    leaves = tuple(dataclasses.replace(leaf, name=n) for leaf, n in zip(numerics.leaves, names, strict=False))
    told = [label.get_text() for label in plot_errors(Numerics(leaves, (), 64)).get_yticklabels()]
    assert len(set(told)) == 2
    assert any(name.endswith(".query.kernel") for name in told)


def test_whoever_names_the_worst_error_names_the_same(evidence, numerics):
    # The largest error is not the worst one where more is tolerated.
    small, large = (
        dataclasses.replace(
            leaf, name=name, after=dataclasses.replace(leaf.after, max_abs=error, share=share, over_tolerance=0)
        )
        for leaf, name, share, error in zip(
            numerics.leaves[1:], ("small", "large"), (0.5, 0.01), (0.05, 1.0), strict=True
        )
    )
    e = dataclasses.replace(evidence, numerics=Numerics((small, large), (), 64))
    setting = Setting()
    (row,) = Ledger([Decision("opened", setting)], {setting: e}).rows()
    worst = "50 % of its tolerance: 5.00e-02 in gradient small, against float64"
    assert f"worst error {worst}" in headline(evidence_dict(e))
    assert row[-2] == worst
    assert f"worst error {worst}" in str(e)


def test_the_tables_say_zero_in_theory_and_no_number_beyond_reading(numerics):
    zero = dataclasses.replace(numerics.leaves[2], zero_in_theory=True)
    far = dataclasses.replace(
        numerics.leaves[1], after=dataclasses.replace(numerics.leaves[1].after, ulp_max=1e39), name="far"
    )
    e = Evidence("mlp", environment(), numerics=Numerics((zero, far), (), 64))
    ((_, heads, rows, _),) = evidence_tables(evidence_dict(e))
    assert all(len(row) == len(heads) for row in rows)
    far, zero = rows
    assert zero[6:10] == ["zero in theory", "", "", ""]
    assert far[9] == "over 1,000,000"
    assert "e+39" not in evidence_html(e)


def test_the_commit_of_the_environment_says_whose_it_is(evidence):
    where = dataclasses.replace(evidence.environment, commit="abc")
    shown = environment_dict(dataclasses.replace(evidence, environment=where))
    assert shown["commit of the current folder's repository"] == "abc"
    assert "commit" not in shown


def test_the_explorer_shows_evidence_only_for_the_sites_it_was_measured_with(case, evidence):
    lab = Explorer(case.graph, case.findings, measure=lambda *a: evidence)
    assert lab.measure() is evidence
    tabs = {t["name"]: t["html"] for t in lab.tabs}
    assert "11.4 ms" in lab.head["sentence"]
    assert "<svg" in tabs["Timing"]
    assert "WORSE" in tabs["Errors"]
    assert lab.status == "measured"
    lab.toggles["gemm_epilogue"] = False
    tabs = {t["name"]: t["html"] for t in lab.tabs}
    assert (lab.evidence, lab.status) == (None, "not measured")
    assert "11.4 ms" not in lab.head["sentence"]
    assert "<svg" not in tabs["Timing"]
    lab.toggles["gemm_epilogue"] = True
    assert (lab.evidence, lab.status) == (evidence, "measured")


def test_plotting_imports_no_pyplot():
    code = (
        "import sys, fusionlab.viz.plots as p; assert 'matplotlib' not in sys.modules; "
        "p.new_axes(2, 2); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("low", "shown"), [(0.15, ["0.2", "0.5", "1", "2", "5"]), (2e-4, ["0.001", "0.01", "0.1", "1"])]
)
def test_an_axis_has_one_kind_of_label(low, shown):
    from fusionlab.viz.plots import _log_axis, new_axes

    ax = new_axes(7.2, 3)
    _log_axis(ax, "{:g}", low, 9.0)
    ax.set_xlim(low, 9.0)
    ax.figure.draw_without_rendering()
    ticks = [*ax.xaxis.get_majorticklabels(), *ax.xaxis.get_minorticklabels()]
    inside = {t.get_position()[0]: t.get_text() for t in ticks if low <= t.get_position()[0] <= 9 and t.get_text()}
    assert [inside[x] for x in sorted(inside)] == shown


def test_the_last_measurement_stays_dimmed_while_the_next_is_awaited(case, evidence):
    running, release = threading.Event(), threading.Event()

    def measure(setting, progress, cancel):
        if len(setting.enabled) == len(case.findings.candidates):
            return evidence
        running.set()
        assert release.wait(10)
        raise ValueError("no such luck")

    def timing():
        return next(t["html"] for t in lab.tabs if t["name"] == "Timing")

    lab = Explorer(case.graph, case.findings, measure=measure)
    lab.start().join(10)
    assert "fl-stale" not in timing()
    lab.toggles["gemm_epilogue"] = False
    assert running.wait(10)
    assert 'class="fl-stale"' in timing()
    assert "<svg" in timing()
    assert "Measured before this change of sites" in timing()
    assert lab.evidence is None
    lab.cancel()
    assert "<svg" not in timing()
    lab.toggles["gemm_epilogue"] = True
    assert "<svg" in timing()
    lab.toggles["gemm_epilogue"] = False  # no longer measured at every change
    assert "<svg" not in timing()
    release.set()
