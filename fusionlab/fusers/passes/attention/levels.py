"""Walks in the canonical view from nodes to their operands, level by level."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ....graph.canonical.view import CanonicalView


def below(view: CanonicalView, level: Iterable[int], through: frozenset[str] | None) -> list[int]:
    """The operands of those nodes of a level that are of the given ops (None: any), each once."""
    inner = [n for n in level if through is None or view.nodes[n].op in through]
    return list(dict.fromkeys(o.nid for n in inner for o in view.nodes[n].operands))


def nearest_below(
    view: CanonicalView,
    start: int,
    wanted: Callable[[CanonicalView, int], bool],
    depth: int,
    through: frozenset[str] | None,
) -> int | None:
    """The nearest wanted node below `start`, within `depth` steps, through nodes of the given ops (None: any)."""
    level = [start]
    for _ in range(depth + 1):
        for nid in level:
            if wanted(view, nid):
                return nid
        level = below(view, level, through)
    return None


def is_dot(view: CanonicalView, nid: int) -> bool:
    return view.nodes[nid].op == "dot"
