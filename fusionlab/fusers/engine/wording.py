"""How findings are written: nodes in sentences by their results, primitive and source line; sites as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...graph.matching.region import Escape
from ...graph.program.ir import Node, Value

_RESULTS = 3  # results of one node that a sentence names

# Keys that are not the attribute's name.
_KEYS = {"pass_name": "pass", "node_ids": "nodes", "site_ids": "site", "is_fused": "fused"}


def anchor_text(node: Node) -> str:
    """ "%7:f32[8,4] = add (model.py:41)": how a sentence names a node, with only the first of many results."""
    more = len(node.outputs) - _RESULTS
    outs = ", ".join(map(repr, node.outputs[:_RESULTS])) + (f" and {more} more" if more > 0 else "")
    return f"{outs} = {node.primitive}" + (f" ({node.source})" if node.source else "")


def escape_text(escape: Escape) -> str:
    """ "%7 = add (model.py:41) is also read by %19 = mul (model.py:44)"."""
    reader = "is also returned" if escape.user is None else f"is also read by {anchor_text(escape.user)}"
    return f"{anchor_text(escape.node)} {reader}"


def plain(item: Any, attributes: str) -> dict[str, Any]:
    """Some attributes of a site, a pair or a structure as data for JSON: sets in order, values by name, lines as text."""
    return {_KEYS.get(name, name): _plain_value(getattr(item, name)) for name in attributes.split()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return [v if isinstance(v, str | int) else dataclasses.asdict(v) for v in value]
    if isinstance(value, Mapping):
        return {key: _text(v) for key, v in value.items()}
    return None if value is None else _text(value)


def _text(value: Any) -> Any:
    """A number or a text unchanged, a value by its name, anything else as text."""
    if isinstance(value, int | float | str | bool):
        return value
    return value.name if isinstance(value, Value) else str(value)
