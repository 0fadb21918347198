"""Whether the scores of a softmax between two products are clipped, in the canonical view."""

from __future__ import annotations

from ....graph.canonical.nodes import ONE
from ....graph.canonical.view import CanonicalView
from .levels import below

_STEPS = 12  # from the product with the values to that of queries and keys
_WEIGHTS = frozenset("prod select cast sum max exp stop_gradient".split())
_SCORES = frozenset("exp sum select prod tanh cast reduce_max stop_gradient".split())


def clip_of(view: CanonicalView, product: int) -> int | None:
    """The canonical node that clips the scores at a number, below the exponentials that a product weighs values with; None where none does.

    `product` is the canonical node of the weights' product with the values.
    """
    level = [o.nid for o in view.nodes[product].operands]
    past = False
    for _ in range(_STEPS):
        if past:
            found = next((n for n in level if _is_clip(view, n)), None)
            if found is not None:
                return found
        past = past or any(view.nodes[n].op == "exp" for n in level)
        level = below(view, level, _SCORES if past else _WEIGHTS)
    return None


def _is_clip(view: CanonicalView, nid: int) -> bool:
    node = view.nodes[nid]
    return node.op == "clamp" or (node.op in ("max", "min") and any(o.nid == ONE for o in node.operands))
