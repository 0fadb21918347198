"""Scans over layers whose backward pass reads a stack of residuals.

Under `jax.grad`, a scan writes what its backward pass needs into arrays with an axis for its trips. XLA copies each part into its array in
one loop and out of it in the other, where the same layers written out one after the other leave it where it was computed. With
`unroll=` as large as the number of layers both loops are written out and XLA removes the arrays; the numbers are the same, and the
program takes longer to compile.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from ...graph.cost.cost import quantity
from ...graph.cost.traffic import base_of, is_view
from ...graph.jax_compat import scan_counts
from ...graph.program.ir import Block, Node, values_in
from ...graph.program.scopes import in_backward
from ...graph.rewriting.rewrite import with_params
from .lint import COPIES, LEAST, Lint, Program

MOST_TRIPS = 128  # of a scan that it is reasonable to write out


class StackedScans:
    """The rule `stacked_scan`."""

    name = "stacked_scan"
    before_fusing = False
    text = "a scan over layers that stacks what its backward pass reads, where copying it takes more than a tenth of the step"

    def lints(self, program: Program, least: float = LEAST) -> Iterator[Lint]:
        """A lint for each such scan."""
        for block in program.graph.blocks():
            for node in block.nodes:
                if node.primitive == "scan" and 1 < node.params["length"] <= MOST_TRIPS:
                    yield from self._of(program, block, node, least)

    def edited(self, program: Program) -> Any | None:
        """The program with all these scans, and those that run back, written out; None without one."""
        nodes = program.graph.node_by_id
        unrolled = {
            i: {"unroll": nodes[i].params["length"]} for lint in self.lints(program, 0.0) for i in lint.node_ids
        }
        return with_params(program.graph, unrolled) if unrolled else None

    def _of(self, program: Program, block: Block, scan: Node, least: float) -> Iterator[Lint]:
        backward, stacked = _read_backward(block, scan)
        length = int(scan.params["length"])
        if not stacked or scan.params["unroll"] == length:
            return
        copied = COPIES * stacked * _runs(program, scan)
        share = copied / (program.at_best + copied)
        if share <= least:
            return
        nodes = [scan, *backward]
        sentence = (
            f"the scan of {length} trips stacks {quantity(stacked)}B that its backward pass reads; copying it in and out takes about "
            f"{share:.0%} of the program's time by the roofline"
        )
        edit = f"unroll={length} where the scan is called (jax.lax.scan, flax's nn.scan and nnx.scan), or fl.fuse(..., edits={self.name!r})"
        edited = functools.partial(with_params, program.graph, {n.id: {"unroll": length} for n in nodes})
        ids = frozenset(n.id for n in nodes)
        yield Lint(f"{self.name}@{scan.scope}", self.name, sentence, edit, ids, share, scan.source, edited)


def _read_backward(block: Block, scan: Node) -> tuple[list[Node], int]:
    """The scans of the backward pass that read what a scan stacks and nobody else reads, and the bytes of that."""
    stacks = {v.id: v for v in scan.outputs[scan_counts(scan.params)[1] :]}
    found: dict[int, Node] = {}
    read: set[int] = set()
    for other in filter(functools.partial(_runs_back, scan), block.nodes):
        made = {base_of(block, x).id for x in values_in(other.inputs[sum(scan_counts(other.params)) :])} & stacks.keys()
        if made:
            read |= made
            found[other.id] = other
    alone = [stacks[i] for i in read if i not in block.returned and _only(block, i, found)]
    return list(found.values()), sum(v.nbytes for v in alone)


def _runs_back(scan: Node, other: Node) -> bool:
    return other.primitive == "scan" and other.params["reverse"] != scan.params["reverse"] and in_backward(other)


def _only(block: Block, value: int, readers: dict[int, Node]) -> bool:
    return all(user.id in readers or is_view(user) for user in block.users.get(value, ()))


def _runs(program: Program, node: Node) -> int:
    """How often a node runs."""
    return program.costs.nodes[node.id].trips or 1
