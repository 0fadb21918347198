"""The plots of a measurement as inline SVG, each drawn once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..markup import inline_svg, text


def evidence_pictures(evidence: Any) -> dict[str, str]:
    """Name -> inline SVG of the plots a measurement allows; empty for None. The same measurement is drawn once."""
    return {} if evidence is None else dict(_pictures(_Same(evidence)))


@dataclass(frozen=True, eq=False)
class _Same:
    """A value by its identity."""

    value: Any

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


@lru_cache(maxsize=4)  # an explorer shows a measurement in its tabs, saves it and exports it: seconds of drawing
def _pictures(measured: _Same) -> dict[str, str]:
    from ..plots import evidence_figures, figure_svg  # matplotlib is imported only when there is something to plot

    return {
        name: f'<figure aria-label="{text(name)}">{inline_svg(figure_svg(figure))}</figure>'
        for name, figure in evidence_figures(measured.value)
    }
