"""The verb `minimise`: a small program that still shows a fault of a fused one, for a bug report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from ..errors import ArgumentError, OutOfMemoryError
from ..evidence.blame.drift import drift_of
from ..evidence.blame.faults import KINDS, Fault, Shows
from ..evidence.blame.program import Small, cut, entered, small
from ..evidence.blame.repro import Minimal, confirmed
from ..evidence.blame.search import Search
from ..evidence.errors.gradients import random_cotangents, value_and_gradients
from ..evidence.instruments.program import on_device
from ..evidence.instruments.timing import check_effort
from ..fusers import Candidate
from ..graph.calls.binding import Bound
from ..graph.program.crossing import BlockTree
from ..graph.rewriting.rewrite import with_names
from ..progress import Cancel, Progress, Stages, watched
from ..tracebacks import own_lines_hidden
from . import lab
from .by_site import selected_sites


@own_lines_hidden
def minimise(
    fn: Callable,
    *args: Any,
    shows: str | Shows | None = None,
    grad: bool = False,
    passes: lab.Passes = None,
    implementation: str | None = None,
    needs: str = "",
    samples: int = 40,
    budget_s: float = 600.0,
    progress: Progress = False,
    cancel: Cancel | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    **kwargs: Any,
) -> Minimal:
    """Cuts out of a function a small program that still shows a fault of its fused version, for a bug report.

    Equations are left out as long as the fault stays: what the rest reads from them is recorded. Loops and calls are replaced by their
    bodies, a loop's in one step.

    Args:
      fn: the function; or one that `fuse` returned, whose own passes with their options, `skip`, `only`, `implementation` and `edits`
        then count: of sites by their ids, which are of the whole program, `only` counts as their passes, and `skip` not at all.
      *args, **kwargs: arrays to run on.
      shows: "error": an output of the fused program is further from its float64 reference than the original's and beyond the tolerance;
        "raises": the fused program raises where the original runs; "time": it is slower, by the verdict of a timing; None: "raises" or
        "error", whichever it is; or a function of (program, *arrays) that returns whether the program shows the fault, or what it shows.
      grad: of the value and the gradients of `fn` instead of its call.
      passes, implementation: as for `fuse`.
      needs: lines of Python that the file runs first: imports of kernels and passes of your own.
      samples: of each timing.
      budget_s: seconds for the search; then the smallest program so far is returned. Where the programs part (`drift`) is looked for
        in the first half of them.
      progress: False, True (a line) or a function of (task, done, total).
      cancel: called before each trial; once it returns True, the smallest program so far is returned.
      static_argnums, static_argnames: as in `jax.jit`.

    Returns:
      The program; `.save("repro.py")` writes it as Python, with its arrays in `repro.npz`. `python repro.py` prints the fault.

    Raises:
      ArgumentError: `fn` does not show the fault, another word in `shows`, or shapes where arrays are needed. TraceError: `fn` does not
        trace.
    """
    if not (shows is None or callable(shows) or shows in KINDS):
        raise ArgumentError(f"shows: got {shows!r}, needed one of {', '.join(map(repr, KINDS))}, or a function")
    check_effort(samples, budget_s)
    options = {"passes": passes, "implementation": implementation}
    if isinstance(fn, lab.Fused):
        options = fn.named_options
    asked = options | {"static_argnums": static_argnums, "static_argnames": static_argnames}
    with watched(progress) as told:
        stages = Stages(told, cancel)
        found, chosen, call = selected_sites(fn, args, kwargs, asked, told)
        if grad:
            found, chosen, call = selected_sites(*_differentiated(call), options, told)
        arrays = jax.tree.leaves(on_device((call.args, call.kwargs)))
        closed, names = with_names(found.graph)
        whole = small(closed, arrays)
        given = {k: v for k, v in options.items() if v is not None}
        faults = [
            Fault(kind, lambda f: lab.fuse(f, **options), shows if callable(shows) else None, samples, budget_s / 20)
            for kind in (("raises", "error") if shows is None else ("shows",) if callable(shows) else (shows,))
        ]
        fault, observed = _first_shown(faults, whole, stages, found.graph.name)
        steps: list[int] = []
        hints = (
            _hints(
                found, list(chosen.values()), arrays, whole, names, steps, Stages(told, _within(budget_s / 2, cancel))
            )
            if fault.kind == "error"
            else []
        )
        result = Search(fault, whole, observed, stages, budget_s).run(hints, steps)
        minimal = Minimal(
            name=found.graph.name,
            kind=fault.kind,
            observed=result.observed,
            equations=result.program.count,
            of=whole.count,
            trials=result.trials,
            stopped=result.stopped,
            unwritten="",
            program=result.program,
            options=given,
            needs=needs,
        )
        return replace(minimal, unwritten=confirmed(minimal, fault.of))


def _within(budget_s: float, cancel: Cancel | None) -> Cancel:
    """A `cancel` that returns True after so many seconds as well."""
    ends = time.perf_counter() + budget_s
    return lambda: time.perf_counter() > ends or (cancel is not None and cancel())


def _differentiated(call: Bound) -> tuple[Callable, tuple, dict]:
    """(the value and the gradients of a call, its arguments)."""
    leaves = jax.tree.leaves((call.args, call.kwargs))
    chosen = [i for i, x in enumerate(leaves) if jax.numpy.issubdtype(jax.numpy.result_type(x), jax.numpy.floating)]
    outs = jax.tree.leaves(jax.eval_shape(call.fn, *call.args, **call.kwargs))
    return value_and_gradients(call.fn, chosen), (random_cotangents(outs), call.args, call.kwargs), {}


def _first_shown(faults: Sequence[Fault], whole: Small, stages: Stages, name: str) -> tuple[Fault, str]:
    for fault in faults:
        stages(f"looking for the fault, {whole.count:,} equations")
        observed = fault(whole)
        if observed:
            return fault, observed
    kinds = " or ".join(f.kind for f in faults)
    raise ArgumentError(
        f"minimise: {name} does not show the fault ({kinds}) with these arguments: its fused version runs and is as near to float64 as "
        "the original. Needed: a function that shows it, or a function of your own as shows="
    )


def _hints(
    found: lab.Findings,
    chosen: Sequence[Candidate],
    arrays: Sequence[Any],
    whole: Small,
    names: Mapping[Any, tuple[int, ...]],
    steps: list[int],
    stages: Stages,
) -> Iterator[Callable[[], Small | None]]:
    """Programs around the value at which the two part; `steps` gets the steps of the loops that it is in."""
    try:
        first = drift_of(found, chosen, arrays, stages).first
    except OutOfMemoryError:  # three programs at once need more than the search, which goes on without hints
        return
    if first is None:
        return
    steps += first.steps
    site = next((c for c in chosen if c.id == first.site), None)
    nodes = {first.node} if site is None else set(site.all_node_ids)
    block = found.graph.block_of[first.node]
    inner, left = whole, list(first.steps)
    tree = BlockTree(found.graph)
    for path in reversed(tree.up(block.path)[:-1]):
        owner = tree.owner[path][0]
        numbers = _equations(inner, names, {v.id for v in owner.outputs})
        inside = entered(inner, numbers[0], left.pop(0) if owner.primitive == "scan" else 0) if numbers else None
        if inside is None:
            return
        inner = inside
    made = {v.id for n in block.nodes if n.id in nodes for v in n.outputs}
    own = _equations(inner, names, made)
    total = len(inner.jaxpr.eqns)
    for around in (0, 8, 32, total):
        kept = {j for i in own for j in range(max(0, i - around), min(total, i + around + 1))}
        yield lambda kept=kept: cut(inner, kept)


def _equations(program: Small, names: Mapping[Any, tuple[int, ...]], values: set[int]) -> list[int]:
    """The numbers of the equations that make some values."""
    return [
        i for i, eqn in enumerate(program.jaxpr.eqns) if any(values.intersection(names.get(v, ())) for v in eqn.outvars)
    ]
