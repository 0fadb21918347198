"""Pass `linear_cross_entropy`: logsumexp(x @ w) - (x @ w)[label], however it is written, and its weighted sum over the rows -> one op.

Which function of the logits and the labels a value is follows from its numbers (`numbers`), not from its spelling. Where the program
makes a scalar of the losses by weights that do not depend on the logits, the op makes the sum, and its gradients going forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ....graph.backward.find import SumTerms, find_backward
from ....graph.canonical.nodes import nonunit
from ....graph.declined import Declined
from ....graph.dtypes import is_float
from ....graph.primitives import having
from ....graph.program.ir import Node, Value
from ....graph.program.scopes import in_backward
from ...engine.base import Pass, Search
from ...engine.outcomes import Candidate, Rejection, in_turn
from ...engine.site import Site
from ...engine.wording import anchor_text
from .gradients import GradientsOfLoss, sums_of_exponentials
from .heads import check_head, head_of, product_of
from .numbers import numbers_of
from .out_of_range import ODD, ODD_EDIT, Treatment, treatment
from .planning import CONCEPTS, EDIT, LOG_EDIT, Loss, notes_of, planned, with_more
from .rows import Cut, Downstream, cuts_with_weights, region_of
from .rules import check_rules, logits_of_rule
from .softmaxes import exponentiated, of_softmax, sum_over_devices
from .sums import WeightedSum, weighted_sum

_TRIED = 8  # values by row that are evaluated
_WHOLE = "write the loss of all classes outside of the shard_map and shard w over them: the fused op adds the sums of the devices itself"
RULES = having("rule")
_READ = RULES | {"log"}


class LinearCrossEntropyPass(Pass):
    """See the module docstring."""

    name = op = "linear_cross_entropy"
    formula = "logsumexp(x @ w + b) - (x @ w + b)[label] for each row, or its weighted sum"
    needs = (
        "rows times a matrix, integer labels, logits that only the loss (and an argmax) reads, a softmax over the last axis; "
        "f64/f32/bf16/f16"
    )
    summary = (
        "Replaces the head of a language model and its cross-entropy by one op, which never has the logits of all rows."
    )
    spellings = (
        "The loss by row is recognised by its values: log_softmax or logsumexp with take_along_axis, indexing or one_hot, as in optax, "
        "with label smoothing, and a z-loss. One that clips, for large logits too, is another function.",
        "The logarithm of a softmax is infinite where the softmax underflows, and the op is not: the site has a note, or is declined where "
        "the program tests its loss for that.",
        "The last classes may be masked or overwritten, as padding of the vocabulary is.",
        "A weighted sum of the losses, as the mean over the rows that a mask or optax's where= keeps, is a part of the site.",
        "Rows may be cut off before or after the softmax, as of the next token or of the tokens after a prompt; what the program computes "
        "from the loss of each row, as in DPO and GRPO, stays.",
        "The matrix may be transposed (tied embeddings); a bias and a soft cap are taken.",
        "The argmax of the same logits, for an accuracy, is a further result of the op.",
    )
    default = (
        "On a CPU on where the rows make several chunks. Off on a GPU, where it was not measured, and where all rows make one chunk, "
        "unless the pass is named."
    )
    codes = ("axes", "bias", "mask", "scalar", "structure", "value")
    primitives = ("log",)

    def sample(self) -> tuple[Any, tuple[Any, ...]]:
        def loss(x: Any, w: Any, labels: Any) -> Any:
            picked = jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[:, None], axis=-1)
            return -jnp.mean(picked)

        return loss, (jnp.zeros((8, 4)), jnp.zeros((4, 16)), jnp.zeros(8, jnp.int32))

    def anchors(self, search: Search) -> Iterator[tuple[Any, ...]]:
        known = set[int]()
        for node in search.block.nodes:
            if node.primitive not in _READ:  # most nodes of a program; no function is called for them
                continue
            logits = logits_of_rule(search.view, node)
            if logits is not None:
                yield node, logits, None
            found = exponentiated(search.view, node) if self.is_anchor(node) else None
            product = None if found is None else product_of(search.view, found[0])
            if found is not None and product is not None and product.id not in known:
                known.add(product.id)  # a z-loss may have a logarithm of its own
                yield node, *found
        if _has_gradients(search):
            yield from sums_of_exponentials(search.view, known)

    def examine(self, search: Search, anchor: Node, *known: Any) -> list[Candidate | Rejection]:
        if anchor.primitive == "reduce_sum":
            return GradientsOfLoss(self, search, anchor).examined(*known)
        found = _LossSite(self, search, anchor).examined(*known)
        if _has_gradients(search) and not any(isinstance(o, Candidate) for o in found):
            gradients = GradientsOfLoss(self, search, anchor).examined(*known)
            return gradients if any(isinstance(o, Candidate) for o in gradients) else found
        return found


def _has_gradients(search: Search) -> bool:
    return search.differentiated and search.gradient


class _LossSite(Site):
    """One logarithm of a sum of exponentials, from there to a candidate or a rejection.

    Attributes:
      notes: those of the candidate, once the loss is known.
    """

    notes: tuple[str, ...] = ()

    def examine(self, *known: Any) -> Candidate | Rejection:
        logits, total = known
        head = head_of(self.view, logits)
        assert head is not None
        self.nodes = (head.product, *head.chain, self.anchor)
        check_head(self.view, head, total)
        split = None if total is None else sum_over_devices(self.view, self.anchor, total)
        if split is not None:
            what = f"{anchor_text(split)} adds the sums of several devices, each of its own classes"
            raise Declined(what, "axes", [split], _WHOLE)
        found, loss = self.loss_in(Downstream(self.view, head))
        check_rules(loss.region)
        if (gradients := self.gradients(loss, known)) is not None:
            return gradients
        summed = weighted_sum(self.view, found, loss.region.root, self.search.certifier)
        self.notes = notes_of(self.view, loss, *(() if summed is None else (summed.value,)))
        by_row = self.attempt(self.by_row, loss)
        if summed is None:
            return by_row
        whole = self.attempt(self.summed, loss, summed)
        if isinstance(whole, Candidate) and whole.alternatives:
            return replace(whole, alternatives=in_turn([by_row, *whole.alternatives]))
        return whole if isinstance(whole, Candidate) else by_row

    def gradients(self, loss: Loss, known: tuple[Any, ...]) -> Candidate | None:
        """The site that makes the gradients as well, where the backward pass is not the one that JAX would make of the loss."""
        derivatives = self.search.derivatives
        if derivatives is None or not self.search.gradient:
            return None
        if find_backward(self.view, loss.region.of(loss.region.root), derivatives, SumTerms(self.view)) is not None:
            return None
        values = [v for v in loss.region.roots if is_float(v.dtype)]
        if any(nonunit(v.shape) != nonunit(loss.head.rows) for v in values):
            return None  # summed already
        found = GradientsOfLoss(self.pass_, self.search, self.anchor).examined(*known, *values)
        return next((outcome for outcome in found if isinstance(outcome, Candidate)), None)

    # -- which loss it is --------------------------------------------------------------------------------------------------

    def loss_in(self, found: Downstream) -> tuple[Downstream, Loss]:
        """The loss by row that the logarithm belongs to, of all rows or of those that the program takes of the log-probabilities.

        Raises:
          Declined: no value by row is one.
        """
        try:
            return found, self.loss(found)
        except Declined:
            taken = found.of_taken_rows()
            with contextlib.suppress(Declined):
                if taken is not None:
                    return taken, self.loss(taken)
            raise

    def loss(self, found: Downstream) -> Loss:
        """The loss by row that the logarithm belongs to.

        Raises:
          Declined: no value by row is one.
        """
        argmax = found.argmax()
        others = () if argmax is None else (argmax,)
        problem: Declined | None = None
        leaks = {v: self.leaks(found, v, others) for v in self.after_anchor(found)}
        least = min(leaks.values(), default=0)
        for value in sorted(leaks, key=leaks.__getitem__)[:_TRIED]:
            if problem is not None and not least and leaks[value]:
                break  # what nothing else reads is another function
            try:
                return self.loss_at(found, value, others)
            except Declined as declined:
                problem = problem or declined
        raise self.hinted(problem or Declined("no value by row is a loss by labels"))

    def hinted(self, problem: Declined) -> Declined:
        """A reason with the edit that helps where the program has the logarithm of a softmax."""
        if problem.code == "value" and self.anchor.primitive == "log" and of_softmax(self.view, self.anchor):
            return Declined(problem.sentence, problem.code, problem.nodes, LOG_EDIT)
        return problem

    def after_anchor(self, found: Downstream) -> Iterator[Value]:
        """The values that may be the loss, of those that the logarithm goes into."""
        known = {v.id for v in self.anchor.outputs}
        losses = {v.id for v in found.losses()}
        yield from self.of_rule(losses)
        for node in found.nodes:
            if any(isinstance(a, Value) and a.id in known for a in node.inputs):
                known.update(v.id for v in node.outputs)
                if node.outputs[0].id in losses:
                    yield node.outputs[0]

    def of_rule(self, losses: Container[int]) -> list[Value]:
        """The losses that the anchor itself makes, where it is a function with a rule of the user's own."""
        return [v for v in self.anchor.outputs if v.id in losses] if self.anchor.blocks else []

    def leaks(self, found: Downstream, value: Value, others: Sequence[Value]) -> int:
        """The number of nodes that read logits, or what is made of them, but that the value is not made of."""
        inside = self.makers(found, [value, *others])
        ends = {v.id for v in (value, *others)}
        made = [v for n in found.nodes if n.id in inside for v in n.outputs if v.id not in ends]
        live = self.live
        return sum(n.id not in inside and n.id in live for v in made for n in found.readers(v))

    def makers(self, found: Downstream, values: list[Value]) -> set[int]:
        """The nodes from the product on that values are made of."""
        inside, stack = {found.head.product.id}, values
        while stack:
            maker = self.search.block.producer.get(stack.pop().id)
            if maker is not None and maker.id not in inside and maker.outputs[0].id in found.ids:
                inside.add(maker.id)
                stack += maker.values
        return inside

    @property
    def live(self) -> frozenset[int]:
        """The nodes that results of the block depend on, not counting the backward pass."""
        key = "live", self.search.block.path
        if key not in self.search.shared:
            self.search.shared[key] = live_nodes(self.search.block)
        return self.search.shared[key]

    def loss_at(self, found: Downstream, value: Value, others: tuple[Value, ...]) -> Loss:
        """The loss that a value is. Raises Declined if it is something else."""
        problem: Declined | None = None
        for cut in cuts_with_weights(found, value, *others):
            try:
                return self.loss_of(found, cut, len(others))
            except Declined as declined:
                problem = problem or declined
        raise problem or Declined(f"{value!r} is no loss by labels")

    def loss_of(self, found: Downstream, cut: Cut, others: int) -> Loss:
        """The loss that a region computes, with an argmax if there are `others`. Raises Declined if it is something else."""
        loss = Loss(found.head, cut, numbers_of(cut, found.head), Treatment(), more=(None,) * others)
        loss = with_more(loss, self.live, self.search.differentiated and bool(self.search.block.path))
        odd = treatment(loss.cut, found.head, lambda odd: planned(self.search, replace(loss, odd=odd)), loss.labelled)
        if odd is None:
            raise Declined(f"{cut.region.root!r} {ODD}", "value", edit=ODD_EDIT)
        return replace(loss, odd=odd)

    # -- what it becomes ---------------------------------------------------------------------------------------------------

    def by_row(self, loss: Loss) -> Candidate | Rejection:
        return self.offered(loss.region, planned(self.search, loss), EDIT, self.notes, CONCEPTS)

    def summed(self, loss: Loss, total: WeightedSum) -> Candidate | Rejection:
        """The site with the sum over its rows."""
        region = loss.region
        leaves = dict(region.leaves) | {f"factor {i}": v for i, v in enumerate(total.given)}
        inner = {n.id: n for n in (*region.nodes, *total.nodes)}
        support = {n.id: n for n in (*region.support, *total.numbers.values()) if n.id not in inner}
        whole = region_of(self.view, total.value, leaves, inner, support, region.others, loss.head.classes)
        plan = planned(self.search, replace(loss, cut=replace(loss.cut, region=whole)), total)
        return self.offered(whole, plan, EDIT, self.notes, CONCEPTS)


def live_nodes(block: Any) -> frozenset[int]:
    """The nodes of a block that its results depend on, not counting the backward pass."""
    wanted, found = set(block.returned), set[int]()
    for node in reversed(block.nodes):
        if not in_backward(node) and any(v.id in wanted for v in node.outputs):
            found.add(node.id)
            wanted.update(v.id for v in node.values)
    return frozenset(found)


PASSES = {47: LinearCrossEntropyPass()}
