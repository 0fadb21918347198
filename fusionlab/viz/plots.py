"""Plots of measurements: matplotlib Axes, never a window.

matplotlib is imported inside, and only its object interface is used: no backend is chosen, no global state touched.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from fusionlab.errors import ArgumentError
from fusionlab.evidence.blame.drift import DriftMap
from fusionlab.evidence.errors.arrays import ULP_EDGES
from fusionlab.evidence.errors.numerics import LeafNumerics, Numerics
from fusionlab.evidence.instruments.timing import Runs, Timing

from .convert import with_palette
from .markup import short
from .model.evidence_view import numerics_of, timing_text, timings_of

BEFORE, AFTER, LIMIT = "#7b8794", "#0072b2", "#d55e00"
AS_IT_IS: dict[str, Any] = {"parse_math": False}  # for texts with names: a dollar sign in one begins no formula
_LEAVES = 24
_PX = 96  # of a page, to the inch
_SMALLEST = 1e-18  # an error of exactly 0 has no place on a log axis; it is drawn here and named


def plot_timing(evidence: Any, ax: Any = None, **kwargs: Any) -> Any:
    """Every sample of both versions, with median and quartiles; the title holds the ratio with its interval.

    Args:
      evidence: an Evidence (all its timings are drawn), or one Timing.
      ax: matplotlib Axes to draw into; None makes a new figure.
      **kwargs: go to the points (`Axes.plot`).

    Returns:
      The Axes. Time is in milliseconds.

    Raises:
      ArgumentError: nothing was timed.
    """
    timings = timings_of(evidence)
    if not timings:
        raise ArgumentError(f"evidence: nothing was timed ({_why_not(evidence)}), so there is no timing to plot")
    runs = [(timing, run) for timing in timings for run in (timing.before, timing.after)]
    ax = axes_or_new(ax, 7.2, 1.3 + 0.62 * len(runs))
    for row, (timing, run) in enumerate(runs):
        _draw_runs(ax, row, run, AFTER if run is timing.after else BEFORE, kwargs)
    ax.set_yticks(range(len(runs)), [_row_name(t, r, len(timings) > 1) for t, r in runs], **AS_IT_IS)
    ax.invert_yaxis()
    samples = np.concatenate([np.asarray(r.samples_s) for _, r in runs]) * 1e3
    if samples.max() > 30 * samples.min():
        _log_axis(ax, "{:g}", samples.min(), samples.max())
    else:
        ax.set_xlim(left=0)
    ax.set_xlabel(f"{timings[0].clock} per call (ms); dots: samples, box: quartiles, bar: median")
    ax.set_title("\n".join([*map(timing_text, timings), timings[0].hardware]), fontsize=9, loc="left", **AS_IT_IS)
    ax.grid(axis="x", color="#e4e9ee")
    ax.set_axisbelow(True)
    return ax


def _why_not(evidence: Any) -> str:
    """Why an Evidence has no timing: its verdict, and what its notes say of it."""
    return ": ".join([str(evidence.verdict), "; ".join(evidence.notes)] if evidence.notes else [str(evidence.verdict)])


def _draw_runs(ax: Any, row: int, run: Runs, colour: str, kwargs: dict[str, Any]) -> None:
    times = np.asarray(run.samples_s) * 1e3
    low, high = (q * 1e3 for q in run.quartiles_s)
    # The same place for the same sample every time: order taken runs from the top of the row to its bottom.
    spread = np.linspace(-0.28, 0.28, len(times)) if len(times) > 1 else np.zeros(1)
    style = {"marker": "o", "linestyle": "", "markersize": 3, "alpha": 0.45, "color": colour, "markeredgewidth": 0}
    ax.plot(times, row + spread, **(style | kwargs))
    ax.barh(row, max(high - low, 1e-12), left=low, height=0.66, color=colour, alpha=0.25, edgecolor=colour)
    ax.plot([run.median_s * 1e3] * 2, [row - 0.38, row + 0.38], color=colour, linewidth=2)


def _row_name(timing: Timing, run: Runs, several: bool) -> str:
    return f"{timing.what}\n{run.name}" if several else run.name


def plot_drift(drift: DriftMap, ax: Any = None, **kwargs: Any) -> Any:
    """Errors of the original and of the fused program along the program, and what rounding explains, on a log axis.

    Args:
      drift: what `fusionlab.drift` returned.
      ax: matplotlib Axes to draw into; None makes a new figure.
      **kwargs: go to the markers (`Axes.plot`).

    Returns:
      The Axes. The first value at which the two differ by more than rounding is marked, and named in the title.

    Raises:
      ArgumentError: no value was compared.
    """
    values = [v for v in drift.values if v.after is not None]
    if not values:
        raise ArgumentError("drift: no value was compared, so there is nothing to plot")
    ax = axes_or_new(ax, 7.2, 3.4)
    rows = range(len(values))
    style = {"linestyle": "", "marker": ".", "markersize": 4}
    for name, colour in (("before", BEFORE), ("after", AFTER)):
        ax.plot(
            rows, [getattr(v, name) or math.nan for v in values], **(style | {"color": colour, "label": name} | kwargs)
        )
    ax.plot(rows, [v.tolerated for v in values], color=LIMIT, linewidth=1, label="tolerated")
    first = drift.first
    if first is not None:
        ax.axvline(values.index(first), color=LIMIT, linestyle=":", linewidth=1)
    ax.set_yscale("log")
    ax.set_xlabel("values, in program order")
    ax.set_ylabel("max error / max of the reference")
    ax.set_title(
        str(first) if first is not None else str(drift).splitlines()[0], fontsize=9, loc="left", wrap=True, **AS_IT_IS
    )
    ax.legend(fontsize=8)
    return ax


def plot_errors(evidence: Any, ax: Any = None, *, measure: str = "max_abs", **kwargs: Any) -> Any:
    """Errors of the original and the fused version against float64, for each output and gradient, on a log axis.

    Args:
      evidence: an Evidence, or its Numerics.
      ax: matplotlib Axes to draw into; None makes a new figure.
      measure: "max_abs" (with the tolerance of each leaf) or "rel_l2".
      **kwargs: go to the markers (`Axes.plot`).

    Returns:
      The Axes. At most 24 leaves, the worst ones; the title gives the number of leaves left out.

    Raises:
      ArgumentError: no errors were measured, or `measure` is another word.
    """
    if measure not in ("max_abs", "rel_l2"):
        raise ArgumentError(f"measure: got {measure!r}, needed 'max_abs' or 'rel_l2'")
    numerics = numerics_of(evidence)
    if numerics is None or not numerics.leaves:
        raise ArgumentError("evidence: no errors were measured, so there is nothing to plot")
    leaves = _worst(numerics, measure)
    ax = axes_or_new(ax, 7.2, 1.4 + 0.3 * len(leaves))
    rows = range(len(leaves))
    for name, colour, marker in (("before", BEFORE, "o"), ("after", AFTER, "D")):
        values = [_on_log(getattr(getattr(leaf, name), measure)) for leaf in leaves]
        style = {
            "linestyle": "",
            "marker": marker,
            "color": colour,
            "markersize": 6,
            "label": name,
            "fillstyle": "none",
        }
        ax.plot(values, rows, **(style | kwargs))
    if measure == "max_abs":
        ax.plot(
            [_tolerance(leaf) for leaf in leaves],
            rows,
            linestyle="",
            marker="|",
            markersize=14,
            color=LIMIT,
            label="tolerance",
        )
    drawn = [v for line in ax.lines for v in line.get_xdata() if math.isfinite(v)]
    _log_axis(ax, "{:.0e}", min(drawn, default=1.0), max(drawn, default=1.0))
    ax.set_yticks(rows, [_leaf_name(leaf) for leaf in leaves], **AS_IT_IS)
    ax.set_ylim(len(leaves) - 0.5, -0.5)
    words = {"max_abs": "largest absolute error", "rel_l2": "relative L2 error"}[measure]
    ax.set_xlabel(f"{words} against the float64 reference")
    left_out = len(numerics.leaves) - len(leaves)
    ax.set_title(f"errors against float64{f'; {left_out} smaller ones not shown' if left_out else ''}", **_OVER_LEGEND)
    _legend(ax, 3)
    ax.grid(axis="x", color="#e4e9ee")
    ax.set_axisbelow(True)
    return ax


def plot_ulps(evidence: Any, ax: Any = None, *, kind: str = "output", **kwargs: Any) -> Any:
    """Histogram of the distances of elements from float64 in units in the last place, original and fused version side by side.

    Args:
      evidence: an Evidence, or its Numerics.
      ax: matplotlib Axes to draw into; None makes a new figure.
      kind: "output" or "gradient": all leaves of that kind together, each in ulp of its own dtype.
      **kwargs: go to the bars (`Axes.bar`).

    Returns:
      The Axes; its vertical axis is logarithmic.

    Raises:
      ArgumentError: nothing of that kind was counted, or `kind` is another word.
    """
    if kind not in ("output", "gradient"):
        raise ArgumentError(f"kind: got {kind!r}, needed 'output' or 'gradient'")
    leaves = _counted_in_ulp(evidence, kind)
    if not leaves:
        raise ArgumentError(f"evidence: no errors of {kind}s were counted in ulp, so there is nothing to plot")
    ax = axes_or_new(ax, 7.2, 3.2)
    places = np.arange(len(ULP_EDGES) + 1)
    for name, colour, aside in (("before", BEFORE, -0.2), ("after", AFTER, 0.2)):
        counts = np.sum([getattr(leaf, name).ulp_histogram for leaf in leaves], axis=0)
        ax.bar(places + aside, counts, **({"width": 0.4, "color": colour, "label": name} | kwargs))
    ax.set_yscale("log")
    ax.set_ylim(bottom=0.5)
    ax.set_xticks(places, ["exact", *(f"≤ {edge:g}" for edge in ULP_EDGES[1:]), f"> {ULP_EDGES[-1]:g}"])
    ax.set_xlabel("units in the last place from the float64 reference")
    ax.set_ylabel("elements")
    dtypes = short(_printable(", ".join(dict.fromkeys(leaf.dtype for leaf in leaves))), 60)
    ax.set_title(f"{len(leaves)} {kind}{'s' if len(leaves) > 1 else ''}, {dtypes}", **_OVER_LEGEND, **AS_IT_IS)
    _legend(ax, 2)
    ax.grid(axis="y", color="#e4e9ee")
    ax.set_axisbelow(True)
    return ax


def _worst(numerics: Numerics, measure: str) -> list[LeafNumerics]:
    """The leaves to show, the worst on top: by what tables rank them by, or the relative error where that is drawn."""
    ranked = numerics.ranked
    if measure == "rel_l2":
        ranked = sorted(ranked, key=lambda leaf: (leaf.ok, -leaf.after.rel_l2))
    return list(ranked[:_LEAVES])


def _log_axis(ax: Any, form: str, low: float, high: float) -> None:
    """A logarithmic x axis whose labels are all numbers of one form: of the decades, and of 2 and 5 in between where these are few."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: form.format(value)))
    few = high < 1e3 * low
    ax.xaxis.set_minor_formatter(
        FuncFormatter(lambda v, _: form.format(v) if _is_2_or_5(v) else "") if few else NullFormatter()
    )


def _is_2_or_5(value: float) -> bool:
    """Whether it is 2 or 5 of its decade: labels of those in between would lie on one another."""
    return f"{value:e}"[0] in "25" and math.isclose(value, float(f"{value:.0e}"), rel_tol=1e-6)


def _on_log(value: float) -> float:
    return max(value, _SMALLEST) if math.isfinite(value) else math.nan


def _tolerance(leaf: LeafNumerics) -> float:
    """Where a log axis shows what a leaf may be off by; nowhere if it must be exact, or is not compared."""
    return _on_log(leaf.atol) if leaf.atol > 0 else math.nan


def _counted_in_ulp(evidence: Any, kind: str) -> list[LeafNumerics]:
    """The leaves of a kind whose errors were counted in units in the last place."""
    numerics = numerics_of(evidence)
    return [leaf for leaf in (numerics.leaves if numerics else ()) if leaf.kind == kind and leaf.after.ulp_histogram]


def _printable(name: str) -> str:
    return "".join(c if c.isprintable() else " " for c in name)


def _leaf_name(leaf: LeafNumerics) -> str:
    name = _KEY.sub(r".\1", _printable(leaf.name))  # x['a']['b'] is twice as long as x.a.b, and the ends alike
    exact = "  (exact)" if leaf.before.max_abs == leaf.after.max_abs == 0 else ""
    # The end of a path tells a parameter from its neighbours; the start is the same for all of them.
    shown = name if len(name) <= _LONGEST_NAME else "…" + name[1 - _LONGEST_NAME :]
    return f"{'∂ ' if leaf.kind == 'gradient' else ''}{shown}{exact}"


# Above the axes, where it covers no point, and below the title, which may be as long as the axes are wide.
_OVER_LEGEND: dict[str, Any] = {"fontsize": 9, "loc": "left", "pad": 20}
_LONGEST_NAME = 40
_KEY = re.compile(r"\['(\w+)'\]")


def _legend(ax: Any, columns: int) -> None:
    ax.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=columns, frameon=False, borderaxespad=0.2)


def evidence_figures(evidence: Any) -> Iterator[tuple[str, Any]]:
    """("Timing", Figure), ("Errors", Figure): whatever was measured."""
    if timings_of(evidence):
        yield "Timing", plot_timing(evidence).figure
    numerics = numerics_of(evidence)
    if numerics is not None and numerics.leaves:
        yield "Errors", plot_errors(evidence).figure


def figure_svg(figure: Any) -> str:
    """A matplotlib figure as SVG text that is the same for the same figure (no date, fixed ids)."""
    import matplotlib as mpl

    text = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "fusionlab", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None}, bbox_inches="tight")
    return text.getvalue()


def figure_png(figure: Any) -> tuple[bytes, dict[str, int]]:
    """A matplotlib figure as PNG, two pixels to a px of the page, and the width in px that a notebook shows it at."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=2 * _PX, bbox_inches="tight", metadata={"Software": None})
    png = with_palette(drawn.getvalue())
    return png, {"width": int.from_bytes(png[16:20], "big") // 2}


def axes_or_new(ax: Any, width: float, height: float) -> Any:
    """The given Axes; without any, the Axes of a new figure, sizes in inches."""
    return ax if ax is not None else new_axes(width, height)


def new_axes(width: float, height: float) -> Any:
    """Axes of a figure of their own, sizes in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure.add_subplot(axes_class=_axes_class())


@cache
def _axes_class() -> type:
    """Axes that show themselves in a notebook, with or without pyplot."""
    from matplotlib.axes import Axes

    class ShownAxes(Axes):
        def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
            return figure_png(self.figure)

    return ShownAxes
