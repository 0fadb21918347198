"""Products in einsum form: every axis is a label; batch, contracted and free follow from where a label occurs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ..program.ir import Node
from .algebra import gives_float, monomial, reduced
from .convolutions import contraction
from .nodes import CNode, Coef, Operand, Ref, node_axes

if TYPE_CHECKING:
    from .view import CanonicalView


def split_rows(view: CanonicalView, ref: Ref, sizes: tuple[int, ...]) -> Ref | None:
    """`(x.reshape(rows) @ w).reshape(x's rows)` as the product of x itself; None if `ref`, a dot, is not reshaped back to these rows."""
    dot = view.nodes[ref.nid]
    for edge, other in zip(dot.operands, dot.operands[::-1], strict=True):
        names = _unmerged(view, dot, edge, other)
        if names is None:
            continue
        inner = view.nodes[edge.nid].operands[0]
        size: dict[Any, int] = {("m", slot): n for slot, n in enumerate(_seen_sizes(view, inner))}
        size |= dict(zip(other.axes, view.nodes[other.nid].shape, strict=True))
        out = _result_of(dot, ref, names)
        if None in out or tuple(size[y] for y in out) != sizes:
            continue
        labels = [
            x for _, x in sorted(zip(inner.axes, itertools.chain(*names.values()), strict=True), key=itemgetter(0))
        ]
        return _einsum(view, ref.coef * inner.coef, [(inner.nid, labels), (other.nid, list(other.axes))], out, size)
    return None


def _unmerged(view: CanonicalView, dot: CNode, edge: Operand, other: Operand) -> dict[Any, list[Any]] | None:
    """For an operand of a product that is another array with free axes merged by a reshape: label -> labels of that array's axes, in
    their order. None where it is not.
    """
    merged = view.nodes[edge.nid]
    if merged.op != "reshape" or min(merged.operands[0].axes, default=0) < 0:
        return None
    inner = merged.operands[0]
    groups = _groups(_seen_sizes(view, inner), merged.shape)
    if groups is None or len(inner.axes) != len(view.nodes[inner.nid].shape):
        return None
    of_label = dict(zip(edge.axes, groups, strict=True))
    free = set(dot.params).difference(other.axes)
    if any(len(g) != 1 for x, g in of_label.items() if x not in free):
        return None
    return {x: [("m", slot) for slot in g] if x in free else [x] for x, g in of_label.items()}


def _seen_sizes(view: CanonicalView, edge: Operand) -> tuple[int, ...]:
    return view.dim_sizes(Ref(1.0, edge.nid, edge.axes))


def _result_of(dot: CNode, ref: Ref, names: Mapping[Any, list[Any]]) -> list[Any]:
    """The labels of the axes of `ref`, a product; `names` replaces some of them. None marks an axis along which it is broadcast."""
    labels = (dot.params[d] if d >= 0 else None for d in ref.dims)
    return [y for x in labels for y in names.get(x, [x])]


def _groups(source: Sequence[int], result: Sequence[int]) -> list[list[int]] | None:
    """For a reshape: the axes of `source` that make each axis of `result`; None if one is split."""
    groups: list[list[int]] = []
    axes = iter(range(len(source)))
    for size in result:
        group, product = [], 1
        while product < size:
            slot = next(axes, None)
            if slot is None:
                return None
            group.append(slot)
            product *= source[slot]
        if product != size:
            return None
        groups.append(group)
    return groups if next(axes, None) is None else None


def dot(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    """Einsum form: every axis is a label; batch, contracted and free follow from where a label occurs."""
    if not gives_float(node):
        return view.opaque(node, ins)
    (lc, rc), (lb, rb) = node.params["dimension_numbers"]
    shapes = [node.inputs[0].shape, node.inputs[1].shape]
    labels = [_labels(shapes[0], lc, lb, "l"), _labels(shapes[1], rc, rb, "r")]
    size = _sizes(labels, shapes)
    names = [[x for x in side if size[x] != 1] for side in labels]
    out = _result_labels(names)
    alone = _sum_of_value(view, ins, names, out, size)
    if alone is not None:
        return [alone]
    on_nodes = _labels_on_nodes(view, ins, labels, shapes)
    if on_nodes is None:
        return view.opaque(node, ins)
    if not len(lc):  # nothing is summed: `einsum("bhts,h->bhts", p, weights)` is a multiplication that broadcasts
        return [_outer(view, ins, labels, shapes, out, [size[x] for x in out])]
    return [_einsum(view, ins[0].coef * ins[1].coef, on_nodes, out, size)]


def _sizes(labels: Sequence[Sequence[Any]], shapes: Sequence[Sequence[int]]) -> dict[Any, int]:
    """Label -> size, of the labels of two operands' axes."""
    return dict(zip((*labels[0], *labels[1]), (*shapes[0], *shapes[1]), strict=True))


def _result_labels(names: Sequence[Sequence[tuple]]) -> list[tuple]:
    """The labels of the result, among those of both operands: of batch axes, then of each side's own."""
    return sorted(x for x in names[0] if x[0] == "b") + [x for side in names for x in side if x[0] in ("l", "r")]


def _sum_of_value(
    view: CanonicalView, ins: list[Ref], names: list[list], out: list, size: dict[Any, int]
) -> Ref | None:
    """A product that is a sum over one value: times one number everywhere, or squared, elementwise."""
    summed = _summand(view, ins, names, size)
    if summed is None:
        return None
    ref, mine = summed
    total = reduced(view, "reduce_sum", ref, [x not in out for x in mine])
    at = dict(zip((x for x in mine if x in out), total.dims, strict=True))
    return Ref(total.coef, total.nid, tuple(at.get(x, ~size[x]) for x in out))


def _summand(view: CanonicalView, ins: list[Ref], names: list[list], size: dict[Any, int]) -> tuple[Ref, list] | None:
    """The value whose sum a product is, and the labels of its axes; None if it is not a sum."""
    if ins[0] == ins[1] and names[0] == names[1] and all(x[0] != "l" for x in names[0]):
        al = node_axes(ins[0])
        return monomial(view, [(ref, al, 1.0) for ref in ins], [size[x] for x in names[0]]), names[0]
    for ref, other, mine in ((ins[1], ins[0], names[1]), (ins[0], ins[1], names[0])):
        if view.is_literal(other) and math.isfinite(other.coef):
            return Ref(ref.coef * other.coef, ref.nid, ref.dims), mine
    return None


def convolution(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    """As `dot`, for a convolution that is equivalent to a product."""
    shapes = [node.inputs[0].shape, node.inputs[1].shape]
    found = contraction(node.params, *shapes) if gives_float(node) else None
    if found is None:
        return view.opaque(node, ins)
    labels: list[Any] = [[x or ("unit", d) for d, x in enumerate(names)] for names in (found.left, found.right)]
    size = _sizes(labels, shapes)
    on_nodes = _labels_on_nodes(view, ins, labels, shapes)
    if on_nodes is None:
        return view.opaque(node, ins)
    out = [x for x in found.out if x is not None and size[x] != 1]
    return [_einsum(view, ins[0].coef * ins[1].coef, on_nodes, out, size)]


def _einsum(view: CanonicalView, coef: Coef, operands: list[tuple[int, list]], out: list, size: dict[Any, int]) -> Ref:
    """`coef` times a dot node over two nodes with a label for each of their axes; `out` are the result's labels in order."""
    first, second = sorted(operands, key=lambda p: (p[0], [str(x) for x in p[1]]))
    number = _numbered((*first[1], *second[1]))
    edges = [Operand(1.0, nid, tuple(number[x] for x in axes)) for nid, axes in (first, second)]
    present = [x for x in number if x in out]
    nid = view.node("dot", tuple(number[x] for x in present), edges, [size[x] for x in present])
    position = _numbered(present)
    return Ref(coef, nid, tuple(position.get(x, ~size[x]) for x in out))


def _numbered(labels: Sequence[Any]) -> dict[Any, int]:
    """Each label's number, in order of appearance."""
    return {x: i for i, x in enumerate(dict.fromkeys(labels))}


def _outer(view: CanonicalView, ins: list[Ref], labels: Any, shapes: Any, out: list[tuple], sizes: list[int]) -> Ref:
    """A product of two operands, each seen at the result's axes `out` by its labels."""
    factors = []
    for ref, names, shape in zip(ins, labels, shapes, strict=True):
        dims = iter(ref.dims)
        at = {x: next(dims) for x, s in zip(names, shape, strict=True) if s != 1}
        factors.append((ref, tuple(a if (a := at.get(x)) is not None and a >= 0 else None for x in out), 1.0))
    return monomial(view, factors, sizes)


def _labels(shape: Sequence[int], contract: Any, batch: Any, side: str) -> list[tuple]:
    c, b = [int(i) for i in contract], [int(i) for i in batch]
    return [("b", b.index(d)) if d in b else ("c", c.index(d)) if d in c else (side, d) for d in range(len(shape))]


def _labels_on_node(view: CanonicalView, ref: Ref, labels: list[tuple], shape: Sequence[int]) -> list[tuple] | None:
    """A label for each axis of the operand's node; None when a contracted axis is a broadcast (left opaque)."""
    out: list[Any] = [None] * len(view.nodes[ref.nid].shape)
    dims = iter(ref.dims)
    for label, s in zip(labels, shape, strict=True):
        if s == 1:
            continue
        d = next(dims)
        if d >= 0:
            out[d] = label
        elif label[0] == "c":
            return None
    return out if all(x is not None for x in out) else None


def _labels_on_nodes(
    view: CanonicalView, ins: list[Ref], labels: Sequence[list[tuple]], shapes: Sequence[Sequence[int]]
) -> list[tuple[int, list]] | None:
    """The nodes of two operands, with a label for each of their axes; None as of `_labels_on_node`."""
    left, right = (_labels_on_node(view, *side) for side in zip(ins, labels, shapes, strict=True))
    return None if left is None or right is None else [(ins[0].nid, left), (ins[1].nid, right)]
