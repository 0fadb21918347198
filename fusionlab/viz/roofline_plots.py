"""Rooflines as pictures: kernels under the roof of a device, and predicted gains next to measured ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from fusionlab.errors import ArgumentError
from fusionlab.evidence.roofline import Point, Prediction, Roofline

from .markup import short
from .palette import INK, QUIET, colour_of
from .plots import AFTER, AS_IT_IS, BEFORE, LIMIT, axes_or_new

_NAMED = 6  # kernels with a name beside them
_PREDICTED = 24


def plot_roofline(roofline: Roofline, ax: Any = None, **kwargs: Any) -> Any:
    """Operations per second against operations per byte: the roof of the device, a dot on it for each kernel, and measurements
    below it.

    Args:
      roofline: of a program.
      ax: matplotlib Axes to draw into; None makes a new figure.
      **kwargs: go to the dots (`Axes.plot`).

    Returns:
      The Axes. The longer a kernel takes at best, the larger its dot; kernels without arithmetic are left out, and counted in the
      title.

    Raises:
      ArgumentError: no kernel computes anything.
    """
    points = [p for p in roofline.points if p.operations and p.bytes_moved]
    if not points:
        raise ArgumentError(f"roofline: no kernel of {roofline.name} computes anything, so there is nothing to plot")
    ax = axes_or_new(ax, 7.2, 4.4)
    rate, peak = float(roofline.device.copy_bytes_per_s or 0), float(roofline.device.gemm_flop_per_s or 0)
    ridge = peak / rate
    marks = [*(p.intensity for p in points), ridge]
    low, high = min(marks) / 3, max(marks) * 3
    x = np.geomspace(low, high, 200)
    ax.plot(x, np.minimum(peak, x * rate) / 1e9, color=INK, linewidth=1.5)
    ax.axvline(ridge, color="#e4e9ee", linewidth=1, zorder=0)
    _draw_attainable(ax, points, kwargs)
    _draw_measured(ax, (*points, roofline.whole))
    _name_longest(ax, points)
    ax.set(xscale="log", yscale="log", xlim=(low, high))
    ax.set_xlabel("operations per byte of memory traffic (flop/byte)")
    ax.set_ylabel("Gflop/s")
    left_out = len(roofline.points) - len(points)
    ax.set_title(_title(roofline, left_out), fontsize=9, loc="left", **AS_IT_IS)
    ax.legend(fontsize=8, frameon=False, loc="lower right")
    ax.grid(color="#e4e9ee")
    ax.set_axisbelow(True)
    return ax


def _draw_attainable(ax: Any, points: list[Point], kwargs: dict[str, Any]) -> None:
    """A dot on the roof for each kernel, the larger the longer it takes at best."""
    longest = max(p.attainable_s for p in points)
    for bound, colour in (("memory", AFTER), ("compute", LIMIT)):
        for p in (p for p in points if p.bound == bound):
            style = {"marker": "o", "linestyle": "", "color": colour, "alpha": 0.7, "markeredgewidth": 0}
            dot = {"markersize": 3 + 9 * math.sqrt(p.attainable_s / longest)}
            ax.plot([p.intensity], [p.attainable / 1e9], **(style | dot | kwargs))
        ax.plot([], [], marker="o", linestyle="", color=colour, label=f"bound by {bound}")


def _draw_measured(ax: Any, points: Iterable[Point]) -> None:
    """Diamonds under the roof for what was measured, with names."""
    for p in (p for p in points if p.measured_s is not None):
        x, y = p.intensity, (p.attained or 0) / 1e9
        ax.plot([x], [y], marker="D", linestyle="", color=BEFORE, markersize=7)
        style = {"textcoords": "offset points", "fontsize": 7, "color": QUIET, "ha": "right"}
        ax.annotate(f"{short(p.name, 24)}, measured", (x, y), (-9, 7), **style, **AS_IT_IS)


def _name_longest(ax: Any, points: list[Point]) -> None:
    """Names at the dots of the kernels that take longest; those at one place share a line."""
    groups: dict[tuple[str, str], list[Point]] = {}
    for p in sorted(points, key=lambda p: -p.attainable_s):
        groups.setdefault((f"{p.intensity:.2g}", p.bound), []).append(p)
    placed: list[tuple[float, bool]] = []
    for alike in list(groups.values())[:_NAMED]:
        first = alike[0]
        name = short(first.name.rpartition(" ")[0].strip(), 26) + (
            f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        )
        slope = first.bound == "memory"
        near = sum(abs(math.log10(first.intensity / x)) < (0.35 if slope and sloped else 0.9) for x, sloped in placed)
        placed.append((first.intensity, slope))
        # Under the roof there is room to the right of the slope, and below the flat part, which ends at the right edge.
        where = (10, -4 - 14 * near) if slope else (14, -16 - 14 * near)
        style = {"textcoords": "offset points", "fontsize": 7, "color": INK, "ha": "left" if slope else "right"}
        ax.annotate(name, (first.intensity, first.attainable / 1e9), where, **style, **AS_IT_IS)


def _title(roofline: Roofline, left_out: int) -> str:
    left_text = f"; {left_out} kernels that compute nothing not shown" if left_out else ""
    d = roofline.device
    rates = f"{(d.gemm_flop_per_s or 0) / 1e9:.3g} Gflop/s, {(d.copy_bytes_per_s or 0) / 1e9:.3g} GB/s, measured"
    return f"{roofline.name}: {len(roofline.points)} kernels as XLA is expected to fuse it{left_text}\n{d} ({rates})"


def plot_predicted(roofline: Roofline, ax: Any = None) -> Any:
    """The predicted saving of each candidate beyond XLA, next to the measured one if there is one.

    Args:
      roofline: of a program's findings; `with_measured` adds the measured savings.
      ax: matplotlib Axes to draw into; None makes a new figure.

    Returns:
      The Axes. Time is in milliseconds; at most 24 candidates, those predicted or measured to save most.

    Raises:
      ArgumentError: there is no candidate.
    """
    if not roofline.predictions:
        raise ArgumentError(
            f"roofline: no candidate of {roofline.name} has a prediction, needed roofline(fl.find(...), device)"
        )
    ranked = sorted(roofline.predictions, key=lambda p: -max(abs(p.saved_s), abs(p.measured_saved_s or 0)))
    kept = [p for p in roofline.predictions if p in ranked[:_PREDICTED]]
    ax = axes_or_new(ax, 7.2, 1.4 + 0.32 * len(kept))
    rows = np.arange(len(kept))
    for y, p in zip(rows, kept, strict=True):
        _draw_prediction(ax, y, p)
    ax.barh([math.nan], [math.nan], color=QUIET, alpha=0.55, label="predicted, at best")
    if any(p.measured_saved_s is not None for p in kept):
        ax.plot([], [], marker="D", linestyle="", color=INK, label="measured")
    ax.axvline(0, color=INK, linewidth=1)
    ax.set_yticks(rows, [short(p.site, 44) for p in kept], fontsize=8, **AS_IT_IS)
    ax.set_ylim(len(kept) - 0.5, -0.5)
    ax.set_xlabel("time saved beyond XLA's expected fusion (ms)")
    left_out = len(roofline.predictions) - len(kept)
    more = f"; {left_out} smaller ones not shown" if left_out else ""
    ax.set_title(f"{roofline.name}{more}\n{roofline.device}", fontsize=9, loc="left", **AS_IT_IS)
    ax.legend(fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2)
    ax.grid(axis="x", color="#e4e9ee")
    ax.set_axisbelow(True)
    return ax


def _draw_prediction(ax: Any, y: np.integer, p: Prediction) -> None:
    """A bar for what is predicted, a diamond for what was measured."""
    ax.barh(y, p.saved_s * 1e3, height=0.5, color=colour_of(p.pass_name), alpha=0.55, linewidth=0)
    if p.measured_saved_s is not None:
        ax.plot([p.measured_saved_s * 1e3], [y], marker="D", markersize=6, color=INK, linestyle="")
    elif p.before == p.after:
        ax.annotate("the same code", (0, y), (6, -3), textcoords="offset points", fontsize=7, color=QUIET)
