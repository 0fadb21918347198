"""Fused ops in the canonical view: nodes whose operands' axes are labels, as a product's are.

A primitive that knows its axes has a method `form(params, shapes) -> Form`. The view does not need to know what the op
computes: two such nodes are equal if op, traits, operands and labels are.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ...showing import Shown
from ..program.ir import Node
from .nodes import ONE, CNode, Operand, Ref, tidy

if TYPE_CHECKING:
    from .view import CanonicalView


@dataclass(frozen=True, repr=False)
class FusedForm(Shown):
    """One call of a fused op, as the canonical view represents it.

    Attributes:
      slots: names of the operands, in order.
      axes: for each operand, a label for each axis: a name and a number ("m0", "m1", "k0").
      result: the labels of the result's axes.
      traits: attributes that change the function ("activation", "is_causal"), by name.
      numbers: attributes that are numbers ("epsilon", "scale"): a pattern may capture them.
    """

    slots: tuple[str, ...]
    axes: tuple[tuple[str, ...], ...]
    result: tuple[str, ...]
    traits: tuple[tuple[str, Hashable], ...] = ()
    numbers: tuple[tuple[str, float], ...] = ()


class Labelled(NamedTuple):
    """Params of a fused op's node.

    Attributes:
      traits: as in `FusedForm`.
      slots: name of each operand; numbers come last, as multiples of one.
      names: label -> the op's name for it ("m", "k"), the same for several rows or batch axes.
      labels: the label of each of the node's own axes.
    """

    traits: tuple[tuple[str, Hashable], ...]
    slots: tuple[str, ...]
    names: tuple[str, ...]
    labels: tuple[int, ...]


def node_labels(node: CNode) -> tuple[int, ...] | None:
    """The labels of a node's own axes, where its operands' axes are labels; else None."""
    if isinstance(node.params, Labelled):
        return node.params.labels
    return node.params if node.op == "dot" else None


def fused(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref] | None:
    """The Refs of a fused op's node; None for any other node, and where a sum runs over an axis no operand has."""
    form = _form_of(node)
    if form is None:
        return None
    number: dict[str, int] = {}
    operands = _nonunit(node, form)
    edges = [_edge(view, ref, labels, number) for ref, labels in zip(ins, operands, strict=True)]
    out = node.outputs[0]
    result = _longer(form.result, out.shape)
    if not set[str]().union(*operands).difference(result) <= number.keys():
        return None
    size = dict(zip(form.result, out.shape, strict=True))
    own = sorted((x for x in result if x in number), key=number.__getitem__)
    edges += [Operand(value, ONE, ()) for _, value in form.numbers]
    nid = view.node(node.primitive, _params(form, number, own), edges, [size[x] for x in own])
    first = Ref(1.0, nid, tuple(own.index(x) if x in number else ~size[x] for x in result))
    return [first, *view.opaque(node, ins)[1:]] if len(node.outputs) > 1 else [first]


def _form_of(node: Node) -> FusedForm | None:
    form_of = getattr(node.eqn.primitive, "form", None)
    return form_of(node.params, [a.shape for a in node.inputs]) if form_of is not None else None


def _params(form: FusedForm, number: Mapping[str, int], own: Sequence[str]) -> Labelled:
    return Labelled(
        form.traits,
        (*form.slots, *(name for name, _ in form.numbers)),
        tuple(x.rstrip("0123456789") for x in number),
        tuple(number[x] for x in own),
    )


def _nonunit(node: Node, form: FusedForm) -> list[list[str]]:
    """The labels of each operand's axes that are longer than 1."""
    return [_longer(labels, atom.shape) for labels, atom in zip(form.axes, node.inputs, strict=True)]


def _longer(labels: Sequence[str], shape: Sequence[int]) -> list[str]:
    """Those labels of axes that are longer than 1."""
    return [x for x, size in zip(labels, shape, strict=True) if size != 1]


def _edge(view: CanonicalView, ref: Ref, labels: Sequence[str], number: dict[str, int]) -> Operand:
    """The edge to an operand. An axis it is broadcast along has no label.

    `number` numbers labels in order of appearance: in the order of the nodes' own axes, whatever the layout.
    """
    label_of = {d: label for label, d in zip(labels, ref.dims, strict=True) if d >= 0}
    axes = (number.setdefault(label_of[axis], len(number)) for axis in range(len(view.nodes[ref.nid].shape)))
    return Operand(tidy(ref.coef), ref.nid, tuple(axes))
