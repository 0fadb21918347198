"""The stream of a layer, which its sums and norms read: where it is a number times another value, and where its rows are joined."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from ....graph.canonical.nodes import ONE, CNode, FoldedNodes
from ....graph.canonical.view import CanonicalView
from ....graph.dtypes import is_float
from ....graph.program.ir import Node, Value
from ...engine.declining import attempted
from .axes import Side
from .projections import ProjectionWalk

_SUMS = frozenset({"add", "add_any"})


def multiples(view: CanonicalView, sites: Iterable[FoldedNodes]) -> frozenset[int]:
    """The values that are a number times another and are a stream of their own: a sum that is in no site reads them, and something else
    too. An embedding times the root of its width is one: the layer reads the multiple, and the number is none of its own.
    """
    inside = frozenset[int]().union(*(tile.node_ids for tile in sites))
    found: set[int] = set()
    for alike in _times_a_number(view):
        readers = list(_readers(view, alike))
        sums = [n for n in readers if n.primitive in _SUMS and n.id not in inside]
        if sums and len(readers) > len(sums):
            found.update(v.id for v in alike)
    return frozenset(found)


def _times_a_number(view: CanonicalView) -> Iterator[list[Value]]:
    """The values that are one number, other than 0 and 1, times one canonical node."""
    for nid, values in view.values_of.items():
        by_number: dict[object, list[Value]] = {}
        for value in values if nid != ONE else ():
            coef = view.ref[value.id].coef
            if coef not in (0, 1) and is_float(value.dtype):
                by_number.setdefault(coef, []).append(value)
        yield from by_number.values()


def _readers(view: CanonicalView, alike: list[Value]) -> Iterator[Node]:
    """What reads any of some values, and is not what makes one of them of another."""
    ids = {v.id for v in alike}
    for value in alike:
        yield from (n for n in view.block.users.get(value.id, ()) if ids.isdisjoint(v.id for v in n.outputs))


class StreamWalk(ProjectionWalk):
    """The part of a reading that is about rows: of each text apart, or joined for one part of the layer."""

    def readers(self, nid: int) -> list[CNode]:
        """The nodes that read a value; but not a reshape that nothing reads, as one that the next undoes."""
        return [n for n in self.users(nid) if n.op != "reshape" or self.view.users.get(n.id) or self._is_returned(n.id)]

    def _is_returned(self, nid: int) -> bool:
        return any(v.id in self.view.block.returned for v in self.view.values_of.get(nid, ()))

    def towards(self, side: Side, wanted: Collection[str]) -> Side:
        """A value in the form in which one of the `wanted` ops reads it: itself, or what a reshape makes of it that is its only one."""
        while True:
            users = self.readers(side.nid)
            reshapes = [n for n in users if n.op == "reshape"]
            if len(reshapes) != 1 or any(n.op in wanted for n in users):
                return side
            side = self.after_reshape(reshapes[0], side.shown)

    def parted_again(self, end: Side, x: Side) -> Side:
        """What a layer ends in, its rows as those of the value `x` that it reads, where nothing but a reshape to that form reads it."""
        users = self.readers(end.nid)
        if end.shown == x.shown or [n.op for n in users] != ["reshape"] or self._is_returned(end.nid):
            return end
        parted = attempted(lambda: self.after_reshape(users[0], end.shown), lambda why: end)
        return parted if parted.shown == x.shown else end

    def same_value(self, first: Side, second: Side) -> bool:
        """Whether two values are one, whatever their rows."""
        return first == second or self.in_rows(first) == self.in_rows(second)

    def in_rows(self, side: Side) -> Side:
        """What a value is made of by reshapes; itself where one of them deals out rows in another way."""
        return attempted(lambda: self.up(side, parts=False), lambda why: side)
