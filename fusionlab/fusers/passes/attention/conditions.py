"""The reasons for declining an attention. For a match: dtypes, masks, sink, biases, maximum and factors. For a near miss: a single key,
a factor per key, a mask that fills with an array, a factor after the mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax.numpy as jnp

from ....graph.canonical.nodes import CNode, Operand
from ....graph.canonical.view import CanonicalView
from ....graph.dtypes import narrows
from ....graph.matching.match import Match, Miss, close
from ....graph.matching.pattern import Pattern
from ....graph.matching.region import Region
from ....graph.program.ir import Value
from ....kernels.op.arrays import FLOATS as DTYPES
from ...engine.nearly import value_of
from ...engine.outcomes import Rejection
from ...engine.site import ARGUMENT, CLOSE_OVER, Site
from ...engine.wording import anchor_text
from .forms import Reading
from .masks import MASK_FILL
from .scores import clip_of

Problems = Iterator[tuple[str, str, str]]
_BY_MAXIMUM = "subtract the maximum over the keys, once, as jax.nn.softmax does"
_OVER_KEYS = "take the softmax over the keys (axis=-1), and contract the weights with v over the keys"
# What would make a site of a near miss, by its code.
_EDITS = {
    "stop_gradient": "remove the stop_gradient, or stop the gradient of q, k or v instead",
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


class AttentionConditions(Site):
    """A site at the product that weighs the values: the conditions under which the op declines it."""

    words = _WORDS

    def check(self, read: Reading, region: Region) -> None:
        """Declines a matched site at the first condition that does not hold."""
        for problems in (self.of_arrays, self.of_softmax, self.of_scaling):
            for code, sentence, edit in problems(read, region):
                self.decline(code, sentence, edit=edit, site=region.nodes)

    def of_arrays(self, read: Reading, region: Region) -> Problems:
        """Code, sentence and edit of each violated condition on dtypes and numbers."""
        where, leaves = anchor_text(self.anchor), region.leaves
        dtypes = {str(leaves[x].dtype) for x in "qkv"} | {str(region.root.dtype)}
        if len(dtypes) > 1 or not dtypes <= set(DTYPES):
            own, taken = ", ".join(sorted(dtypes)), ", ".join(DTYPES)
            sentence = f"{where} computes in {own}; the fused op takes one of {taken} throughout"
            yield "dtype", sentence, "cast q, k and v to one of these dtypes"
        fills = [x for name, x in read.match.scalars.items() if name.startswith("fill") and not x <= MASK_FILL]
        if fills:  # masked scores may still have weight
            sentence = f"masked scores become {fills[0]:g}, which still gives them weight; the fill of a mask must be <= {MASK_FILL:g}"
            yield "scalar", sentence, "fill with -jnp.inf"
        sink = leaves.get("sink")
        # the op computes in float32 at least
        if sink is not None and narrows(jnp.promote_types(region.root.dtype, jnp.float32), sink.dtype):
            yield "dtype", f"{where}: its sink {sink!r} is wider than its scores", "cast the sink to the dtype of q"

    def of_softmax(self, read: Reading, region: Region) -> Problems:
        """As `of_arrays`, on the softmax's operand and the maximum it subtracts."""
        where, own = anchor_text(self.anchor), self.bias_of_scores(read)
        if own is not None:
            sentence = (
                f"{where}: {region.leaves[own]!r}, which is added to the scores, is computed from the scores themselves"
            )
            yield "structure", sentence, _BY_MAXIMUM
        times = self.maximum_taken(read.match)
        if not close(times, 1.0):
            what = (
                f"maximum of the scores {times:g} times"
                if times >= 0
                else "minimum of the scores instead of their maximum"
            )
            sentence = (
                f"{where}: its softmax subtracts the {what}; "
                "the program's exponentials may overflow or all vanish; those of the fused op do not"
            )
            yield "structure", sentence, _BY_MAXIMUM

    def of_scaling(self, read: Reading, region: Region) -> Problems:
        """As `of_arrays`, on scores that are scaled by data: the op is given scaled queries instead."""
        factor = next((s.leaf for s in read.steps if s.kind in ("times", "over")), None)
        wide = {str(n.outputs[0].dtype) for n in region.nodes if n.primitive == "dot_general" and n is not self.anchor}
        # not where that rounds what the program does not round
        if factor is not None and wide != {str(region.leaves["q"].dtype)}:
            scaled = f"the scores are scaled by data, {region.leaves[factor]!r}, in a wider dtype than q's"
            yield "dtype", f"{anchor_text(self.anchor)}: {scaled}", "scale q instead of the scores"

    def maximum_taken(self, found: Match) -> float:
        """How many times the softmax subtracts the maximum of its exponents; 1 if it subtracts none.

        A leaf may carry any factor, and, as far as the matcher knows, so may each of the two occurrences of the scores.
        """
        for p, target in found.nodes.items():
            operands = self.view.nodes[target].operands if found.pattern.nodes[p].op == "sum" else ()
            for maximum, coef in self.maxima(operands):
                (of,) = self.view.nodes[maximum.nid].operands
                scores = next((o for o in operands if o.nid == of.nid), None)
                if scores is not None:
                    times = -float(coef * maximum.coef * of.coef) / float(scores.coef)
                    # The maximum of negated scores is their minimum.
                    return times if float(of.coef * scores.coef) > 0 else -1.0
        return 1.0

    def maxima(self, operands: Sequence[Operand]) -> Iterator[tuple[Operand, float]]:
        """The maxima over keys among the terms of a sum, those combined with a sink included, each with its factor."""
        for term in operands:
            node = self.view.nodes[term.nid]
            if node.op == "reduce_max":
                yield term, 1.0
            elif node.op == "max":
                yield from ((o, float(term.coef)) for o in node.operands if self.view.nodes[o.nid].op == "reduce_max")

    def bias_of_scores(self, read: Reading) -> str | None:
        """The leaf that is matched as a bias but computed from the scores, such as another maximum of theirs."""
        found = read.match
        scores = next(
            (t for p, t in found.nodes.items() if found.pattern.nodes[p].op == "dot" and p != found.pattern.root), None
        )
        biases = [s.leaf for s in read.steps if s.kind == "added"]
        return next((b for b in biases if scores is not None and self.computed_from(found.leaves[b], scores, 4)), None)

    # -- where it matches no example ------------------------------------------------------------------------------

    def missed(self, found: Miss) -> Rejection:
        """The rejection of a site that matches no example."""
        self.check_keys()
        self.check_clips()
        problem = self.near_miss(found)
        changes = self.by_axes(found) or self.by_keys(found) or self.filled_with_data(found)
        return replace(problem, **changes or {"edit": _EDITS.get(problem.code)})

    def check_keys(self) -> None:
        """Declines an attention to a single key."""
        contracted = self.anchor.params["dimension_numbers"][0][0]
        if all(self.anchor.inputs[0].shape[i] == 1 for i in contracted):
            weighs = (
                f"{anchor_text(self.anchor)} weighs one key: a softmax of one entry is 1, so the result is the values"
            )
            self.decline("axes", weighs, edit="skip the attention where there is only one key")

    def check_clips(self) -> None:
        """Declines scores that are clipped between the products."""
        node = clip_of(self.view, self.nid(self.anchor.outputs[0]))
        clip = None if node is None else self.view.maker(node)
        if clip is not None:
            clips = "clips the scores; the fused op can only cap them by tanh"
            edit = "remove the clip, or cap the scores: c * jnp.tanh(scores / c)"
            sentence = f"{anchor_text(clip)} {clips}"
            self.decline("structure", sentence, [clip], progress=(1, 2), edit=edit, concepts=("attention",))

    def by_axes(self, found: Miss) -> dict[str, str]:
        """Sentence and edit for a softmax over one axis and a product that contracts another, as the program numbers them; empty for any
        other miss.
        """
        crossed = _crossed_axes(self.view, found.target) if found.kind == "axes" else None
        if crossed is None:
            return {}
        weights, over, contracted = crossed
        sentence = (
            f"{anchor_text(self.anchor)}: the weights {weights!r} are a softmax over axis {over}, "
            f"and their product with the values contracts axis {contracted}"
        )
        return {"sentence": sentence, "edit": _OVER_KEYS}

    def by_keys(self, found: Miss) -> dict[str, str | None]:
        """Sentence and edit for scores with a factor per key; empty for any other miss."""
        names = found.leaves[0] if found.leaves else ()
        factor = next((n for n in names if n.startswith("factor") and n != "factors"), None)
        if factor is None or not {"k", "v"} <= set(names):
            return {}
        shown = value_of(self.view, next(found.known[p] for p, n in found.pattern.leaf_of.items() if n == factor))
        sentence = f"the scores have a factor per key, {shown}; the fused op takes factors per query and per head"
        # A factor on scores that have been masked or biased before is none on the keys.
        edit = "scale k by it instead" if _changes_scores_once(found.pattern) else None
        return {"sentence": f"{anchor_text(self.anchor)}: {sentence}", "edit": edit}

    def filled_with_data(self, found: Miss) -> dict[str, str]:
        """Code, sentence and edit for a mask that fills with an array instead of a number; empty for any other miss."""
        node, target = self.view.maker(found.target), self.view.nodes[found.target]
        filled = node is not None and target.op == "select" and len(target.operands) == 3
        fill = (
            next((o.nid for o in target.operands[1:] if self.view.nodes[o.nid].op == "leaf"), None) if filled else None
        )
        if node is None or fill is None:
            return {}
        given, edit = self.argument(fill), "fill with a number such as -jnp.inf or -1e9"
        predicate = f"gives masked keys the score {value_of(self.view, fill)}, an array; needed a number"
        if given is not None:
            predicate = f"needs a number: {ARGUMENT.format(_WORDS['fill'], given)}"
            edit = f"{CLOSE_OVER.format(given)}; or {edit}"
        return {"code": "mask", "sentence": f"{anchor_text(node)} {predicate}", "edit": edit}

    def scaled_late(self, read: Reading, outcome: Rejection) -> Rejection:
        """The rejection for differing values, reworded if the cause is a factor on scores that are already masked."""
        operands = (o for t in read.match.nodes.values() for o in self.view.nodes[t].operands)
        late = next((o for o in operands if self.view.nodes[o.nid].op == "select" and not close(o.coef, 1.0)), None)
        masked = None if late is None else self.view.maker(late.nid)
        if late is None or masked is None or late.coef == 0:
            return outcome
        sentence = f"{anchor_text(masked)} masks the scores, which are then multiplied by {float(late.coef):g}"
        return replace(outcome, code="mask", sentence=sentence, edit="scale the scores, or q, before they are masked")


def _changes_scores_once(pattern: Pattern) -> bool:
    """Whether an example changes the scores by a single factor, bias or mask."""
    return sum(name[:4] in ("fact", "bias", "mask") for name in pattern.leaf_of.values()) == 1


def _crossed_axes(view: CanonicalView, product: int) -> tuple[Value, int, int] | None:
    """(weights, the axis of their softmax, the axis that the product contracts), as the program numbers them, if those axes differ.

    `product` is a canonical node; None if it is not a product with a softmax, or if either is over several axes.
    """
    dot = view.nodes[product]
    found = (_crossed(view, dot, operand) for operand in dot.operands if dot.op == "dot")
    return next((crossed for crossed in found if crossed is not None), None)


def _crossed(view: CanonicalView, dot: CNode, operand: Operand) -> tuple[Value, int, int] | None:
    """`_crossed_axes` of one operand of a product."""
    total, shown = _divided_by(view, operand.nid), next(iter(view.values_of.get(operand.nid, ())), None)
    if total is None or shown is None:
        return None
    number = view.ref[shown.id].dims.index
    axes = [c for c in view.ref[shown.id].dims if c >= 0]
    over, contracted = set(axes) - set(total.axes), {c for c in axes if operand.axes[c] not in dot.params}
    is_crossed = len(over) == len(contracted) == 1 and over != contracted
    return (shown, number(*over), number(*contracted)) if is_crossed else None


def _divided_by(view: CanonicalView, nid: int) -> Operand | None:
    """The sum by which a canonical node, the weights of a softmax, is divided; None if there is none."""
    node = view.nodes[nid]
    totals = (o for o in node.operands if view.nodes[o.nid].op == "reduce_sum")
    return next(totals, None) if node.op == "prod" else None
