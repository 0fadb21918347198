"""Time of each module and named scope of a program, as a tree whose rows add up to the whole run; before and after fusing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fusionlab.fusers import Candidate
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.scopes import in_backward, place_of
from fusionlab.showing import Shown, Table, plural

from ..instruments.timing import seconds
from ..node_times import NodeTimes
from .trace_events import packed_trace

NO_SCOPE, NO_NODE = "(no scope)", "(kernels of no node)"
BETWEEN, AROUND = "(between kernels)", "(before and after the kernels)"
TRACE = ".perfetto.json.gz"
_LEAST = 0.005  # of the whole: a row of less is not printed, but counted
_Times = dict[str, float]


@dataclass(frozen=True, repr=False)
class ScopeTime(Shown):
    """One row: a module or named scope, or a part of the run that belongs to none.

    Attributes:
      scope: "Net/Block/attn"; "(no scope)"; "(kernels of no node)"; "(between kernels)"; "(before and after the kernels)".
      total_s: its seconds with all scopes inside it.
      self_s: its seconds without these; `self_s` of all rows add up to the run.
      backward_s: of `total_s`, what belongs to a backward pass.
      fused_total_s, fused_self_s: the same with the sites fused; None where that was not measured.
    """

    scope: str
    total_s: float
    self_s: float
    backward_s: float = 0.0
    fused_total_s: float | None = None
    fused_self_s: float | None = None

    @property
    def depth(self) -> int:
        """How many scopes are around it."""
        return self.scope.count("/") if not self.scope.startswith("(") else 0

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.scope.rpartition("/")[2] if not self.scope.startswith("(") else self.scope

    def __str__(self) -> str:
        fused = f" -> {seconds(self.fused_total_s)}" if self.fused_total_s is not None else ""
        return f"{self.scope}: {seconds(self.total_s)}{fused}, of which {seconds(self.self_s)} its own"


@dataclass(frozen=True, repr=False)
class ScopeTimes(Shown):
    """Seconds of every module and named scope.

    Where a program names no scopes, calls take their place: the user's functions, "loss()", and the modules of libraries, "Linear".
    A kernel that several scopes share is divided among them by the bytes that their nodes move. A loop's time is that of all its steps.

    Attributes:
      name: of the function.
      rows: the tree in order, the most expensive first on each level, and at the end what belongs to no scope.
      before, after: the times of the nodes from which they come; `after` is None where only one program was measured.
      graph: the program whose nodes these are.
      sites: node id -> the site that is fused there.
    """

    _listed = "rows"

    name: str
    rows: tuple[ScopeTime, ...]
    before: NodeTimes
    after: NodeTimes | None = None
    graph: Graph | None = field(default=None, repr=False)
    sites: Mapping[int, str] = field(default_factory=dict, repr=False)

    @property
    def whole_s(self) -> float:
        """Seconds of a run, from the call until its results are ready."""
        return self.before.whole_s

    @property
    def fused_whole_s(self) -> float | None:
        """The same with the sites fused; None where that was not measured."""
        return self.after.whole_s if self.after is not None else None

    @property
    def has_backward(self) -> bool:
        """Whether a part of the program is a backward pass."""
        return any(row.backward_s for row in self.rows)

    def __str__(self) -> str:
        shown = [row for row in self.rows if _weighs(row, self.whole_s)]
        backward = ["backward"] if self.has_backward else []
        heads = ["total", *(["fused"] if self.after else []), "self", *backward, "share", "scope"]
        cells = [[*self._cells(row), "  " * row.depth + row.name] for row in shown]
        cells.append([*self._cells(self._sum()), "whole run"])
        widths = [max(len(line[k]) for line in [heads, *cells]) for k in range(len(heads) - 1)]
        table = [
            "  " + "  ".join([*(c.rjust(w) for c, w in zip(line, widths, strict=False)), line[-1]])
            for line in [heads, *cells]
        ]
        left = len(self.rows) - len(shown)
        more = [f"  {left} more {plural('row', left)} of less than {_LEAST:.1%} each"] if left else []
        return "\n".join([self._head(), *table, *more, f"  {self.how}"])

    def _head(self) -> str:
        after = f" -> {seconds(self.after.whole_s)}" if self.after is not None else ""
        scopes = sum(not row.scope.startswith("(") for row in self.rows)
        return f"{self.name}: {seconds(self.whole_s)}{after} a run, in {scopes} {plural('scope', scopes)}"

    @property
    def how(self) -> str:
        """How it was measured, and where."""
        k = self.before.kernels
        return f"mean of the middle of {k.runs} runs under the profiler; {k.source}, on {k.hardware}"

    def _sum(self) -> ScopeTime:
        backward = sum(row.backward_s for row in self.rows if not row.depth)
        return ScopeTime("whole run", self.whole_s, sum(r.self_s for r in self.rows), backward, self.fused_whole_s)

    def _cells(self, row: ScopeTime) -> list[str]:
        fused = [] if self.after is None else [seconds(row.fused_total_s or 0.0)]
        share = f"{row.total_s / (self.whole_s or 1.0):.1%}"
        backward = [seconds(row.backward_s)] if self.has_backward else []
        return [seconds(row.total_s), *fused, seconds(row.self_s), *backward, share]

    def _sentence(self) -> str:
        return self._head()

    def _table(self) -> Table:
        whole = self.whole_s or 1.0
        fused = ("with sites fused (s)",) if self.after is not None else ()
        heads = ("scope", "total (s)", *fused, "self (s)", "backward (s)", "share")
        rows = (
            (r.scope, r.total_s, *([r.fused_total_s] if fused else []), r.self_s, r.backward_s, r.total_s / whole)
            for r in self.rows
        )
        return Table(heads, tuple(rows))

    def _makers(self) -> dict[str, Callable[[], str | bytes]]:
        return super()._makers() | {TRACE: self.trace}

    def trace(self) -> bytes:
        """One run as a gzipped trace in the Trace Event Format, for https://ui.perfetto.dev; before and after are two processes."""
        versions = {"before" if self.after else self.name: self.before}
        versions |= {"after": self.after} if self.after is not None else {}
        return packed_trace(self.name, versions, self.graph, self.sites)

    def to_dataframe(self) -> Any:
        """A pandas frame of `rows`.

        Raises:
          MissingDependencyError: pandas is not installed.
        """
        return self._table().dataframe()


def scope_times(
    graph: Graph, before: NodeTimes, after: NodeTimes | None = None, fused: Iterable[Candidate] = ()
) -> ScopeTimes:
    """The tree of a program's scopes.

    Args:
      graph: the program.
      before: times of its nodes.
      after: times of the same nodes with the sites `fused`, or None.
      fused: the sites.
    """
    places = {node.id: place_of(node) or NO_SCOPE for node in graph.nodes()}
    backward = {i for i in before.seconds if in_backward(graph.node_by_id[i])}
    own, later = _by_place(before, places), _by_place(after, places) if after is not None else None
    total, back = _totals(own), _totals(_by_place(before, places, backward))
    fused_total = _totals(later) if later is not None else None
    rows = [
        ScopeTime(
            scope,
            total.get(scope, 0.0),
            own.get(scope, 0.0),
            back.get(scope, 0.0),
            None if fused_total is None else fused_total.get(scope, 0.0),
            None if later is None else later.get(scope, 0.0),
        )
        for scope in _in_order({**(fused_total or {}), **total})
    ]
    sites = {nid: c.id for c in fused for nid in c.all_node_ids}
    name = before.kernels.name
    return ScopeTimes(name, (*rows, *_rest(before, after)), before, after, graph, sites)


def _rest(before: NodeTimes, after: NodeTimes | None) -> Iterable[ScopeTime]:
    """What belongs to no scope."""
    for scope, part in ((NO_NODE, "unplaced_s"), (BETWEEN, "between_s"), (AROUND, "around_s")):
        own, fused = getattr(before, part), getattr(after, part, None)
        yield ScopeTime(scope, own, own, 0.0, fused, fused)


def _by_place(times: NodeTimes, places: Mapping[int, str], among: Iterable[int] | None = None) -> _Times:
    found: _Times = {}
    for i in times.seconds if among is None else among:
        found[places[i]] = found.get(places[i], 0.0) + times.seconds[i]
    return found


def _totals(own: _Times) -> _Times:
    """Each scope and each scope around one, with the sum of all in it."""
    found: _Times = {}
    for scope, s in own.items():
        parts = scope.split("/")
        for k in range(1, len(parts) + 1):
            path = "/".join(parts[:k])
            found[path] = found.get(path, 0.0) + s
    return found


def _in_order(total: _Times) -> list[str]:
    """Depth first, the most expensive first on each level; what is in no scope last."""

    def key(scope: str) -> list[tuple[bool, float, str]]:
        parts = scope.split("/")
        paths = ["/".join(parts[: k + 1]) for k in range(len(parts))]
        return [(path == NO_SCOPE, -total[path], path) for path in paths]

    return sorted(total, key=key)


def _weighs(row: ScopeTime, whole: float) -> bool:
    return max(row.total_s, row.fused_total_s or 0.0) >= _LEAST * whole
