"""Examples by name: what a structure, or a way to write one thing, is called in a report."""

from __future__ import annotations

from dataclasses import dataclass

from ...graph.matching.pattern import Example


@dataclass(frozen=True)
class Form:
    """A structure's example, and what it is called in a report."""

    kind: str
    text: str
    example: Example
