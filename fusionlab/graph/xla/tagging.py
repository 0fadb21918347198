"""Tags every equation of a program with its node's number, so that compiled code can be mapped to nodes.

The number is written into the equation's name stack, inside the user's own scopes. JAX passes name stacks on to XLA as metadata
(`op_name`), which XLA's passes do not use: the program compiles to the same instructions with and without the numbers. Nothing else
in the traced program changes; its calls stay calls.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from ..jax_compat import child_jaxprs, rebuild, split_closed
from ..primitives import having
from ..program.graph import Graph
from ..program.ir import Block, Node

_TAG = re.compile(r"fusionlab\.n(\d+)(?!\w)")
# What is known to run the jaxprs it owns as part of the program. Others (a Pallas kernel's, a reduction's) have the owner's number.
_ENTERED = having("call", "loop", "branch", "remat", "mesh", "rule")


def tagged_jaxpr(graph: Graph) -> Any:
    """The graph's closed jaxpr, with each equation tagged with the number of its node."""
    return _Tagger(graph).jaxpr(graph.top.jaxpr, ())


def tagged_graph(graph: Graph) -> Graph:
    """The graph on tagged equations, for `rewrite.to_jaxpr`.

    The replacement of a site, or of its backward pass, has the number of the node at whose place it is written: one of the site's.
    """
    return dataclasses.replace(graph, top=_Tagger(graph).block(graph.top))


def tag_in(op_name: str) -> int | None:
    """The number of the innermost tagged node in an `op_name`; None if there is none.

    A region's own machinery (a scan's counter, its slices) has the number of the region's node.
    """
    found = _TAG.findall(op_name)
    return int(found[-1]) if found else None


class _Tagger:
    """Tags equations. Several calls may share a jaxpr, so an equation is identified by the calls around it and itself."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = {(*map(id, n.calls), id(n.eqn)): n for n in graph.nodes()}

    def jaxpr(self, x: Any, calls: tuple[Any, ...]) -> Any:
        jaxpr, consts = split_closed(x)
        eqns = [self.eqn(eqn, calls) for eqn in jaxpr.eqns]
        return rebuild(x, list(jaxpr.constvars), list(jaxpr.invars), list(jaxpr.outvars), eqns, list(consts))

    def eqn(self, eqn: Any, calls: tuple[Any, ...]) -> Any:
        node = self.nodes.get((*map(id, calls), id(eqn)))
        info = eqn.source_info
        if node is not None:
            info = info.replace(name_stack=info.name_stack.extend(f"fusionlab.n{node.id}"))
        return eqn.replace(source_info=info, params=self.params(eqn, (*calls, eqn)))

    def params(self, eqn: Any, calls: tuple[Any, ...]) -> dict[str, Any]:
        params = dict(eqn.params)
        for key, index, child in child_jaxprs(eqn) if eqn.primitive.name in _ENTERED else ():
            new = self.jaxpr(child, calls)
            if index is None:
                params[key] = new
            else:
                items = list(params[key])
                items[index] = new
                params[key] = type(params[key])(items)
        return params

    def block(self, block: Block) -> Block:
        return dataclasses.replace(block, nodes=tuple(map(self.node, block.nodes)))

    def node(self, node: Node) -> Node:
        blocks = tuple(map(self.block, node.blocks))
        return dataclasses.replace(node, eqn=self.eqn(node.eqn, node.calls), blocks=blocks)
