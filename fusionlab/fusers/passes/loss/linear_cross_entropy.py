"""Pass `linear_cross_entropy`: logsumexp(x @ w) - (x @ w)[label], however it is written, and its weighted sum over the rows -> one op.

Which function of the logits and the labels a value is follows from its numbers (`numbers`), not from its spelling. Where the program
makes a scalar of the losses by weights that do not depend on the logits, the op makes the sum, and its gradients going forward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ....graph.canonical.rules import is_jax_rule
from ....graph.canonical.view import CanonicalView
from ....graph.declined import Declined
from ....graph.matching.region import Region
from ....graph.primitives import having
from ....graph.program.ir import Block, Node, Value
from ....graph.program.scopes import in_backward
from ....kernels import OPS
from ....kernels.op.arrays import FLOATS, is_explicitly_sharded
from ...engine.base import AUTO_AXES, Pass, Search, Substitution
from ...engine.layout import input_positions
from ...engine.outcomes import Candidate, Rejection, in_turn
from ...engine.site import Site
from ...engine.wording import anchor_text
from .heads import Head, exponentiated, head_of, product_of
from .numbers import Numbers, is_total, numbers_of
from .out_of_range import Treatment, treatment
from .rows import Cut, Downstream, cuts, region_of
from .sums import WeightedSum, weighted_sum

OP = OPS["linear_cross_entropy"]
_TRIED = 8  # values by row that are evaluated
_MOST = 1 << 18  # entries of an array that has the vocabulary twice
_CONCEPTS = ("linear_cross_entropy",)
_ODD = "treats labels outside of the vocabulary in a way that the fused op does not have"
_ODD_EDIT = "subtract the maximum by jax.nn.log_softmax or jax.nn.logsumexp, or pick the logit by jnp.take_along_axis"
RULES = having("rule")
_READ = RULES | {"log"}
_EDIT = "compute the outside use from x and w again, or return it from a function of its own"


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
        "with label smoothing, and a z-loss.",
        "A weighted sum of the losses, as the mean over the rows that a mask keeps, is a part of the site.",
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

    def anchors(self, search: Search) -> Iterator[tuple[Node, Value, Node] | tuple[Node]]:
        known = set[int]()
        for node in search.block.nodes:
            if node.primitive not in _READ:  # most nodes of a program; no function is called for them
                continue
            if _is_rule_of_loss(search, node):
                yield (node,)
            found = exponentiated(search.view, node) if self.is_anchor(node) else None
            product = None if found is None else product_of(search.view, found[0])
            if found is not None and product is not None and product.id not in known:
                known.add(product.id)  # a z-loss may have a logarithm of its own
                yield node, *found

    def examine(self, search: Search, anchor: Node, *known: Any) -> list[Candidate | Rejection]:
        return _LossSite(self, search, anchor).examined(*known)


def _is_rule_of_loss(search: Search, node: Node) -> bool:
    """Whether a node is a function with a derivative of the user's own that takes the logits of a product, and the logarithm of the sum of
    their exponentials."""
    if node.primitive not in RULES or not node.blocks or is_jax_rule(node):
        return False
    read = _exponentiated_inputs(node.blocks[0])
    given = (a for v, a in zip(node.blocks[0].inputs, node.inputs, strict=False) if v.id in read)
    return any(isinstance(a, Value) and product_of(search.view, a) is not None for a in given)


def _exponentiated_inputs(block: Block) -> set[int]:
    """The ids of the logits in a block that computes the logarithm of the sum of their exponentials."""
    view = CanonicalView(block)
    found = (exponentiated(view, n) for n in block.nodes if n.primitive == "log")
    return {f[0].id for f in found if f is not None}


@dataclass(frozen=True, eq=False)
class _Loss:
    """A loss by row: its head, the region that computes it, its numbers, and what a label out of range picks."""

    head: Head
    cut: Cut
    numbers: Numbers
    odd: Treatment

    @property
    def region(self) -> Region:
        return self.cut.region

    @property
    def is_total(self) -> bool:
        return is_total(self.cut.region.root, self.head)

    @property
    def attrs(self) -> dict[str, Any]:
        head, given = self.head, self.numbers
        return {
            "label_smoothing": given.label_smoothing,
            "z_loss": given.z_loss,
            "softcap": head.softcap,
            "logits_dtype": head.dtype,
            "transposed": head.transposed,
            "out_of_range": self.odd.name,
            "precision": head.product.params.get("precision"),
            "also": ("argmax",) * len(self.region.others),
        }


class _LossSite(Site):
    """One logarithm of a sum of exponentials, from there to a candidate or a rejection."""

    def examine(self, *known: Any) -> Candidate | Rejection:
        if not known:
            edit = "write the loss without a rule of its own, as optax and jax.nn have it: the fused op brings its gradient"
            self.decline(
                "custom_rule", f"{anchor_text(self.anchor)} is a loss with a derivative of the user's own", edit=edit
            )
        logits, total = known
        head = head_of(self.view, logits)
        assert head is not None
        self.nodes = (head.product, *head.chain, self.anchor)
        self.check(head, total)
        found = Downstream(self.view, head)
        loss = self.loss(found)
        by_row = self.attempt(self.by_row, loss)
        summed = weighted_sum(self.view, found, loss.region.root)
        if summed is None:
            return by_row
        whole = self.attempt(self.summed, loss, summed)
        if isinstance(whole, Candidate) and self.search.differentiated:
            return replace(whole, alternatives=in_turn([by_row]))
        return whole if isinstance(whole, Candidate) else by_row

    def check(self, head: Head, total: Node) -> None:
        """Declines a head that the op does not take."""
        if int(total.params["axes"][0]) != len(head.logits.shape) - 1:
            self.decline("axes", f"{anchor_text(total)} does not sum over the last axis of the logits", [total])
        alike = head.classes ** (1 + sum(n == head.classes for n in head.x.shape))
        if head.classes in head.x.shape and alike > _MOST:
            sentence = (
                f"{head.x!r} has an axis as long as the vocabulary, {head.classes}: there is no proof at reduced sizes"
            )
            self.decline("uncertified", sentence, [head.product])
        operands = [*head.leaves.values()]
        if any(is_explicitly_sharded(v.aval) for v in operands):
            self.decline("sharding", f"{anchor_text(head.product)} is sharded over explicit mesh axes", edit=AUTO_AXES)
        given = {np.dtype(v.dtype).name for v in (head.x, head.w)}
        if len(given) > 1 or not given <= set(FLOATS):
            sentence = f"{anchor_text(head.product)} multiplies {' by '.join(sorted(given))}"
            self.decline("dtype", f"{sentence}; the fused op takes one of {', '.join(FLOATS)}", [head.product])

    # -- which loss it is --------------------------------------------------------------------------------------------------

    def loss(self, found: Downstream) -> _Loss:
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
        raise problem or Declined("no value by row is a loss by labels")

    def after_anchor(self, found: Downstream) -> Iterator[Value]:
        """The values that may be the loss, of those that the logarithm goes into."""
        known = {v.id for v in self.anchor.outputs}
        losses = {v.id for v in found.losses()}
        for node in found.nodes:
            if any(isinstance(a, Value) and a.id in known for a in node.inputs):
                known.update(v.id for v in node.outputs)
                if node.outputs[0].id in losses:
                    yield node.outputs[0]

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

    def loss_at(self, found: Downstream, value: Value, others: tuple[Value, ...]) -> _Loss:
        """The loss that a value is. Raises Declined if it is something else."""
        problem: Declined | None = None
        for cut in cuts(found, value, others):
            loss = _Loss(found.head, cut, numbers_of(cut, found.head), Treatment())
            odd = treatment(cut, found.head, lambda odd, loss=loss: _plan(self, replace(loss, odd=odd), None))
            if odd is not None:
                return replace(loss, odd=odd)
            problem = problem or Declined(f"{value!r} {_ODD}", "value", edit=_ODD_EDIT)
        raise problem or Declined(f"{value!r} is no loss by labels")

    # -- what it becomes ---------------------------------------------------------------------------------------------------

    def by_row(self, loss: _Loss) -> Candidate | Rejection:
        return self.offered(loss.region, _plan(self, loss, None), _EDIT, concepts=_CONCEPTS)

    def summed(self, loss: _Loss, total: WeightedSum) -> Candidate | Rejection:
        """The site with the sum over its rows."""
        region = loss.region
        leaves = dict(region.leaves) | {f"factor {i}": v for i, v in enumerate(total.given)}
        inner = {n.id: n for n in (*region.nodes, *total.nodes)}
        support = {n.id: n for n in (*region.support, *total.numbers.values()) if n.id not in inner}
        whole = region_of(self.view, total.value, leaves, inner, support, region.others, loss.head.classes)
        return self.offered(
            whole, _plan(self, replace(loss, cut=replace(loss.cut, region=whole)), total), _EDIT, concepts=_CONCEPTS
        )


def live_nodes(block: Any) -> frozenset[int]:
    """The nodes of a block that its results depend on, not counting the backward pass."""
    wanted, found = set(block.returned), set[int]()
    for node in reversed(block.nodes):
        if not in_backward(node) and any(v.id in wanted for v in node.outputs):
            found.add(node.id)
            wanted.update(v.id for v in node.values)
    return frozenset(found)


def _plan(site: _LossSite, loss: _Loss, total: WeightedSum | None) -> Substitution:
    """The call of the op: rows as the logits have them, and weights for a sum; `total` is what is summed after the loss."""
    region, head, factor = loss.region, loss.head, loss.numbers.factor
    where, root = input_positions(region), region.root
    attrs = loss.attrs | {"implementation": site.search.implementation}
    summed = total is not None or loss.is_total
    if summed:
        attrs["masked"] = total is not None and total.masks

    def operands(*inputs: Any) -> tuple[Any, ...]:
        given = {name: inputs[i] for name, i in where.items()}
        labels = jnp.reshape(given["labels"], head.rows)
        weights: Any = jnp.asarray(1.0, root.dtype)
        if total is not None:
            beside = [given[f"factor {i}"] for i in range(len(total.given))]
            weights = total.weights(region, beside)
        spread = jnp.broadcast_to if weights.size == 1 else jnp.reshape
        weights = spread(weights, head.rows) * factor if summed else None
        return head.of_rows(given["x"]), given["w"], labels, given.get("bias"), weights

    def finish(out: Any) -> Any:
        first, *others = out if region.others else (out,)
        first = first if summed or factor > 0 else -first
        first = jnp.reshape(first, root.shape).astype(root.dtype)
        ends = (jnp.reshape(o, v.shape).astype(v.dtype) for o, v in zip(others, region.others, strict=True))
        return (first, *ends) if others else first

    formula = OP.formula(**attrs, bias=head.bias is not None, weights=summed)
    how = _WithNaN if loss.odd.nan else Substitution
    return how(OP, attrs, operands, finish, formula)


class _WithNaN(Substitution):
    """A call whose losses are NaN for labels outside of the vocabulary."""

    def calling(self, *inputs: Any) -> tuple[tuple[Any, ...], Any]:
        operands = self.operands(*inputs)
        _, w, labels, _, weights = operands
        outside = (labels < 0) | (labels >= w.shape[0 if self.attrs["transposed"] else 1])
        finish = functools.partial(self._marked, outside, weights)
        _, given = Substitution.calling(replace(self, finish=finish), *inputs)
        return operands, given

    def _marked(self, outside: Any, weights: Any, out: Any) -> Any:
        first, *others = out if isinstance(out, tuple | list) else (out,)
        if weights is None:
            marked = jnp.where(outside, jnp.nan, first)
        else:
            counted = outside & (weights != 0) if self.attrs["masked"] else outside
            marked = first + jnp.sum(weights * jnp.where(counted, jnp.nan, 0)).astype(first.dtype)
        return self.finish((marked, *others) if others else marked)


PASSES = {47: LinearCrossEntropyPass()}
