"""The canonical view of every block worth searching, with or without tiles folded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..primitives import having
from ..program.boundary import Fault, guarded
from ..program.graph import Graph
from ..program.ir import Block, Node
from ..program.symbolic import needs_numbers
from .given import Known, known_inputs
from .nodes import FoldedNodes
from .rules import is_jax_rule
from .view import CanonicalView

# Regions a site may stand in. Other nodes with child blocks (sort comparators, scatter updates, Pallas kernels) are not programs
# of the user's own.
SEARCHED = having("loop", "branch", "remat", "mesh", "jit", "rule")

_RULES = having("rule")


def views(
    graph: Graph,
    tiles: Mapping[str, Sequence[FoldedNodes]] | None = None,
    failed: Callable[[Block, Fault], None] = lambda block, fault: None,
) -> Iterator[tuple[CanonicalView, Node | None]]:
    """Each block's view, with the user's custom rule that contains it (None: none). `tiles` are given by the block's path.

    A block that cannot be interpreted is skipped with the blocks inside it, and `failed` is called.
    """
    needs_numbers(graph, "a search for patterns")
    stack: list[tuple[Block, dict[int, Known], Node | None, Any]] = [(graph.top, {}, None, None)]
    while stack:
        block, given, owner, outer = stack.pop()
        view = _view(block, given, outer, (tiles or {}).get(block.path, ()), failed)
        if view is None:
            continue
        yield view, owner
        for node in reversed(block.nodes):
            if node.primitive not in SEARCHED or is_jax_rule(node) or node.id in view.covered:
                continue
            inner = node if node.primitive in _RULES else owner
            known = known_inputs(view, node)
            stack.extend((child, known, inner, (view, node)) for child in reversed(node.blocks))


def _view(
    block: Block,
    known: dict[int, Known],
    outer: Any,
    tiles: Sequence[FoldedNodes],
    failed: Callable[[Block, Fault], None],
) -> CanonicalView | None:
    return guarded(lambda: CanonicalView(block, known, outer, tiles), lambda fault: failed(block, fault))
