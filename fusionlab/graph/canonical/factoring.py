"""Factoring a sum: `a * f + b * f + c` as `(a + b) * f + c`, in a canonical view.

The factors to take out of a sum do not follow from the sum alone, so no rule of the view does it: the caller names a node, and the terms
with a power of it as a factor are collected, with all common factors in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from .algebra import compose, monomial, total
from .nodes import ONE, Coef, Operand, Ref, node_axes, tidy
from .view import CanonicalView

# Coefficient, node, its axis for each axis of the sum, exponent.
_Factor = tuple[Coef, int, tuple[int | None, ...], float]


def factored(view: CanonicalView, nid: int, about: int) -> Ref:
    """Node `nid` with its terms that are multiples of (a power of) node `about` collected, with the node's own axes.

    The node itself where there are no two such terms.
    """
    return _Factoring(view, about).of(nid)


@dataclass(frozen=True)
class _Term:
    """A number times some factors, of a sum with axes of its own."""

    coef: Coef
    factors: tuple[_Factor, ...]

    def has(self, nid: int) -> bool:
        return any(f[1] == nid for f in self.factors)

    def without(self, factors: Sequence[_Factor]) -> _Term:
        rest = list(self.factors)
        for factor in factors:
            rest.remove(factor)
        return _Term(self.coef, tuple(rest))


class _Factoring:
    def __init__(self, view: CanonicalView, about: int) -> None:
        self.view, self.about = view, about
        self.known: dict[int, Ref] = {}
        self.above: dict[int, bool] = {about: True}

    def of(self, nid: int) -> Ref:
        if nid not in self.known:
            node = self.view.nodes[nid]
            whole = Ref(1.0, nid, tuple(range(len(node.shape))))
            rewritten = whole
            if nid != self.about and self.reads(nid):
                rewritten = (
                    self.of_sum(nid) if node.op == "sum" else self.of_product(nid) if node.op == "prod" else whole
                )
            self.known[nid] = rewritten
        return self.known[nid]

    def reads(self, nid: int) -> bool:
        """Whether a node depends on the node `about`."""
        if nid not in self.above:
            self.above[nid] = any(self.reads(o.nid) for o in self.view.nodes[nid].operands)
        return self.above[nid]

    def of_product(self, nid: int) -> Ref:
        node = self.view.nodes[nid]
        refs = [self.of(o.nid) for o in node.operands]
        if all(ref.nid == o.nid for ref, o in zip(refs, node.operands, strict=True)):
            return Ref(1.0, nid, tuple(range(len(node.shape))))
        parts = zip(refs, node.operands, node.params, strict=True)
        factors = [
            (Ref(ref.coef * o.coef, ref.nid, ref.dims), _seen(ref, o, len(node.shape)), float(e)) for ref, o, e in parts
        ]
        return monomial(self.view, factors, node.shape)

    def of_sum(self, nid: int) -> Ref:
        node = self.view.nodes[nid]
        terms = self.terms(nid)
        mine = [t for t in terms if t.has(self.about)]
        rewritten = [self.of_term(t, node.shape) for t in terms if not t.has(self.about)]
        if len(mine) > 1:
            rewritten.insert(0, self.together(mine, node.shape))
        elif all(self.of(o.nid).nid == o.nid for o in node.operands):
            return Ref(1.0, nid, tuple(range(len(node.shape))))
        else:
            rewritten += [self.of_term(t, node.shape) for t in mine]
        return rewritten[0] if len(rewritten) == 1 else self.added(rewritten, node.shape)

    def together(self, terms: Sequence[_Term], sizes: Sequence[int]) -> Ref:
        """The sum of some terms as their common factors times the sum of the rest."""
        shared = reduce(_common, (t.factors for t in terms))
        inner = self.added([self.of_term(t.without(shared), sizes) for t in terms], sizes)
        return monomial(self.view, [(inner, node_axes(inner), 1.0), *map(_as_factor, shared)], sizes)

    def terms(self, nid: int) -> list[_Term]:
        """The terms of a sum, those of sums that it is a sum of among them."""
        node, found = self.view.nodes[nid], []
        for operand in node.operands:
            ref = self.of(operand.nid)
            al = _seen(ref, operand, len(node.shape))
            inside = self.view.nodes[ref.nid]
            coef = ref.coef * operand.coef
            if inside.op == "sum" and self.reads(operand.nid):
                for term in self.terms(ref.nid):
                    moved = tuple((c, n, _through(a, al), e) for c, n, a, e in term.factors)
                    found.append(_Term(coef * term.coef, moved))
            elif inside.op == "prod":
                parts = zip(inside.operands, inside.params, strict=True)
                factors = [(tidy(o.coef), o.nid, compose(o.axes, al), float(e)) for o, e in parts]
                found.append(_Term(coef, tuple(factors)))
            else:
                found.append(_Term(coef, () if ref.nid == ONE else ((1.0, ref.nid, al, 1.0),)))
        return found

    def of_term(self, term: _Term, sizes: Sequence[int]) -> Ref:
        ref = monomial(self.view, [_as_factor(f) for f in term.factors], sizes)
        return Ref(ref.coef * term.coef, ref.nid, ref.dims)

    def added(self, refs: Sequence[Ref], sizes: Sequence[int]) -> Ref:
        return total(self.view, [(r, node_axes(r), 1) for r in refs], sizes)


def _common(first: tuple[_Factor, ...], second: tuple[_Factor, ...]) -> tuple[_Factor, ...]:
    rest = list(second)
    return tuple(f for f in first if f in rest and (rest.remove(f) is None))


def _as_factor(factor: _Factor) -> tuple[Ref, tuple[int | None, ...], float]:
    coef, nid, al, exponent = factor
    return Ref(coef, nid, ()), al, exponent


def _through(inner: tuple[int | None, ...], outer: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Axes given for an inner sum, translated to those of the outer sum."""
    return tuple(None if axis is None else inner[axis] for axis in outer)


def _seen(ref: Ref, operand: Operand, rank: int) -> tuple[int | None, ...]:
    """For each axis of a consumer, the axis of the node that replaces one of its operands."""
    position = {slot: axis for axis, slot in enumerate(operand.axes)}
    found = (ref.dims[position[d]] if d in position else None for d in range(rank))
    return tuple(d if d is not None and d >= 0 else None for d in found)
