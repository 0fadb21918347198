"""The loss curve that `fusionlab.compare(step, fused, state, data=batches)` returns."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from html import escape
from typing import Any

from ..evidence.training.curve import Curve
from ..showing import page
from ..tracebacks import errors_for_users


@errors_for_users
class LossCurve(Curve):
    """A loss curve (see `fusionlab.evidence.training.curve.Curve`) that can draw itself."""

    def plot(self, ax: Any = None, **kwargs: Any) -> Any:
        """The losses of both versions, with the band; returns matplotlib Axes. `differences=True`: less the original's."""
        from ..viz.curve_plots import plot_losses

        return plot_losses(self, ax=ax, **kwargs)

    def plot_distance(self, ax: Any = None, *, of: str | None = None, **kwargs: Any) -> Any:
        """How far the states are apart at each step, or, `of` one of its arrays, in each block of steps; returns matplotlib Axes."""
        from ..viz.curve_plots import plot_distances

        return plot_distances(self, ax=ax, of=of, **kwargs)

    def _repr_html_(self) -> str:
        from ..viz.plots import figure_svg

        text = f"<pre>{escape(str(self))}</pre>"
        if not self.reached:
            return text
        drawn = (self.plot(), self.plot(differences=True), self.plot_distance())
        return text + "".join(figure_svg(ax.figure) for ax in drawn) + super()._table().html()

    def _makers(self) -> dict[str, Callable[[], str | bytes]]:
        def picture(kind: str) -> bytes:
            file = io.BytesIO()
            self.plot().figure.savefig(file, format=kind, bbox_inches="tight")
            return file.getvalue()

        pictures = {f".{kind}": functools.partial(picture, kind) for kind in ("png", "svg", "pdf")}
        return {**super()._makers(), ".html": lambda: page(self._sentence(), self._repr_html_()), **pictures}
