"""Plots of a loss curve: the losses of both versions in the band of the original, and how far their states are apart."""

from __future__ import annotations

from typing import Any

import numpy as np

from fusionlab.errors import ArgumentError
from fusionlab.evidence.training.blocks import blocks_of
from fusionlab.evidence.training.curve import LOSS, TOTAL, Curve

from .plots import AFTER, AS_IT_IS, BEFORE, LIMIT, axes_or_new

_BAND = "#c9d3dc"


def plot_losses(curve: Curve, ax: Any = None, *, differences: bool = False, **kwargs: Any) -> Any:
    """The losses of the original and of the fused version at each step, with the band.

    Args:
      curve: the result of `fusionlab.compare(step, fused, state, data=batches)`.
      ax: matplotlib Axes to draw into; None makes a new figure.
      differences: what the fused version's loss and those of the further runs are above the original's: the band is narrower than a line
        where the losses themselves are drawn.
      **kwargs: go to the line of the fused version (`Axes.plot`).

    Returns:
      The Axes.

    Raises:
      ArgumentError: no step was made.
    """
    _check(curve)
    ax = axes_or_new(ax, 7.2, 3.4)
    steps = np.arange(1, curve.reached + 1)
    losses, fused = (np.asarray(x[: curve.reached], float) for x in (curve.losses, curve.fused_losses))
    base = np.zeros(len(steps)) if differences else losses
    half = np.asarray(curve.loss_limits, float)
    if len(half):
        inside = slice(0, len(half))
        ax.fill_between(steps[inside], base[inside] - half, base[inside] + half, color=_BAND, linewidth=0, label="band")
    if differences:
        for k, run in enumerate(curve.loss_differences):
            label = "original, sums rounding otherwise" if k == 0 else None
            ax.plot(steps[: len(run)], run[: len(steps)], color=BEFORE, linewidth=0.7, label=label)
        if curve.wide_losses:
            wide = np.asarray(curve.wide_losses[: len(steps)], float)
            ax.plot(
                steps[: len(wide)], wide - losses[: len(wide)], color=BEFORE, linestyle=":", label="original in float32"
            )
    else:
        ax.plot(steps, losses, color=BEFORE, linewidth=2.4, label="original")
    style = {"color": AFTER, "linewidth": 1.0, "label": "fused"}
    ax.plot(steps, fused - losses if differences else fused, **(style | kwargs))
    ax.set_xlabel("step")
    ax.set_ylabel("loss less the original's" if differences else "loss")
    _finish(ax, f"{curve.name}: {curve.verdict}, {curve.reached} steps")
    return ax


def plot_distances(curve: Curve, ax: Any = None, *, of: str | None = None, **kwargs: Any) -> Any:
    """How far the fused version's state is from the original's, and the runs of the original with other roundings: relative L2, log axes.

    Args:
      curve: the result of `fusionlab.compare(step, fused, state, data=batches)`.
      ax: matplotlib Axes to draw into; None makes a new figure.
      of: an array of the state, by its name (`curve.worst` has them), drawn by blocks of steps; None: all floats of the state.
      **kwargs: go to the line of the fused version (`Axes.plot`).

    Returns:
      The Axes.

    Raises:
      ArgumentError: no step was made, or the state has no such array.
    """
    _check(curve)
    found = [s for s in curve.stretches if s.of == (of or TOTAL)]
    if of is not None and (not found or of == LOSS):
        names = ", ".join(dict.fromkeys(s.of for s in curve.worst if s.of != LOSS))
        raise ArgumentError(f"of: got {of!r}, needed the name of an array of the state: {names:.300}")
    ax = axes_or_new(ax, 7.2, 3.4)
    steps = np.arange(1, curve.reached + 1)
    blocks = [(s.first, s.last + 1) for s in found] or [(a, b + 1) for a, b in blocks_of(curve.reached)]
    style = {"color": AFTER, "linewidth": 1.4, "label": "fused"}
    if of is None:
        for k, run in enumerate(curve.band_distances):
            label = "original, sums rounding otherwise" if k == 0 else None
            ax.plot(steps[: len(run)], _above_0(run[: len(steps)]), color=BEFORE, linewidth=0.7, label=label)
        ax.plot(steps, _above_0(curve.distances), **(style | kwargs))
    else:
        _by_blocks(
            ax, blocks, [s.band for s in found], color=BEFORE, linewidth=1.0, label="original, sums rounding otherwise"
        )
        _by_blocks(ax, blocks, [s.fused for s in found], **(style | kwargs))
    _by_blocks(ax, blocks, [s.limit for s in found], color=LIMIT, linewidth=1.0, linestyle="--", label="limit")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("step")
    ax.set_ylabel("distance from the original's, relative L2")
    _finish(ax, f"{curve.name}: {of or TOTAL}")
    return ax


def _check(curve: Curve) -> None:
    if not curve.reached:
        raise ArgumentError(
            f"curve: no step of {curve.name} was made ({curve.stopped or 'it has none'}), so there is nothing to plot"
        )


def _above_0(values: Any) -> np.ndarray:
    """What a log axis can show; no distance at all has no place on it."""
    found = np.asarray(values, float)
    return np.where(found > 0, found, np.nan)


def _by_blocks(ax: Any, blocks: list[tuple[int, int]], values: list[float], **style: Any) -> None:
    if values:
        edges = np.asarray(blocks, float)[: len(values)]
        ax.plot(edges.ravel(), np.repeat(_above_0(values), 2), **style)


def _finish(ax: Any, title: str) -> None:
    ax.set_title(title, fontsize=9, loc="left", **AS_IT_IS)
    ax.grid(color="#e4e9ee")
    ax.set_axisbelow(True)
    ax.legend(fontsize=8, frameon=False)
