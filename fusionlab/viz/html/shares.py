"""The time that each site saves: bars, and the table with them."""

from __future__ import annotations

from typing import Any

from fusionlab.evidence.attribution import SiteShare, SiteShares
from fusionlab.evidence.instruments.timing import seconds

from ..markup import as_on_screen, pick, quiet, table, text
from ..palette import QUIET, colour_of

MOST_SHARES = 12  # sites beyond this are not timed one by one: a program for each has to be compiled


def plot_shares(shares: SiteShares, ax: Any = None, **kwargs: Any) -> Any:
    """A bar for each site: the seconds by which fusing it shortens the program, given all the others. Returns matplotlib Axes.

    Bars to the left are sites that lengthen it; the interval of hatched ones contains 1, so that they are inconclusive.

    Args:
      shares: of `fusionlab.time_by_site`.
      ax: where to draw; None makes new Axes.
      **kwargs: for `Axes.barh`.
    """
    from ..plots import axes_or_new

    rows = list(reversed(shares.sites))
    ax = axes_or_new(ax, 7.0, 1.2 + 0.34 * len(rows))
    names = [_label(s) for s in rows]
    colours = [colour_of(s.site.partition("@")[0]) for s in rows]
    bars = ax.barh(range(len(rows)), [1e6 * s.saved_s for s in rows], color=colours, **kwargs)
    for bar, share in zip(bars, rows, strict=True):
        if not share.is_clear:
            bar.set(hatch="///", alpha=0.5)
    ax.axvline(0.0, color=QUIET, linewidth=1)
    ax.set_yticks(range(len(rows)), [name.replace("$", r"\$") for name in names])
    ax.set_xlabel("time saved per call by fusing it (µs); left of 0: lost")
    together = f"all together, per call: {seconds(shares.unfused.median_s)} → {seconds(shares.fused.median_s)}"
    ax.set_title(
        f"{together}; hatched: no clear difference\n{shares.fused.clock}, {shares.hardware}", fontsize=9, loc="left"
    )
    return ax


def _not_timed(sites: int) -> str:
    if not sites:
        return "Every site that is on is what XLA runs anyway, so there is nothing to time one by one."
    if sites > MOST_SHARES:
        return (
            f"{sites} sites that are on run other code than XLA does anyway. More than {MOST_SHARES} are not timed one by one, "
            "since each needs a program of its own compiled."
        )
    return "Not timed one by one yet: press Measure, which times them after the whole program."


def shares_html(shares: SiteShares | None, sites: int) -> str:
    """The bars and their table as HTML, names escaped and selectable; or the reason why there are no bars.

    Args:
      shares: what was measured, or None.
      sites: how many sites are on that run anything but what XLA runs anyway.
    """
    if shares is None:
        return quiet(_not_timed(sites))
    from ..markup import inline_svg
    from ..plots import figure_svg

    drawn = inline_svg(figure_svg(plot_shares(shares).figure))
    rows = [
        [s.site, _sign(s.saved_s), f"{s.interval[0]:.3f} to {s.interval[1]:.3f}", _verdict(s)] for s in shares.sites
    ]
    heads = ["site", "saves", "without / with, 95 %", "verdict"]
    rest = [quiet(as_on_screen(line)) for line in str(shares).splitlines()[len(shares.sites) :]]
    rest.append(quiet("Timed in a call of the function; a gradient taken of the function is not included."))
    links = " ".join(pick(s.site) for s in shares.sites)
    return f'<figure aria-label="{text("share of each site")}">{drawn}</figure>{table(heads, rows, (1, 2))}<p>{links}</p>{"".join(rest)}'


def _label(share: SiteShare) -> str:
    return share.site if len(share.site) <= 48 else "…" + share.site[-47:]


def _sign(saved: float) -> str:
    return f"{'-' if saved < 0 else ''}{seconds(abs(saved))}"


def _verdict(share: SiteShare) -> str:
    if not share.is_clear:
        return "no clear difference"
    return "faster" if share.saved_s > 0 else "slower: the program is faster without it"
