"""How the keys and values of a layer join those of the tokens before: appended to them, or written into a cache at a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....graph.canonical.nodes import ONE, CNode
from ....graph.canonical.view import CanonicalView
from .axes import Atoms, Shown, Side, Unread, Walk, renamed


@dataclass(frozen=True)
class CacheJoin:
    """How the keys (or values) of a call join those before: `kind` is "append" or "write", `node` makes all of them, `step` is where
    they are written, counted from the end where it is negative and `from_the_end`.
    """

    kind: str
    node: int
    shown: Shown
    before: Side
    step: int | None
    from_the_end: bool = False


def joins(node: CNode) -> tuple[tuple[Any, ...], int]:
    """(raw shapes of what a concatenation joins, along which raw axis); ((), -1) where that is not known."""
    known, _ = node.params
    return (known[1], int(dict(known[2])["dimension"])) if known[0] == "params" else ((), -1)


def raw_letters(shown: Shown, shape: Sequence[int]) -> list[Atoms]:
    """What each raw axis of a value that shows these is, where its shape is this: nothing, of an axis of 1."""
    own = iter(shown)
    return [next(own) if n != 1 else () for n in shape]


class CacheWalk(Walk):
    """The part of a reading that is about caches. `met` holds the nodes that belong to the layer."""

    def __init__(self, view: CanonicalView) -> None:
        super().__init__(view)
        self.met: list[int] = []

    def cached(self, side: Side) -> tuple[CacheJoin | None, Side]:
        """The cache that keys or values join, if any, and those of this call."""
        node = self.node(side.nid)
        if node.op == "concatenate" and self.joins_cache(side):
            return self.appended(node, side)
        if node.op == "dynamic_update_slice":
            return self.written(node, side)
        return None, renamed(side, {"s": "t"})

    def joins_cache(self, side: Side) -> bool:
        """Whether keys or values are put together of two along their positions, or written into others."""
        node = self.node(side.nid)
        if node.op != "concatenate":
            return node.op == "dynamic_update_slice"
        shapes, axis = joins(node)
        lengths = [sum(s[d] for s in shapes) if d == axis else n for d, n in enumerate(shapes[0] if shapes else ())]
        along = raw_letters(side.shown, lengths)[axis : axis + 1]
        return len(node.operands) == 2 and along != [("c",)]

    def appended(self, node: CNode, side: Side) -> tuple[CacheJoin, Side]:
        shapes, axis = joins(node)
        old, new = node.operands
        sides = [self._joined(node, side, edge, shape, axis) for edge, shape in zip((old, new), shapes, strict=False)]
        if len(sides) != 2 or old.coef != 1 or new.coef != 1:
            raise Unread("keys or values are put together in a way that is not known", node.id)
        self.met.append(node.id)
        before, fresh = renamed(sides[0], {"s": "p"}), renamed(sides[1], {"s": "t"})
        self.sizes["p"] = int(shapes[0][axis])
        self.sizes.setdefault("t", int(shapes[1][axis]))
        return CacheJoin("append", node.id, side.shown, before, None), fresh

    def _joined(self, node: CNode, side: Side, edge: Any, shape: Any, axis: int) -> Side:
        """One operand of a concatenation along `axis`."""
        # What is put together is 2 long at least.
        lengths = [2 if d == axis else n for d, n in enumerate(shape)]
        return self._part(node, edge, shape, raw_letters(side.shown, lengths))

    def written(self, node: CNode, side: Side) -> tuple[CacheJoin, Side]:
        known, _ = node.params
        if known[0] != "params":
            raise Unread("a cache is written in a way that is not known", node.id)
        shape, update, *_ = known[1]
        old, new, *starts = node.operands
        atoms = raw_letters(side.shown, shape)
        axis = self.axis_written(node, atoms, shape, update)
        at = starts.pop(axis)
        if any(s.nid != ONE or s.coef != 0 for s in starts):
            raise Unread("a cache is written at other than its first head, feature or batch entry", node.id, "axes")
        if at.coef != 1 and at.nid != ONE:
            raise Unread("a cache is written at a multiple of a step", node.id)
        self.met.append(node.id)
        fresh = renamed(self._part(node, new, update, atoms), {"s": "t"})
        self.sizes.setdefault("t", int(update[axis]))
        before = self._part(node, old, shape, atoms)
        if at.nid == ONE:
            raise Unread(f"a cache is written at the fixed position {at.coef}", node.id)
        step = self.before_wrapping(at.nid, int(shape[axis]))
        return CacheJoin(
            "write", node.id, side.shown, before, at.nid if step is None else step, step is not None
        ), fresh

    def axis_written(self, node: CNode, atoms: Sequence[Atoms], shape: Any, update: Any) -> int:
        """The raw axis along which an update is shorter than the cache that it is written into, which has these letters.

        Raises:
          Unread: there are several, or it is not that of the positions.
        """
        moving = [d for d, n in enumerate(update) if n != shape[d]]
        if len(moving) != 1 or atoms[moving[0]] != ("s",) or any(o.coef != 1 for o in node.operands[:2]):
            raise Unread("a cache is written otherwise than at one place along its positions", node.id, "axes")
        return moving[0]

    def _part(self, node: CNode, edge: Any, shape: Any, atoms: Sequence[Atoms]) -> Side:
        """An operand of this raw shape, whose raw axes have these letters."""
        found: list[Atoms] = [()] * len(self.node(edge.nid).shape)
        theirs = iter(edge.axes)
        for size, own in zip(shape, atoms, strict=True):
            if size == 1:
                continue
            source = next(theirs)
            if source < 0:
                raise Unread("a cache is joined with a value that is repeated along an axis", node.id, "axes")
            found[source] = own
        return Side(edge.nid, tuple(found))

    def before_wrapping(self, nid: int, length: int) -> int | None:
        """The index of which this is `where(index < 0, index + length, index)`, as JAX has it of any index; None where it is not."""
        node = self.node(nid)
        if node.op != "select" or len(node.operands) != 3 or any(o.coef != 1 for o in node.operands):
            return None
        negative, index, wrapped = (o.nid for o in node.operands)
        is_wrapped = self.is_negative(negative, index) and self.is_counted_on(wrapped, index, length)
        return index if is_wrapped else None

    def is_negative(self, nid: int, index: int) -> bool:
        """Whether a node is 0 > index."""
        test = self.node(nid)
        return test.op == "gt" and [(o.nid, o.coef) for o in test.operands] == [(ONE, 0), (index, 1)]

    def is_counted_on(self, nid: int, index: int, length: int) -> bool:
        """Whether a node is index + length, of whole numbers."""
        added = self.node(nid)
        numbers = [o.coef for o in added.operands if o.nid == ONE]
        plain = [o.nid for o in added.operands if o.nid != ONE and o.coef == 1]
        return added.op == "iadd" and len(added.operands) == 2 and numbers == [length] and plain == [index]

    def same_cache(self, keys: CacheJoin | None, values: CacheJoin | None) -> None:
        """Keys and values join their caches alike."""
        if keys is None or values is None:
            return
        if keys.kind != values.kind:
            raise Unread("keys are appended and values are written, or the other way round", values.node)
        if (keys.step, keys.from_the_end) != (values.step, values.from_the_end):
            raise Unread("keys and values are written at different positions", values.node)
        if keys.before.nid == values.before.nid:
            raise Unread("keys and values are kept in one cache", values.node)
