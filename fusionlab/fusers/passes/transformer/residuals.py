"""The residual sums of a layer, and the sums over devices before them where its products are spread over several."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ....graph.canonical.nodes import CNode
from ....graph.canonical.view import CanonicalView
from ....graph.primitives import SUMS_OVER_DEVICES
from .axes import Side, Unread, is_plain, side_of, slot_reading
from .factors import FactorWalk
from .projections import Projection
from .streams import StreamWalk


class ResidualWalk(StreamWalk, FactorWalk):
    """The part of a reading that is about residual sums.

    Attributes: `axes` (the mesh axes along which products are summed over devices), `alone` (the output projection, where no sum over
    devices reads it).
    """

    def __init__(self, view: CanonicalView, attention: int) -> None:
        super().__init__(view, attention)
        self.axes: tuple[str, ...] = ()
        self.alone: int | None = None

    def reader(self, side: Side, name: str, wanted: Collection[str], needed: str, about: str = "") -> CNode:
        """The one node of the `wanted` ops that reads a value; what else reads it is told when the site is cut out.

        Raises:
          Unread: there is none, or several; with `about`.
        """
        users = self.readers(side.nid)
        fit = [n for n in users if n.op in wanted]
        if len(fit) == 1:
            return fit[0]
        if not users:
            raise Unread(f"nothing reads {name}, needed {needed}", side.nid, about=about)
        if not fit:
            readers = ", ".join(sorted({n.op for n in users}))
            raise Unread(f"{readers} reads {name} where the op has {needed}", users[0].id, about=about)
        raise Unread(f"{len(fit)} of {', '.join(sorted(wanted))} read {name}, needed one", side.nid, about=about)

    def sum_of(self, side: Side, name: str, of: Collection[int]) -> CNode:
        """The sum that adds a value to one of some nodes; the one that reads it, where there is no such."""
        users = self.readers(side.nid)
        fit = [n for n in users if n.op == "sum" and any(o.nid in of or self.up_of(o) in of for o in n.operands)]
        return fit[0] if len(fit) == 1 else self.reader(side, name, {"sum"}, "a residual sum")

    def added(self, side: Side, name: str, of: Collection[int]) -> tuple[Side, Side]:
        """The sum that reads a value, and what it adds to it: one of the nodes `of`, if any."""
        side = self.towards(side, ("sum",))
        node = self.sum_of(side, name, of)
        if len(node.operands) != 2 or not is_plain(node):
            raise Unread(f"{name} is added with a factor, or to more than one value", node.id, "scalar")
        mine = slot_reading(node, side.nid)
        known = self.slots(node, mine, side.shown)
        total = self.result(node, known)
        self.met.append(node.id)
        return total, side_of(node, 1 - mine, known)

    def residual(self, product: Projection, name: str, of: Collection[int]) -> tuple[Projection, Side, Side]:
        """(the product, the residual sum that it goes into, what is added to it). A product whose rows are spread over devices is summed
        over them first; then its bias may be added before what it goes to or behind it.
        """
        product = self.scaled(product)
        summed = self.over_devices(product)
        total, rest = self.added(summed, name, of)
        if summed is product.out:
            if self.axes:
                raise Unread(
                    f"{name} is not summed over {', '.join(self.axes)}, as the output projection's is",
                    summed.nid,
                    "region",
                )
            self.alone = product.nid
            return product, total, rest
        if product.factor is not None:
            raise Unread(
                f"{name} is multiplied by a vector before it is summed over devices", product.out.nid, "region"
            )
        bias = None
        if self.up(rest, parts=False).nid not in of and rest.atoms == {"e"}:
            bias = rest
            total, rest = self.added(total, name, of)
        elif [n.op for n in self.users(total.nid)] == ["sum"]:
            end, bias = self.added(total, name, ())
            if bias.atoms != {"e"}:
                raise Unread(f"{name} is added to more than one value", end.nid)
            total = end
        return replace(product, bias=bias and self.up(bias, parts=False)), total, rest

    def over_devices(self, product: Projection) -> Side:
        """The product's result, or the sum of all devices' where there is one."""
        users = self.readers(product.out.nid)
        if not any(n.op in SUMS_OVER_DEVICES for n in users):
            return product.out
        node = self.reader(product.out, "the product", SUMS_OVER_DEVICES, "a sum over devices")
        (raw, *_) = self.view.values_of[node.id]
        params = self.view.block.producer[raw.id].params
        axes = params.get("axes", params.get("axis_name", ()))
        known, self.axes = self.axes, tuple(sorted(map(str, axes)))
        over, coef = ", ".join(self.axes), node.operands[0].coef
        _check_sum_over_devices(node, params, axes)
        if self.alone is not None:
            raise Unread(
                f"the output projection's result is not summed over {over}, as the feed-forward's is",
                self.alone,
                "region",
            )
        if known not in ((), self.axes):
            raise Unread(f"sums over {', '.join(known)} and over {over}", node.id, "region")
        if coef != 1:
            raise Unread(f"what is summed over {over} is the product times {coef:g}", node.id, "scalar")
        if product.bias is not None:
            raise Unread(
                "a bias is added before the sum over devices, and so by each of them",
                product.nid,
                "bias",
                "add it behind the sum",
            )
        self.met.append(node.id)
        if sorted(node.operands[0].axes) != list(range(len(product.out.shown))):
            raise Unread("it is repeated along an axis before it is summed over devices", node.id, "axes")
        return Side(node.id, self.cut_shown(node, product.out))


def _check_sum_over_devices(node: CNode, params: Mapping[str, Any], axes: Collection[Any]) -> None:
    """Whether a node sums a value over all devices along mesh axes.

    Raises:
      Unread: it sums several, over groups of devices, or over an axis of the array; or leaves each device a part.
    """
    if node.op == "reduce_scatter" or params.get("axis_index_groups") is not None or len(node.operands) != 1:
        raise Unread(f"{node.op} is no sum over all devices along an axis", node.id, "region")
    # JAX has an axis of the array, as psum under vmap sums over, by its number among the mesh axes' names.
    if not all(isinstance(axis, str) for axis in axes):
        over = ", ".join(sorted(map(str, axes)))
        raise Unread(f"it sums over {over}, which is no name of a mesh axis", node.id, "region")
