"""Rotary embeddings of a layer's queries and keys, as they are written out: heads that are turned by tables of cosines and sines.

Three ways to write one down are read (Su et al. 2021, arXiv:2104.09864; the pairs are entry j of the one half and of the other):

  x * cos + concatenate([-r, l]) * sin, with tables as wide as a head, and
  concatenate([l * cos - r * sin, r * cos + l * sin]), with tables half as wide,

where l and r are the halves of x. The third is the first with pairs of neighbours: stack([-odd, even], -1) of the entries of x, with its
last two axes merged, in place of the concatenation. The weights' columns and the tables are put in the order of halves then. What was
read is certified with the layer that it is part of.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from ....graph.canonical.nodes import CNode
from .axes import Cut, Side, Unread, parts_of, renamed
from .caches import CacheWalk, joins

_FEATURE, _HALF = "c", "w"
NEIGHBOURS = "pairs of neighbours are turned, needed pairs of entry j of the one half and of the other"


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


class RotaryWalk(CacheWalk):
    """The part of a reading that is about rotary embeddings."""

    def unturned(self, side: Side) -> tuple[Rotary | None, Side]:
        """How the heads at `side` are turned, if they are, and what is: [.., c] alike.

        Raises:
          Unread: they are turned in a way that the op does not have.
        """
        made = self.node(side.nid)
        if made.op == "reshape" and self.node(made.operands[0].nid).op == "stack":
            raise Unread(NEIGHBOURS, made.id, "rotary", "take halves for pairs, and the features in that order")
        side = self.up(side)
        node = self.node(side.nid)
        found = self.by_width(node, side) if node.op == "sum" else None
        if node.op == "concatenate":
            found = self.by_halves(node, side)
        if found is None:
            return None, side
        cos, sin, source, nids = found
        width = _HALF if node.op == "concatenate" else _FEATURE
        for table in (cos, sin):
            if any(not isinstance(a, str) or not (a in (width, "t") or a.startswith("b")) for a in table.atoms):
                raise Unread("heads are turned by tables of their own", node.id, "rotary")
            if width not in table.atoms:
                raise Unread(
                    "all features are turned by one angle, where the op has one for each pair", node.id, "rotary"
                )
        self.met += nids
        products = frozenset(n for n in nids if self.node(n).op == "prod")
        return Rotary(cos, sin, products, any(self.node(n).op == "reshape" for n in nids)), self.up(source)

    def by_width(self, node: CNode, side: Side) -> Any:
        """x * cos + concatenate([-r, l]) * sin."""
        terms = self.terms(node, side)
        if terms is None or [c for c, _ in terms] != [1, 1]:
            return None
        size = self.sizes[_FEATURE] // 2 if _FEATURE in self.sizes else 0
        for (_, plain), (_, across) in (terms, terms[::-1]):
            for turned, sin in itertools.permutations(self.factors(across)):
                of = self.halves_turned(self.node(turned.nid), size) or self.neighbours_turned(self.node(turned.nid))
                for source, cos in itertools.permutations(self.factors(plain)):
                    if source.nid == of:
                        return cos, sin, source, [node.id, plain.nid, across.nid, turned.nid]
        return None

    def halves_turned(self, joined: CNode, size: int) -> int | None:
        """What a node is concatenate([-r, l]) of."""
        if joined.op != "concatenate" or [o.coef for o in joined.operands] != [-1, 1]:
            return None
        right, left = (self.half_of(o.nid, start, size) for o, start in zip(joined.operands, (size, 0), strict=True))
        return left if left == right else None

    def neighbours_turned(self, merged: CNode) -> int | None:
        """What a node is stack([-odd, even], -1) of, its last two axes merged."""
        made = self.node(merged.operands[0].nid) if merged.op == "reshape" else None
        if (
            made is None
            or made.op != "stack"
            or [o.coef for o in made.operands] != [-1, 1]
            or made.params[0][0] != "params"
        ):
            return None
        _, shapes, items = made.params[0]
        in_order = all(o.axes == tuple(range(len(o.axes))) for o in (*merged.operands, *made.operands))
        last = int(dict(items)["axis"]) in (-1, len(shapes[0]))
        if (
            not in_order
            or not last
            or made.shape[-1] != 2
            or tuple(merged.params) != (*((1, 1),) * (len(made.shape) - 2), (2, 1))
        ):
            return None
        odd, even = (self.every_second(o.nid, start) for o, start in zip(made.operands, (1, 0), strict=True))
        return odd if odd == even else None

    def every_second(self, nid: int, first: int) -> int | None:
        """What a node is every second entry of along the last axis, from this one on."""
        node = self.node(nid)
        if node.op != "slice" or node.params[0][0] != "params":
            return None
        _, (shape, *_), items = node.params[0]
        params = dict(items)
        starts, lengths = parts_of("slice", params, shape, 0)
        whole = not any(starts[:-1]) and lengths[:-1] == [int(n) for n in shape[:-1]]
        fits = whole and (starts[-1], 2 * lengths[-1]) == (first, shape[-1])
        strides = [int(n) for n in params.get("strides") or (1,)]
        source = node.operands[0]
        if not fits or strides[-1] != 2 or source.coef != 1 or source.axes != tuple(range(len(source.axes))):
            return None
        return source.nid

    def by_halves(self, node: CNode, side: Side) -> Any:
        """concatenate([l * cos - r * sin, r * cos + l * sin])."""
        shapes, axis = joins(node)
        if len(node.operands) != 2 or [o.coef for o in node.operands] != [1, 1] or len(shapes) != 2:
            return None
        halves = [
            renamed(self._joined(node, side, o, s, axis), {_FEATURE: _HALF})
            for o, s in zip(node.operands, shapes, strict=True)
        ]
        if any((_HALF,) not in half.shown for half in halves):
            return None
        size = self.sizes.setdefault(_HALF, self.sizes[_FEATURE] // 2)
        found = []
        for half in halves:
            terms = self.terms(self.node(half.nid), half)
            if terms is None or sorted(c for c, _ in terms) != sorted((1, -1) if half is halves[0] else (1, 1)):
                return None
            found.append(terms)
        (_, plus), (_, minus) = sorted(found[0], key=lambda t: -t[0])
        read = self.pairs(plus, minus, [{o.nid for o in self.node(term.nid).operands} for _, term in found[1]], size)
        if read is None:
            return None
        left, cos, sin = read
        source = self.before_part(self.node(left.nid), left.shown)
        whole = Side(source.nid, tuple(tuple(_FEATURE if isinstance(a, Cut) else a for a in x) for x in source.shown))
        nids = [node.id, *(h.nid for h in halves), *(t.nid for terms in found for _, t in terms)]
        return cos, sin, whole, nids

    def pairs(self, plus: Side, minus: Side, again: list[set[int]], size: int) -> tuple[Side, Side, Side] | None:
        """(l, cos, sin) of l * cos - r * sin, where l and r are the halves of one value, and r * cos and l * sin are added elsewhere."""
        for left, cos in itertools.permutations(self.factors(plus)):
            for right, sin in itertools.permutations(self.factors(minus)):
                wanted = [{right.nid, cos.nid}, {left.nid, sin.nid}]
                parts = [self.half_of(left.nid, 0, size), self.half_of(right.nid, size, size)]
                if again in (wanted, wanted[::-1]) and parts[0] is not None and parts[0] == parts[1]:
                    return left, cos, sin
        return None

    def half_of(self, nid: int, start: int, length: int) -> int | None:
        """What a node is this part of."""
        node = self.node(nid)
        fits = node.op in ("split", "slice") and self.part_of(node) == (start, length)
        return node.operands[0].nid if fits else None

    def part_of(self, node: CNode) -> tuple[int, int] | None:
        """(start, length) of what a split's result or a slice takes of one axis; None of several, or of every second entry."""
        known, index = node.params
        if known[0] != "params":
            return None
        params, (shape, *_) = dict(known[2]), known[1]
        starts, lengths = parts_of(node.op, params, shape, index)
        cut = [(start, n) for start, n, size in zip(starts, lengths, shape, strict=True) if n != size]
        return cut[0] if len(cut) == 1 and set(params.get("strides") or (1,)) == {1} else None

    def terms(self, node: CNode, side: Side) -> list[tuple[float, Side]] | None:
        """(factor, what is added) of a sum of two products of two."""
        if node.op != "sum" or len(node.operands) != 2:
            return None
        known = dict(enumerate(side.shown))
        found = [(o.coef, Side(o.nid, tuple(known.get(x, ()) for x in o.axes))) for o in node.operands]
        two = all(self.node(s.nid).op == "prod" and len(self.node(s.nid).operands) == 2 for _, s in found)
        return found if two else None

    def factors(self, term: Side) -> list[Side]:
        """The two operands of a product, where neither has a factor."""
        node = self.node(term.nid)
        known = dict(enumerate(term.shown))
        sides = [Side(o.nid, tuple(known.get(x, ()) for x in o.axes)) for o in node.operands]
        return sides if all(o.coef == 1 for o in node.operands) else []
