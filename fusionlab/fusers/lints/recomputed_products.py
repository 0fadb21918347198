"""Products that the backward pass of a checkpoint computes again.

`jax.checkpoint` keeps what it is given and computes everything else again in the backward pass. With the policy
`dots_with_no_batch_dims_saveable` it also keeps the results of products with weights, which take the most time to compute for each byte;
the numbers are the same. A step whose attention and loss are fused often has the memory for them.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ...graph.backward.numbering import Numbering
from ...graph.cost.cost import quantity
from ...graph.primitives import having
from ...graph.program.crossing import BlockTree
from ...graph.program.graph import Graph
from ...graph.program.ir import Block, Node, Value, values_in
from ...graph.rewriting.rewrite import with_values_kept
from .lint import COPIES, Lint, Program

LEAST_OF_PRODUCTS = (
    0.03  # of the program's time; measured on an H200, keeping them saved 6 to 9 % (benchmarks language_models)
)
_REMAT = having("remat")
_POLICY = "policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable"


class RecomputedProducts:
    """The rule `recomputed_products`."""

    name = "recomputed_products"
    before_fusing = True
    text = f"a checkpoint whose backward pass computes products again that take more than {LEAST_OF_PRODUCTS:.0%} of the fused step"

    def lints(self, program: Program, least: float = LEAST_OF_PRODUCTS) -> Iterator[Lint]:
        """A lint for the checkpoints of each line of the source."""
        lines: dict[Any, list[_Again]] = {}
        for each in _computed_again(program.graph):
            lines.setdefault(each.checkpoint.source, []).append(each)
        for source, found in lines.items():
            share, sentence = _saved(program, found)
            if share >= least:
                name, ids = f"{self.name}@{found[0].checkpoint.scope}", frozenset(each.maker.id for each in found)
                edit = (
                    f"{_POLICY} in jax.checkpoint (flax's nn.remat and nnx.remat), or fl.fuse(..., edits={self.name!r})"
                )
                edited = functools.partial(_kept, program, found)
                yield Lint(name, self.name, sentence, edit, ids, share, source, edited, least=LEAST_OF_PRODUCTS)

    def edited(self, program: Program) -> Any | None:
        """The program with all these results kept; None without one."""
        found = list(_computed_again(program.graph))
        return _kept(program, found) if found else None


@dataclass(frozen=True, eq=False)
class _Again:
    """A product that is computed again in a checkpoint; `before` is the value that its result is."""

    checkpoint: Node
    maker: Node
    before: Value


def _kept(program: Program, found: Iterable[_Again]) -> Any:
    return with_values_kept(program.graph, {each.maker.outputs[0].id: each.before for each in found})


def _saved(program: Program, found: Iterable[_Again]) -> tuple[float, str]:
    """What keeping the results of some products may save of the program's time, and the particulars."""
    costs = [(each.maker.outputs[0].nbytes, program.costs.nodes[each.maker.id]) for each in found]
    trips = [cost.trips or 1 for _, cost in costs]
    kept = [nbytes * times for (nbytes, _), times in zip(costs, trips, strict=True)]
    copied = COPIES * sum(size for size, times in zip(kept, trips, strict=True) if times > 1)
    time = sum(cost.operations for _, cost in costs) / program.flop_per_byte
    share = max((time - copied) / program.at_best, 0.0)
    sentence = (
        f"a checkpoint makes the backward pass compute {sum(trips)} products again; keeping their results takes {quantity(sum(kept))}B of "
        f"memory and saves about {share:.0%} of the {'fused ' if program.fused else ''}program's time by the roofline"
    )
    return share, sentence


def _computed_again(graph: Graph) -> Iterator[_Again]:
    """The products whose results can be passed to where they are computed again."""
    checkpoints = [n for n in graph.nodes() if n.primitive in _REMAT and n.params.get("differentiated")]
    if checkpoints:
        earlier = _Earlier(graph)
        yield from (each for node in checkpoints for each in _in_checkpoint(earlier, node))


def _in_checkpoint(earlier: _Earlier, checkpoint: Node) -> Iterator[_Again]:
    for block in _with_scans(body := checkpoint.blocks[0]):
        makers = {n.outputs[0].id: n for n in block.nodes if _is_product(n)}
        found = {i: before for i, n in makers.items() if (before := earlier.value(body, n.outputs[0])) is not None}
        yield from (_Again(checkpoint, makers[i], found[i]) for i in _needed(block, found))


def _with_scans(body: Block) -> Iterator[Block]:
    """A block, and the bodies of its scans."""
    yield body
    for node in body.nodes:
        if node.primitive == "scan":
            yield from _with_scans(node.blocks[0])


def _is_product(node: Node) -> bool:
    """Whether it is a product that the policy keeps: of matrices, or a convolution."""
    if node.primitive == "dot_general":
        return node.params["dimension_numbers"][1] == ((), ())
    return node.primitive in having("product")


class _Earlier:
    """What was computed before."""

    def __init__(self, graph: Graph) -> None:
        self.numbering, self.tree = Numbering(graph), BlockTree(graph)
        self.products = {n.outputs[0].id for n in graph.nodes() if _is_product(n)}

    def value(self, body: Block, value: Value) -> Value | None:
        """What a product's result in a checkpoint's body is, from where it can be passed there: where it is computed first, or a nearer
        block that is given it; None without one."""
        place, ways, found = self.tree.of_value, self.tree.ways, dict[int, Value]()
        same = self.numbering.holders[self.numbering.of[value.id]]
        for other in same[: same.index(value)]:
            if found and other.id in self.products:
                continue  # computed again itself
            outside = body.path not in self.tree.up(place[other.id])
            if outside and other.aval == value.aval and _is_passed(self.tree, place[other.id], place[value.id]):
                found.setdefault(len(ways(place[other.id], place[value.id])[0]), other)
        return found[min(found)] if found else None


def _is_passed(tree: BlockTree, forward: str, backward: str) -> bool:
    """Whether scans of the same lengths are left and entered, and nothing else but checkpoints."""
    ways = ([tree.owner[path][0] for path in way] for way in tree.ways(forward, backward))
    leave, enter = ([node for node in way if node.primitive not in _REMAT] for way in ways)
    lengths = [[n.params.get("length") for n in way] for way in (leave, enter)]
    return all(node.primitive == "scan" for node in (*leave, *enter)) and lengths[0] == lengths[1]


def _needed(block: Block, found: Collection[int]) -> list[int]:
    """Those of the values found from which the results of a block are computed, though the others are kept."""
    seen = dict[int, None]()
    stack = values_in(block.outputs)
    while stack:
        value = stack.pop()
        if value.id not in seen:
            seen[value.id] = None
            stack += block.producer[value.id].values if value.id in block.producer and value.id not in found else ()
    return [i for i in seen if i in found]
