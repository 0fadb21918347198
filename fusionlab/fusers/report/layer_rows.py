"""Equal layers in a row, each reading the one before: recognised by their computation and data flow, not by names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from ...graph.canonical.fused_nodes import Labelled
from ...graph.canonical.nodes import ONE, CNode
from ...graph.canonical.view import CanonicalView
from ...graph.matching.match import Match

LayerT = TypeVar("LayerT")


def rows_of(view: CanonicalView, layers: Sequence[tuple[Match, LayerT]]) -> Iterator[list[LayerT]]:
    """Each row of two layers or more.

    Args:
      view: the block's canonical view.
      layers: each with its match.
    """
    after: dict[Any, list[tuple[Match, LayerT]]] = {}
    for found, layer in layers:
        after.setdefault((_kind_of(view, found), _reads(view, found)), []).append((found, layer))
    used: set[int] = set()
    for found, layer in layers:
        row = [layer]
        while id(row[-1]) not in used:
            used.add(id(row[-1]))
            following = after.get((_kind_of(view, found), _gives(view, found)), ())
            found, following = next(((m, s) for m, s in following if id(s) not in used), (found, None))
            if following is None:
                break
            row.append(following)
        if len(row) > 1:
            yield row


def _reads(view: CanonicalView, found: Match) -> tuple[int, tuple[str, ...]]:
    """The input of a layer, and the letter of each of its axes."""
    return found.leaves["x"], _letters_of(view, found, found.leaf_id("x"))


def _gives(view: CanonicalView, found: Match) -> tuple[int, tuple[str, ...]]:
    """The result of a layer, and the letter of each of its axes: the next one may read it transposed."""
    return found.nodes[found.pattern.root], _letters_of(view, found, found.pattern.root)


def _letters_of(view: CanonicalView, found: Match, pid: int) -> tuple[str, ...]:
    letter = {c: x for x, cs in found.letters.items() for c in cs}
    return tuple(letter[found.axes[pid, axis]] for axis in range(len(view.nodes[found.nodes[pid]].shape)))


def _kind_of(view: CanonicalView, found: Match) -> Any:
    """A key for the computation of a match, whatever its weights: equal for equal layers."""
    inner = [p for p in sorted(found.nodes) if p not in found.pattern.leaf_of]
    nodes = [view.nodes[found.nodes[p]] for p in inner]
    op_traits = tuple(
        (n.params.traits, n.params.slots, _numbers(n)) if isinstance(n.params, Labelled) else () for n in nodes
    )
    sizes = tuple((x, tuple(sorted(found.sizes[c] for c in cs))) for x, cs in sorted(found.letters.items()))
    dtype = view.values_of[found.nodes[found.pattern.root]][0].dtype
    return found.pattern.example.name, op_traits, sizes, str(dtype)


def _numbers(node: CNode) -> tuple[tuple[str, Any], ...]:
    """The numbers among a fused op's operands, and its mask: layers that see different keys are not equal."""
    slots = zip(node.params.slots, node.operands, strict=True)
    return tuple((slot, o.nid if slot == "mask" else o.coef) for slot, o in slots if o.nid == ONE or slot == "mask")
