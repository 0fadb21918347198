"""The verb `compare`, and the measured comparison that it returns."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any, overload

from ..errors import ArgumentError
from ..evidence.comparison import Evidence, measure
from ..evidence.instruments.workload import site_states
from ..evidence.training.running import train
from ..progress import Stages, noticed, watched
from ..tracebacks import errors_for_users, own_lines_hidden
from .fused import Fused, already_fused, searched
from .lab import check_names, not_swallowed
from .shown import fields_of
from .training import LossCurve


@errors_for_users
class Comparison(Evidence):
    """Measured evidence (see `fusionlab.evidence.comparison.Evidence`) that can draw itself."""

    def plot(self, ax: Any = None, **kwargs: Any) -> Any:
        """Timing before and after; returns matplotlib Axes."""
        from ..viz.plots import plot_timing

        return plot_timing(self, ax=ax, **kwargs)

    def _repr_html_(self) -> str:
        from ..viz.html.report import evidence_summary_html

        return evidence_summary_html(self)

    def _makers(self) -> dict[str, Callable[[], str | bytes]]:
        def picture(kind: str) -> bytes:
            file = io.BytesIO()
            self.plot().figure.savefig(file, format=kind, bbox_inches="tight")
            return file.getvalue()

        pictures = {f".{kind}": functools.partial(picture, kind) for kind in ("png", "svg", "pdf")}
        return super()._makers() | pictures | {".html": self.to_html}

    def save(self, path: Any) -> Path:
        """Writes .json (the record, with every sample: `load` reads it back), .html (the report), .csv, .txt, or the plot: .svg .png .pdf.

        Raises:
          ArgumentError: another suffix, or nothing was timed that could be drawn. OutputError: the file cannot be written.
        """
        return super().save(path)

    def plot_errors(self, ax: Any = None, **kwargs: Any) -> Any:
        """Errors of both versions against float64; returns matplotlib Axes."""
        from ..viz.plots import plot_errors

        return plot_errors(self, ax=ax, **kwargs)

    def plot_ulps(self, ax: Any = None, **kwargs: Any) -> Any:
        """Histogram of the distances of elements from float64, in units in the last place; returns matplotlib Axes."""
        from ..viz.plots import plot_ulps

        return plot_ulps(self, ax=ax, **kwargs)

    def to_html(self, path: Any = None) -> str:
        """A self-contained report; written to `path` when given."""
        from ..output import write_file
        from ..viz.html.report import evidence_html

        with noticed("writing the page"):
            text = evidence_html(self)
            if path is not None:
                write_file(path, text)
        return text


@overload
def compare(
    fn: Callable, fused: Callable, *args: Any, grad: bool | None = None, data: None = None, **options: Any
) -> Comparison: ...
@overload
def compare(fn: Callable, fused: Callable, *args: Any, data: Any, **options: Any) -> LossCurve: ...
@own_lines_hidden
def compare(
    fn: Callable, fused: Callable, *args: Any, grad: bool | None = None, data: Any = None, **options: Any
) -> Comparison | LossCurve:
    """Measures time, memory and errors of `fn` (jitted) against `fused`: of the call and its gradient, or of a train step as it is.

    With `data` it trains both from one state instead, and compares the losses and states (see `LossCurve`).

    Where every site runs what XLA runs anyway and both versions compile to the same instructions, nothing is timed.
    On a GPU times are device time, elsewhere (and on several devices, or without CuPy) wall time; each timing's `clock` names the clock.

    Args:
      fn, fused: the original and the version to judge.
      *args: arrays to run on; with `data`, the step's arguments but for the batch.
      grad: also compare gradients, and time value and gradient; None: where `fn` has one, and is not differentiated already.
      data: batches, for a train step.
      **options: argnums, samples, budget_s, donate_argnums, static_argnums, static_argnames, timing, numerics, memory, progress and
        cancel, as for `fusionlab.evidence.comparison.measure`; with `data` steps, loss, next_state, data_argnum, runs, resume, budget_s,
        static_argnums, static_argnames, progress and cancel, as for `fusionlab.evidence.training.running.train`. The rest are keyword
        arguments of the functions. Static arguments that are not named here are those that `fused` was made with.

    Raises:
      ArgumentError: shapes where arrays are needed, an option with the name of a parameter of `fn`, or an argument that is not an
        array and was not named as static; with `data`, a step whose state or loss is not found. SideEffectError: the function has
        callbacks or prints. TraceError: it does not trace.
    """
    verb = measure if data is None else train
    own = signature(verb).parameters
    kwargs = {k: v for k, v in options.items() if k not in own}
    check_names("compare", fn, kwargs, (*own, "grad", "data"))
    not_swallowed(
        "compare", fn, {k: v for k, v in options.items() if k in own} | ({} if data is None else {"data": data})
    )
    if data is not None:
        return _trained(fn, fused, args, grad, data, options)
    if not isinstance(fused, Fused):
        return Comparison(**fields_of(measure(fn, fused, *args, grad=grad, **options)))
    # An original with objects of nnx is traced to be bound: once for the search and for the measurement.
    is_shared = fn is fused.original and not {"static_argnums", "static_argnames"} & {*options}
    options = fused.__fusionlab_jit__.static | options
    with watched(options.get("progress", False)) as told:
        Stages(told)("searching")
        with searched(fused, args, kwargs) as (bound, found, fusing):
            options.setdefault("same_code", all(c.same_code for c in fusing))
            options["progress"] = told
            grad = False if grad is None and found.differentiated else grad
            evidence = measure(bound if is_shared else fn, fused, *args, grad=grad, **options)
    notes = (*evidence.notes, *found.notes, *already_fused(fn))
    called = getattr(fn, "__name__", type(fn).__name__)
    return Comparison(**fields_of(evidence, name=called, notes=notes, sites=site_states(found, fusing)))


def _trained(
    fn: Callable, fused: Callable, args: tuple, grad: bool | None, data: Any, options: dict[str, Any]
) -> LossCurve:
    if grad is not None:
        raise ArgumentError(
            f"grad: got {grad!r} with data; needed one of the two: with data, the steps are run and not differentiated"
        )
    static = fused.__fusionlab_jit__.static if isinstance(fused, Fused) else {}
    curve = train(fn, fused, *args, data=data, **(static | options))
    return LossCurve(**fields_of(curve, notes=(*curve.notes, *already_fused(fn))))
