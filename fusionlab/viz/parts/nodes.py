"""The kinds of single nodes: a product, other work, or only a view, a cast or a mask of another node's result."""

from __future__ import annotations

from fusionlab.graph.cost.traffic import is_region
from fusionlab.graph.primitives import having
from fusionlab.graph.program.ir import Node

from ..palette import pass_of_op

# Only move, convert or make up data.
_LAYOUT = having("layout", "cast", "copy", "variance", "precision") | {
    "iota",
    "slice",
    "rev",
    "stop_gradient",
    "name",
}
PRODUCTS = having("product", "ragged product")
ALONE = PRODUCTS | {"sort", "top_k", "fft"}  # each is a thing of its own
_COMPARISONS = having("order") | {"eq", "and"}  # what masks are made of


def is_light(node: Node) -> bool:
    """Whether a node only moves, converts or makes up data: it is shown with its reader."""
    return not is_region(node) and (node.primitive in _LAYOUT or node.primitive in _COMPARISONS)


def fused_name(node: Node) -> str:
    """ "multi_transformer attention": what a fused op is, in a program whose sites are fused already; "" for any other node."""
    if pass_of_op(node.primitive) is None:
        return ""
    part = node.params.get("part")
    return f"{node.primitive} {str(part).replace('_', '-')}" if part else node.primitive


def is_recomputed(node: Node) -> bool:
    """Whether the backward pass computes here again what the forward pass did not keep."""
    return any("rematted_computation" in str(e.source_info.name_stack) for e in (*node.calls, node.eqn))
