"""The verb `drift`, and the map that it returns: where a fused program parts from its original."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from ..evidence.blame.drift import DriftMap, drift_of
from ..evidence.instruments.program import on_device
from ..progress import Cancel, Progress, Stages, watched
from ..tracebacks import errors_for_users, own_lines_hidden
from . import lab
from .by_site import selected_sites
from .shown import fields_of


@errors_for_users
class Drift(DriftMap):
    """The errors at every value (see `fusionlab.evidence.blame.drift.DriftMap`), with pictures."""

    def plot(self, ax: Any = None, **kwargs: Any) -> Any:
        """Errors of both programs along the program, on a log axis; returns matplotlib Axes."""
        from ..viz.plots import plot_drift

        return plot_drift(self, ax=ax, **kwargs)

    def to_svg(self, **options: Any) -> str:
        """The graph as SVG text, with a stripe on each card: the broader, the further the fused program is off there.

        Options as of `Graph.to_svg`: `show=["model.py:41"]` opens the cards around these.

        Raises:
          ArgumentError: the graph contains nothing of that name.
        """
        from ..viz.export import to_svg

        found = self.findings
        assert found is not None  # it was measured in this process
        return to_svg(found.graph, found, found.applied, drift=self.by_node(), **options)

    def _makers(self) -> dict[str, Callable[[], str | bytes]]:
        from ..viz.convert import to_pdf, to_png

        first = self.first
        svg = functools.partial(self.to_svg, show=(f"n{first.node}",) if first is not None else ())
        pictures = {".svg": svg, ".png": lambda: to_png(svg()), ".pdf": lambda: to_pdf(svg())}
        return super()._makers() | pictures

    def save(self, path: Any) -> Any:
        """Writes .csv (a row for each value), .json, .html or .txt, or the graph in its colours: .svg .png .pdf.

        Raises:
          ArgumentError: another suffix. OutputError: the file cannot be written. MissingDependencyError: PDF without the extra.
        """
        return super().save(path)


@own_lines_hidden
def drift(
    fn: Callable,
    *args: Any,
    passes: lab.Passes = None,
    implementation: str | None = None,
    progress: Progress = False,
    cancel: Cancel | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    **kwargs: Any,
) -> Drift:
    """Measures the error of the original and of the fused program against float64 at every value, and where the two part.

    All three programs run equation by equation, side by side; values are compared as they are made and not kept. Bodies of scans run
    step by step, and each step has values of its own. A train step is a program like any other.

    Args:
      fn: the function; or one that `fuse` returned, whose own choice of sites then counts instead of the options below.
      *args, **kwargs: arrays to run on.
      passes, implementation: as for `fuse`.
      progress: False, True (a line) or a function of (task, done, total).
      cancel: called at each value; once it returns True, what was compared until then is returned.
      static_argnums, static_argnames: as in `jax.jit`.

    Returns:
      The map: `.first` is the value at which the programs part by more than rounding, `.values` has all of them. It prints as
      sentences, and draws the graph in its colours.

    Raises:
      ArgumentError: shapes where arrays are needed. TraceError: `fn` does not trace, or has no float64 form. SideEffectError: it prints
        or calls back into Python. OutOfMemoryError: the device has too little memory.
    """
    asked = {"passes": passes, "implementation": implementation}
    asked |= {"static_argnums": static_argnums, "static_argnames": static_argnames}
    with watched(progress) as told:
        found, chosen, call = selected_sites(fn, args, kwargs, asked, told)
        arrays = jax.tree.leaves(on_device((call.args, call.kwargs)))
        return Drift(**fields_of(drift_of(found, list(chosen.values()), arrays, Stages(told, cancel))))
