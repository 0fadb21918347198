"""Routes of matrix products as pictures: the route of each product, and the measured gain of the choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fusionlab.errors import ArgumentError
from fusionlab.fusers.passes.matmul.route_table import TAGS, ProductRoute, Routes
from fusionlab.kernels.ops.matmul.routes import ROUTES

from .markup import short
from .plots import AFTER, AS_IT_IS, BEFORE, axes_or_new

# Okabe and Ito's hues, pale: each cell is written in as well.
FILLS = {"evaluate": "#cfe8dc", "kernel": "#fbe3c8", "xla": "#e8ebef", "": "#ffffff"}
_QUIET = "#5b6672"


def plot_routes(*tables: Routes, ax: Any = None) -> Any:
    """The decision table as a picture.

    Args:
      *tables: `findings.routes()`. Of one: a column for each route, in the order in which they are asked, with the code of its refusal.
        Of the same program on several devices: a column for each device, with the tag of each product there.
      ax: matplotlib Axes to draw into; None makes a new figure.

    Returns:
      The Axes.

    Raises:
      ArgumentError: there is no product in it, or the tables are not of the same products.
    """
    _check_products(tables)
    first, *_ = tables
    rows = first.rows
    several = len(tables) > 1
    heads = [_short_device(t.device) for t in tables] if several else [r.name for r in ROUTES]
    cells = [[_tag_cell(t[i]) for t in tables] if several else _route_cells(row) for i, row in enumerate(rows)]
    ax = axes_or_new(ax, 3.2 + (1.0 if several else 1.5) * len(heads), 0.9 + 0.38 * len(rows))
    _draw_cells(ax, cells)
    ax.set_xticks(range(len(heads)), heads, fontsize=8)
    ax.xaxis.tick_top()
    ax.set_yticks(
        range(len(rows)), [f"{short(r.formula, 44)}\n{r.shape}, {r.dtype}" for r in rows], fontsize=7, **AS_IT_IS
    )
    ax.tick_params(length=0)
    ax.set(xlim=(-0.5, len(heads) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    ax.spines[:].set_visible(False)
    ax.set_title("route of each product" if several else f"routes on {first.device}", fontsize=9, loc="left")
    return ax


def _check_products(tables: Sequence[Routes]) -> None:
    """Raises where there is no product, or where the tables are not of the same ones."""
    if not tables or not tables[0].rows:
        raise ArgumentError(
            "plot_routes: no product to draw; needed findings.routes() of a program with a matrix product"
        )
    names = [[(row.value, row.shape) for row in table] for table in tables]
    if any(product_names != names[0] for product_names in names):
        raise ArgumentError(
            "plot_routes: the tables are not of the same products; needed those of one program on several devices"
        )


def _draw_cells(ax: Any, cells: Sequence[Sequence[tuple[str, str]]]) -> None:
    """Rows of (text, tag): filled in the tag's colour, quiet where there is no tag."""
    for y, row in enumerate(cells):
        for x, (text, tag) in enumerate(row):
            ax.fill_between([x - 0.5, x + 0.5], y - 0.46, y + 0.46, color=FILLS[tag], linewidth=0)
            look = {"fontweight": "bold", "color": "black"} if tag else {"fontweight": "normal", "color": _QUIET}
            ax.text(x, y, text, ha="center", va="center", fontsize=8, **look)


def _short_device(text: str) -> str:
    """ "a CUDA sm_90 device (simulated)" -> "sm_90"."""
    return next((word for word in text.split() if word.startswith("sm_")), "CPU" if "cpu" in text.lower() else text)


def _tag_cell(row: ProductRoute) -> tuple[str, str]:
    return row.tag, row.tag


def _route_cells(row: ProductRoute) -> list[tuple[str, str]]:
    """Text and tag of each route's cell; no tag where it does not take the product."""
    answers = {a.route.name: a for a in row.answers}
    if not answers:
        middle, why = len(ROUTES) // 2, short(row.reason.partition(":")[0], 60)
        return [(why if i == middle else "", row.tag) for i in range(len(ROUTES))]
    cells = []
    for route in ROUTES:
        answer = answers.get(route.name)
        if answer is None:
            cells.append(("not asked", ""))
        else:
            cells.append((f"takes it: {route.tag}", route.tag) if answer.takes else (answer.code, ""))
    return cells


def plot_route_record(record: Mapping[str, Any], ax: Any = None, *, only: Sequence[str] = ()) -> Any:
    """The speed-up over jax.jit of each case of a record, with FusionLab's chosen routes and 95 % intervals.

    Args:
      record: the record of `python -m benchmarks matmul_schedule`.
      ax: matplotlib Axes to draw into; None makes a new figure.
      only: names of the cases to draw; none draws all.

    Returns:
      The Axes.
    """
    cases = {name: c for name, c in record["cases"].items() if not only or name in only}
    ax = axes_or_new(ax, 7.2, 1.2 + 0.24 * len(cases))
    colours = {"evaluate": "#009e73", "kernel": "#d55e00", "xla": BEFORE}
    for y, found in enumerate(cases.values()):
        bar = found["fusionlab"]
        tag = _tag_of(found["products"]["fusionlab"])
        low, high = bar["interval"]
        bars = [[max(0.0, bar["ratio"] - low)], [max(0.0, high - bar["ratio"])]]
        ax.errorbar([bar["ratio"]], [y], xerr=bars, marker="D", markersize=4, capsize=2, color=colours[tag])
    for tag, colour in colours.items():
        ax.plot([], [], marker="D", linestyle="", markersize=4, color=colour, label=tag)
    ax.axvline(1, color=AFTER, linewidth=1)
    ax.set_yticks(range(len(cases)), list(cases), fontsize=7, **AS_IT_IS)
    ax.set_ylim(len(cases) - 0.5, -0.5)
    ends = [end for found in cases.values() for end in (found["fusionlab"]["ratio"], *found["fusionlab"]["interval"])]
    ax.set_xlim(min(0.85, 0.95 * min(ends, default=1.0)), 1.08 * max(ends, default=1.0))
    ax.set_xlabel("speed relative to jax.jit (device time; right of 1 is faster; bars: 95 % intervals)")
    ax.set_title(record["environment"]["hardware"], fontsize=9, loc="left", **AS_IT_IS)
    ax.legend(fontsize=8, frameon=False, loc="lower right")
    ax.grid(axis="x", color="#e4e9ee")
    ax.set_axisbelow(True)
    return ax


def _tag_of(products: Sequence[Sequence[str]]) -> str:
    """The tag of a case: of its first product that does not stay with XLA."""
    found = [tag for tag, *_ in products]
    return next((tag for tag in TAGS if tag in found), "xla")
