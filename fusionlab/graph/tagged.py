"""Every equation of a program named by its node's number, so that what a compiler made of it tells which nodes it came from.

The number is written into the equation's name stack, beside the user's own scopes. JAX passes name stacks on to XLA as metadata
(`op_name`), which no pass of XLA decides by: the program compiles to the same instructions with the numbers and without.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from .ir import Block, Graph, Node
from .rewrite import Replacement, to_jaxpr

_TAG = re.compile(r"fusionlab\.n(\d+)(?!\w)")


def tagged_jaxpr(graph: Graph, replacements: Iterable[Replacement] = ()) -> Any:
    """`to_jaxpr`, each equation tagged with the number of its node, also inside regions.

    What stands in place of a site, or of its backward pass, has the number of the node at which it is written: one of the site's.
    """
    return to_jaxpr(dataclasses.replace(graph, top=_block(graph.top)), replacements, everywhere=True)


def tag_in(op_name: str) -> int | None:
    """The number of the innermost tagged node that an `op_name` of XLA's names; None where it names none.

    What a region's own machinery does (a scan's counter, its slices) has the number of the region's node.
    """
    found = _TAG.findall(op_name)
    return int(found[-1]) if found else None


def _block(block: Block) -> Block:
    return dataclasses.replace(block, nodes=tuple(map(_node, block.nodes)))


def _node(node: Node) -> Node:
    info = node.eqn.source_info
    eqn = node.eqn.replace(source_info=info.replace(name_stack=info.name_stack.extend(f"fusionlab.n{node.id}")))
    return dataclasses.replace(node, eqn=eqn, blocks=tuple(map(_block, node.blocks)))
