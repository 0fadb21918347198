"""Times of a program's nodes: the kernels that XLA makes, timed one by one, each divided among its nodes.

All seconds are means over the same runs (`timeline.middle`), and kernels that run at once share the time: the nodes, the kernels of no node
and the gaps add up to the run from its call to its results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from fusionlab.errors import ArgumentError
from fusionlab.fusers import Candidate, Findings
from fusionlab.graph.cost.cost import Costs, cost_of
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.rewriting.rewrite import to_jaxpr
from fusionlab.graph.settings import as_function
from fusionlab.graph.xla.modules import CompiledModule, metadata_of_its_own, read_hlo
from fusionlab.graph.xla.tagging import tagged_graph, tagged_jaxpr
from fusionlab.progress import SILENT, Stages
from fusionlab.showing import Shown, Table
from fusionlab.tracebacks import own_lines_hidden

from .instruments.program import compile_program
from .instruments.timeline import Timeline, middle
from .kernel_times import KernelTimes, traceable, traced

RUNS = 5


@dataclass(frozen=True, repr=False)
class NodeTimes(Shown):
    """Seconds of a program's nodes, and of the rest of a run.

    Attributes:
      seconds: node id -> its share of the kernels it is in: a kernel's time is divided among its nodes by the bytes they move.
      kernels: the kernels, as timed.
      unplaced_s: seconds of kernels that come from no node.
      between_s: seconds between the first kernel and the last in which none ran.
      around_s: seconds before the first kernel and after the last: dispatch, and waiting for the results.
      weights: kernel's HLO instruction -> its nodes, each with the part of the kernel's time that is its own.
    """

    seconds: Mapping[int, float]
    kernels: KernelTimes
    unplaced_s: float
    between_s: float = 0.0
    around_s: float = 0.0
    weights: Mapping[str, Mapping[int, float]] = field(default_factory=dict, repr=False)

    @property
    def whole_s(self) -> float:
        """Seconds of a run, from the call until its results are ready: the sum of all others."""
        return sum(self.seconds.values()) + self.unplaced_s + self.between_s + self.around_s

    @property
    def run(self) -> Timeline:
        """The run whose time is the median.

        Raises:
          ArgumentError: there is no run.
        """
        runs = sorted(self.kernels.timelines, key=lambda run: run.whole_s)
        if not runs:
            raise ArgumentError(
                f"{self.kernels.name}: got no run, needed times from `node_times`, which keeps its runs"
            )
        return runs[len(runs) // 2]

    def nodes_of(self, name: str, hlo: str) -> Mapping[int, float]:
        """The nodes of a kernel, each with its part of the kernel's time; none for a kernel of no node."""
        return self.weights.get(hlo or name, {})

    def __str__(self) -> str:
        placed = sum(self.seconds.values())
        share = placed / (placed + self.unplaced_s or 1.0)
        return (
            f"{self.kernels.name}: {len(self.seconds)} nodes, {share:.1%} of all kernels' time placed\n{self.kernels}"
        )

    def _table(self) -> Table:
        total = sum(self.seconds.values()) or 1.0
        rows = sorted(self.seconds.items(), key=lambda item: -item[1])
        return Table(("node", "time (s)", "share"), tuple((f"n{node}", s, s / total) for node, s in rows))


@own_lines_hidden
def node_times(graph: Graph, *args: Any, runs: int = RUNS, stages: Stages = SILENT, **kwargs: Any) -> NodeTimes:
    """Compiles a program, times its kernels and assigns the times to its nodes.

    Args:
      graph: the program, `fl.trace(fn, *args)`.
      *args, **kwargs: arrays, as it was traced with.
      runs: of the program, traced after one that is not.
      stages: called as each stage begins.

    Raises:
      ArgumentError: the arguments are not those of the graph, or no runs. SideEffectError: it prints or calls back into Python.
    """
    return _timed(tagged_jaxpr(graph), graph, jax.tree.leaves((args, kwargs)), runs, stages, "")


def fused_node_times(
    found: Findings, sites: Sequence[Candidate], leaves: Sequence[Any], runs: int = RUNS, stages: Stages = SILENT
) -> NodeTimes:
    """The same with these sites fused, by the nodes of the original: what replaces a site counts as one of its nodes.

    Args:
      found: the findings that contain the sites.
      sites: those to fuse.
      leaves: the arrays among the arguments, in order.
      runs, stages: as of `node_times`.

    Raises: as `node_times`.
    """
    closed = to_jaxpr(tagged_graph(found.graph), [c.site for c in sites])
    return _timed(closed, found.graph, leaves, runs, stages, ", fused")


def _timed(closed: Any, graph: Graph, leaves: Sequence[Any], runs: int, stages: Stages, which: str) -> NodeTimes:
    if len(leaves) != len(graph.top.inputs):
        raise ArgumentError(f"arguments: got {len(leaves)} arrays, needed the {len(graph.top.inputs)} of {graph!r}")
    if runs < 1:
        raise ArgumentError(f"runs: got {runs}, needed at least 1")
    stages(f"compiling{which}, to time each kernel")
    with metadata_of_its_own():
        program = compile_program(as_function(closed), tuple(leaves), {}, name=graph.name, compiling=traceable())
    stages(f"time of each kernel{which}")
    module = read_hlo(program.hlo, graph)
    return placed(traced(program, runs), module, cost_of(graph), program.started)


def placed(times: KernelTimes, module: CompiledModule, costs: Costs, started: Mapping[str, str]) -> NodeTimes:
    """Times of the kernels of a module, divided among its nodes; `started` as `Program` has it."""
    weights = {kernel.name: _weights(kernel.nodes, costs) for kernel in module.kernels if kernel.nodes}
    weights |= {name: weights[by] for name, by in started.items() if by in weights}
    runs = middle(times.timelines)
    seconds: dict[int, float] = {}
    unplaced = 0.0
    for launch in (launch for run in runs for launch in run.launches):
        mine, share = weights.get(launch.hlo or launch.name, {}), launch.share_s / len(runs)
        for nid, weight in mine.items():
            seconds[nid] = seconds.get(nid, 0.0) + share * weight
        unplaced += 0.0 if mine else share
    gaps = (_mean(run.between_s for run in runs), _mean(run.around_s for run in runs))
    return NodeTimes(seconds, times, unplaced, *gaps, weights)


def _weights(nodes: Sequence[int], costs: Costs) -> dict[int, float]:
    """The part of each node in a kernel, by the bytes that it moves."""
    moved = {i: costs.nodes[i].bytes_moved + 1 for i in nodes}
    return {i: n / sum(moved.values()) for i, n in moved.items()}


def _mean(numbers: Iterable[float]) -> float:
    known = list(numbers)
    return sum(known) / max(len(known), 1)
