"""A picture as plain data: what can be written as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from .card import Overview


def plain(overview: Overview) -> dict[str, Any]:
    """The lanes, rows, cards and edges of a picture as dicts, lists, strings and numbers, under the names of `card.py`."""
    return _plain(overview)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value
