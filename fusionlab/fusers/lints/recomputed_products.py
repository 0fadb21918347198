"""Products that the backward pass of a checkpoint computes again.

`jax.checkpoint` keeps what it is given and computes everything else again in the backward pass. With the policy
`dots_with_no_batch_dims_saveable` it also keeps the results of products with weights, which take the most time to compute for each byte;
the numbers are the same. A step whose attention and loss are fused often has the memory for them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from ...graph.backward.numbering import Numbering
from ...graph.cost.cost import quantity
from ...graph.primitives import having
from ...graph.program.crossing import BlockTree
from ...graph.program.graph import Graph
from ...graph.program.ir import Block, Node, Value, values_in
from ...graph.rewriting.rewrite import with_values_kept
from .lint import COPIES, LEAST, Lint, Program

_REMAT = having("remat")
_POLICY = "policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable"


class RecomputedProducts:
    """The rule `recomputed_products`."""

    name = "recomputed_products"
    text = "a checkpoint whose backward pass computes products again that take more than a tenth of the step"

    def lints(self, program: Program, least: float = LEAST) -> Iterator[Lint]:
        """A lint for the checkpoints of each line of the source."""
        graph = program.graph
        lines: dict[Any, list[tuple[Node, dict[int, Value]]]] = {}
        for node, before in _computed_again(graph):
            lines.setdefault(node.source, []).append((node, before))
        for found in lines.values():
            node, before = found[0][0], {again: first for _, each in found for again, first in each.items()}
            makers = [c.blocks[0].producer[again] for c, each in found for again in each]
            share, sentence = self._of(program, makers)
            if share >= least:
                edit = (
                    f"{_POLICY} in jax.checkpoint (flax's nn.remat and nnx.remat), or fl.fuse(..., edits={self.name!r})"
                )
                edited = functools.partial(with_values_kept, graph, before)
                ids = frozenset(n.id for n in makers)
                yield Lint(f"{self.name}@{node.scope}", self.name, sentence, edit, ids, share, node.source, edited)

    def _of(self, program: Program, makers: list[Node]) -> tuple[float, str]:
        """What keeping the results of some products may save of the program's time, and the particulars."""
        costs = [program.costs.nodes[n.id] for n in makers]
        trips = [cost.trips or 1 for cost in costs]
        kept = [times * n.outputs[0].nbytes for times, n in zip(trips, makers, strict=True)]
        copied = COPIES * sum(size for size, times in zip(kept, trips, strict=True) if times > 1)
        time = sum(cost.operations for cost in costs) / program.flop_per_byte
        share = max((time - copied) / program.at_best, 0.0)
        sentence = (
            f"a checkpoint makes the backward pass compute {sum(trips)} products again; keeping their results takes "
            f"{quantity(sum(kept))}B of memory and saves about {share:.0%} of the program's time by the roofline"
        )
        return share, sentence


def _computed_again(graph: Graph) -> Iterator[tuple[Node, dict[int, Value]]]:
    """(checkpoint in a backward pass, the results of its products -> the values of the forward pass that they are)."""
    checkpoints = [n for n in graph.nodes() if n.primitive in _REMAT and n.params.get("differentiated")]
    if not checkpoints:
        return
    numbering, tree = Numbering(graph), BlockTree(graph)
    for node in checkpoints:
        body = node.blocks[0]
        results = [n.outputs[0] for n in body.nodes if _is_product(n)]
        found = {v.id: _first(numbering, tree, body, v) for v in results}
        if before := _needed(body, {again: first for again, first in found.items() if first is not None}):
            yield node, before


def _is_product(node: Node) -> bool:
    """Whether it is a product that the policy keeps: of matrices, or a convolution."""
    if node.primitive == "dot_general":
        return node.params["dimension_numbers"][1] == ((), ())
    return node.primitive in having("product")


def _first(numbering: Numbering, tree: BlockTree, body: Block, value: Value) -> Value | None:
    """The value of another block that a value of a checkpoint's body is, and that can be passed there; None without one."""
    for other in numbering.holders[numbering.of[value.id]]:
        if other is value:
            return None
        if other.aval == value.aval and _is_passed(tree, tree.of_value[other.id], body.path):
            return other
    return None


def _is_passed(tree: BlockTree, forward: str, backward: str) -> bool:
    """Whether scans of the same lengths, and no other loops, are left and entered."""
    leave, enter = ([tree.owner[path][0] for path in way] for way in tree.ways(forward, backward))
    enter = [node for node in enter if node.primitive not in _REMAT]
    scans = all(node.primitive == "scan" for node in (*leave, *enter)) and forward != backward
    return scans and [n.params["length"] for n in leave] == [n.params["length"] for n in enter]


def _needed(body: Block, found: dict[int, Value]) -> dict[int, Value]:
    """Those of the values found from which the results of a body are computed, though the others are kept."""
    needed, seen = dict[int, Value](), set[int]()
    stack = values_in(body.outputs)
    while stack:
        value = stack.pop()
        if value.id in seen:
            continue
        seen.add(value.id)
        if value.id in found:
            needed[value.id] = found[value.id]
        elif value.id in body.producer:
            stack += body.producer[value.id].values
    return needed
