"""Softmaxes between two products, in the canonical view: where their exponentials are, and whether their scores are clipped."""

from __future__ import annotations

from collections.abc import Callable

from ..graph.canonical import ONE, CNode, View
from ..graph.ir import all_nodes
from ..graph.scopes import is_backward

# What may stand between the exponentials and the product that they weigh.
_THROUGH = frozenset("prod select cast sum max stop_gradient name custom_jvp_call custom_vjp_call".split())
_STEPS = 12  # from the product with the values to that of queries and keys
_WEIGHTS = frozenset("prod select cast sum max exp stop_gradient".split())
_SCORES = frozenset("exp sum select prod tanh cast reduce_max stop_gradient".split())


def exponentials_of(view: View, dot: CNode) -> int | None:
    """The exponentials of another product that an operand of this product is made of: those of the attention weights."""
    if dot.op != "dot":
        return None
    for operand in dot.operands:
        chosen = (
            view.nodes[operand.nid].op == "select"
        )  # weights with others in their place, one choice after another maybe
        exp = _reach(view, operand.nid, _is_exp, 7 if chosen else 3, _THROUGH)
        if exp is not None and not _in_sigmoid(view, exp) and _reach(view, exp, _is_dot, 8, None) is not None:
            return exp
    return None


def _in_sigmoid(view: View, exp: int) -> bool:
    """Whether an exponential is read by 1 + exp alone, but for a backward pass: that of a sigmoid, which normalises nothing."""
    users = view.users.get(exp, ())
    added = [u for u in users if {o.nid for o in view.nodes[u].operands} == {ONE, exp} and view.nodes[u].op == "sum"]
    return bool(added) and all(u in added or _is_derived(view, u) for u in users)


def _is_derived(view: View, nid: int) -> bool:
    """Whether every operation that makes a canonical node's value belongs to a backward pass."""
    makers = [m for v in view.values_of.get(nid, ()) if (m := view.block.producer.get(v.id)) is not None]
    return bool(makers) and all(is_backward(m.eqn) for m in makers)


def _is_dot(view: View, nid: int) -> bool:
    return view.nodes[nid].op == "dot"


def _is_exp(view: View, nid: int) -> bool:
    """An exponential, or a function with a derivative of the user's own that takes one and is summed: their softmax, or its exp."""
    if view.nodes[nid].op not in ("custom_jvp_call", "custom_vjp_call"):
        return view.nodes[nid].op == "exp"
    makers = (view.block.producer.get(v.id) for v in view.values_of.get(nid, ()))
    inside = {n.primitive for m in makers if m is not None for n in all_nodes([m])}
    summed = any(view.nodes[u].op == "reduce_sum" for u in view.users.get(nid, ()))
    return "exp" in inside and (summed or "reduce_sum" in inside)


def _reach(
    view: View, start: int, wanted: Callable[[View, int], bool], depth: int, through: frozenset[str] | None
) -> int | None:
    """The nearest wanted node below `start`, within `depth` steps, through nodes of the given ops (None: any)."""
    level = [start]
    for _ in range(depth + 1):
        for nid in level:
            if wanted(view, nid):
                return nid
        inner = [n for n in level if through is None or view.nodes[n].op in through]
        level = list(dict.fromkeys(o.nid for n in inner for o in view.nodes[n].operands))
    return None


def clip_of(view: View, product: int) -> int | None:
    """The canonical node that clips the scores at a number, below the exponentials that a product weighs values with; None where none does.

    `product` is the canonical node of the weights' product with the values.
    """
    level = [o.nid for o in view.nodes[product].operands]
    past = False
    for _ in range(_STEPS):
        if past:
            clips = (n for n in level if view.nodes[n].op == "clamp" or _is_clip(view, n))
            found = next(clips, None)
            if found is not None:
                return found
        past = past or any(view.nodes[n].op == "exp" for n in level)
        through = _SCORES if past else _WEIGHTS
        inner = [n for n in level if view.nodes[n].op in through]
        level = list(dict.fromkeys(o.nid for n in inner for o in view.nodes[n].operands))
    return None


def _is_clip(view: View, nid: int) -> bool:
    node = view.nodes[nid]
    return node.op in ("max", "min") and any(o.nid == ONE for o in node.operands)
