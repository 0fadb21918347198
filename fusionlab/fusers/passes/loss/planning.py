"""How a loss, its weighted sum, or its gradients become a call of the op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ....graph.matching.region import Region
from ....kernels import OPS
from ...engine.base import Search, Substitution
from ...engine.layout import input_positions
from .heads import Head
from .numbers import Numbers, is_total
from .out_of_range import Treatment
from .rows import Cut
from .sums import WeightedSum

OP = OPS["linear_cross_entropy"]
CONCEPTS = ("linear_cross_entropy",)
EDIT = "compute the outside use from x and w again, or return it from a function of its own"


@dataclass(frozen=True, eq=False)
class Loss:
    """A loss by row: its head, the region that computes it, its numbers, and what a label out of range picks.

    Attributes:
      slots: of a region that computes its gradients, the operands by which it is differentiated, in the order of its roots.
    """

    head: Head
    cut: Cut
    numbers: Numbers
    odd: Treatment
    slots: tuple[str, ...] = ()

    @property
    def region(self) -> Region:
        return self.cut.region

    @property
    def is_total(self) -> bool:
        """Whether the op makes the sum over the rows."""
        return bool(self.slots) or is_total(self.cut.region.root, self.head)

    @property
    def attrs(self) -> dict[str, Any]:
        """The op's attributes."""
        head, given = self.head, self.numbers
        return {
            "label_smoothing": given.label_smoothing,
            "z_loss": given.z_loss,
            "softcap": head.softcap,
            "logits_dtype": head.dtype,
            "transposed": head.transposed,
            "out_of_range": self.odd.name,
            "precision": head.product.params.get("precision"),
            "also": () if self.slots else ("argmax",) * len(self.region.others),
        }


def planned(search: Search, loss: Loss, total: WeightedSum | None = None) -> Substitution:
    """The call of the op: rows as the logits have them, and weights for a sum; `total` is what is summed after the loss."""
    region, head, cut = loss.region, loss.head, loss.cut
    where, root = input_positions(region), region.root
    attrs = loss.attrs | {"implementation": search.implementation}
    summed = total is not None or loss.is_total
    chosen = cut.weights is not None and cut.weights.dtype == bool
    if summed:
        attrs["masked"] = chosen or (total is not None and total.masks)

    def operands(*inputs: Any) -> tuple[Any, ...]:
        given = {name: inputs[i] for name, i in where.items()}
        labels = jnp.reshape(given["labels"], head.rows)
        weights: Any = jnp.asarray(1.0, root.dtype)
        if total is not None:
            weights = total.weights(region, _beside(total, given))
        spread = jnp.broadcast_to if weights.size == 1 else jnp.reshape
        weights = spread(weights, head.rows) * loss.numbers.factor if summed else None
        if weights is not None and cut.weights is not None:
            weights = weights * jnp.reshape(given["weights"], head.rows).astype(weights.dtype)
        return head.of_rows(given["x"]), given["w"], labels, given.get("bias"), weights

    def finish(out: Any) -> Any:
        results = out if len(region.roots) > 1 else (out,)
        ends = [jnp.reshape(o, v.shape).astype(v.dtype) for o, v in zip(results, region.roots, strict=True)]
        return tuple(ends) if len(ends) > 1 else ends[0]

    formula = OP.formula(**attrs, bias=head.bias is not None, weights=summed)
    if loss.slots:
        formula = f"gradients of {formula}"
    return _Call(OP, attrs, operands, finish, formula, loss=loss, total=total)


def _beside(total: WeightedSum, given: dict[str, Any]) -> list[Any]:
    """The values that a sum reads besides the losses, from the region's inputs by name."""
    return [given[f"factor {i}"] for i in range(len(total.given))]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Call(Substitution):
    """A call whose result is adapted to the program's: the sign of a loss by row, its weights, NaN for labels outside of the vocabulary,
    what a sum adds to it; or its gradients."""

    loss: Loss
    total: WeightedSum | None = None

    def result(self, operands: tuple[Any, ...], inputs: tuple[Any, ...]) -> Any:
        loss, given = self.loss, {name: inputs[i] for name, i in input_positions(self.loss.region).items()}
        if loss.slots:
            return self.gradients(operands, given)
        out = super().result(operands, inputs)
        first, *others = out if loss.region.others else (out,)
        first = self.marked(operands, first) if loss.odd.nan else first
        if self.total is None and not loss.is_total:
            first = self.by_row(first, given)
        elif self.total is not None and self.total.adds:
            first = first + self.total.rest(loss.region, _beside(self.total, given)).astype(first.dtype)
        return (first, *others) if others else first

    def by_row(self, out: Any, given: dict[str, Any]) -> Any:
        """The losses by row with the sign and the weights that the program gives them."""
        out = out if self.loss.numbers.factor > 0 else -out
        if self.loss.cut.weights is None:
            return out
        weights = jnp.reshape(given["weights"], out.shape)
        return jnp.where(weights, out, 0) if weights.dtype == bool else weights.astype(out.dtype) * out

    def marked(self, operands: Sequence[Any], out: Any) -> Any:
        """The result, NaN where a label outside of the vocabulary counts."""
        _, w, labels, _, weights = operands
        outside = (labels < 0) | (labels >= w.shape[0 if self.attrs["transposed"] else 1])
        if weights is None:
            return jnp.where(outside, jnp.nan, out)
        counted = outside & (weights != 0) if self.attrs["masked"] else outside
        return out + jnp.sum(weights * jnp.where(counted, jnp.nan, 0)).astype(out.dtype)

    def gradients(self, operands: Sequence[Any], given: dict[str, Any]) -> Any:
        """The gradients of the sum of the losses, each turned as its root."""
        loss, (rows, w, labels, bias, weights) = self.loss, operands
        named = {"x": rows, "w": w} | ({} if bias is None else {"bias": bias})
        fixed = {name: a for name, a in named.items() if name not in loss.slots}

        def summed(moving: dict[str, Any]) -> Any:
            at = fixed | moving
            return self.op.call(at["x"], at["w"], labels, at.get("bias"), weights, **self.attrs)

        out, pull = jax.vjp(summed, {name: named[name] for name in loss.slots})
        (found,) = pull(jnp.ones_like(out))
        if "x" in found:
            (found["x"],) = jax.vjp(loss.head.of_rows, given["x"])[1](found["x"])
        turned = zip((found[name] for name in loss.slots), loss.region.roots, strict=True)
        ends = [a if a.shape == v.shape else a.T for a, v in turned]
        return tuple(ends) if len(ends) > 1 else ends[0]
