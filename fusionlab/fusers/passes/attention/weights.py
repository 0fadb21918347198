"""The weights of an attention: their exponentials, and the changes before they weigh the values."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ....graph.canonical.concatenated import SLICES, joined
from ....graph.canonical.nodes import ONE, CNode
from ....graph.canonical.view import CanonicalView
from ....graph.matching.match import close
from ....graph.matching.region import CASTS, VIEWS, Region
from ....graph.primitives import having
from ....graph.program.ir import Node, Value, all_nodes
from ....graph.program.scopes import is_backward
from ....graph.program.signature import Memo
from .forms import Reading, Tail, WeightChange
from .levels import is_dot, nearest_below
from .masks import Masking, is_ones
from .sinks import SINKS, SOFTMAXES, may_have_sink

# What may stand between the exponentials and the product that they weigh.
_THROUGH = frozenset("prod select cast sum max stop_gradient name custom_jvp_call custom_vjp_call".split())
_CHANGE_LIMIT = 4  # between a softmax and its product; models have up to 3: a mask, a dropout, a factor on each head


def exponentials(view: CanonicalView, dot: CNode) -> tuple[int, int] | None:
    """The operand of a product that is computed from exponentials of another product, as attention weights are; and the exponentials."""
    if dot.op != "dot":
        return None
    for operand in dot.operands:
        weights = _before_slices(view, operand.nid)
        far = weights != operand.nid or _is_chosen(view, weights)
        exp = nearest_below(view, weights, _is_exp, 7 if far else 3, _THROUGH)
        if exp is None or (weights != operand.nid and not joined(view, exp)):
            continue
        if not _in_sigmoid(view, exp) and nearest_below(view, exp, is_dot, 8, None) is not None:
            return operand.nid, exp
    return None


def _before_slices(view: CanonicalView, nid: int) -> int:
    """The node from which weights are sliced; the node itself if it is not a slice."""
    while view.nodes[nid].op in SLICES:
        nid = view.nodes[nid].operands[0].nid
    return nid


def weighs_a_part(view: CanonicalView, node: Node) -> bool:
    """Whether a product reads a single weight that was sliced off others: that of a key or a sink, apart from the rest."""
    contracted = node.params["dimension_numbers"][0]
    for atom, axes in zip(node.inputs, contracted, strict=True):
        if any(atom.shape[i] != 1 for i in axes):
            return False
        while isinstance(atom, Value) and (maker := view.block.producer.get(atom.id)) is not None:
            if maker.primitive in SLICES:
                return True
            if maker.primitive not in VIEWS | CASTS:
                break
            atom = maker.inputs[0]
    return False


def _is_chosen(view: CanonicalView, nid: int) -> bool:
    """Whether weights, factors aside, are replaced by others in one choice or several."""
    node = view.nodes[nid]
    return node.op == "select" or (node.op == "prod" and any(view.nodes[o.nid].op == "select" for o in node.operands))


def tails_of(view: CanonicalView, weights: int, roots: Sequence[int]) -> list[Tail]:
    """The spellings that weights, a canonical node, may have, and the results `roots` of their product; the likeliest first."""
    kinds = _changes(view, weights)
    tails = []
    for spelling in (*SINKS, *SOFTMAXES) if may_have_sink(view, roots) else SOFTMAXES:
        if not (spelling.after and kinds):
            is_first = spelling.is_a_factor and kinds[:1] == ("factors",)
            tails.append(Tail(spelling, kinds[1:] if is_first else kinds))
    return [*tails, *([Tail(SOFTMAXES[0], ("where", *kinds[1:]))] if kinds[:1] == ("kept",) else [])]


def _changes(view: CanonicalView, nid: int) -> tuple[str, ...]:
    """The kinds of changes of the probabilities, innermost first."""
    found: list[str] = []
    while len(found) < _CHANGE_LIMIT:
        kinds, inner = _change(view, view.nodes[nid])
        found += kinds
        if inner is None:
            break
        nid = inner
    return tuple(reversed(found))


def _change(view: CanonicalView, node: CNode) -> tuple[list[str], int | None]:
    """The outermost change of the weights, and the weights before it; None if they are a softmax."""
    choice = _choice(node)
    if choice is not None:
        return [choice[0]], choice[1]
    if node.op != "prod":
        return [], None
    plain = [o.nid for o, power in zip(node.operands, node.params, strict=True) if power == 1]
    weights = next((n for n in plain if nearest_below(view, n, _is_exp, _CHANGE_LIMIT, _THROUGH) is not None), None)
    return ["factors"] * (len(plain) - 1), weights if weights is not None and view.nodes[weights].op != "exp" else None


def _choice(node: CNode) -> tuple[str, int] | None:
    """(kind, weights) of a choice between weights and 0; None for any other node."""
    operands = node.operands
    if node.op == "select" and len(operands) == 3:
        for kind, other, inner in (("kept", operands[1], operands[2]), ("hidden", operands[2], operands[1])):
            if other.nid == ONE and other.coef == 0 and inner.nid != ONE:
                return kind, inner.nid
    return None


def needless_changes(
    view: CanonicalView, read: Reading, region: Region, masks: Masking, factor: float, memo: Memo
) -> tuple[frozenset[str], bool]:
    """The operands of a tail's changes that the op does not need, and whether the op must give 0 for a fully masked row.

    These are factors that are all ones, and choices by a mask that the scores already have: the entries they set to 0 are already 0,
    except in a fully masked row. One change must remain if the weights are multiplied by a number, `factor`.
    """
    needless, zeroed = [], False
    for change in read.tail.changes:
        if is_ones(view, region.leaves[change.leaf], memo) and change.kind != "hidden":
            needless.append(change.leaf)
        elif change.kind in ("kept", "hidden") and (by := _masks_already(read, change, masks)) is not None:
            needless.append(change.leaf)
            zeroed |= by in masks.masks
    if len(needless) == len(read.tail.changes) and not close(factor, 1.0):
        return frozenset(), False
    return frozenset(needless), zeroed


def _masks_already(read: Reading, change: WeightChange, masks: Masking) -> str | None:
    """The mask of the scores that a choice among the weights repeats, if that mask alone decides which keys a row sees."""
    leaves = read.match.leaves
    alike = (s for s in read.steps if s.masks and (s.kind == "hidden") == (change.kind == "hidden"))
    step = next((s for s in alike if leaves[s.leaf] == leaves[change.leaf]), None)
    return step.leaf if step is not None and _is_alone(step.leaf, masks) else None


def _is_alone(leaf: str, masks: Masking) -> bool:
    """Whether a mask of the scores alone decides which keys a row sees.

    If another mask or a bias hides keys too, the two together may mask a row fully, whose weights this mask alone does not set to 0.
    """
    if leaf in masks.masks:
        return not (len(masks.masks) > 1 or masks.row is not None or masks.biases)
    return masks.row is not None and (masks.fill == -math.inf or not (masks.masks or masks.biases))


def _in_sigmoid(view: CanonicalView, exp: int) -> bool:
    """Whether 1 + exp is the only reader of an exponential, a backward pass aside: it belongs to a sigmoid, which normalises nothing."""
    users = view.users.get(exp, ())
    added = [u for u in users if {o.nid for o in view.nodes[u].operands} == {ONE, exp} and view.nodes[u].op == "sum"]
    return bool(added) and all(u in added or _is_derived(view, u) for u in users)


def _is_derived(view: CanonicalView, nid: int) -> bool:
    """Whether every operation that computes a canonical node's value belongs to a backward pass."""
    makers = [m for v in view.values_of.get(nid, ()) if (m := view.block.producer.get(v.id)) is not None]
    return bool(makers) and all(is_backward(m.eqn) for m in makers)


_RULES = having("rule")


def _is_exp(view: CanonicalView, nid: int) -> bool:
    """Whether a node is an exponential, or a function with a user's derivative that takes one and is summed: their softmax, or its exp."""
    if view.nodes[nid].op not in _RULES:
        return view.nodes[nid].op == "exp"
    makers = (view.block.producer.get(v.id) for v in view.values_of.get(nid, ()))
    inside = {n.primitive for m in makers if m is not None for n in all_nodes([m])}
    summed = any(view.nodes[u].op == "reduce_sum" for u in view.users.get(nid, ()))
    return "exp" in inside and (summed or "reduce_sum" in inside)
