"""A reshape of batch axes of a function that acts on a product elementwise and row by row.

Programs merge and split the batch and the heads of their scores between the product, the mask and the softmax: `scores.reshape(B, H, T, S)
+ mask`, and `weights.reshape(B * H, T, S) @ v`. A reshape commutes with elementwise functions, and with a maximum or a sum along axes
that it keeps. If it undoes a reshape of a product further in, the function is applied to the product itself, and its other operands
there (a mask) are reshaped instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .algebra import elementwise
from .nodes import CNode, Operand, Ref

if TYPE_CHECKING:
    from .view import CanonicalView

_ENTRYWISE = frozenset(
    "sum prod difference select cast exp exp2 log tanh logistic max min stop_gradient not and or xor gt ge eq ne".split()
)
_COMMUTATIVE = frozenset("sum prod max min eq ne and or xor".split())
_ROWWISE = frozenset({"reduce_max", "reduce_sum"})
_LIMIT = 40  # nodes between a reshape and the one that it undoes; a masked softmax has about 10

# Neighbouring axes that become others: (axis or LACKING, size) of each, and the sizes they become.
AxisGroup = tuple[tuple[tuple[int, int], ...], tuple[int, ...]]
LACKING = -1  # a node repeats itself along it
# A node, and where its axes are: ("kept", axis before) or ("new", group, number) -> axis.
Regrouped = tuple[int, dict[Any, int]]


def regrouped(view: CanonicalView, ref: Ref, groups: Sequence[tuple[int, int]], sizes: Sequence[int]) -> Ref | None:
    """`ref` reshaped to `sizes`, if that undoes a reshape of a product further in; None if it does not.

    `groups` gives the numbers of neighbouring axes before and after.
    """
    if view.nodes[ref.nid].op not in _ENTRYWISE:
        return None
    before = [(max(d, LACKING), size) for d, size in zip(ref.dims, view.dim_sizes(ref), strict=True)]
    after, moved, axes = list(sizes), dict[int, AxisGroup](), list[Any]()
    for number, (old, new) in enumerate(groups):
        joined, sizes_after = tuple(before[:old]), tuple(after[:new])
        del before[:old], after[:new]
        if old == new == 1:
            axes.append(("kept", joined[0][0]))
            continue
        if _has_any(joined):
            moved[number] = joined, sizes_after
        axes += _new_axes(number, new)
    found = _Regrouping(view).of(ref.nid, moved) if moved else None
    if found is None:
        return None
    nid, where = found
    return Ref(ref.coef, nid, tuple(where.get(axis, ~size) for axis, size in zip(axes, sizes, strict=True)))


class _Regrouping:
    def __init__(self, view: CanonicalView) -> None:
        self.view, self.known, self.results = view, dict[Any, bool](), dict[Any, Regrouped | None]()

    def undoes(self, nid: int, groups: Mapping[int, AxisGroup]) -> bool:
        """Whether regrouping a node's axes undoes a reshape inside it. No nodes are created before that is known."""
        key = nid, tuple(groups.items())
        if key not in self.known:
            self.known[key] = False
            if len(self.known) < _LIMIT:
                self.known[key] = self._undoes(self.view.nodes[nid], groups)
        return self.known[key]

    def _undoes(self, node: CNode, groups: Mapping[int, AxisGroup]) -> bool:
        if node.op == "reshape":
            return self._undone(node, groups) is not None
        if node.op not in _ENTRYWISE | _ROWWISE:
            return False
        return any(self.undoes(o.nid, own) for o in node.operands if (own := _on_operand(o, groups)))

    def of(self, nid: int, groups: Mapping[int, AxisGroup]) -> Regrouped | None:
        """A node with its axes regrouped; None if that undoes no reshape inside it."""
        key = nid, tuple(groups.items())
        if key not in self.results:
            self.results[key] = self._of(self.view.nodes[nid], groups) if self.undoes(nid, groups) else None
        return self.results[key]

    def _of(self, node: CNode, groups: Mapping[int, AxisGroup]) -> Regrouped | None:
        if node.op == "reshape":
            return self._undone(node, groups)
        parts = [self._operand(o, groups) for o in node.operands]
        return self._of_rows(node, *parts[0]) if node.op in _ROWWISE else self._of_entries(node, groups, parts)

    def _of_entries(self, node: CNode, groups: Mapping[int, AxisGroup], parts: Sequence[Regrouped]) -> Regrouped:
        axes, sizes = _regrouped_axes(node, groups)
        operands = [
            (Ref(o.coef, nid, ()), tuple(where.get(a) for a in axes))
            for o, (nid, where) in zip(node.operands, parts, strict=True)
        ]
        ref = elementwise(self.view, node.op, node.params, operands, sizes, node.op in _COMMUTATIVE)
        return ref.nid, {a: d for a, d in zip(axes, ref.dims, strict=True) if d >= 0}

    def _of_rows(self, node: CNode, nid: int, where: dict[Any, int]) -> Regrouped:
        shape, reduced = self.view.nodes[nid].shape, ("kept", -1)
        kept = [(a, d) for a, d in sorted(where.items(), key=lambda x: x[1]) if a != reduced]
        slot = {d: i for i, (_, d) in enumerate(kept)}
        edge = Operand(node.operands[0].coef, nid, tuple(slot.get(d, -1) for d in range(len(shape))))
        new_id = self.view.node(node.op, node.params, (edge,), [shape[d] for _, d in kept])
        return new_id, {a: slot[d] for a, d in kept}

    def _operand(self, operand: Operand, groups: Mapping[int, AxisGroup]) -> Regrouped:
        """An operand regrouped, its axes called as in the node that reads it."""
        own = _on_operand(operand, groups)
        found = self.of(operand.nid, own) if own else None
        nid, where = found or self._reshaped(self.view.nodes[operand.nid], own)
        return nid, {("kept", operand.axes[a[1]]) if a[0] == "kept" else a: d for a, d in where.items()}

    def _reshaped(self, node: CNode, groups: Mapping[int, AxisGroup]) -> Regrouped:
        """A new node that regroups the axes of another, or that node itself if there is nothing to regroup."""
        if not groups:
            return node.id, {("kept", d): d for d in range(len(node.shape))}
        axes, sizes = _regrouped_axes(node, groups)
        dims = [axis[1] for axis in axes if axis[0] == "kept"]
        counts = [(1, 1)] * len(dims)
        for joined, new_sizes in groups.values():
            dims += [axis if axis != LACKING else ~size for axis, size in joined]
            counts.append((len(joined), len(new_sizes)))
        nid = self.view.node("reshape", tuple(counts), (Operand(1.0, node.id, tuple(dims)),), sizes)
        return nid, {a: d for d, a in enumerate(axes)}

    def _undone(self, node: CNode, groups: Mapping[int, AxisGroup]) -> Regrouped | None:
        """The product below a reshape whose groups are undone, with its original axes."""
        (edge,) = node.operands
        if not self._is_whole_product(edge):
            return None
        where: dict[Any, int] = {}
        of_joined = {
            tuple(axis for axis, _ in joined): (number, new_sizes) for number, (joined, new_sizes) in groups.items()
        }
        source, axes_left = list(edge.axes), list(range(len(node.shape)))
        for old, new in node.params:
            before, after = source[:old], tuple(axes_left[:new])
            del source[:old], axes_left[:new]
            if old == new == 1:
                where["kept", after[0]] = before[0]
                continue
            number, new_sizes = of_joined.pop(after, (None, ()))
            if number is None or tuple(self.view.nodes[edge.nid].shape[d] for d in before) != new_sizes:
                return None
            where.update(zip(_new_axes(number, len(new_sizes)), before, strict=True))
        return None if of_joined else (edge.nid, where)

    def _is_whole_product(self, edge: Operand) -> bool:
        return edge.coef == 1 and self.view.nodes[edge.nid].op == "dot" and min(edge.axes) >= 0


def _has_any(axes: Sequence[tuple[int, int]]) -> bool:
    """Whether a node has one of some axes, (axis or LACKING, size) of each."""
    return any(axis != LACKING for axis, _ in axes)


def _regrouped_axes(node: CNode, groups: Mapping[int, AxisGroup]) -> tuple[list[Any], list[int]]:
    """(names, sizes) of the axes of a node that is regrouped: those that are kept, then those that the groups become."""
    grouped = {axis for joined, _ in groups.values() for axis, _ in joined}
    axes: list[Any] = [("kept", d) for d in range(len(node.shape)) if d not in grouped]
    sizes = [node.shape[d] for _, d in axes]
    for number, (_, new_sizes) in groups.items():
        axes += _new_axes(number, len(new_sizes))
        sizes += new_sizes
    return axes, sizes


def _new_axes(number: int, count: int) -> list[Any]:
    """The names of the axes that a group becomes."""
    return [("new", number, i) for i in range(count)]


def _on_operand(operand: Operand, groups: Mapping[int, AxisGroup]) -> dict[int, AxisGroup]:
    """The groups by the axes of an operand, without those of which it has no axis. A reduced axis (-1) does not count as missing."""
    own: dict[int, AxisGroup] = {}
    for number, (joined, new_sizes) in groups.items():
        mine = tuple(
            (operand.axes.index(a) if a != LACKING and a in operand.axes else LACKING, size) for a, size in joined
        )
        if _has_any(mine):
            own[number] = mine, new_sizes
    return own
