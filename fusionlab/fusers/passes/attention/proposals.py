"""A matched attention proposed as the op: with heads before or after their repetition, and with or without a key for its dropout mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from ....graph.declined import Declined
from ....graph.matching.region import Region, escapes
from ...engine.declining import attempted, reason_to_tell
from ...engine.outcomes import Candidate, Rejection, in_turn, or_else
from ...engine.proposing import propose
from .conditions import AttentionConditions
from .dropout import draw_of, kept_as_data
from .forms import Reading
from .masks import Masking
from .plan import Layout, attention_attributes, attention_plan, keyed_plan, present_changes
from .regions import without
from .repeated_heads import Repeated, without_repeats
from .scores import NEGATED


class AttentionProposals(AttentionConditions):
    """A site at the product that weighs the values, once its conditions hold: the op that it becomes."""

    def of_either_heads(
        self, read: Reading, region: Region, dropped: frozenset[str], known: tuple[Masking, float, tuple[str, ...]]
    ) -> Candidate | Rejection:
        """The site with heads before their repetition, if that is possible; otherwise, or as its fallback, with the repeated heads.

        `known`: the masks, the factor on the result, the notes.
        """
        few = self.of_fewer_heads(read, region, known[0])

        def outcome(region: Region, repeated: Mapping[str, Repeated]) -> Candidate | Rejection:
            rest = without(region, dropped), *known
            leaks = escapes(region)
            if not leaks:
                return self.proposed(read, *rest, None, repeated)
            edit = "return or reuse the attention weights only where you need them, in a call of their own"
            if read.tail.sink is not None:
                edit += "; the fused op drops the sink's weight"
            problem = self.escaping(leaks[0], edit, region.nodes, region=region)
            return self.proposed(read, *rest, problem, repeated) if self.search.differentiated else problem

        first = None if few is None else outcome(*few)
        if not isinstance(first, Candidate):
            return outcome(region, {})
        return or_else(first, outcome(region, {})) if first.alternatives else first

    def of_fewer_heads(
        self, read: Reading, region: Region, masks: Masking
    ) -> tuple[Region, Mapping[str, Repeated]] | None:
        """The site as a function of keys and values before their heads are repeated. A repeated batch (for the beams of a search) would
        count as heads as well, but then more data would be permuted than repeated.
        """
        few = without_repeats(self.view, read.match, region)
        if few is None:
            return None
        plain, own = (Layout.nearest(self.view, read.match, r, masks, of) for r, of in ((region, {}), few))
        return few if own.permutations <= plain.permutations else None

    def proposed(
        self,
        read: Reading,
        region: Region,
        masks: Masking,
        factor: float,
        notes: tuple[str, ...],
        problem: Rejection | None,
        repeated: Mapping[str, Repeated],
    ) -> Candidate | Rejection:
        """The site as the op, with the key of its dropout mask if known, else with the mask.

        If it cannot be fused with its backward pass, the fallback is the mask as data; after that `problem`, or the site alone.
        """
        attrs = attention_attributes(read, region, self.scale(read, region), masks, factor)
        attrs["precision"] = self.precision(region)
        if self.pass_.option(self.search, "deterministic"):
            attrs["deterministic"] = True
        layout = Layout.nearest(self.view, read.match, region, masks, repeated)

        def as_data(*more: str, instead: Candidate | Rejection | None = problem) -> Candidate | Rejection:
            plan = attention_plan(self.search, read, region, masks, attrs, layout)
            outcome = propose(self.search, self.pass_.name, region, plan, self.anchor, (*notes, *more))
            if not isinstance(outcome, Candidate):
                return reason_to_tell(problem, outcome)
            return outcome if instead is None else replace(outcome, alternatives=(instead,))

        again = attempted(
            lambda: self.drawn_again(read, region, masks, attrs, notes, layout), lambda reason: reason.sentence
        )
        if isinstance(again, str):
            factors = [region.leaves[c.leaf] for c in present_changes(read, region)]
            return as_data(*kept_as_data(self.view, factors, again))
        if not self.search.differentiated:
            return again
        return replace(again, alternatives=in_turn([as_data(instead=problem or again)]))

    def drawn_again(
        self,
        read: Reading,
        region: Region,
        masks: Masking,
        attrs: dict[str, Any],
        notes: tuple[str, ...],
        layout: Layout,
    ) -> Candidate:
        """The site with the key of its dropout mask as an operand instead of the mask. Raises Declined if it has no such mask."""
        factors = present_changes(read, region)
        if len(factors) != 1 or read.tail.of_some_keys:
            raise Declined(
                "there are other factors besides it" if factors else "it is not one of the factors on the weights"
            )
        draw = draw_of(self.view, region.leaves[factors[0].leaf], self.search.certifier)
        if factors[0].kind == "hidden":
            raise Declined("it is True where an entry is dropped, and the op's mask is True where it is kept")
        whole, plan = keyed_plan(self.search, read, region, masks, attrs, (factors[0].leaf, draw), layout)
        outcome = propose(self.search, self.pass_.name, whole, plan, self.anchor, notes)
        if isinstance(outcome, Rejection):
            raise Declined(outcome.sentence)
        return outcome

    def scale(self, read: Reading, region: Region) -> float:
        """The factor on q k^T that the bound operands do not carry themselves."""
        scalars = read.match.scalars
        sign = -1.0 if read.steps == NEGATED else 1.0
        return sign * scalars.get("scale", 1.0) * scalars.get("cap", 1.0) / self.carried(region, ("q", "k"))

    def precision(self, region: Region) -> Any:
        """The precision requested of the products; None for the default."""
        asked = {str(p): p for n in region.nodes if n.primitive == "dot_general" for p in (n.params.get("precision"),)}
        if region.root.dtype != jnp.float32:
            return None  # 16-bit products accumulate in float32 whatever is asked
        if len(asked) > 1:
            raise Declined(f"its two products request different precisions ({' and '.join(asked)})")
        return next(iter(asked.values()), None)
