"""A site's region as a function of other operands: of values from which its own are computed, or of fewer of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ....graph.matching.region import Region, dead_with
from ....graph.matching.walks import upstream
from ....graph.program.ir import Block, Node, Value


def ancestors(block: Block, values: Iterable[Value], until: Value | None = None) -> list[Node]:
    """The equations of a block that values are made by; not those that `until` is made by."""
    made = upstream(
        block, (v for v in values if v is not until), lambda node: (a for a in node.values if a is not until)
    )
    return list({node.id: node for _, node in made}.values())


def grown(region: Region, leaves: Mapping[str, Value], makers: Iterable[Node]) -> Region:
    """The region as a function of `leaves`, from which the nodes `makers` compute its own leaves: the makers that only it reads belong to
    it, the others to its support.
    """
    inner = {n.id: n for n in region.nodes}
    support = {n.id: n for n in region.support} | {n.id: n for n in makers if n.id not in inner}
    inner |= dead_with(region.block, inner, support, leaves.values())
    return replace(
        region,
        leaves=leaves,
        nodes=tuple(inner[i] for i in sorted(inner)),
        support=tuple(support[i] for i in sorted(support) if i not in inner),
    )


def without(region: Region, dropped: frozenset[str]) -> Region:
    """The region as a function of fewer leaves: constants that are dropped become part of its support."""
    gone = [region.leaves[name] for name in region.leaves.keys() & dropped]
    leaves = {name: v for name, v in region.leaves.items() if name not in dropped}
    # What was made like one of them is made again by itself.
    copies = _copies_of(gone, region)
    kept = [n for n in region.support if n not in copies]
    known = {n.id for n in (*region.nodes, *kept)}
    extra = ancestors(region.block, [*gone, *(n.outputs[0] for n in copies)])
    support = tuple(sorted((*kept, *(n for n in extra if n.id not in known)), key=lambda n: n.id))
    return Region(region.block, region.root, leaves, region.nodes, support, region.known)


def _copies_of(leaves: list[Value], region: Region) -> list[Node]:
    """The support nodes that give one of these leaves for a value that the program makes like it."""
    return [n for n in region.support if n.id < 0 and n.inputs[0] in leaves]
