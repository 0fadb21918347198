"""How a loss, its weighted sum, or its gradients become a call of the op."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ....graph.canonical.nodes import nonunit
from ....graph.canonical.view import CanonicalView
from ....graph.declined import Declined
from ....graph.dtypes import is_float
from ....graph.matching.region import CASTS, VIEWS, Escape, Region, escapes
from ....graph.matching.walks import source_of
from ....graph.program.ir import Node, Value
from ....graph.program.scopes import in_backward
from ....graph.unit_cotangent import unit_cotangent
from ....kernels import OPS
from ...engine.base import Search, Substitution
from ...engine.fully_masked_rows import nan_test
from ...engine.layout import input_positions
from .heads import Head
from .numbers import Beside, Numbers, beside, is_total
from .out_of_range import Treatment
from .rows import Cut
from .sums import WeightedSum

OP = OPS["linear_cross_entropy"]
CONCEPTS = ("linear_cross_entropy",)
EDIT = "compute the outside use from x and w again, or return it from a function of its own"
_LOST = (
    "where the softmax of a label underflows, or an exponential overflows, the program's loss is infinite or NaN, and the fused op's is "
    "the loss"
)
_HIDDEN = (
    "where rows are left out by a choice between their logits and a number, and their activations are NaN or infinite, the program's "
    "gradient of the matrix is NaN, and the fused op's has nothing of these rows"
)
ROW_EDIT = "leave the rows out of the losses, jnp.where(mask, loss, 0), and not out of the softmax"
LOG_EDIT = "write the loss by jax.nn.log_softmax, which is a number for all logits that are"


@dataclass(frozen=True, eq=False)
class Loss:
    """A loss by row: its head, the region that computes it, its numbers, and what a label out of range picks.

    Attributes:
      slots: of a region that computes its gradients, the operands by which it is differentiated, in the order of its first roots.
      more: what its further roots are; None for the argmax.
    """

    head: Head
    cut: Cut
    numbers: Numbers
    odd: Treatment
    slots: tuple[str, ...] = ()
    more: tuple[Beside | None, ...] = ()

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
            "also": self.also,
            **({} if head.scale == 1 else {"scale": head.scale}),
            **({} if head.counted is None else {"classes": head.counted, "fill": head.fill}),
        }

    @property
    def labelled(self) -> list[int]:
        """The numbers of the further roots in which labels count."""
        start = len(self.region.roots) - len(self.more)
        return [start + i for i, how in enumerate(self.more) if how is not None and how.loss]

    @property
    def also(self) -> tuple[str, ...]:
        """The op's further results."""
        given = [b for b in self.more if b is not None]
        lse, loss = self.odd.lse or any(b.lse or b.squared for b in given), any(b.loss for b in given)
        wanted = {"lse": lse, "argmax": None in self.more, "loss": loss}
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)


def with_more(loss: Loss, live: Container[int] | None = None, kept: bool = False) -> Loss:
    """A loss with the values by row that are read elsewhere, by nodes that are `live`, and that the op can make, as a z-loss that is
    reported. `kept`: what the block returns is kept for a backward pass."""
    region = loss.region
    read = (e.value for e in escapes(region) if _is_read(e, live, kept))
    values = {v.id: v for v in read if _is_by_row(v, loss.head)}
    made = {v: beside(loss.cut, loss.head, v, loss.numbers) for v in values.values()}
    known = {v: how for v, how in made.items() if how is not None}
    cut = replace(loss.cut, region=replace(region, others=(*region.others, *known)))
    return replace(loss, cut=cut, more=(*loss.more, *known.values()))


def notes_of(view: CanonicalView, loss: Loss, *ends: Value) -> tuple[str, ...]:
    """What the fused op has another number for. Raises Declined if the program tests whether its loss is one, or an end, its sum, or a
    gradient."""
    region, backward = loss.region, _read_backward(loss.region)
    gradients = (*region.roots[: len(loss.slots)], *backward)
    told = []
    if loss.numbers.lost:
        told.append((_LOST, (*region.roots, *ends, *backward), LOG_EDIT))
    if _hides_logits(region, _choices(loss.cut, loss.head)):
        told.append((_HIDDEN, gradients, ROW_EDIT))
    for note, values, edit in told:
        asked = next((n for v in values if (n := nan_test(view, v, sums=True)) is not None), None)
        if asked is not None:
            raise Declined(f"{note}, and {asked!r} tests for that", "value", [asked], edit)
    return tuple(note for note, _, _ in told)


def _read_backward(region: Region) -> list[Value]:
    """What the backward pass makes of the values inside a region."""
    inner = (v for n in region.nodes for v in n.outputs)
    readers = {u.id: u for v in inner for u in region.block.users.get(v.id, ()) if in_backward(u)}
    return [v for n in readers.values() for v in n.outputs]


def planned(search: Search, loss: Loss, total: WeightedSum | None = None) -> Substitution:
    """The call of the op: rows as the logits have them, and weights for a sum; `total` is what is summed after the loss."""
    region, head, cut = loss.region, loss.head, loss.cut
    where, root = input_positions(region), region.root
    attrs: dict[str, Any] = loss.attrs | {"implementation": search.implementation}
    summed = total is not None or loss.is_total
    if not summed:
        attrs["also"] = tuple(name for name in attrs["also"] if name != "loss")
    choices = _choices(cut, head)
    chosen, hidden = bool(choices), _hides_logits(region, choices)
    if summed:
        attrs["masked"] = chosen or (total is not None and total.masks)

    def operands(*inputs: Any) -> tuple[Any, ...]:
        given = {name: inputs[i] for name, i in where.items()}
        labels = jnp.reshape(given["labels"], head.rows)
        weights: Any = jnp.asarray(1.0, root.dtype)
        if total is not None:
            weights = total.weights(region, _read_by(total, given))
        spread = jnp.broadcast_to if weights.size == 1 else jnp.reshape
        weights = spread(weights, head.rows) * loss.numbers.factor if summed else None
        if weights is not None and cut.weights is not None:
            own = jnp.reshape(given["weights"], head.rows)
            weights = jnp.where(own, weights, 0) if chosen else weights * own.astype(weights.dtype)
        x = head.of_rows(given["x"])
        if hidden:  # a softmax of rows that are left out has no logits of theirs
            x = jnp.where(jnp.reshape(given["weights"], (*head.rows, 1)), x, 0)
        # In the dtype in which it is added: a sum that the program does not round is for no kernel that rounds it.
        bias = given["bias"].astype(head.sum_dtype) if "bias" in given else None
        return x, given["w"], labels, bias, weights

    def finish(out: Any) -> Any:
        results = out if len(region.roots) > 1 else (out,)
        ends = [jnp.reshape(o, v.shape).astype(v.dtype) for o, v in zip(results, region.roots, strict=True)]
        return tuple(ends) if len(ends) > 1 else ends[0]

    formula = OP.formula(**attrs, bias=head.bias is not None, weights=summed)
    if loss.slots:
        formula = f"gradients of {formula}"
    return _Call(OP, attrs, operands, finish, formula, loss=loss, total=total)


def _is_read(found: Escape, live: Container[int] | None, kept: bool) -> bool:
    if found.user is None:
        return not kept
    return live is None or found.user.id in live


def _is_by_row(value: Value, head: Head) -> bool:
    return nonunit(value.shape) == nonunit(head.rows) and is_float(value.dtype)


def _choices(cut: Cut, head: Head) -> list[Node]:
    """The nodes by which the weights choose the rows that count, of what logits go into: multiplied by 0, as by targets, NaN is NaN."""
    if cut.weights is None:
        return []
    block, own = cut.region.block, source_of(cut.region.block, cut.weights, VIEWS)
    made, found = {v.id for v in head.product.outputs}, list[Node]()
    for node in sorted((*cut.region.nodes, *cut.region.support), key=lambda n: n.id):
        if any(v.id in made for v in node.values):
            made.update(v.id for v in node.outputs)
            found += [node] if node.primitive == "select_n" and source_of(block, node.inputs[0], VIEWS) is own else []
    return found


def _hides_logits(region: Region, choices: Sequence[Node]) -> bool:
    """Whether choices leave out the logits of rows, before their exponentials."""
    chosen = {v.id for n in choices for v in n.outputs}
    sources = (source_of(region.block, n.inputs[0], CASTS | {"sub"}) for n in region.nodes if n.primitive == "exp")
    return any(isinstance(a, Value) and a.id in chosen for a in sources)


def _read_by(total: WeightedSum, given: dict[str, Any]) -> list[Any]:
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
        roots, out = self.gradients(operands, given) if loss.slots else ((), super().result(operands, inputs))
        first, *others = out if self.attrs["also"] else (out,)
        named = dict(zip(self.attrs["also"], others, strict=True))
        if loss.odd.differs:
            lost = self.lost(operands, named)
            named |= {name: a + lost for name, a in named.items() if name == "loss"}
            first = self.without(operands, first, lost)
        more = [_made(how, {"loss": first, **named}) for how in loss.more]
        ends = [*(roots or (self.as_root(first, given),)), *more]
        return tuple(ends) if len(ends) > 1 else ends[0]

    def as_root(self, out: Any, given: dict[str, Any]) -> Any:
        """The loss as the root of the region is."""
        if self.total is None and not self.loss.is_total:
            return self.by_row(out, given)
        # Of no row, a mean is NaN; the weights of rows that are left out are 0, and XLA multiplies infinity by a mask to 0.
        if self.total is not None and (self.total.adds or self.total.given):
            return out + self.total.rest(self.loss.region, _read_by(self.total, given)).astype(out.dtype)
        return out

    def by_row(self, out: Any, given: dict[str, Any]) -> Any:
        """The losses by row with the sign and the weights that the program gives them."""
        out = out if self.loss.numbers.factor > 0 else -out
        if self.loss.cut.weights is None:
            return out
        weights = jnp.reshape(given["weights"], out.shape)
        return (
            jnp.where(weights, out, 0) if _choices(self.loss.cut, self.loss.head) else weights.astype(out.dtype) * out
        )

    def lost(self, operands: Sequence[Any], named: dict[str, Any]) -> Any:
        """What the loss of a row has besides the op's: of labels outside of the vocabulary alone, and no gradient."""
        _, w, labels, *_ = operands
        outside = (labels < 0) | (labels >= w.shape[0 if self.attrs["transposed"] else 1])
        if self.loss.odd.nan:
            return jnp.where(outside, jnp.nan, 0.0)
        kept = 1 - self.loss.numbers.label_smoothing
        return jax.lax.stop_gradient(jnp.where(outside, -kept * named["lse"], 0))

    def without(self, operands: Sequence[Any], out: Any, lost: Any) -> Any:
        """The result of which some rows have more, or less, by `lost`."""
        weights = operands[-1]
        if weights is None:
            return out + lost.astype(out.dtype)
        counted = jnp.where(weights != 0, lost, 0) if self.attrs["masked"] else lost
        return out + jnp.sum(weights * counted).astype(out.dtype)

    def gradients(self, operands: Sequence[Any], given: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        """(the gradients of the sum of the losses, each turned as its root; the op's result)."""
        loss, (rows, w, labels, bias, weights) = self.loss, operands
        named = {"x": rows, "w": w} | ({} if bias is None else {"bias": bias})
        fixed = {name: a for name, a in named.items() if name not in loss.slots}

        def summed(moving: dict[str, Any]) -> Any:
            at = fixed | moving
            out = self.op.call(at["x"], at["w"], labels, at.get("bias"), weights, **self.attrs)
            return (out[0] if self.attrs["also"] else out), out

        with unit_cotangent():
            total, pull, out = jax.vjp(summed, {name: named[name] for name in loss.slots}, has_aux=True)
        (found,) = pull(jnp.ones_like(total))
        if "x" in found:
            (found["x"],) = jax.vjp(loss.head.of_rows, given["x"])[1](found["x"])
        turned = zip((found[name] for name in loss.slots), loss.region.roots, strict=False)
        return tuple(a if a.shape == v.shape else a.T for a, v in turned), out


def _made(how: Beside | None, named: dict[str, Any]) -> Any:
    """A further value by row, of the op's results."""
    if how is None:
        return named["argmax"]
    parts = [] if not how.loss else [how.loss * named["loss"]]
    parts += [how.lse * named["lse"]] if how.lse else []
    parts += [how.squared * jnp.square(named["lse"])] if how.squared else []
    out = sum(parts[1:], start=parts[0])
    return jax.lax.stop_gradient(out) if how.stopped else out
