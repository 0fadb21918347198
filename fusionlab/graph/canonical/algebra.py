"""The constructors of canonical nodes that rules share: elementwise nodes, monomials, sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..dtypes import is_float
from ..program.ir import Node
from .nodes import ONE, Coef, Operand, Ref, tidy

if TYPE_CHECKING:
    from .view import CanonicalView

Aligned = tuple[Ref, tuple[int | None, ...]]  # a Ref, and for each non-unit output axis its node axis or None


def gives_float(node: Node) -> bool:
    return is_float(node.outputs[0].dtype)


def aligned(node: Node, i: int, ref: Ref) -> Aligned:
    """Input i of an elementwise node against the output's non-unit axes (same rank, or a scalar)."""
    in_shape, out_shape = node.inputs[i].shape, node.outputs[0].shape
    dims = iter(ref.dims)
    full: list[int | None] = [next(dims) if s != 1 else None for s in in_shape]
    full = [None] * (len(out_shape) - len(full)) + full
    return ref, tuple(f if f is not None and f >= 0 else None for f, s in zip(full, out_shape, strict=True) if s != 1)


def elementwise(
    view: CanonicalView,
    op: str,
    params: Any,
    operands: Sequence[Aligned],
    sizes: Sequence[int],
    commutative: bool = False,
) -> Ref:
    """A node whose operands meet axis by axis; its own axes are the ones any operand has, in the operands' order."""
    items = list(operands)
    order_params = params
    if commutative:
        order = sorted(range(len(items)), key=lambda i: (items[i][0].nid, str(items[i][0].coef), str(items[i][1])))
        items = [items[i] for i in order]
        if isinstance(params, tuple) and len(params) == len(order):
            order_params = tuple(params[i] for i in order)
    slots: dict[int, int] = {}
    for _, al in items:
        for _, d in sorted((a, d) for d, a in enumerate(al) if a is not None):
            slots.setdefault(d, len(slots))
    edges = []
    for ref, al in items:
        axes = [0] * len(view.nodes[ref.nid].shape)
        for d, a in enumerate(al):
            if a is not None:
                axes[a] = slots[d]
        edges.append(Operand(tidy(ref.coef), ref.nid, tuple(axes)))
    by_slot = sorted(slots, key=slots.__getitem__)
    nid = view.node(op, order_params, edges, [sizes[d] for d in by_slot])
    return Ref(1.0, nid, tuple(slots.get(d, ~s) for d, s in enumerate(sizes)))


def placed(ref: Ref, al: tuple[int | None, ...], sizes: Sequence[int]) -> Ref:
    """The same Ref seen at the output's shape (broadcast where it has no axis)."""
    return Ref(ref.coef, ref.nid, tuple(a if a is not None else ~s for a, s in zip(al, sizes, strict=True)))


def monomial(
    view: CanonicalView, factors: Sequence[tuple[Ref, tuple[int | None, ...], float]], sizes: Sequence[int]
) -> Ref:
    """A monomial: factors with exponents, flattened and merged; scalar factors go to the coefficient."""
    coef: Coef = 1.0
    flat: list[tuple[Ref, tuple[int | None, ...], float]] = []
    for ref, al, exponent in factors:
        power = _power(ref.coef, exponent)
        if power is None:  # cannot leave the edge (a root of a negative, a power of zero)
            flat.append((ref, al, exponent))
            continue
        # Numbers of the program may overflow only together: the coefficient is a float64.
        if not math.isfinite(coef * power):
            flat.append((ref, al, exponent))
            continue
        coef *= power
        inner = view.nodes[ref.nid]
        if ref.nid == ONE:
            continue
        # (x**2)**0.5 is |x|: only whole exponents multiply.
        if inner.op == "prod" and float(exponent).is_integer():
            for edge, e in zip(inner.operands, inner.params, strict=True):
                flat.append((Ref(edge.coef, edge.nid, ()), compose(edge.axes, al), e * exponent))
        else:
            flat.append((Ref(1.0, ref.nid, ref.dims), al, exponent))
    merged: dict[Any, float] = {}
    for ref, al, exponent in flat:
        key = (tidy(ref.coef), ref.nid, al)
        merged[key] = merged.get(key, 0) + exponent
    powers = list(merged.items())
    if any(e == 0 for e in merged.values()):  # x / x is 1 only where x is neither 0 nor NaN: keep it as it stands
        powers = [((tidy(r.coef), r.nid, al), e) for r, al, e in flat]
    if not powers:
        return Ref(coef, ONE, tuple(~s for s in sizes))
    if len(powers) == 1:
        (c, nid, al), e = powers[0]
        if e == 1:
            return placed(Ref(coef * c, nid, ()), al, sizes)
    operands = [(Ref(c, nid, ()), al) for (c, nid, al), _ in powers]
    node = elementwise(view, "prod", tuple(tidy(e) for _, e in powers), operands, sizes, True)
    return Ref(coef, node.nid, node.dims)


def _power(coef: Coef, exponent: float) -> float | None:
    if coef < 0 and not float(exponent).is_integer():
        return None
    if coef == 0 and exponent < 0:
        return None
    try:
        power = float(coef) ** exponent
    except OverflowError:
        return None
    return power if math.isfinite(power) or not math.isfinite(coef) else None


def compose(axes: tuple[int, ...], al: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Operand axes of an inner node, seen at the outer output: inner axis -> consumer slot -> output axis."""
    position = {slot: i for i, slot in enumerate(axes)}
    return tuple(position.get(a) if a is not None else None for a in al)


def total(view: CanonicalView, terms: Sequence[tuple[Ref, tuple[int | None, ...], int]], sizes: Sequence[int]) -> Ref:
    """A sum with absolute coefficients on its edges and coefficient 1 outside (an outer factor would leak into context)."""
    terms = [t for t in terms if not _is_zero(view, t[0])] or list(terms[:1])
    merged: dict[Any, Coef] = {}
    for ref, al, sign in terms:
        key = (ref.nid, al)
        merged[key] = merged.get(key, 0) + sign * ref.coef
    if any(c == 0 for c in merged.values()):  # x - x is 0 only where x is finite: keep it as it stands
        edges = [(Ref(sign * ref.coef, ref.nid, ref.dims), al) for ref, al, sign in terms]
        return elementwise(view, "difference", (), edges, sizes)
    if len(merged) == 1:
        (nid, al), coef = next(iter(merged.items()))
        return placed(Ref(coef, nid, ()), al, sizes)
    return elementwise(view, "sum", (), [(Ref(c, nid, ()), al) for (nid, al), c in merged.items()], sizes, True)


def reduced(
    view: CanonicalView,
    op: str,
    ref: Ref,
    gone: Sequence[bool],
    floats: bool = True,
    by_law: Callable[[Ref, int], Ref | None] = lambda whole, axis: None,
) -> Ref:
    """A sum, maximum or minimum over those of a Ref's axes that are `gone`. Scalar factors leave a sum, positive ones a maximum; summing
    a broadcast axis is a factor. `by_law`: the reduction of a node (a Ref without dims) over one axis, if a law replaces it.
    """
    coef, inner, over, kept = _parted(op, ref, gone, floats)
    if not over:
        return Ref(coef * inner, ref.nid, tuple(kept))
    rest = [a for a in range(len(view.nodes[ref.nid].shape)) if a not in over]
    slot = {a: i for i, a in enumerate(rest)}
    found = by_law(Ref(inner, ref.nid, ()), over[0]) if floats and len(over) == 1 else None
    if found is None:
        found = _reduction(view, op, Ref(inner, ref.nid, ()), slot)
    return Ref(coef * found.coef, found.nid, tuple(found.dims[slot[k]] if k >= 0 else k for k in kept))


def _parted(op: str, ref: Ref, gone: Sequence[bool], floats: bool) -> tuple[Coef, Coef, list[int], list[int]]:
    """(factor before a reduction, factor in it, the node's axes that it is over, the dims that are left)."""
    coef, over, kept = ref.coef, [], []
    for axis, away in zip(ref.dims, gone, strict=True):
        if not away:
            kept.append(axis)
        elif axis >= 0:
            over.append(axis)
        elif op == "reduce_sum":
            coef = coef * ~axis
    if not floats or (op != "reduce_sum" and not coef > 0):
        return coef / ref.coef if ref.coef else 1.0, ref.coef, over, kept
    return coef, 1.0, over, kept


def _reduction(view: CanonicalView, op: str, whole: Ref, slot: Mapping[int, int]) -> Ref:
    """The node that reduces another to its axes in `slot`, which maps each to its new position."""
    shape = view.nodes[whole.nid].shape
    edge = Operand(tidy(whole.coef), whole.nid, tuple(slot.get(a, -1) for a in range(len(shape))))
    return Ref(1.0, view.node(op, (), (edge,), [shape[a] for a in slot]), tuple(range(len(slot))))


def _is_zero(view: CanonicalView, ref: Ref) -> bool:
    """Whether a term is known to add nothing: zero times a value that is finite for all inputs."""
    return ref.coef == 0 and (ref.nid == ONE or view.nodes[ref.nid].op == "iota")
