"""The residual stream of a layer, read by its sums and norms: multiples of another value, merged rows, residual sums, and the
sums over devices before them if its products are sharded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ....graph.canonical.nodes import ONE, CNode, FoldedNodes
from ....graph.canonical.view import CanonicalView
from ....graph.dtypes import is_float
from ....graph.primitives import SUMS_OVER_DEVICES
from ....graph.program.ir import Node, Value
from ...engine.declining import attempted
from .axes import Side, Unread, is_plain
from .factors import FactorWalk
from .projections import Projection

_SUMS = frozenset({"add", "add_any"})


def multiples(view: CanonicalView, sites: Iterable[FoldedNodes]) -> frozenset[int]:
    """The values that are a number times another value and form a stream: a sum outside any site reads them, and another node
    too. An embedding times the root of its width is an example: the layer reads the multiple, and the number is not part of the layer.
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
    """The readers of some values, except the nodes that compute one of them from another."""
    ids = {v.id for v in alike}
    for value in alike:
        yield from (n for n in view.block.users.get(value.id, ()) if ids.isdisjoint(v.id for v in n.outputs))


class ResidualWalk(FactorWalk):
    """The part of a reading that handles rows, separate per text or merged for a part of the layer, and residual sums."""

    def readers(self, nid: int) -> list[CNode]:
        """The nodes that read a value, except unread reshapes, such as one undone by the next."""
        return [n for n in self.users(nid) if n.op != "reshape" or self.view.users.get(n.id) or self._is_returned(n.id)]

    def _is_returned(self, nid: int) -> bool:
        return any(v.id in self.view.block.returned for v in self.view.values_of.get(nid, ()))

    def towards(self, side: Side, wanted: Collection[str]) -> Side:
        """A value in the form in which one of the `wanted` ops reads it: itself, or its only reshape."""
        while True:
            users = self.readers(side.nid)
            reshapes = [n for n in users if n.op == "reshape"]
            if len(reshapes) != 1 or any(n.op in wanted for n in users):
                return side
            side = self.after_reshape(reshapes[0], side.shown)

    def parted_again(self, end: Side, x: Side) -> Side:
        """The layer's result with the rows of its input `x`, if a reshape to that form is its only reader."""
        users = self.readers(end.nid)
        if end.shown == x.shown or [n.op for n in users] != ["reshape"] or self._is_returned(end.nid):
            return end
        parted = attempted(lambda: self.after_reshape(users[0], end.shown), lambda why: end)
        return parted if parted.shown == x.shown else end

    def same_value(self, first: Side, second: Side) -> bool:
        """Whether two values are the same up to the form of their rows."""
        return first == second or self.in_rows(first) == self.in_rows(second)

    def in_rows(self, side: Side) -> Side:
        """The value under reshapes; the value itself if one of them splits rows differently."""
        return attempted(lambda: self.up(side, parts=False), lambda why: side)

    def reader(self, side: Side, name: str, wanted: Collection[str], needed: str, about: str = "") -> CNode:
        """The only reader among the `wanted` ops. Other readers are reported later, when the region is cut.

        Raises:
          Unread: there is not exactly one; with `about`.
        """
        users = self.readers(side.nid)
        fit = [n for n in users if n.op in wanted]
        if len(fit) == 1:
            return fit[0]
        if not users:
            raise Unread(f"nothing reads {name}; needed {needed}", side.nid, about=about)
        if not fit:
            readers = ", ".join(sorted({n.op for n in users}))
            raise Unread(f"{readers} reads {name} where the op has {needed}", users[0].id, about=about)
        raise Unread(f"{len(fit)} nodes ({', '.join(sorted(wanted))}) read {name}; needed one", side.nid, about=about)

    def sum_of(self, side: Side, name: str, of: Collection[int]) -> CNode:
        """The sum of a value and one of the nodes `of`, else the only sum that reads the value."""
        users = self.readers(side.nid)
        fit = [n for n in users if n.op == "sum" and any(o.nid in of or self.up_of(o) in of for o in n.operands)]
        return fit[0] if len(fit) == 1 else self.reader(side, name, {"sum"}, "a residual sum")

    def added(self, side: Side, name: str, of: Collection[int]) -> tuple[Side, Side]:
        """The sum that reads a value, and its other term, preferably one of the nodes `of`."""
        side = self.towards(side, ("sum",))
        node = self.sum_of(side, name, of)
        if len(node.operands) != 2 or not is_plain(node):
            raise Unread(f"{name} is added with a factor, or to more than one value", node.id, "scalar")
        known, other = self.beside(node, side)
        total = self.result(node, known)
        self.met.append(node.id)
        return total, other

    def residual(self, product: Projection, name: str, of: Collection[int]) -> tuple[Projection, Side, Side]:
        """(the product, its residual sum, the other term). Its bias may be added before the residual or after it. A product whose rows
        are sharded over devices is summed over them first.
        """
        product = self.scaled(product)
        summed = self.over_devices(product)
        total, rest = self.added(summed, name, of)
        if summed is product.out:
            if self.axes:
                over = ", ".join(self.axes)
                why = f"{name} is not summed over {over}, but the output projection's is"
                raise Unread(why, summed.nid, "region")
            self.alone = product.nid
            return self.bias_after(product, total, rest, name, of)
        if product.factor is not None:
            why = f"{name} is multiplied by a vector before it is summed over devices"
            raise Unread(why, product.out.nid, "region")
        bias = None
        if self.up(rest, parts=False).nid not in of and rest.atoms == {"e"}:
            bias = rest
            total, rest = self.added(total, name, of)
        elif [n.op for n in self.users(total.nid)] == ["sum"]:
            total, bias = self.added(total, name, ())
            if bias.atoms != {"e"}:
                raise Unread(f"{name} is added to more than one value", total.nid)
        return replace(product, bias=bias and self.up(bias, parts=False)), total, rest

    def bias_after(
        self, product: Projection, total: Side, rest: Side, name: str, of: Collection[int]
    ) -> tuple[Projection, Side, Side]:
        """As `residual` gives them, with a bias that is added to the sum with the residual. Of one row the residual has the form of a
        bias, too, and is read as such.
        """
        if product.factor is not None:
            return product, total, rest
        bias = product.bias
        if bias is not None and rest.atoms == {"e"} and (bias.nid in of or self.up_of(bias) in of):
            return replace(product, bias=self.up(rest, parts=False)), total, bias
        if bias is not None or [n.op for n in self.readers(total.nid)] != ["sum"]:
            return product, total, rest
        all_of_it, bias = self.added(total, name, ())
        if bias.atoms != {"e"}:
            raise Unread(f"{name} is added to more than one value", total.nid)
        return replace(product, bias=self.up(bias, parts=False)), all_of_it, rest

    def over_devices(self, product: Projection) -> Side:
        """The product's result, or its sum over devices if there is one."""
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
                f"the output projection's result is not summed over {over}, but the feed-forward's is",
                self.alone,
                "region",
            )
        if known not in ((), self.axes):
            raise Unread(
                f"one projection is summed over {', '.join(known)} and the other over {over}", node.id, "region"
            )
        if coef != 1:
            raise Unread(f"the value summed over {over} is the product times {coef:g}", node.id, "scalar")
        if product.bias is not None:
            raise Unread(
                "a bias is added before the sum over devices, so every device adds it",
                product.nid,
                "bias",
                "add it after the sum",
            )
        self.met.append(node.id)
        if sorted(node.operands[0].axes) != list(range(len(product.out.shown))):
            raise Unread("it is broadcast along an axis before it is summed over devices", node.id, "axes")
        return self.part_side(node, product.out)


def _check_sum_over_devices(node: CNode, params: Mapping[str, Any], axes: Collection[Any]) -> None:
    """Checks that a node sums a value over all devices along mesh axes.

    Raises:
      Unread: it sums several values, over groups of devices, or over an axis of the array, or leaves each device a part.
    """
    if node.op == "reduce_scatter" or params.get("axis_index_groups") is not None or len(node.operands) != 1:
        raise Unread(f"{node.op} is not a sum over all devices along an axis", node.id, "region")
    # JAX has an axis of the array, as psum under vmap sums over, by its number among the mesh axes' names.
    if not all(isinstance(axis, str) for axis in axes):
        over = ", ".join(sorted(map(str, axes)))
        raise Unread(f"it sums over {over}, which is not the name of a mesh axis", node.id, "region")
