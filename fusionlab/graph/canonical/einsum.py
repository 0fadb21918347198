"""Products in einsum form: every axis is a label; batch, contracted and free follow from where a label occurs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..program.ir import Node
from .algebra import is_float, product, reduced
from .convolutions import contraction
from .nodes import Coef, Operand, Ref

if TYPE_CHECKING:
    from .view import View


def split_rows(view: View, ref: Ref, sizes: tuple[int, ...]) -> Ref | None:
    """`(x.reshape(rows) @ w).reshape(x's rows)` as the product of x itself; None where `ref`, a dot, is not reshaped back so."""
    dot = view.nodes[ref.nid]
    for i, edge in enumerate(dot.operands):
        merged = view.nodes[edge.nid]
        if merged.op != "reshape" or min(merged.operands[0].axes, default=0) < 0:
            continue
        inner, other = merged.operands[0], dot.operands[1 - i]
        source = view.dim_sizes(Ref(1.0, inner.nid, inner.axes))
        groups = _groups(source, merged.shape)
        if groups is None or len(inner.axes) != len(view.nodes[inner.nid].shape):
            continue
        of_label = dict(zip(edge.axes, groups, strict=True))
        free = [x for x in dot.params if x in of_label and x not in other.axes]
        if any(len(g) != 1 for x, g in of_label.items() if x not in free):
            continue
        size: dict[Any, int] = {("m", slot): source[slot] for slot in range(len(source))}
        size |= dict(zip(other.axes, view.nodes[other.nid].shape, strict=True))
        name = {x: [("m", slot) for slot in g] if x in free else [x] for x, g in of_label.items()}
        out: list[Any] = [y for d in ref.dims for y in (name.get(dot.params[d], [dot.params[d]]) if d >= 0 else [None])]
        if None in out or tuple(size[y] for y in out) != sizes:
            continue
        by_slot = {slot: name[x][k] for x, g in of_label.items() for k, slot in enumerate(g)}
        labels: list[Any] = [None] * len(source)
        for slot, axis in enumerate(inner.axes):
            labels[axis] = by_slot[slot]
        return _einsum(view, ref.coef * inner.coef, [(inner.nid, labels), (other.nid, list(other.axes))], out, size)
    return None


def _groups(source: Sequence[int], made: Sequence[int]) -> list[list[int]] | None:
    """For a reshape: the axes of `source` that make each axis of `made`; None where one is split."""
    groups: list[list[int]] = []
    axes = iter(range(len(source)))
    for size in made:
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


def dot(view: View, node: Node, ins: list[Ref]) -> list[Ref]:
    """Einsum form: every axis is a label; batch, contracted and free follow from where a label occurs."""
    if not is_float(node):
        return view.opaque(node, ins)
    (lc, rc), (lb, rb) = node.params["dimension_numbers"]
    shapes = [node.inputs[0].shape, node.inputs[1].shape]
    labels = [_labels(shapes[0], lc, lb, "l"), _labels(shapes[1], rc, rb, "r")]
    size = {label: s for side in (0, 1) for label, s in zip(labels[side], shapes[side], strict=True)}
    out = [("b", i) for i in range(len(lb))]
    out += [x for x in labels[0] if x[0] == "l"] + [x for x in labels[1] if x[0] == "r"]
    out = [x for x in out if size[x] != 1]
    alone = _sum_of_one(view, ins, [[x for x in side if size[x] != 1] for side in labels], out, size)
    if alone is not None:
        return [alone]
    on_axes = [_labels_on_node(view, ins[i], labels[i], shapes[i]) for i in (0, 1)]
    if on_axes[0] is None or on_axes[1] is None:
        return view.opaque(node, ins)
    if not len(lc):  # nothing is summed: `einsum("bhts,h->bhts", p, weights)` is a multiplication that broadcasts
        return [_outer(view, ins, labels, shapes, out, [size[x] for x in out])]
    coef = ins[0].coef * ins[1].coef
    return [_einsum(view, coef, [(ins[i].nid, axes) for i, axes in enumerate(on_axes) if axes is not None], out, size)]


def _sum_of_one(view: View, ins: list[Ref], names: list[list], out: list, size: dict[Any, int]) -> Ref | None:
    """A product that is a sum over one value: of what is multiplied by one number everywhere, or of squares, entry by entry."""
    summed = None
    for ref, other, mine in ((ins[0], ins[1], names[0]), (ins[1], ins[0], names[1])):
        if view.is_literal(other) and math.isfinite(other.coef):
            summed = Ref(ref.coef * other.coef, ref.nid, ref.dims), mine
    if ins[0] == ins[1] and names[0] == names[1] and all(x[0] != "l" for x in names[0]):
        al = tuple(d if d >= 0 else None for d in ins[0].dims)
        summed = product(view, [(ref, al, 1.0) for ref in ins], [size[x] for x in names[0]]), names[0]
    if summed is None:
        return None
    ref, mine = summed
    made = reduced(view, "reduce_sum", ref, [x not in out for x in mine])
    at = dict(zip((x for x in mine if x in out), made.dims, strict=True))
    return Ref(made.coef, made.nid, tuple(at.get(x, ~size[x]) for x in out))


def convolution(view: View, node: Node, ins: list[Ref]) -> list[Ref]:
    """The same for a convolution that is a product."""
    shapes = [node.inputs[0].shape, node.inputs[1].shape]
    found = contraction(node.params, *shapes) if is_float(node) else None
    if found is None:
        return view.opaque(node, ins)
    labels: list[Any] = [[x or ("unit", d) for d, x in enumerate(names)] for names in (found.left, found.right)]
    size = {label: s for side in (0, 1) for label, s in zip(labels[side], shapes[side], strict=True)}
    on_axes = [_labels_on_node(view, ins[i], labels[i], shapes[i]) for i in (0, 1)]
    if on_axes[0] is None or on_axes[1] is None:
        return view.opaque(node, ins)
    out = [x for x in found.out if x is not None and size[x] != 1]
    coef = ins[0].coef * ins[1].coef
    return [_einsum(view, coef, [(ins[i].nid, axes) for i, axes in enumerate(on_axes) if axes is not None], out, size)]


def _einsum(view: View, coef: Coef, operands: list[tuple[int, list]], out: list, size: dict[Any, int]) -> Ref:
    """`coef` times a dot node over two nodes with a label for each of their axes; `out` are the result's labels in order."""
    first, second = sorted(operands, key=lambda p: (p[0], [str(x) for x in p[1]]))
    number: dict[Any, int] = {}
    for _, axes in (first, second):
        for label in axes:
            number.setdefault(label, len(number))
    edges = [Operand(1.0, nid, tuple(number[x] for x in axes)) for nid, axes in (first, second)]
    present = sorted((x for x in number if x in out), key=number.__getitem__)
    nid = view.node("dot", tuple(number[x] for x in present), edges, [size[x] for x in present])
    position = {x: i for i, x in enumerate(present)}
    return Ref(coef, nid, tuple(position.get(x, ~size[x]) for x in out))


def _outer(view: View, ins: list[Ref], labels: Any, shapes: Any, out: list[tuple], sizes: list[int]) -> Ref:
    """A product of two operands, each seen at the result's axes `out` by its labels."""
    factors = []
    for ref, names, shape in zip(ins, labels, shapes, strict=True):
        dims = iter(ref.dims)
        at = {x: next(dims) for x, s in zip(names, shape, strict=True) if s != 1}
        factors.append((ref, tuple(a if (a := at.get(x)) is not None and a >= 0 else None for x in out), 1.0))
    return product(view, factors, sizes)


def _labels(shape: Sequence[int], contract: Any, batch: Any, side: str) -> list[tuple]:
    c, b = [int(i) for i in contract], [int(i) for i in batch]
    return [("b", b.index(d)) if d in b else ("c", c.index(d)) if d in c else (side, d) for d in range(len(shape))]


def _labels_on_node(view: View, ref: Ref, labels: list[tuple], shape: Sequence[int]) -> list[tuple] | None:
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
