"""The norms of a layer: folded sites, whose scale and shift may come after them if the norm's own site has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ....graph.canonical.fused_nodes import Labelled
from ....graph.canonical.nodes import CNode
from .axes import Atoms, Side, Unread, is_plain, is_product_of, side_of, slots_of
from .residuals import ResidualWalk

EPSILON_LIMIT = 1e-3  # the original's: it refuses to fuse a norm with a larger one
_BEHIND = (("sum", "bias"), ("prod", "scale"))  # what is done last, first


@dataclass(frozen=True)
class NormRead:
    """A norm: `out` is its result, and `site` is the node of its own site, which may lack the scale and the shift."""

    out: Side
    site: int
    x: Side
    kind: str
    epsilon: float
    scale: Side | None
    bias: Side | None

    @property
    def nid(self) -> int:
        return self.out.nid


class NormWalk(ResidualWalk):
    """The part of a reading that is about norms."""

    def norm(self, side: Side) -> NormRead:
        """The norm over the model's width that computes a value."""
        inner, behind = self._without(side)
        node = self.node(inner.nid)
        if node.op != "layer_norm" or not isinstance(node.params, Labelled):
            raise Unread(f"found {self.node(side.nid).op} where the op has a norm", side.nid)
        known = dict(zip(node.params.labels, inner.shown, strict=True))
        over = [x for x, name in enumerate(node.params.names) if name == "n"]
        if [known.get(x) for x in over] != [("e",)]:
            raise Unread("a norm is taken over axes other than the model's width", side.nid, "axes")
        sides = behind | self.operands_of(node, known, side.nid, bool(behind))
        epsilon = float(node.operands[slots_of(node)["epsilon"]].coef)
        if epsilon > EPSILON_LIMIT:
            raise Unread(
                f"epsilon is {epsilon:g}, above the {EPSILON_LIMIT:g} up to which a layer is fused", side.nid, "scalar",
                "use a smaller epsilon, if that is acceptable",
            )  # fmt: skip
        self.met += dict.fromkeys((inner.nid, side.nid))
        kind = str(dict(node.params.traits)["kind"])
        return NormRead(side, inner.nid, sides["x"], kind, epsilon, sides.get("scale"), sides.get("bias"))

    def operands_of(self, node: CNode, known: Mapping[int, Atoms], nid: int, is_scaled: bool) -> dict[str, Side]:
        """Slot -> operand, for a norm's own site; `nid` is the norm's result, `is_scaled` whether a scale or a shift follows it.

        Raises:
          Unread: it has them twice, or one of them is multiplied by a number.
        """
        sides: dict[str, Side] = {}
        for slot in ("x", "scale", "bias"):
            i = slots_of(node).get(slot)
            if i is None:
                continue
            if node.operands[i].coef != 1:
                raise Unread("a norm's operand is multiplied by a number", nid, "scalar")
            if slot != "x" and is_scaled:
                raise Unread(f"a norm has a {slot}, and another one after it", nid)
            sides[slot] = side_of(node, i, known)
        return sides

    def normed(self, side: Side) -> Side | None:
        """The node of the norm that computes a value, if any."""
        inner, _ = self._without(side)
        return inner if self.node(inner.nid).op == "layer_norm" else None

    def norm_from(self, norm: Side) -> Side:
        """A norm's result after the scale and shift that follow it, if nothing else reads it without them."""
        if slots_of(self.node(norm.nid)).keys() & {"scale", "bias"}:
            return norm
        side = norm
        for op, _ in reversed(_BEHIND):
            readers = self.readers(side.nid)
            if [n.op for n in readers] != [op]:
                continue
            known, _ = self.beside(readers[0], side)
            if len(known) == len(readers[0].shape):
                whole = self.result(readers[0], known)
                side = whole if self._parted(whole) is not None else side
        return side

    def _without(self, side: Side) -> tuple[Side, dict[str, Side]]:
        """The norm under the scale and shift that follow it, and these."""
        found: dict[str, Side] = {}
        for op, slot in _BEHIND:
            parts = self._parted(side) if self.node(side.nid).op == op else None
            if parts is not None:
                side, found[slot] = parts
        return side, found

    def _parted(self, side: Side) -> tuple[Side, Side] | None:
        """(the other operand, a vector along the model's width) of a sum or a product of two without factors."""
        node = self.node(side.nid)
        if len(node.operands) != 2 or not is_plain(node) or (node.op == "prod" and not is_product_of(node, 2)):
            return None
        sides = self.operands(side)
        for whole, vector in (sides, sides[::-1]):
            if vector.shown == (("e",),) and len(whole.shown) == len(side.shown):
                return whole, vector
        return None
