"""How the sentences of rejections name nodes: by their results, their primitive and the user's line."""

from __future__ import annotations

from ...graph.matching.region import Escape
from ...graph.program.ir import Node

_RESULTS = 3  # results of one node that a sentence names


def anchor_text(node: Node) -> str:
    """ "%7:f32[8,4] = add (model.py:41)": how a sentence names a node; of many results the first ones."""
    more = len(node.outputs) - _RESULTS
    outs = ", ".join(map(repr, node.outputs[:_RESULTS])) + (f" and {more} more" if more > 0 else "")
    return f"{outs} = {node.primitive}" + (f" ({node.source})" if node.source else "")


def escape_text(escape: Escape) -> str:
    """ "%7 = add (model.py:41) is also read by %19 = mul (model.py:44)"."""
    reader = "is also returned" if escape.user is None else f"is also read by {anchor_text(escape.user)}"
    return f"{anchor_text(escape.node)} {reader}"
