"""Where an elementwise function switches: the inputs at which a comparison in it changes its answer.

Each value of the cone is tracked as a set of affine pieces a*h + b that it may equal. Two pieces that meet in a comparison cross at
one h; the switches of a comparison that is not piecewise affine are unknown, and the answer is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..canonical.view import CanonicalView
from ..primitives import having
from ..program.ir import Atom, Literal, Node, Value

AffinePieces = frozenset[tuple[float, float]] | None  # None: not piecewise affine
_LIMIT = 24  # pieces followed; more is given up on
_BOOLS: AffinePieces = frozenset({(0.0, 0.0), (0.0, 1.0)})
_COMPARES = having("equality", "order", "extreme")
_ROUNDS = having("rounding")


def breakpoints(view: CanonicalView, start: Value, nodes: Sequence[Node]) -> list[float] | None:
    """The switches of the function of `start` that `nodes` compute, ascending and finite; None where they are not known."""
    walk = _Walk(view)
    walk.pieces[start.id] = frozenset({(1.0, 0.0)})
    if not walk.run(nodes):
        return None
    return sorted({c for c in walk.crossings if math.isfinite(c)})


class _Walk:
    def __init__(self, view: CanonicalView) -> None:
        self.view = view
        self.pieces: dict[int, AffinePieces] = {}
        self.crossings: set[float] = {0.0}

    def run(self, nodes: Sequence[Node]) -> bool:
        return all(self.node(node) for node in nodes)

    def read(self, atom: Atom) -> AffinePieces:
        if isinstance(atom, Value) and atom.id in self.pieces:
            return self.pieces[atom.id]
        if isinstance(atom, Literal):
            value = np.asarray(atom.val)
            return frozenset({(0.0, float(value))}) if value.ndim == 0 else None
        ref = self.view.ref.get(atom.id)
        return frozenset({(0.0, float(ref.coef))}) if ref is not None and self.view.is_literal(ref) else None

    def node(self, node: Node) -> bool:
        """Tracks one node; False if its switch points are unknown."""
        ins = [self.read(a) for a in node.inputs]
        if node.blocks:
            body = node.blocks[0]
            self.pieces.update((v.id, p) for v, p in zip(body.inputs, ins, strict=True))
            known = self.run(body.nodes)
            self.pieces.update((v.id, self.read(a)) for v, a in zip(node.outputs, body.outputs, strict=True))
            return known
        out, known = self.apply(node.primitive, ins)
        self.pieces.update((v.id, out) for v in node.outputs)
        return known

    def apply(self, name: str, ins: list[AffinePieces]) -> tuple[AffinePieces, bool]:
        if name in _ROUNDS:
            return None, False
        if name in _COMPARES or name in ("abs", "sign", "clamp"):
            return self.compare(name, ins)
        if name in ("not", "and", "or", "is_finite"):
            return _BOOLS, True
        if name == "select_n":
            return _union(ins[1:]), True
        rule = _AFFINE.get(name)
        return (rule(*ins) if rule and None not in ins else None), True

    def compare(self, name: str, ins: list[AffinePieces]) -> tuple[AffinePieces, bool]:
        if None in ins:
            return None, False
        zero: AffinePieces = frozenset({(0.0, 0.0)})
        pairs = {"abs": [(ins[0], zero)], "sign": [(ins[0], zero)]}.get(name)
        if pairs is None:
            pairs = [(ins[1], ins[0]), (ins[1], ins[2])] if name == "clamp" else [(ins[0], ins[1])]
        for left, right in pairs:
            self.crossings |= _crossings(left, right)
        if name == "abs":
            return _union([ins[0], _scaled(ins[0], -1.0)]), True
        if name == "sign":
            return frozenset({(0.0, -1.0), (0.0, 0.0), (0.0, 1.0)}), True
        return (_union(ins) if name in ("max", "min", "clamp") else _BOOLS), True


def _crossings(left: AffinePieces, right: AffinePieces) -> set[float]:
    """The inputs at which a piece of one meets a piece of the other."""
    return {(d - b) / (a - c) for a, b in left or () for c, d in right or () if a != c}


def _union(parts: Sequence[AffinePieces]) -> AffinePieces:
    if any(p is None for p in parts):
        return None
    return _limited(frozenset().union(*(p for p in parts if p is not None)))


def _limited(pieces: frozenset[tuple[float, float]]) -> AffinePieces:
    return pieces if len(pieces) <= _LIMIT else None


def _scaled(pieces: AffinePieces, factor: float) -> AffinePieces:
    return None if pieces is None else frozenset((a * factor, b * factor) for a, b in pieces)


def _sum(sign: float) -> Callable[[AffinePieces, AffinePieces], AffinePieces]:
    def rule(left: AffinePieces, right: AffinePieces) -> AffinePieces:
        return _limited(frozenset((a + sign * c, b + sign * d) for a, b in left or () for c, d in right or ()))

    return rule


def _product(left: AffinePieces, right: AffinePieces) -> AffinePieces:
    for constants, rest in ((left, right), (right, left)):
        if constants is not None and all(a == 0 for a, _ in constants):
            return _limited(frozenset((a * c, b * c) for _, c in constants for a, b in rest or ()))
    return None


def _quotient(left: AffinePieces, right: AffinePieces) -> AffinePieces:
    if right is None or any(a != 0 or b == 0 for a, b in right):
        return None
    return _product(left, frozenset((0.0, 1 / b) for _, b in right))


def _same(operand: AffinePieces) -> AffinePieces:
    return operand


_AFFINE: Mapping[str, Callable[..., Any]] = {
    "add": _sum(1.0),
    "add_any": _sum(1.0),
    "sub": _sum(-1.0),
    "mul": _product,
    "div": _quotient,
    "neg": lambda operand: _scaled(operand, -1.0),
    "copy": _same,
    "convert_element_type": _same,
    "broadcast_in_dim": _same,
    "reshape": _same,
    "pvary": _same,
}
