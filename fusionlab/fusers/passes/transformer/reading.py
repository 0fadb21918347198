"""A whole transformer layer, read off a block's view in which its small sites are folded into the ops they become.

The reading starts at an attention. Upwards it finds the projections and their input, downwards the output projection, the
residual sums, the norms and the feed-forward. It only proposes the parts of a layer: the site is certified like any other.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from ....graph.canonical.fused_nodes import node_labels
from ....graph.canonical.nodes import CNode
from ....graph.declined import Declined
from ...engine.declining import attempted
from ...engine.site import CODES_OF_OPS
from .axes import Side, Unread, is_plain, is_product_of, read_by, slot_reading, slots_of
from .caches import CacheJoin
from .norms import NormRead, NormWalk
from .projections import HELD, PRODUCTS, Projection, product_slots
from .rotary import Rotary

READING_STEPS = 8  # of a reading, for the measure of progress: q, k, v, output, residual, norm, feed-forward, residual


@dataclass(frozen=True)
class LayerRead:
    """The parts of a layer.

    Attributes:
      root: its last node. x: its input, [b.., t, e].
      q, k, v: their projections; if `fused`, all three are the same one, with its columns ordered as in `columns`.
      keys, values: the call's own, as the attention or the cache reads them.
      key_cache, value_cache: None without a cache.
      factor: the factor on queries times keys, besides the attention's own scale.
      rotary: the tables of the rotary embedding of queries and keys, if any.
      axes: the mesh axes over which its two last products are summed; empty on one device.
      attention: the attention's node. out, up, gate, down: the other products. norm1, norm2: the attention's and the feed-forward's.
    """

    root: Side
    x: Side
    out: Projection
    norm1: NormRead
    norm2: NormRead
    up: Projection
    gate: Projection | None
    down: Projection
    pre_norm: bool
    attention: int
    factor: float
    rotary: Rotary | None
    axes: tuple[str, ...]
    sizes: dict[str, int]
    halves: dict[str, tuple[str, ...]]
    q: Projection
    k: Projection
    v: Projection
    columns: str
    keys: Side
    values: Side
    key_cache: CacheJoin | None
    value_cache: CacheJoin | None

    @property
    def fused(self) -> bool:
        return self.columns != "separate"

    @property
    def decoder(self) -> bool:
        return self.key_cache is not None

    @property
    def batch(self) -> tuple[str, ...]:
        """The letters of the batch's axes."""
        return tuple(a for a in self.sizes if a.startswith("b"))

    @property
    def key_letter(self) -> str:
        """The letter of the heads of keys and values."""
        return "g" if "g" in self.sizes else "h"

    @property
    def key_heads(self) -> int:
        """The number of heads of keys and values: as many as of queries, fewer, or a single one without an axis."""
        return self.sizes.get("g", self.sizes.get("h", 1) if "h" in self.keys.atoms else 1)


@dataclass(frozen=True)
class Partial:
    """A partially read layer: why the reading ends, the steps done, and whether it is a decoder and fused, as far as known."""

    why: Unread
    steps: int
    decoder: bool
    fused: bool
    nids: tuple[int, ...]
    axes: tuple[str, ...]


class LayerReader(NormWalk):
    """Reads the layer around one attention of a view."""

    def read(self) -> LayerRead | Partial:
        """The layer, or how far the reading got."""
        return attempted(self._read, self._partial)

    def _partial(self, why: Declined) -> Partial:
        assert isinstance(why, Unread)
        op = self.node(why.nid).op
        if why.code == "structure" and op in CODES_OF_OPS:
            why = Unread(HELD.get(op, f"the layer contains {op}"), why.nid, CODES_OF_OPS[op])
        return Partial(why, self.steps, self.decoder, self.is_fused, tuple(self.met), self.axes)

    def _read(self) -> LayerRead:
        node = self.node(self.attention)
        names = self.letters(node)
        query, key, value = (self.of_attention(node, names, slot) for slot in ("query", "key", "value"))
        self.decoder = self.joins_cache(key) or self.joins_cache(value)
        key_cache, keys = self.cached(key)
        value_cache, values = self.cached(value)
        if (key_cache is None) != (value_cache is None):
            raise Unread("keys and values do not both join a cache", self.attention)
        q, k, v, columns = self.projections(query, keys, values)
        self.same_cache(key_cache, value_cache)
        source = self.common_source(q, k, v)
        out = self.output(node, names)
        caches = {"key_cache": key_cache, "value_cache": value_cache}
        return self.around(source, out, q=q, k=k, v=v, columns=columns, keys=keys, values=values, **caches)

    # -- the attention --------------------------------------------------------------------------------------------

    def letters(self, node: CNode) -> dict[int, str]:
        """Label of the attention's axis -> its letter here."""
        if "sink" in slots_of(node):
            raise Unread("its attention has a sink", node.id)
        count = itertools.count()
        names = {x: f"b{next(count)}" if name == "b" else name for x, name in enumerate(node.params.names)}
        if len(set(names.values())) != len(names):
            raise Unread("its attention has rows or heads along several axes", node.id, "axes")
        for operand in node.operands:
            for axis, label in enumerate(operand.axes):
                self.sizes.setdefault(names[label], self.node(operand.nid).shape[axis])
        return names

    def of_attention(self, node: CNode, names: dict[int, str], slot: str) -> Side:
        edge = node.operands[slots_of(node)[slot]]
        if slot != "value" and edge.coef != 0:
            self.factor *= edge.coef  # of one number times the other, whichever of the two has it
        elif edge.coef != 1:
            raise Unread(f"its {slot} is multiplied by {edge.coef:g}", edge.nid, "scalar")
        return Side(edge.nid, tuple((names[label],) for label in edge.axes))

    # -- the rest -------------------------------------------------------------------------------------------------

    def output(self, node: CNode, names: dict[int, str]) -> Projection:
        """The product that reads the attention's heads."""
        side = Side(node.id, tuple((names[x],) for x in node.params.labels))
        expected = "the attention's result", {"reshape", *PRODUCTS}, "the output projection"
        user = self.reader(side, *expected)
        while user.op == "reshape":
            side = self.after_reshape(user, side.shown)
            user = self.reader(side, *expected)
        found = self.consumed(user, side, "e")
        if found is None:
            raise Unread(f"{user.op} reads the attention's result where the op has the output projection", user.id)
        if found.activation != "none":
            raise Unread(f"the output projection is activated: {found.activation}", user.id, "activation")
        wanted, read = ({p for a in of for p in self.halves.get(a, (a,))} for of in ("hd", found.x.atoms))
        if not wanted & self.sizes.keys() <= read:
            raise Unread("the output projection does not read all heads", user.id, "axes")
        self.steps += 1
        return found

    def consumed(self, node: CNode, side: Side, feature: str) -> Projection | None:
        """A product that reads `side` and whose weight has the axis `feature`; None for any other node."""
        slots = product_slots(node, 1 - slot_reading(node, side.nid))
        if slots is None or node.operands[slots.x].nid != side.nid or not slots.are_plain(node):
            return None
        known = self.slots(node, slots.x, side.shown)
        rows, weight = known.keys() & (node_labels(node) or ()), node.operands[slots.w]
        fresh = [x for x in weight.axes if x not in known]
        if len(fresh) > 1 or not rows.isdisjoint(weight.axes):
            raise Unread("a weight has its rows or its columns along several axes", node.id, "axes")
        self.name_new(node, slots, known, dict.fromkeys(fresh, feature))
        self.met.append(node.id)
        return self.projection(node, slots, known)

    def around(self, source: Side, out: Projection, **attended: Any) -> LayerRead:
        """The layer, given everything before the attention: its queries, keys and values are computed from `source`."""
        norm = self.normed(source)
        of = {source.nid, *(o.nid for o in self.node(source.nid if norm is None else norm.nid).operands[:1])}
        out, total, rest = self.residual(out, "the output projection's result", of)
        pre = self.is_norm_first(source, total, rest)
        self.steps += 1
        norm1, norm2, x = self.norms_before(source, total, rest) if pre else (self.norm_after(total), None, source)
        fed = norm1.out if norm2 is None else norm2.out
        self.steps += 1
        up, gate, down = self.feed_forward(self.towards(fed, PRODUCTS))
        self.steps += 1
        down, root, rest = self.residual(down, "the feed-forward's result", {total.nid, fed.nid}, ends=pre)
        if not self.same_value(rest, total if pre else fed):
            raise Unread("the feed-forward's result is added to a value other than its own input", root.nid)
        self.steps += 1
        if norm2 is None:
            norm2 = self.norm_after(root)
            root = norm2.out
        if self.held is not None:
            raise Unread(f"it contains {self.node(self.held).op}", self.held)
        return LayerRead(
            self.parted_again(root, x), x, out, norm1, norm2, up, gate, down, pre, self.attention,
            self.factor, self.rotary, self.axes, self.sizes, self.halves, **attended,
        )  # fmt: skip

    def is_norm_first(self, source: Side, total: Side, rest: Side) -> bool:
        """Whether the attention reads a norm of the value that is added to its result, rather than that value itself.

        Args:
          source: the input of queries, keys and values. total: the first residual sum. rest: its other term.

        Raises:
          Unread: it reads another value, or the norm of it is added as well.
        """
        norm, pre = self.normed(source), not self.same_value(rest, source)
        if pre and norm is None:
            why = "queries, keys and values read neither a norm nor the value that is added to the attention's result"
            raise Unread(why, source.nid, about="norm before")
        if not pre and norm is not None and any(n.op == "sum" for n in self.users(total.nid)):
            why = "the norm's result is added to the attention's result; needed the norm's input"
            raise Unread(why, total.nid)
        return pre

    def norms_before(self, source: Side, total: Side, rest: Side) -> tuple[NormRead, NormRead, Side]:
        norm1 = self.norm(source)
        if not self.same_value(norm1.x, rest):
            if norm1.x.nid == rest.nid:
                raise Unread("the value added to the attention's result has different axes", total.nid, "axes")
            raise Unread("the value added to the attention's result is not the norm's input", total.nid)
        total = self.towards(total, ("layer_norm",))
        found = [n.id for n in self.users(total.nid) if n.op == "layer_norm"]
        if len(found) != 1:
            why = f"{len(found)} norms read the sum after the attention; needed one"
            raise Unread(why, total.nid, about="norm after")
        return norm1, self.norm(self.norm_from(Side(found[0], total.shown))), norm1.x

    def norm_after(self, total: Side) -> NormRead:
        total = self.towards(total, ("layer_norm",))
        node = self.reader(total, "the residual sum", {"layer_norm"}, "a norm", "norm after")
        return self.norm(self.norm_from(Side(node.id, total.shown)))

    def feed_forward(self, fed: Side) -> tuple[Projection, Projection | None, Projection]:
        """Up (and gate) and down products of a norm's result."""
        readers = self.readers(fed.nid)
        products = [p for n in readers if n.op in PRODUCTS and (p := self.consumed(n, fed, "f")) is not None]
        if len(products) == 2:
            return self.gated(products)
        if len(products) != 1:
            why = f"{len(products)} products read the feed-forward's norm; needed one, or two for a gate"
            raise Unread(why, fed.nid)
        (up,) = products
        if (quick := self.quick(up)) is not None:
            return quick, None, replace(self.last(quick.out), stretch=1.0 / quick.stretch)
        if (both := self.packed(up)) is not None:
            return both[0], both[1], self.last(both[2])
        if up.activation == "none":
            raise self.unactivated(self.view.users.get(up.nid, (up.nid,))[0])
        return up, None, self.last(up.out)

    def unactivated(self, user: int) -> Unread:
        """The reason for a feed-forward whose first product is not followed by an activation known to the op."""
        if self.node(user).op in CODES_OF_OPS:
            return Unread("it comes after the feed-forward's first product", user)
        if self.node(user).op in ("split", "slice"):
            return Unread(
                "one product makes both sides of the feed-forward's gate, where the op has two",
                user,
                edit="multiply by each part of the weight: w1, w2 = jnp.split(w, 2, -1)",
            )
        return Unread("the feed-forward has no activation known to the op", user, "activation")

    def gated(self, products: list[Projection]) -> tuple[Projection, Projection, Projection]:
        """Up, gate and down products, if two products read a norm's result."""
        up, gate = sorted(products, key=lambda p: p.activation != "none")
        if up.activation != "none" or gate.activation == "none":
            why = "two products read the feed-forward's norm, but not exactly one of them is activated"
            raise Unread(why, products[0].nid, "activation")
        node = self.reader(gate.out, "the gate", {"prod"}, "the product with the other")
        if not is_product_of(node, 2) or read_by(node) != {gate.nid, up.nid}:
            raise Unread("the gate is not multiplied by the other product", node.id)
        if not is_plain(node):
            raise Unread("the gate is multiplied by a number", node.id, "scalar")
        known, other = self.beside(node, gate.out)
        if other != up.out:
            raise Unread("the gate is multiplied along different axes", node.id, "axes")
        self.met.append(node.id)
        return up, gate, self.last(self.result(node, known))

    def last(self, side: Side) -> Projection:
        node = self.reader(side, "the feed-forward's inner value", PRODUCTS, "its second product")
        down = self.consumed(node, side, "e")
        if down is None:
            raise Unread(f"{node.op} reads the feed-forward's inner value where the op has the second product", node.id)
        if down.activation != "none":
            raise Unread(f"the feed-forward's second product is activated: {down.activation}", node.id, "activation")
        return down
