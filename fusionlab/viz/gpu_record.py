"""A record of `python -m benchmarks gemm_epilogue` as a section of a report: where it was measured, ratios with their intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from fusionlab.evidence.instruments.timing import ratio_interval, seconds

from .markup import table
from .plots import AFTER, AS_IT_IS, BEFORE, axes_or_new, figure_svg

BASE, BOUND = "jax.jit", "bare products"
RIVALS = {
    "fusionlab": "FusionLab",
    "torch eager": "torch eager",
    "torch.compile": "torch.compile",
    BOUND: "its products alone",
}
_LOOKS = {
    "fusionlab": (AFTER, "D"),
    "torch eager": ("#e69f00", "o"),
    "torch.compile": ("#cc79a7", "s"),
    BOUND: (BEFORE, "|"),
}


@dataclass(frozen=True)
class Ratio:
    """One program against jax.jit: device seconds (median), jax.jit's median divided by it, and the 95 % interval of that ratio.

    Attributes:
      median_s: device seconds.
      ratio: jax.jit's median over this one.
      interval: the 95 % interval of that ratio.
    """

    median_s: float
    ratio: float
    interval: tuple[float, float]


def ratios(record: Mapping[str, Any]) -> dict[str, tuple[float, dict[str, Ratio]]]:
    """Perceptron -> (median device seconds of jax.jit, rival -> its ratio), for those of `RIVALS` that were measured."""
    found = {}
    for name, timed in record["mlp"].items():
        programs = {**timed, **timed.get("torch", {})}
        base = programs[BASE]
        rivals = {}
        for rival in (r for r in RIVALS if r in programs):
            rival_times = programs[rival]
            interval = ratio_interval(base["samples_s"], rival_times["samples_s"])
            rivals[rival] = Ratio(rival_times["median_s"], base["median_s"] / rival_times["median_s"], interval)
        found[name] = base["median_s"], rivals
    return found


def where(record: Mapping[str, Any]) -> str:
    """Device, driver, versions, day and commit of a record, in a line."""
    e = record["environment"]
    versions = [f"{k} {v}" for k, v in e["versions"].items() if k in ("jax", "torch")]
    parts = (e["hardware"], e["driver"], *versions, e["time"][:10], f"commit {e['commit'][:12]}" if e["commit"] else "")
    return ", ".join(p for p in parts if p)


def ratio_range(record: Mapping[str, Any]) -> str:
    """The record in a line: the range of FusionLab's ratios."""
    found = [rivals["fusionlab"].ratio for _, rivals in ratios(record).values()]
    return f"{min(found):.2f}x to {max(found):.2f}x of jax.jit's speed on {len(found)} perceptrons, forward + backward"


def plot_record(record: Mapping[str, Any], ax: Any = None) -> Any:
    """Each perceptron's ratios with their intervals, jax.jit at 1.

    Args:
      record: the record of `python -m benchmarks gemm_epilogue`.
      ax: matplotlib Axes to draw into; None makes a new figure.

    Returns:
      The Axes.
    """
    found = ratios(record)
    ax = axes_or_new(ax, 7.2, 1.2 + 0.5 * len(found))
    for i, (rival, label) in enumerate(RIVALS.items()):
        rows = [(row, rivals[rival]) for row, (_, rivals) in enumerate(found.values()) if rival in rivals]
        if not rows:
            continue
        colour, marker = _LOOKS[rival]
        at = [row + 0.18 * (i - 1.5) for row, _ in rows]
        low, high = ([max(0.0, s * (r.ratio - r.interval[side])) for _, r in rows] for side, s in ((0, 1), (1, -1)))
        style = {"linestyle": "", "marker": marker, "color": colour, "markersize": 9 if marker == "|" else 5}
        ax.errorbar([r.ratio for _, r in rows], at, xerr=[low, high], label=label, capsize=2, **style)
    ax.axvline(1, color=BEFORE, linewidth=1)
    ax.set_yticks(range(len(found)), list(found), **AS_IT_IS)
    ax.set_ylim(len(found) - 0.5, -0.5)
    ax.set_xlabel("speed relative to jax.jit (device time; right of 1 is faster; bars: 95 % intervals)")
    ax.set_title(f"{record['environment']['hardware']}\n", fontsize=9, loc="left")  # the empty line is the legend's
    ax.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False, borderaxespad=0.2)
    ax.grid(axis="x", color="#e4e9ee")
    ax.set_axisbelow(True)
    return ax


def record_html(record: Mapping[str, Any]) -> str:
    """The section: heading, where it was measured, plot and table. The picture is inline SVG."""
    from .markup import inline_svg

    found = ratios(record)
    shown = [r for r in RIVALS if any(r in rivals for _, rivals in found.values())]
    rows = [[name, seconds(base), *(_cell(rivals.get(r)) for r in shown)] for name, (base, rivals) in found.items()]
    heads = ["perceptron (rows x features x hidden)", BASE, *(RIVALS[r] for r in shown)]
    figure = inline_svg(figure_svg(plot_record(record).figure))
    return (
        f"<h2>On a GPU: {escape(record['environment']['hardware'])}</h2>"
        f"<p>Not this machine: the newest record of <code>{escape(record['command'])}</code>, measured on {escape(where(record))}. "
        "Two-layer perceptrons in bfloat16, forward and backward; medians of device time, and jax.jit's divided by each, with its 95 % "
        "interval. torch ran after the others, not in turns with them.</p>"
        f'<figure aria-label="Ratios on a GPU">{figure}</figure>' + table(heads, rows, range(1, len(heads)))
    )


def _cell(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    low, high = ratio.interval
    return f"{seconds(ratio.median_s)}, {ratio.ratio:.2f}× [{low:.2f}, {high:.2f}]"
