"""Times of a program's nodes: the kernels that XLA makes, timed one by one, each divided among its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from fusionlab.errors import ArgumentError
from fusionlab.graph.cost.cost import Costs, cost_of
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.settings import as_function
from fusionlab.graph.xla.modules import CompiledModule, metadata_of_its_own, read_hlo
from fusionlab.graph.xla.tagging import tagged_jaxpr
from fusionlab.progress import SILENT, Stages
from fusionlab.showing import Shown, Table
from fusionlab.tracebacks import own_lines_hidden

from .instruments.program import compile_program
from .kernel_times import KernelTimes, traceable, traced

RUNS = 5


@dataclass(frozen=True, repr=False)
class NodeTimes(Shown):
    """Seconds of a program's nodes.

    Attributes:
      seconds: node id -> its share of the kernels it is in: a kernel's time is divided among its nodes by the bytes they move.
      kernels: the kernels, as timed.
      unplaced_s: seconds of kernels that come from no node.
    """

    seconds: Mapping[int, float]
    kernels: KernelTimes
    unplaced_s: float

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
    leaves = jax.tree.leaves((args, kwargs))
    if len(leaves) != len(graph.top.inputs):
        raise ArgumentError(f"arguments: got {len(leaves)} arrays, needed the {len(graph.top.inputs)} of {graph!r}")
    if runs < 1:
        raise ArgumentError(f"runs: got {runs}, needed at least 1")
    stages("compiling, to time each kernel")
    with metadata_of_its_own():
        program = compile_program(
            as_function(tagged_jaxpr(graph)), tuple(leaves), {}, name=graph.name, compiling=traceable()
        )
    stages("time of each kernel")
    module = read_hlo(program.hlo, graph)
    return placed(traced(program, runs), module, cost_of(graph))


def placed(times: KernelTimes, module: CompiledModule, costs: Costs) -> NodeTimes:
    """Times of the kernels of a module, divided among its nodes."""
    nodes = {kernel.name: kernel.nodes for kernel in module.kernels}
    seconds: dict[int, float] = {}
    unplaced = 0.0
    for kernel in times.kernels:
        mine = nodes.get(kernel.hlo or kernel.name, ())
        weights = [costs.nodes[i].bytes_moved + 1 for i in mine]
        for nid, weight in zip(mine, weights, strict=True):
            seconds[nid] = seconds.get(nid, 0.0) + kernel.median_s * weight / sum(weights)
        unplaced += 0.0 if mine else kernel.median_s
    return NodeTimes(seconds, times, unplaced)
