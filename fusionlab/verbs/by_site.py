"""The verbs `bisect`, `errors_by_site` and `time_by_site`: what each fused site does to the errors and the time of a program; and
`time_by_scope`: where the time goes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from ..errors import ArgumentError
from ..evidence import subsets as trials
from ..evidence.attribution import SiteShares, sites_of
from ..evidence.bisection import Bisection
from ..evidence.instruments.timing import check_effort
from ..evidence.node_times import RUNS, fused_node_times, node_times
from ..evidence.scopes.scope_times import ScopeTimes, scope_times
from ..evidence.site_errors import local_errors
from ..fusers import Candidate
from ..graph.calls.binding import Bound
from ..graph.program.trace import bind_users
from ..graph.settings import as_function
from ..progress import Cancel, Progress, Stages, Stopped, watched
from ..showing import Records
from ..tracebacks import own_lines_hidden
from . import lab

_FAULTS = ("error", "time")


@own_lines_hidden
def bisect(
    fn: Callable,
    *args: Any,
    of: str = "error",
    passes: lab.Passes = None,
    implementation: str | None = None,
    grad: bool | None = None,
    samples: int = 40,
    budget_s: float = 20.0,
    progress: Progress = False,
    cancel: Cancel | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    **kwargs: Any,
) -> Bisection:
    """Finds the smallest sets of sites that explain why the fused function is wrong, or slower than the original.

    Each trial compiles the function with some sites fused; n sites, one of them to blame, take about log2(n) + 3 trials.

    Args:
      fn: the function; or one that `fuse` returned, whose own choice of sites then counts instead of the options below.
      *args, **kwargs: arrays to run on.
      of: "error": an output or gradient is further from its float64 reference than before and beyond the tolerance; "time": slower,
        by the verdict of a timing.
      passes, implementation: as for `fuse`.
      grad: also gradients of all float arguments; None: unless `fn` is differentiated already, as a train step is, or has
        none. With `of="time"`, time of value and gradient instead of the call.
      samples, budget_s: of each timing.
      progress: False, True (a line) or a function of (task, done, total).
      cancel: called between stages; once it returns True, the causes found so far are returned.
      static_argnums, static_argnames: as in `jax.jit`.

    Returns:
      The result; it prints as sentences, `.causes` has the sites, `.trials` every program tried.

    Raises:
      ArgumentError: `of` is neither "error" nor "time", or shapes where arrays are needed. TraceError: `fn` does not trace, has no
        float64 form, or (with `grad`) cannot be differentiated. SideEffectError: it prints or calls back into Python.
    """
    if of not in _FAULTS:
        raise ArgumentError(f"of: got {of!r}, needed one of {', '.join(map(repr, _FAULTS))}")
    check_effort(samples, budget_s)
    asked = {"passes": passes, "implementation": implementation}
    asked |= {"static_argnums": static_argnums, "static_argnames": static_argnames}
    with watched(progress) as told:
        stages = Stages(told, cancel)
        found, chosen, call = selected_sites(fn, args, kwargs, asked, told)
        tried = _trials(found, call, grad, stages, "trial")
        effort = {"samples": samples, "budget_s": budget_s, "stages": stages}
        return trials.bisect_subsets(tried, found.graph.name, of, list(chosen), **effort)


@own_lines_hidden
def errors_by_site(
    fn: Callable,
    *args: Any,
    passes: lab.Passes = None,
    implementation: str | None = None,
    grad: bool | None = None,
    local: bool = False,
    progress: Progress = False,
    cancel: Cancel | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    **kwargs: Any,
) -> Records[trials.SiteErrors]:
    """Measures how each site, fused alone, changes the errors of outputs and gradients; the rest of the program is left as it is.

    With `local`, the errors are those of the site's own output and of the gradients with respect to its inputs, on the values that
    reach it: only the site runs in float64, so this also works for programs whose float64 version does not fit into memory.

    Arguments and errors are those of `bisect`.

    Returns:
      One record per site, in program order: a tuple that prints one line for each, with the output or gradient that got worst.
    """
    asked = {"passes": passes, "implementation": implementation}
    asked |= {"static_argnums": static_argnums, "static_argnames": static_argnames}
    with watched(progress) as told:
        stages = Stages(told, cancel)
        found, chosen, call = selected_sites(fn, args, kwargs, asked, told)
        tried, arrays = (
            _trials(found, call, grad, stages, "site", len(chosen)),
            jax.tree.leaves((call.args, call.kwargs)),
        )

        wanted = not found.differentiated if grad is None else grad

        def errors(site: str) -> trials.SiteErrors:
            if local:
                return local_errors(found, chosen[site], arrays, wanted, stages.inside(site))
            return trials.SiteErrors(site, tried.errors((site,)))

        return Records(trials.each_site(list(chosen), errors, stages))


@own_lines_hidden
def time_by_site(
    fn: Callable,
    *args: Any,
    passes: lab.Passes = None,
    implementation: str | None = None,
    samples: int = 40,
    budget_s: float = 60.0,
    progress: Progress = False,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    **kwargs: Any,
) -> SiteShares:
    """Measures how much time each site saves: times the forward call with every site fused, with none, and with each left out in
    turn.

    Args: as for `bisect`; `budget_s` is for all of them together.

    Returns:
      A share for each site that runs other code than XLA does anyway, and the remainder that no single site explains; prints as a
      table.

    Raises:
      ArgumentError: every site runs what XLA runs anyway, or shapes where arrays are needed. TraceError: `fn` does not
        trace. SideEffectError: it prints or calls back into Python.
    """
    check_effort(samples, budget_s)
    asked = {"passes": passes, "implementation": implementation}
    asked |= {"static_argnums": static_argnums, "static_argnames": static_argnames}
    with watched(progress) as told:
        found, chosen, call = selected_sites(fn, args, kwargs, asked, told)
        effort = {"samples": samples, "budget_s": budget_s, "progress": told}
        return sites_of(found, *call.args, chosen=list(chosen.values()), **effort, **call.kwargs)


@own_lines_hidden
def time_by_scope(
    fn: Callable,
    *args: Any,
    runs: int = RUNS,
    progress: Progress = False,
    cancel: Cancel | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    **kwargs: Any,
) -> ScopeTimes:
    """Measures the time of each module and named scope, kernel by kernel; all rows add up to a whole run.

    Args:
      fn: the function; one that `fuse` returned is measured before and after.
      *args, **kwargs: arrays to run on.
      runs: of each program under the profiler, after one that is not traced.
      progress: False, True (a line) or a function of (task, done, total).
      cancel: called between stages; once it returns True, the times of the original are returned.
      static_argnums, static_argnames: as in `jax.jit`.

    Returns:
      The tree, which prints as a table; `.save("x.perfetto.json.gz")` writes one run for https://ui.perfetto.dev.

    Raises:
      ArgumentError: shapes where arrays are needed, or no runs. TraceError: `fn` does not trace. SideEffectError: it prints or calls
        back into Python. Stopped: it was cancelled before anything was measured.
    """
    asked = {"static_argnums": static_argnums, "static_argnames": static_argnames}
    with watched(progress) as told:
        stages = Stages(told, cancel)
        if isinstance(fn, lab.Fused):
            found, chosen, call = selected_sites(fn, args, kwargs, {}, told)
            graph, sites = found.graph, [*chosen.values()]
        else:
            stages("tracing")
            found, sites = None, []
            graph, call = lab.trace(fn, *args, **asked, **kwargs), bind_users(fn, args, kwargs, *asked.values())
        before, after = node_times(graph, *call.args, runs=runs, stages=stages, **call.kwargs), None
        with contextlib.suppress(Stopped):
            if found is not None and sites:
                leaves = jax.tree.leaves((call.args, call.kwargs))
                after = fused_node_times(found, sites, leaves, runs, stages)
    return scope_times(graph, before, after, sites)


def selected_sites(
    fn: Callable, args: tuple, kwargs: dict, options: dict[str, Any], progress: Progress
) -> tuple[lab.Findings, dict[str, Candidate], Bound]:
    """(what is found, the sites that are fused by id in program order, the call without its static arguments)."""
    fused = fn if isinstance(fn, lab.Fused) else lab.fuse(fn, **options)
    Stages(progress)("searching")
    found, chosen = fused.selected(*args, **kwargs)
    call = bind_users(fused.original, args, kwargs, **fused.asked)
    return found, {c.id: c for c in sorted(chosen, key=lambda c: min(c.node_ids))}, call


def _trials(
    found: lab.Findings, call: Bound, grad: bool | None, stages: Stages, each: str, total: int = 0
) -> trials.Trials:
    def version(sites: tuple[str, ...]) -> Callable:
        closed = found.rewritten(sites)

        def with_sites(*given: Any, **named: Any) -> Any:
            outs = as_function(closed)(*jax.tree.leaves((given, named)))
            return jax.tree.unflatten(found.graph.out_tree, outs)

        return with_sites

    return trials.Trials(call, version, grad, stages, each, total)
