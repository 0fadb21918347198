"""What an attention that is nearly one is told: one key, a factor for each of them, a mask that fills with an array, a factor behind it."""

from __future__ import annotations

from dataclasses import replace

from ....graph.canonical.nodes import CNode, Operand
from ....graph.canonical.view import CanonicalView
from ....graph.matching.match import Miss, close
from ....graph.matching.pattern import Pattern
from ....graph.program.ir import Value
from ...engine.base import anchor_text
from ...engine.nearly import value_of
from ...engine.outcomes import Rejection
from ...engine.site import ARGUMENT, CLOSE_OVER, Site
from .forms import Reading
from .scores import clip_of

_OVER_KEYS = "take the softmax over the keys (axis=-1), and contract the weights with v over the keys"
# What would make a site of a near miss, by its code.
_EDITS = {
    "stop_gradient": "leave out the stop_gradient, or stop the gradient of q, k or v instead",
    "named_residual": "name q, k, v or the result instead, with jax.ad_checkpoint.checkpoint_name",
}
# What the operations and operands of an attention are to a reader.
_WORDS = {
    "dot": "the product of queries and keys",
    "result": "the product of the weights with the values",
    "exp": "the exponential of the scores",
    "reduce_max": "the maximum of the scores over the keys",
    "reduce_sum": "the sum of the exponentials over the keys",
    "z": "the scores",
    "mask": "the mask",
    "bias": "the bias",
    "factor": "the factor",
    "factors": "the factors on the weights",
    "fill": "the score of masked keys",
    "q": "the queries",
    "k": "the keys",
    "v": "the values",
}


class AttentionMisses(Site):
    """A site at the product that weighs the values: what is said where it matches no example."""

    words = _WORDS

    def missed(self, found: Miss) -> Rejection:
        """The rejection of a site that matches no example."""
        rejection = self.single_key() or self.clipped() or self.by_axes(found) or self.filled_with_data(found)
        return rejection or self.unnamed(found)

    def unnamed(self, found: Miss) -> Rejection:
        """The rejection of what no other sentence is for."""
        problem = self.near_miss(found)
        return replace(problem, edit=_EDITS.get(problem.code))

    def single_key(self) -> Rejection | None:
        """The rejection where there is one key."""
        contracted = self.anchor.params["dimension_numbers"][0][0]
        if any(self.anchor.inputs[0].shape[i] != 1 for i in contracted):
            return None
        sentence = (
            f"{anchor_text(self.anchor)} weighs one key: a softmax of one entry is 1, and the result is the values"
        )
        return self.rejection("axes", sentence, edit="leave the attention out where there is one key")

    def clipped(self) -> Rejection | None:
        """The rejection where scores are clipped at numbers between the products."""
        node = clip_of(self.view, self.nid(self.anchor.outputs[0]))
        clip = None if node is None else self.raw_of(node)
        if clip is None:
            return None
        sentence = (
            f"{anchor_text(clip)} clips the scores at a number; the fused op has a cap by tanh, and none that cuts off"
        )
        edit = "leave the scores as they are, or cap them: c * jnp.tanh(scores / c)"
        return self.rejection("structure", sentence, [clip], (1, 2), edit, concepts=("attention",))

    def by_axes(self, found: Miss) -> Rejection | None:
        """The rejection for an axis, in the program's own, where the softmax is over one and the product contracts another, or where the
        scores have a factor for each key.
        """
        if found.kind != "axes":
            return None
        crossed = _crossed_axes(self.view, found.target)
        if crossed is not None:
            weights, over, contracted = crossed
            sentence = (
                f"{anchor_text(self.anchor)}: the weights {weights!r} are a softmax over axis {over}, "
                f"and their product with the values contracts axis {contracted}"
            )
            return replace(self.near_miss(found), sentence=sentence, edit=_OVER_KEYS)
        return self.by_keys(found)

    def by_keys(self, found: Miss) -> Rejection | None:
        """The rejection where the scores have a factor for each key."""
        names = found.leaves[0] if found.leaves else ()
        factors = [n for n in names if n.startswith("factor") and n != "factors"]
        if not factors or not {"k", "v"} <= set(names):
            return None
        leaf = next(pid for pid, name in found.pattern.leaf_of.items() if name == factors[0])
        factor, where = value_of(self.view, found.known[leaf]), anchor_text(self.anchor)
        sentence = (
            f"{where}: the scores have a factor for each key, {factor}; the fused op has factors for queries and heads"
        )
        # A factor on scores that have been masked or biased before is none on the keys.
        edit = "scale k by it instead" if _changes_scores_once(found.pattern) else None
        return replace(self.near_miss(found), sentence=sentence, edit=edit)

    def filled_with_data(self, found: Miss) -> Rejection | None:
        """The rejection for a mask that puts an array where a number is needed."""
        node, target = self.raw_of(found.target), self.view.nodes[found.target]
        if node is None or target.op != "select" or len(target.operands) != 3:
            return None
        fill = next((o.nid for o in target.operands[1:] if self.view.nodes[o.nid].op == "leaf"), None)
        if fill is None:
            return None
        given, edit = self.argument(fill), "fill with a number, as -jnp.inf or -1e9"
        predicate = f"gives masked keys the score {value_of(self.view, fill)}, an array; needed is a number"
        if given is not None:
            predicate = f"needs a number: {ARGUMENT.format(_WORDS['fill'], given)}"
            edit = f"{CLOSE_OVER.format(given)}; or {edit}"
        sentence = f"{anchor_text(node)} {predicate}"
        return replace(self.near_miss(found), code="mask", sentence=sentence, edit=edit)

    def scaled_late(self, read: Reading, outcome: Rejection) -> Rejection:
        """The rejection of other values, where what makes them others is a factor on scores that are masked already."""
        operands = (o for t in read.match.nodes.values() for o in self.view.nodes[t].operands)
        late = next((o for o in operands if self.view.nodes[o.nid].op == "select" and not close(o.coef, 1.0)), None)
        masked = None if late is None else self.raw_of(late.nid)
        if late is None or masked is None or late.coef == 0:
            return outcome
        sentence = f"{anchor_text(masked)} masks the scores, which are multiplied by {float(late.coef):g} after that"
        return replace(outcome, code="mask", sentence=sentence, edit="scale the scores, or q, before they are masked")


def _changes_scores_once(pattern: Pattern) -> bool:
    """Whether one factor, bias or mask is all that an example does to the scores."""
    return sum(name[:4] in ("fact", "bias", "mask") for name in pattern.leaf_of.values()) == 1


def _crossed_axes(view: CanonicalView, product: int) -> tuple[Value, int, int] | None:
    """(weights, the axis of their softmax, the axis that the product contracts), as the program numbers them, where those are two axes.

    `product` is a canonical node; None where it is no product of a softmax, or either is over several axes.
    """
    dot = view.nodes[product]
    if dot.op != "dot":
        return None
    found = (_crossed(view, dot, operand) for operand in dot.operands)
    return next((crossed for crossed in found if crossed is not None), None)


def _crossed(view: CanonicalView, dot: CNode, operand: Operand) -> tuple[Value, int, int] | None:
    """`_crossed_axes` of one operand of a product."""
    total, shown = _divided_by(view, operand.nid), view.values_of.get(operand.nid)
    if total is None or not shown:
        return None
    numbers = _program_axes(view, shown[0])
    normalised = [i for c, i in numbers.items() if c not in total.axes]
    contracted = [i for c, i in numbers.items() if operand.axes[c] not in dot.params]
    if [len(normalised), len(contracted)] != [1, 1] or normalised == contracted:
        return None
    return shown[0], normalised[0], contracted[0]


def _program_axes(view: CanonicalView, value: Value) -> dict[int, int]:
    """Axis of a value's canonical node -> the value's own axis."""
    return {c: i for i, c in enumerate(view.ref[value.id].dims) if c >= 0}


def _divided_by(view: CanonicalView, nid: int) -> Operand | None:
    """The sum that a canonical node, the weights of a softmax, is divided by; None where there is none."""
    node = view.nodes[nid]
    totals = (o for o in node.operands if view.nodes[o.nid].op == "reduce_sum")
    return next(totals, None) if node.op == "prod" else None
