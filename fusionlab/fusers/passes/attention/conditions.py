"""What has to hold at a site that matches, so that the op's numbers are the program's: of dtypes, masks, sink, biases, maximum, factors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from ....graph.canonical.nodes import Operand
from ....graph.dtypes import narrows
from ....graph.matching.match import Match, close
from ....graph.matching.region import Region
from ....kernels.op.arrays import FLOATS as DTYPES
from ...engine.base import anchor_text
from .forms import Reading
from .masks import MASK_FILL
from .misses import AttentionMisses

_BY_MAXIMUM = "subtract the maximum over the keys, once; jax.nn.softmax does"


class AttentionConditions(AttentionMisses):
    """A site at the product that weighs the values: what is said where it matches, and is none of the op's."""

    def check(self, read: Reading, region: Region) -> None:
        """Declines at the first that does not hold."""
        self.check_dtypes(region)
        self.check_fill(read, region)
        self.check_sink(region)
        self.check_bias(read, region)
        self.check_maximum(read, region)
        self.check_scaling(read, region)

    def check_dtypes(self, region: Region) -> None:
        """Declines for operands and a result that are not all of one of the op's dtypes."""
        dtypes = {str(region.leaves[x].dtype) for x in "qkv"} | {str(region.root.dtype)}
        if len(dtypes) == 1 and dtypes <= set(DTYPES):
            return
        own, taken = ", ".join(sorted(dtypes)), ", ".join(DTYPES)
        sentence = f"{anchor_text(self.anchor)} computes in {own}; the fused op takes one of {taken} throughout"
        self.decline("dtype", sentence, edit="cast q, k and v to one of these dtypes", site=region.nodes)

    def check_fill(self, read: Reading, region: Region) -> None:
        """Declines for masked scores that may still have weight."""
        fills = [x for name, x in read.match.scalars.items() if name.startswith("fill") and not x <= MASK_FILL]
        if not fills:
            return
        sentence = f"masked scores become {fills[0]:g}, which still gives them weight; a mask's fill is -inf or <= {MASK_FILL:g}"
        self.decline("scalar", sentence, edit="fill with -jnp.inf", site=region.nodes)

    def check_sink(self, region: Region) -> None:
        """Declines for a sink that the op, which computes in float32 at least, would round."""
        sink, wide = region.leaves.get("sink"), jnp.promote_types(region.root.dtype, jnp.float32)
        if sink is None or not narrows(wide, sink.dtype):
            return
        sentence = f"{anchor_text(self.anchor)}: its sink {sink!r} is wider than its scores"
        self.decline("dtype", sentence, edit="cast the sink to the dtype of q", site=region.nodes)

    def check_bias(self, read: Reading, region: Region) -> None:
        """Declines for a bias that is made of the scores."""
        own = self.bias_of_scores(read)
        if own is None:
            return
        sentence = f"{anchor_text(self.anchor)}: {region.leaves[own]!r}, which is added to the scores, is made of the scores themselves"
        self.decline("structure", sentence, site=region.nodes, edit=_BY_MAXIMUM)

    def check_maximum(self, read: Reading, region: Region) -> None:
        """Declines for a softmax that subtracts something else than the maximum, once."""
        times = self.maximum_taken(read.match)
        if close(times, 1.0):
            return
        subtracted = (
            f"maximum of the scores {times:g} times" if times >= 0 else "minimum of the scores, and not their maximum"
        )
        sentence = (
            f"{anchor_text(self.anchor)}: its softmax subtracts the {subtracted}; "
            "the exponentials of the original may overflow or all vanish, where those of the fused op do not"
        )
        self.decline("structure", sentence, site=region.nodes, edit=_BY_MAXIMUM)

    def maximum_taken(self, found: Match) -> float:
        """How many times the softmax subtracts the maximum of what it exponentiates; 1 where it subtracts none.

        A leaf may carry any factor, and so may, as far as the matcher can tell, each of the two places where the scores stand.
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
        """The maxima over keys among the terms of a sum, and those that are the larger of one and a sink; each with a factor on it."""
        for term in operands:
            node = self.view.nodes[term.nid]
            if node.op == "reduce_max":
                yield term, 1.0
            elif node.op == "max":
                yield from ((o, float(term.coef)) for o in node.operands if self.view.nodes[o.nid].op == "reduce_max")

    def bias_of_scores(self, read: Reading) -> str | None:
        """The leaf that the match calls a bias and that is computed from the scores: another maximum of theirs, say."""
        found = read.match
        scores = next(
            (t for p, t in found.nodes.items() if found.pattern.nodes[p].op == "dot" and p != found.pattern.root), None
        )
        biases = [s.leaf for s in read.steps if s.kind == "added" and s.leaf]
        return next((b for b in biases if scores is not None and self.computed_from(found.leaves[b], scores, 4)), None)

    def check_scaling(self, read: Reading, region: Region) -> None:
        """The op is given queries that are scaled already: not where that rounds what the program does not round."""
        factors = [s.leaf for s in read.steps if s.kind in ("times", "over") and s.leaf]
        wide = {str(n.outputs[0].dtype) for n in region.nodes if n.primitive == "dot_general" and n is not self.anchor}
        if not factors or wide == {str(region.leaves["q"].dtype)}:
            return
        sentence = f"{anchor_text(self.anchor)}: the scores are scaled by data, {region.leaves[factors[0]]!r}, in a wider dtype than q's"
        self.decline("dtype", sentence, site=region.nodes, edit="scale q instead of the scores")
