"""Puts the explorer together: the search, the rewriter and the evidence behind `fl.explore`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .device import Device
from .errors import ArgumentError
from .evidence.attribution import SiteShares, sites_of
from .evidence.peaks import measure_peaks
from .evidence.timing import check_effort
from .fusers import Findings as PlainFindings
from .fusers import Strategy, registry
from .graph.trace import bind_users
from .lab import Comparison, Passes, compare, find, fuse

if TYPE_CHECKING:
    from .viz.setting import Setting


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

    def find(self, strategy: Strategy | None) -> PlainFindings:
        return find(self.graph, passes=strategy, **self.search)

    def after(self, setting: Setting, found: PlainFindings) -> Any:
        return found.apply(sorted(setting.enabled))

    def measure(self, setting: Setting, progress: Any = False, cancel: Any = None) -> Comparison:
        fused = fuse(self.fn, passes=setting.strategy, only=sorted(setting.enabled), **self.fusing)
        effort = {
            "progress": progress,
            "cancel": cancel,
            "budget_s": self.budget_s / 4,
        }  # forward, and with its gradient
        return compare(self.fn, fused, *self.args, **effort, **self.static, **self.kwargs)

    def shares(
        self, setting: Setting, found: PlainFindings, progress: Any = False, cancel: Any = None
    ) -> SiteShares | None:
        from .viz.share_plots import MOST_SHARES

        chosen = found.select(sorted(setting.enabled))
        toggled = [c for c in chosen if not c.same_code]
        if not 0 < len(toggled) <= MOST_SHARES or (cancel is not None and cancel()):
            return None
        call = bind_users(self.fn, self.args, dict(self.kwargs), *(self.static.get(k, ()) for k in _STATIC))
        effort = {"progress": progress, "cancel": cancel, "budget_s": self.budget_s / 2}
        return sites_of(found, *call.args, chosen=chosen, **effort, **call.kwargs)

    def script(self, setting: Setting, found: PlainFindings) -> str:
        from .viz.script import script

        return script(self.fn, setting, len(found.candidates), self.fusing, tuple(self.kwargs))


_STATIC = ("static_argnums", "static_argnames")


def make_explorer(
    fn: Callable, args: tuple, kwargs: dict, *, passes: Passes, measure: bool, budget_s: float, **options: Any
) -> Any:
    """An `Explorer` widget over `fn` at these arguments; see `fusionlab.explore`."""
    from .viz.widget import Explorer

    check_effort(2, budget_s)
    if not isinstance(measure, bool):
        raise ArgumentError(f"measure: got {measure!r:.80}, needed True or False")
    static = {k: options[k] for k in _STATIC if options[k] != ()}
    search = {k: options[k] for k in ("device", "implementation")}
    found = find(fn, *args, passes=passes, **search, **static, **kwargs)
    live = _Live(fn, args, kwargs, found.graph, search, static, budget_s)
    explorer = Explorer(
        found.graph,
        found,
        measure=live.measure,
        shares=live.shares,
        rates=measure_peaks,
        # On a CPU it takes as long as all the rest, which few ask for there.
        rates_at_once=Device.current().platform != "cpu",
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
    """What `passes=` means, as a Strategy; None for all by default."""
    if passes is None or isinstance(passes, Strategy):
        return passes
    return Strategy(**dict.fromkeys([passes] if isinstance(passes, str) else passes, True))
