"""The verb `explore`, which assembles the explorer from the search, the rewriter and the evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from ..device import Device
from ..errors import ArgumentError
from ..evidence.attribution import SiteShares, sites_of
from ..evidence.bisection import Bisection
from ..evidence.instruments.peaks import measure_peaks
from ..evidence.instruments.timing import check_effort
from ..evidence.node_times import NodeTimes, fused_node_times, node_times
from ..fusers import Findings as PlainFindings
from ..fusers import Strategy, registry
from ..graph.calls.binding import Bound
from ..graph.program.trace import bind_users
from ..progress import Progress, Stages, watched
from ..tracebacks import own_lines_hidden
from .comparison import Comparison, compare
from .lab import Passes, find, fuse, not_swallowed

if TYPE_CHECKING:
    from ..viz.explorer.widget import Explorer
    from ..viz.html.blame import Fault
    from ..viz.model.setting import Setting


@dataclass(frozen=True, eq=False)
class _Live:
    """A function with its arguments: what an explorer needs to search again, to fuse, to measure and to write it down.

    Attributes:
      graph: the function, traced.
      search: device and implementation, as for `find`.
      static: static arguments, as for `jax.jit`.
      budget_s: seconds of one measurement, compiling apart.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    graph: Any
    search: Mapping[str, Any]
    static: Mapping[str, Any]
    budget_s: float

    @property
    def fusing(self) -> dict[str, Any]:
        """Options of `fuse`, passes and sites apart."""
        named = self.search.get("implementation")
        return ({} if named is None else {"implementation": named}) | dict(self.static)

    def find(self, strategy: Strategy | None, progress: Progress = False) -> PlainFindings:
        return find(self.graph, passes=strategy, progress=progress, **self.search)

    def after(self, setting: Setting, found: PlainFindings) -> Any:
        return found.apply(sorted(setting.enabled))

    def measure(self, setting: Setting, progress: Any = False, cancel: Any = None) -> Comparison:
        fused = fuse(self.fn, passes=setting.strategy, only=sorted(setting.enabled), **self.fusing)
        # Forward, and with its gradient.
        effort = {"progress": progress, "cancel": cancel, "budget_s": self.budget_s / 4}
        return compare(self.fn, fused, *self.args, **effort, **self.static, **self.kwargs)

    def shares(
        self, setting: Setting, found: PlainFindings, progress: Any = False, cancel: Any = None
    ) -> SiteShares | None:
        from ..viz.html.shares import MOST_SHARES

        chosen = found.select(sorted(setting.enabled))
        toggled = [c for c in chosen if not c.same_code]
        if not 0 < len(toggled) <= MOST_SHARES or (cancel is not None and cancel()):
            return None
        call = self.call
        effort = {"progress": progress, "cancel": cancel, "budget_s": self.budget_s / 2}
        return sites_of(found, *call.args, chosen=chosen, **effort, **call.kwargs)

    @property
    def call(self) -> Bound:
        """The function of its arrays alone."""
        return bind_users(self.fn, self.args, dict(self.kwargs), *(self.static.get(k, ()) for k in _STATIC))

    def times(self, progress: Any = False) -> NodeTimes:
        call = self.call
        return node_times(self.graph, *call.args, stages=Stages(progress), **call.kwargs)

    def scopes(self, setting: Setting, found: PlainFindings, progress: Any = False) -> NodeTimes:
        call = self.call
        leaves = jax.tree.leaves((call.args, call.kwargs))
        return fused_node_times(found, found.select(sorted(setting.enabled)), leaves, stages=Stages(progress))

    def rates(self, progress: Any = False) -> Device:
        return measure_peaks(progress=progress)

    def which(self, setting: Setting, fault: Fault, progress: Any = False, cancel: Any = None) -> Bisection:
        from .by_site import bisect

        fused = fuse(self.fn, passes=setting.strategy, only=sorted(setting.enabled), **self.fusing)
        effort = {"progress": progress, "cancel": cancel, "budget_s": self.budget_s / 4}
        return bisect(fused, *self.args, of=fault.of, grad=fault.grad, **effort, **self.kwargs)

    def tune(self, setting: Setting, progress: Any = False, cancel: Any = None) -> Any:
        from .tuning import tune

        return tune(self.fn, *self.args, passes=setting.strategy, progress=progress, **self.static, **self.kwargs)

    def script(self, setting: Setting, found: PlainFindings) -> str:
        from ..viz.explorer.script import script

        return script(self.fn, setting, len(found.candidates), self.fusing, tuple(self.kwargs))


_STATIC = ("static_argnums", "static_argnames")


@own_lines_hidden
def explore(
    fn: Callable,
    *args: Any,
    passes: Passes = None,
    device: Device | str | None = None,
    implementation: str | None = None,
    measure: bool = False,
    budget_s: float = 20.0,
    progress: Progress | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    **kwargs: Any,
) -> Explorer:
    """Opens the explorer: a widget to switch passes, options and sites, and to see the graph, times and errors. It measures only on
    request.

    Args:
      fn: the function, as for `find`.
      *args, **kwargs: its arguments; arrays if anything is to be measured.
      passes, device, implementation: as for `find`.
      measure: start measuring at once, in the background, as a press of Measure does.
      budget_s: seconds of timing in one measurement; compiling, and errors against float64, come on top.
      progress: of tracing and searching, as for `find`; None shows a line in a notebook's cell and in a terminal, and nothing elsewhere.
      static_argnums, static_argnames: as in `jax.jit`.

    Returns:
      A `fusionlab.viz.explorer.widget.Explorer`. Everything that can be clicked can be called: `lab.toggles["gemm_epilogue"] = False`,
      `lab.select("%143")`, `lab.measure()`, `lab.undo()`, `lab.code()`, `lab.save("x.html")`.

    Raises:
      As `find`; ArgumentError also for a budget that is not a number of seconds above 0.
    """
    options = {"passes": passes, "device": device, "implementation": implementation}
    not_swallowed("explore", fn, options | {"measure": measure or None, "progress": progress})
    options |= {"static_argnums": static_argnums, "static_argnames": static_argnames, "progress": progress}
    return _explorer(fn, args, kwargs, measure=measure, budget_s=budget_s, **options)


def _explorer(
    fn: Callable, args: tuple, kwargs: dict, *, passes: Passes, measure: bool, budget_s: float, **options: Any
) -> Any:
    from ..viz.explorer.widget import Explorer

    check_effort(2, budget_s)
    if not isinstance(measure, bool):
        raise ArgumentError(f"measure: got {measure!r:.80}, needed True or False")
    static = {k: options[k] for k in _STATIC if options[k] != ()}
    search = {k: options[k] for k in ("device", "implementation")}
    with watched(options["progress"]) as told:
        found = find(fn, *args, passes=passes, **search, **static, progress=told, **kwargs)
        live = _Live(fn, args, kwargs, found.graph, search, static, budget_s)
        Stages(told)("drawing")
        explorer = Explorer(
            found.graph,
            found,
            measure=live.measure,
            shares=live.shares,
            times=live.times,
            scopes=live.scopes,
            rates=live.rates,
            # On a CPU it takes as long as all the rest, which few ask for there.
            rates_at_once=Device.current().platform != "cpu",
            which=live.which,
            tune=live.tune,
            after=live.after,
            find=live.find,
            script=live.script,
            strategy=_strategy(passes),
            formulas={p.name: p.formula for p in registry().values()},
        )
    if measure:
        explorer.start()
    return explorer


def _strategy(passes: Passes) -> Strategy | None:
    """The argument `passes=` as a Strategy; None for all passes with their defaults."""
    if passes is None or isinstance(passes, Strategy):
        return passes
    return Strategy(**dict.fromkeys([passes] if isinstance(passes, str) else passes, True))
