"""Concatenations, resolved in the canonical view.

A slice that picks one part of an elementwise function of a concatenation is that function of the part; the maximum over such an axis is
the maximum of the parts' maxima, and a sum of exponentials is the sum of the parts' sums. So a softmax over the keys and one more logit
whose weight is sliced off (attention with a sink) has one canonical form in every spelling.

An axis is given by its number among the node's axes. A part of one entry lacks that axis, because the view has no unit axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..primitives import CANONICAL_ELEMENTWISE, COMMUTATIVE, having
from ..program.ir import Node
from .algebra import Aligned, elementwise, monomial, total
from .nodes import CNode, Coef, Operand, Ref, node_axes

if TYPE_CHECKING:
    from .view import CanonicalView

SLICES = having("slice") | {"split"}
_MOST = 64  # nodes above the concatenations that are looked at; a softmax and its mask are ten
_THROUGH = CANONICAL_ELEMENTWISE | {"sum", "prod", "difference", "select", "cast", "stop_gradient"}

Bounds = tuple[int, int]
Parts = dict[Bounds, Ref]  # first entry and the one after the last -> what stands there


def concatenate(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    """The canonical form of a concatenation; parts without entries are dropped."""
    axis = int(node.params["dimension"])
    kept = [ref for ref, atom in zip(ins, node.inputs, strict=True) if atom.shape[axis]]
    return kept if len(kept) == 1 else view.opaque(node, ins)


def sliced(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    """The canonical form of a slice along one axis, or of a dynamic slice with literal starts."""
    if node.primitive == "dynamic_slice":
        if not all(map(view.is_literal, ins[1:])):
            return view.opaque(node, ins)
        sizes, whole = node.params["slice_sizes"], node.inputs[0].shape
        starts = [min(max(int(r.coef), 0), n - m) for r, n, m in zip(ins[1:], whole, sizes, strict=True)]
        ends = [a + int(m) for a, m in zip(starts, sizes, strict=True)]
    else:
        starts, ends = node.params["start_indices"], node.params["limit_indices"]
        if any(s != 1 for s in node.params["strides"] or ()):
            return view.opaque(node, ins)
    found = _sliced(view, ins[0], node.inputs[0].shape, [(int(a), int(b)) for a, b in zip(starts, ends, strict=True)])
    return view.opaque(node, ins) if found is None else [found]


def split(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    """The parts of a split, known ones resolved, the others as results of an opaque node."""
    return _split(view, node, ins, int(node.params["axis"]), node.params["sizes"])


def unstacked(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    """A split into parts of one entry, each without that axis."""
    axis = int(node.params["axis"])
    return _split(view, node, ins, axis, (1,) * node.inputs[0].shape[axis])


def _split(view: CanonicalView, node: Node, ins: list[Ref], axis: int, sizes: Sequence[int]) -> list[Ref]:
    shape, at = node.inputs[0].shape, 0
    if len(sizes) == 1:
        return ins
    found: list[Ref | None] = []
    for size in map(int, sizes):
        bounds = [(at, at + size) if i == axis else (0, n) for i, n in enumerate(shape)]
        found.append(_sliced(view, ins[0], shape, bounds))
        at += size
    if None not in found:
        return [ref for ref in found if ref is not None]
    unread = view.unread(node, ins, "split", {"axis": axis, "sizes": tuple(sizes)}, [shape])
    return [ref or other for ref, other in zip(found, unread, strict=True)]


def _sliced(view: CanonicalView, ref: Ref, shape: Sequence[int], bounds: Sequence[Bounds]) -> Ref | None:
    """The part between bounds along each raw axis, if it is one part of a concatenation; else None."""
    cut = _cut_axis(shape, bounds)
    if cut is None:
        return None
    at = sum(n != 1 for n in shape[:cut])
    start, stop = bounds[cut]
    axis = ref.dims[at]
    if axis < 0 or stop <= start or (start, stop) not in _bounds(view, ref.nid, axis):
        return None
    part = _part(view, ref.nid, axis, (start, stop), {})
    several = stop - start > 1
    has = _axes_of_part(len(view.nodes[ref.nid].shape), axis, several)
    dims = (ref.dims[i] for i in _axes_of_part(len(ref.dims), at, several))
    return Ref(_times(ref.coef, part.coef), part.nid, tuple(part.dims[has.index(d)] if d >= 0 else d for d in dims))


def _cut_axis(shape: Sequence[int], bounds: Sequence[Bounds]) -> int | None:
    """The only axis along which bounds exclude entries; None if there are none or several."""
    cut = [i for i, (n, b) in enumerate(zip(shape, bounds, strict=True)) if b != (0, n)]
    return cut[0] if len(cut) == 1 and shape[cut[0]] != 1 else None


def _axes_of_part(rank: int, axis: int, several: bool) -> list[int]:
    """The axes of a part: without the concatenated one, unless the part has several entries there."""
    return [a for a in range(rank) if several or a != axis]


def _times(a: Coef, b: Coef) -> Coef:
    return a if b == 1 and not isinstance(b, bool) else b if a == 1 and not isinstance(a, bool) else a * b


# -- what is concatenated -------------------------------------------------------------------------------------------------------------


def _parts_of(view: CanonicalView, node: CNode, axis: int) -> Parts | None:
    """The parts of a concatenation along `axis`, or of an array padded with one number there; None for any other node."""
    if node.op not in ("concatenate", "pad") or node.params[0][0] != "params":
        return None
    _, shapes, items = node.params[0]
    given = dict(items)
    refs = [Ref(o.coef, o.nid, o.axes) for o in node.operands]  # of an opaque node: as the values show them
    if node.op == "concatenate":
        raw = int(given["dimension"])
        sizes = [shape[raw] for shape in shapes]
    else:
        padded = _padded(view, refs, shapes[0], given["padding_config"])
        if padded is None:
            return None
        raw, sizes, refs = padded
    if sum(n != 1 for n in shapes[0][:raw]) != axis or sum(sizes) == 1:
        return None
    return _in_a_row(refs, sizes)


def _padded(
    view: CanonicalView, refs: Sequence[Ref], shape: Sequence[int], config: Any
) -> tuple[int, list[int], list[Ref]] | None:
    """For an array padded with one number along one axis: (that axis, the sizes of the parts along it, the parts)."""
    padded = [(i, edges) for i, edges in enumerate(config) if any(map(int, edges))]
    if len(padded) != 1 or not view.is_literal(refs[1]):
        return None
    raw, (low, high, inner) = padded[0]
    # XLA pads by a negative number where it cuts off, and inside where it spreads the entries.
    if min(low, high) < 0 or inner:
        return None
    before, after = (view.literal(refs[1].coef, [*shape[:raw], n, *shape[raw + 1 :]]) for n in (low, high))
    return raw, [int(low), shape[raw], int(high)], [before, refs[0], after]


def _in_a_row(refs: Sequence[Ref], sizes: Sequence[int]) -> Parts:
    """Parts one behind the other, without those that have no entry."""
    found, at = Parts(), 0
    for ref, size in zip(refs, sizes, strict=True):
        if size:
            found[at, at + size] = ref
        at += size
    return found


def _bounds(view: CanonicalView, nid: int, axis: int) -> tuple[Bounds, ...]:
    """The bounds of the parts along `axis` of which a node is an elementwise function, the same for each; none if it is not."""
    found: tuple[Bounds, ...] = ()
    stack, seen = [(nid, axis)], set[tuple[int, int]]()
    while stack:
        at = stack.pop()
        if at in seen:
            continue
        seen.add(at)
        node = view.nodes[at[0]]
        parts = _parts_of(view, node, at[1])
        if parts is not None:
            if found not in ((), tuple(parts)):
                return ()
            found = tuple(parts)
        elif node.op in _THROUGH and len(seen) < _MOST:
            stack += [(o.nid, own) for o in node.operands for own, slot in enumerate(o.axes) if slot == at[1]]
        else:
            return ()
    return found


def joined(view: CanonicalView, nid: int) -> list[tuple[int, int]]:
    """(length, node) of the parts of the first concatenation from which a node is computed elementwise, whatever its other operands."""
    level, seen = [nid], set[int]()
    while level and len(seen) < _MOST:
        for at in level:
            parts = _first_parts(view, view.nodes[at])
            if parts is not None:
                return [(stop - start, ref.nid) for (start, stop), ref in parts.items()]
        seen.update(level)
        level = [n for n in _entrywise_operands(view, level) if n not in seen]
    return []


def _entrywise_operands(view: CanonicalView, nids: Sequence[int]) -> dict[int, None]:
    """The nodes, each once, from which some nodes are computed elementwise."""
    inner = (view.nodes[at] for at in nids if view.nodes[at].op in _THROUGH)
    return dict.fromkeys(o.nid for node in inner for o in node.operands)


def _first_parts(view: CanonicalView, node: CNode) -> Parts | None:
    """The parts of a concatenation along whichever axis it is."""
    if node.op not in ("concatenate", "pad"):
        return None
    found = (_parts_of(view, node, axis) for axis in range(len(node.shape)))
    return next((parts for parts in found if parts is not None), None)


def _part(view: CanonicalView, nid: int, axis: int, bounds: Bounds, known: dict[tuple[int, int], Ref]) -> Ref:
    """A part of a node, that `_bounds` has found; its `dims` are for the node's axes, without `axis` where it has one entry there."""
    key = nid, axis
    if key in known:
        return known[key]
    node = view.nodes[nid]
    parts = _parts_of(view, node, axis)
    if parts is not None:
        known[key] = parts[bounds]
        return known[key]
    kept = _axes_of_part(len(node.shape), axis, bounds[1] - bounds[0] > 1)
    sizes = [bounds[1] - bounds[0] if a == axis else node.shape[a] for a in kept]
    known[key] = _again(view, node, [_operand(view, o, axis, bounds, kept, known) for o in node.operands], sizes)
    return known[key]


def _operand(
    view: CanonicalView,
    edge: Operand,
    axis: int,
    bounds: Bounds,
    kept: Sequence[int],
    known: dict[tuple[int, int], Ref],
) -> Aligned:
    """The operand of an edge restricted to a part, with the axes of its consumer that the part has."""
    own = {slot: a for a, slot in enumerate(edge.axes)}
    if axis not in own:
        return Ref(edge.coef, edge.nid, ()), tuple(own.get(d) for d in kept)
    part = _part(view, edge.nid, own[axis], bounds, known)
    has = _axes_of_part(len(edge.axes), own[axis], axis in kept)
    place = {a: d if d >= 0 else None for a, d in zip(has, part.dims, strict=True)}
    return Ref(_times(edge.coef, part.coef), part.nid, ()), tuple(place[own[d]] if d in own else None for d in kept)


def _again(view: CanonicalView, node: CNode, operands: Sequence[Aligned], sizes: Sequence[int]) -> Ref:
    """An elementwise node applied to other operands."""
    if node.op == "sum":
        return total(view, [(ref, al, 1) for ref, al in operands], sizes)
    if node.op == "prod":
        return monomial(view, [(*operand, e) for operand, e in zip(operands, node.params, strict=True)], sizes)
    return elementwise(view, node.op, node.params, operands, sizes, node.op in COMMUTATIVE)


# -- reductions ------------------------------------------------------------------------------------------------------------------------


def reduced_by_parts(
    view: CanonicalView, op: str, whole: Ref, axis: int, reduce: Callable[[Ref, int], Ref]
) -> Ref | None:
    """A maximum, or a sum of exponentials, over an axis along which one entry is appended to others, by parts; None for any other.

    A norm over a concatenation keeps its single sum: only a softmax with a sink has exponentials there and one more entry.

    Args:
      whole: the operand of the reduction; its dims do not matter, and those of the result refer to the remaining axes of its node.
      reduce: (a part, its axis) -> the reduced part, with the remaining axes.
    """
    node = view.nodes[whole.nid]
    if op not in ("reduce_max", "reduce_sum") or (op == "reduce_sum" and node.op != "exp"):
        return None
    bounds = _bounds(view, whole.nid, axis)
    if not _is_entry_beside_rest(bounds):
        return None
    rest = [n for a, n in enumerate(node.shape) if a != axis]
    terms = [_reduced_part(view, whole, axis, each, reduce) for each in bounds]
    if op == "reduce_sum":
        return total(view, [(ref, al, 1) for ref, al in terms], rest)
    return elementwise(view, "max", (), terms, rest, True)


def _is_entry_beside_rest(bounds: Sequence[Bounds]) -> bool:
    widths = sorted(stop - start for start, stop in bounds)
    return len(widths) == 2 and widths[0] == 1 and widths[1] != 1


def _reduced_part(
    view: CanonicalView, whole: Ref, axis: int, bounds: Bounds, reduce: Callable[[Ref, int], Ref]
) -> Aligned:
    """A part, reduced over the concatenated axis; a part of one entry no longer has it."""
    part = _part(view, whole.nid, axis, bounds, {})
    part = Ref(_times(whole.coef, part.coef), part.nid, part.dims)
    if bounds[1] - bounds[0] > 1:
        part = reduce(part, axis)
    return part, node_axes(part)
