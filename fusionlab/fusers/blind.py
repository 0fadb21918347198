"""Query rows that see no key. A program whose mask is -inf has NaN there, the fused op has 0 (see `kernels/dot_product_attention`):
no site is rewritten whose program goes on to ask where the NaN are, since the answer would be another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..graph.canonical import View
from ..graph.ir import Node, Value
from .base import all_nodes

NOTE = "a query row that sees no key is 0 in the fused op, where the program has NaN"
_MAKERS = 8  # steps from a bias back to the -inf it is made with


def made_with_infinity(view: View, leaves: Mapping[str, Value], names: tuple[str, ...]) -> bool:
    """Whether one of these biases is made in the block with a literal -inf: a mask that is added."""
    level = [view.ref[leaves[n].id].nid for n in names]
    for _ in range(_MAKERS):
        operands = [o for nid in level for o in view.nodes[nid].operands]
        if any(o.coef == -math.inf for o in operands):
            return True
        level = list(dict.fromkeys(o.nid for o in operands))
    return False


def nan_test(view: View, root: Value) -> Node | None:
    """The first node that asks whether a number is NaN of what is made of `root` entry by entry, or by products; None if none does.

    Followed also out of the block, from all results of the node that holds it; into a loop's body or a branch one that asks anywhere in
    it counts. Not followed through reductions: a maximum that is asked whether it is finite is how a logarithm of a sum starts.
    """
    starts = [view.ref[root.id].nid]
    here: View | None = view
    while here is not None:
        found = _among_users(here, starts)
        if found is not None:
            return found
        if here.outer is None:
            return None
        here, holder = here.outer
        starts = [here.ref[v.id].nid for v in holder.outputs if v.id in here.ref]
    return None


def _among_users(view: View, starts: list[int]) -> Node | None:
    seen, stack = set(starts), list(starts)
    while stack:
        for user in view.users.get(stack.pop(), ()):
            node = view.nodes[user]
            if user in seen or node.op.startswith("reduce_"):
                continue
            seen.add(user)
            stack.append(user)
            raw = next((n for v in view.values_of.get(user, ()) if (n := view.block.producer.get(v.id))), None)
            if raw is None:
                continue
            if node.op == "is_finite" or (node.op in ("ne", "eq") and len({o[:2] for o in node.operands}) == 1):
                return raw
            inside = next((n for n in all_nodes(b for b in raw.blocks for b in b.nodes) if _asks(n)), None)
            if inside is not None:
                return inside
    return None


def _asks(node: Node) -> bool:
    pair = node.inputs[:2]
    same = node.primitive in ("ne", "eq") and all(isinstance(a, Value) for a in pair) and pair[0] == pair[1]
    return same or node.primitive == "is_finite"
