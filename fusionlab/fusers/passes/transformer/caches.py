"""How the keys and values of a layer join those of earlier tokens: appended to them, or written into a cache at a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....graph.canonical.nodes import ONE, CNode
from .axes import Atoms, Shown, Side, Unread, Walk, is_plain, raw_letters, raw_params, renamed

_JOINED = "a cache is joined with a value"


@dataclass(frozen=True)
class CacheJoin:
    """How the keys (or values) of a call join earlier ones: `kind` is "append" or "write", `node` computes all of them, `step` is the
    position at which they are written, counted from the end if it is negative and `from_the_end`.
    """

    kind: str
    node: int
    shown: Shown
    before: Side
    step: int | None
    from_the_end: bool = False


def joins(node: CNode) -> tuple[Sequence[Any], int]:
    """(raw shapes of a concatenation's operands, its raw axis); ((), -1) if they are not known."""
    known = raw_params(node)
    return ((), -1) if known is None else (known[0], int(known[1]["dimension"]))


class CacheWalk(Walk):
    """The part of a reading that is about caches."""

    def cached(self, side: Side) -> tuple[CacheJoin | None, Side]:
        """The cache that keys or values join, if any, and the keys or values of this call."""
        node = self.node(side.nid)
        if node.op == "concatenate" and self.joins_cache(side):
            return self.appended(node, side)
        if node.op == "dynamic_update_slice":
            return self.written(node, side)
        return None, renamed(side, {"s": "t"})

    def joins_cache(self, side: Side) -> bool:
        """Whether keys or values are concatenated from two along their positions, or written into others."""
        node = self.node(side.nid)
        if node.op != "concatenate":
            return node.op == "dynamic_update_slice"
        shapes, axis = joins(node)
        lengths = [sum(s[d] for s in shapes) if d == axis else n for d, n in enumerate(shapes[0] if shapes else ())]
        along = raw_letters(side.shown, lengths)[axis : axis + 1]
        return len(node.operands) == 2 and along != [("c",)]

    def appended(self, node: CNode, side: Side) -> tuple[CacheJoin, Side]:
        sides, (shapes, axis) = self.joined(node, side), joins(node)
        if len(sides) != 2 or not is_plain(node):
            raise Unread("keys or values are concatenated in an unknown way", node.id)
        self.met.append(node.id)
        before, fresh = renamed(sides[0], {"s": "p"}), renamed(sides[1], {"s": "t"})
        self.sizes["p"] = int(shapes[0][axis])
        self.sizes.setdefault("t", int(shapes[1][axis]))
        return CacheJoin("append", node.id, side.shown, before, None), fresh

    def joined(self, node: CNode, side: Side) -> list[Side]:
        """The operands of a concatenation."""
        shapes, axis = joins(node)
        # What is put together is 2 long at least.
        atoms = [raw_letters(side.shown, [2 if d == axis else n for d, n in enumerate(shape)]) for shape in shapes]
        return [self.raw_operand(node, i, shape, atoms[i], _JOINED) for i, shape in enumerate(shapes)]

    def written(self, node: CNode, side: Side) -> tuple[CacheJoin, Side]:
        known = raw_params(node)
        if known is None:
            raise Unread("a cache is written in an unknown way", node.id)
        shape, update, *_ = known[0]
        _, _, *starts = node.operands
        atoms = raw_letters(side.shown, shape)
        axis = self.axis_written(node, atoms, shape, update)
        at = starts.pop(axis)
        if any(s.nid != ONE or s.coef != 0 for s in starts):
            raise Unread("a cache is written at a head, feature or batch entry other than the first", node.id, "axes")
        if at.coef != 1 and at.nid != ONE:
            raise Unread("a cache is written at a multiple of a step", node.id)
        self.met.append(node.id)
        fresh = renamed(self.raw_operand(node, 1, update, atoms, _JOINED), {"s": "t"})
        self.sizes.setdefault("t", int(update[axis]))
        before = self.raw_operand(node, 0, shape, atoms, _JOINED)
        if at.nid == ONE:
            raise Unread(f"a cache is written at the fixed position {at.coef}", node.id)
        step = self.before_wrapping(at.nid, int(shape[axis]))
        join = CacheJoin("write", node.id, side.shown, before, at.nid if step is None else step, step is not None)
        return join, fresh

    def axis_written(self, node: CNode, atoms: Sequence[Atoms], shape: Any, update: Any) -> int:
        """The raw axis along which an update is shorter than the cache into which it is written, which has these letters.

        Raises:
          Unread: there are several, or it is not the axis of the positions.
        """
        moving = [d for d, n in enumerate(update) if n != shape[d]]
        if len(moving) != 1 or atoms[moving[0]] != ("s",) or any(o.coef != 1 for o in node.operands[:2]):
            raise Unread("a cache is not written at a single place along its positions", node.id, "axes")
        return moving[0]

    def before_wrapping(self, nid: int, length: int) -> int | None:
        """The index in `where(index < 0, index + length, index)`, which JAX makes of any index; None for any other node."""
        node = self.node(nid)
        if node.op != "select" or len(node.operands) != 3 or not is_plain(node):
            return None
        negative, index, added = (self.node(o.nid) for o in node.operands)
        is_negative = negative.op == "gt" and _edges(negative) == [(ONE, 0), (index.id, 1)]
        is_wrapped = added.op == "iadd" and sorted(_edges(added)) == sorted([(ONE, length), (index.id, 1)])
        return index.id if is_negative and is_wrapped else None

    def same_cache(self, keys: CacheJoin | None, values: CacheJoin | None) -> None:
        """Raises Unread unless keys and values join their caches in the same way."""
        if keys is None or values is None:
            return
        if keys.kind != values.kind:
            raise Unread("keys are appended but values are written into the cache, or the reverse", values.node)
        if (keys.step, keys.from_the_end) != (values.step, values.from_the_end):
            raise Unread("keys and values are written at different positions", values.node)
        if keys.before.nid == values.before.nid:
            raise Unread("keys and values are kept in one cache", values.node)


def _edges(node: CNode) -> list[tuple[int, Any]]:
    """(node, factor) of each operand."""
    return [(o.nid, o.coef) for o in node.operands]
