"""Rotary embeddings of a layer's queries and keys, written out: heads rotated by tables of cosines and sines.

Three spellings are supported (Su et al. 2021, arXiv:2104.09864; entry j of one half is paired with entry j of the other):

  x * cos + concatenate([-r, l]) * sin, with tables as wide as a head, and
  concatenate([l * cos - r * sin, r * cos + l * sin]), with tables half as wide,

where l and r are the halves of x. The third is the first with pairs of neighbours: stack([-odd, even], -1) of the entries of x, with its
last two axes merged, in place of the concatenation. The weights' columns and the tables are then reordered into halves. The
result is certified as part of its layer.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from ....graph.canonical.nodes import CNode, Operand
from .axes import AxisPart, Side, Unread, is_plain, raw_params, read_by, renamed, taken_by
from .caches import CacheWalk, joins

_FEATURE, _HALF = "c", "w"
NEIGHBOURS = (
    "the rotary embedding pairs neighbouring features; needed entry j of one half paired with entry j of the other"
)


@dataclass(frozen=True)
class Rotary:
    """The tables of a rotary embedding; the last of their letters is "c", as wide as a head, or "w", half as wide.

    `products`: the nodes that multiply by them. `neighbours`: the pairs are of neighbours.
    """

    cos: Side
    sin: Side
    products: frozenset[int] = field(default=frozenset(), compare=False)
    neighbours: bool = False

    @property
    def width(self) -> str:
        return _HALF if _HALF in self.cos.atoms else _FEATURE


def _check_table(table: Side, width: str, nid: int) -> None:
    """Checks that a table has an angle for each position (per text or not) and each feature.

    Raises:
      Unread: it does not.
    """
    if any(not isinstance(a, str) or not (a in (width, "t") or a.startswith("b")) for a in table.atoms):
        raise Unread("each head has rotary tables of its own", nid, "rotary")
    if width not in table.atoms:
        raise Unread("one angle rotates all features, where the op has one per pair", nid, "rotary")


def _is_in_order(edge: Operand) -> bool:
    """Whether a node has an operand's axes as its first ones, in the operand's order."""
    return edge.axes == tuple(range(len(edge.axes)))


class RotaryWalk(CacheWalk):
    """The part of a reading that handles rotary embeddings."""

    def unturned(self, side: Side) -> tuple[Rotary | None, Side]:
        """The rotary embedding of the heads at `side`, if any, and the heads before it, [.., c] as well.

        Raises:
          Unread: they are rotated in a way that the op does not support.
        """
        merged = self.node(side.nid)
        if merged.op == "reshape" and self.node(merged.operands[0].nid).op == "stack":
            raise Unread(
                NEIGHBOURS,
                merged.id,
                "rotary",
                "pair the two halves instead of neighbours, with the features in that order",
            )
        side = self.up(side)
        node = self.node(side.nid)
        found = self.by_width(side) if node.op == "sum" else None
        if node.op == "concatenate":
            found = self.by_halves(node, side)
        if found is None:
            return None, side
        cos, sin, source, nids = found
        width = _HALF if node.op == "concatenate" else _FEATURE
        _check_table(cos, width, node.id)
        _check_table(sin, width, node.id)
        self.met += nids
        products = frozenset(n for n in nids if self.node(n).op == "prod")
        return Rotary(cos, sin, products, any(self.node(n).op == "reshape" for n in nids)), self.up(source)

    def by_width(self, side: Side) -> Any:
        """x * cos + concatenate([-r, l]) * sin."""
        terms = self.terms(side, (1, 1))
        if terms is None:
            return None
        size = self.sizes[_FEATURE] // 2 if _FEATURE in self.sizes else 0
        for plain, across in (terms, terms[::-1]):
            for turned, sin in itertools.permutations(self.factors(across)):
                of = self.halves_turned(self.node(turned.nid), size) or self.neighbours_turned(self.node(turned.nid))
                for source, cos in itertools.permutations(self.factors(plain)):
                    if source.nid == of:
                        return cos, sin, source, [side.nid, plain.nid, across.nid, turned.nid]
        return None

    def halves_turned(self, joined: CNode, size: int) -> int | None:
        """The x of a node that is concatenate([-r, l])."""
        if joined.op != "concatenate" or [o.coef for o in joined.operands] != [-1, 1]:
            return None
        right, left = (self.half_of(o.nid, start, size) for o, start in zip(joined.operands, (size, 0), strict=True))
        return left if left == right else None

    def neighbours_turned(self, merged: CNode) -> int | None:
        """The x of a node that is stack([-odd, even], -1) with its last two axes merged."""
        stacked = self.node(merged.operands[0].nid) if merged.op == "reshape" else None
        if stacked is None or not self.pairs_up(stacked) or not _is_in_order(merged.operands[0]):
            return None
        if tuple(merged.params) != (*((1, 1),) * (len(stacked.shape) - 2), (2, 1)):
            return None
        odd, even = (self.every_second(o.nid, start) for o, start in zip(stacked.operands, (1, 0), strict=True))
        return odd if odd == even else None

    def pairs_up(self, stacked: CNode) -> bool:
        """Whether a node is stack([-odd, even], -1) of any value."""
        known = raw_params(stacked) if stacked.op == "stack" else None
        if known is None or [o.coef for o in stacked.operands] != [-1, 1]:
            return False
        last = int(known[1]["axis"]) in (-1, len(known[0][0]))
        return last and stacked.shape[-1] == 2 and all(map(_is_in_order, stacked.operands))

    def every_second(self, nid: int, first: int) -> int | None:
        """The value of which a node is every second entry along the last axis, from this one on."""
        node = self.node(nid)
        taken = taken_by(node)
        if taken is None:
            return None
        *outer, last = taken.shape
        fits = taken.starts == [*[0] * len(outer), first] and [*taken.lengths[:-1], 2 * taken.lengths[-1]] == [
            *outer,
            last,
        ]
        source = node.operands[0]
        return source.nid if fits and taken.strides[-1] == 2 and source.coef == 1 and _is_in_order(source) else None

    def by_halves(self, node: CNode, side: Side) -> Any:
        """concatenate([l * cos - r * sin, r * cos + l * sin])."""
        halves = self.halves_joined(node, side)
        if halves is None:
            return None
        size = self.sizes.setdefault(_HALF, self.sizes[_FEATURE] // 2)
        difference, total = self.terms(halves[0], (1, -1)), self.terms(halves[1], (1, 1))
        if difference is None or total is None:
            return None
        read = self.pairs(difference, [read_by(self.node(term.nid)) for term in total], size)
        if read is None:
            return None
        left, cos, sin = read
        nids = [node.id, *(side.nid for side in (*halves, *difference, *total))]
        return cos, sin, self.whole_of(left), nids

    def halves_joined(self, node: CNode, side: Side) -> list[Side] | None:
        """The two unscaled operands of a concatenation along the features; None for any other node."""
        if not is_plain(node) or not len(node.operands) == len(joins(node)[0]) == 2:
            return None
        halves = [renamed(half, {_FEATURE: _HALF}) for half in self.joined(node, side)]
        return halves if all((_HALF,) in half.shown for half in halves) else None

    def whole_of(self, half: Side) -> Side:
        """The value of which a node is a half of the features."""
        source = self.before_part(self.node(half.nid), half.shown)
        return Side(
            source.nid, tuple(tuple(_FEATURE if isinstance(a, AxisPart) else a for a in x) for x in source.shown)
        )

    def pairs(self, terms: list[Side], again: list[set[int]], size: int) -> tuple[Side, Side, Side] | None:
        """(l, cos, sin) of l * cos - r * sin, where l and r are the halves of one value, and r * cos and l * sin are added elsewhere."""
        plus, minus = (itertools.permutations(self.factors(term)) for term in terms)
        for (left, cos), (right, sin) in itertools.product(plus, minus):
            wanted = [{right.nid, cos.nid}, {left.nid, sin.nid}]
            parts = [self.half_of(left.nid, 0, size), self.half_of(right.nid, size, size)]
            if again in (wanted, wanted[::-1]) and parts[0] is not None and parts[0] == parts[1]:
                return left, cos, sin
        return None

    def half_of(self, nid: int, start: int, length: int) -> int | None:
        """The value of which a node is this part."""
        node = self.node(nid)
        return node.operands[0].nid if self.part_of(node) == (start, length) else None

    def part_of(self, node: CNode) -> tuple[int, int] | None:
        """(start, length) of a split's result or a slice of one axis; None for several axes, for strides, and for other nodes."""
        taken = taken_by(node)
        if taken is None:
            return None
        cut = [(a, n) for a, n, size in zip(taken.starts, taken.lengths, taken.shape, strict=True) if n != size]
        return cut[0] if len(cut) == 1 and set(taken.strides) == {1} else None

    def terms(self, side: Side, signs: tuple[int, int]) -> list[Side] | None:
        """The terms of a sum of two products of two, with these signs, the higher first."""
        node = self.node(side.nid)
        if node.op != "sum" or sorted((o.coef for o in node.operands), reverse=True) != list(signs):
            return None
        terms = self.operands(side) if node.operands[0].coef == signs[0] else self.operands(side)[::-1]
        made_by = [self.node(term.nid) for term in terms]
        return terms if all(n.op == "prod" and len(n.operands) == 2 for n in made_by) else None

    def factors(self, term: Side) -> list[Side]:
        """The two operands of a product without factors."""
        return self.operands(term) if is_plain(self.node(term.nid)) else []
