"""The projections of a layer: the products that compute queries, keys and values from one value, one each or one for all three."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ....graph.canonical.fused_nodes import Labelled, node_labels
from ....graph.canonical.nodes import CNode
from .axes import Atoms, AxisPart, Side, Unread, all_letters, letters_in, side_of, slots_of
from .rotary import Rotary, RotaryWalk

PRODUCTS = ("gemm_epilogue", "dot")
HELD = {
    "name": "it names a value inside the layer, which a remat policy may ask for",
    "stop_gradient": "it stops a gradient inside the layer",
}


@dataclass(frozen=True)
class Projection:
    """A matrix product with its epilogue.

    Attributes: `nid`, `out` (its own axes, or those of a following view), `x`, `w`, `bias` (None: none), `activation`, `factor` (a
    vector that multiplies it after its bias; None: none), `stretch` (a number that multiplies its weight), `part` (the first and the
    number of the weight's columns that it uses; None: all).
    """

    nid: int
    out: Side
    x: Side
    w: Side
    bias: Side | None
    activation: str
    factor: Side | None = None
    stretch: float = 1.0
    part: tuple[int, int] | None = None


@dataclass(frozen=True)
class Slots:
    """The operand numbers of a product's input, weight and bias (None: none), and its activation."""

    x: int
    w: int
    bias: int | None = None
    activation: str = "none"

    def are_plain(self, node: CNode) -> bool:
        """Whether none of them is multiplied by a number."""
        return all(node.operands[i].coef == 1 for i in (self.x, self.w, self.bias) if i is not None)


def product_slots(node: CNode, weight: int | None) -> Slots | None:
    """The slots of a product, with this operand as the weight of a bare one; None for any other node."""
    if node.op == "dot":
        return None if weight is None else Slots(1 - weight, weight)
    if node.op != "gemm_epilogue" or not isinstance(node.params, Labelled):
        return None
    slots = slots_of(node)
    return Slots(slots["x"], slots["w"], slots.get("bias"), str(dict(node.params.traits)["activation"]))


class ProjectionWalk(RotaryWalk):
    """The part of a reading that handles the projections. `rotary` is the rotary embedding of queries and keys."""

    rotary: Rotary | None = None

    def product(self, side: Side, feature: str) -> Projection:
        """The product, through views, that computes a value and whose weight has the axis `feature`."""
        out = self.through(self.up(side))
        node = self.node(out.nid)
        known = dict(zip(node_labels(node) or (), out.shown, strict=False))
        slots = product_slots(node, _having(node, known, feature))
        if node.op not in PRODUCTS:
            raise Unread(f"found {node.op} where the op has a projection", node.id)
        if slots is None or not slots.are_plain(node):
            raise Unread("a product is multiplied by a number", node.id, "scalar")
        self.met.append(node.id)
        summed = {*node.operands[slots.x].axes, *node.operands[slots.w].axes} - known.keys()
        self.name_new(node, slots, known, {x: f"e{n or ''}" for n, x in enumerate(sorted(summed))})
        return self.projection(node, slots, known)

    def name_new(self, node: CNode, slots: Slots, known: dict[int, Atoms], names: Mapping[int, str]) -> None:
        """Adds letters of labels to the `known`, and their lengths."""
        for edge in (node.operands[slots.x], node.operands[slots.w]):
            for label, size in zip(edge.axes, self.node(edge.nid).shape, strict=True):
                if label in names:
                    known[label] = (names[label],)
                    self.sizes.setdefault(names[label], size)

    def projection(self, node: CNode, slots: Slots, known: Mapping[int, Atoms]) -> Projection:
        """A product, the letters of whose labels are `known`."""
        out, x, w = self.result(node, known), side_of(node, slots.x, known), side_of(node, slots.w, known)
        bias = None if slots.bias is None else self.up(side_of(node, slots.bias, known), parts=False)
        return Projection(node.id, out, x, self.up(w, parts=False), bias, slots.activation)

    def through(self, side: Side) -> Side:
        """The value below a node that a layer may not have, so that the reading goes on and the node is reported at the end."""
        while self.node(side.nid).op in HELD:
            self.held = self.held or side.nid
            edge = self.node(side.nid).operands[0]
            if len(self.node(side.nid).operands) != 1 or edge.axes != tuple(range(len(side.shown))):
                break
            side = self.up(Side(edge.nid, side.shown))
        return side

    def projections(self, query: Side, keys: Side, values: Side) -> tuple[Projection, Projection, Projection, str]:
        t = self.sizes.get("t", 1)
        s = self.sizes.get("s", t)
        if s != t and not self.decoder:
            raise Unread(f"{t} queries see {s} keys computed from another value, as in cross-attention", self.attention)
        query, keys = self.turned_alike(query, keys)
        found: list[Projection] = []
        for side, feature, name in ((query, "c", "queries"), (keys, "c", "keys"), (values, "d", "values")):
            self.positioned(side, name)
            projection = self.product(side, feature)
            if projection.activation != "none":
                why = f"the {name} are activated: {projection.activation} follows their product"
                raise Unread(why, projection.nid, "activation")
            found.append(projection)
            if projection.x.nid != found[0].x.nid:
                raise Unread(f"queries and {name} are computed from different values", projection.nid)
            self.steps += 1
        q, k, v = found
        products = len({q.nid, k.nid, v.nid})
        self.is_fused = products == 1
        self.check_heads(q)
        if products == 2:
            raise Unread(
                "one product makes two of queries, keys and values, and another product makes the third", v.nid
            )
        return q, k, v, self.columns(q, k, v) if self.is_fused else "separate"

    def check_heads(self, queries: Projection) -> None:
        """Checks that the columns of the queries' weight are heads and their features.

        Raises:
          Unread: they also include rows of the attention: with one token per text, its rows are the heads that share a head of keys.
        """
        if "t" not in letters_in(self.features(queries)):
            return
        each = self.sizes["t"]
        raise Unread(
            f"the queries of one position keep the {each} heads that share a head of keys on a separate axis; needed all heads on one axis",
            queries.nid,
            "axes",
            f"repeat keys and values for the heads that share them, jnp.repeat(k, {each}, axis=...): the op reads them without a copy",
        )

    def turned_alike(self, query: Side, keys: Side) -> tuple[Side, Side]:
        """Queries and keys before a rotary embedding of both or neither.

        Raises:
          Unread: their rotary embeddings differ.
        """
        (self.rotary, before), (theirs, keys_before) = self.unturned(query), self.unturned(keys)
        if (self.rotary is None) != (theirs is None):
            name, whose = ("queries", query) if theirs is None else ("keys", keys)
            raise Unread(f"a rotary embedding is applied only to the {name}", whose.nid, "rotary")
        if self.rotary != theirs:
            raise Unread("the rotary embeddings of queries and keys use different tables", keys.nid, "rotary")
        if self.rotary is not None and theirs is not None:
            self.rotary = replace(self.rotary, products=self.rotary.products | theirs.products)
        return before, keys_before

    def positioned(self, side: Side, name: str) -> None:
        """Checks the steps on queries, keys or values after their product for a scale that is not a number, or a rotary embedding in
        an unsupported form.

        Raises:
          Unread: there is one.
        """
        node = self.node(self.up(side).nid)
        products = {o.nid for o in node.operands if self.node(self.up_of(o)).op in PRODUCTS}
        if node.op == "prod" and len(products) == 1:
            why = f"the {name} are multiplied by a value unknown at trace time, such as a scale per head"
            raise Unread(why, node.id, "scalar")
        below = {self.node(o.nid).op for o in node.operands} & {"prod", "concatenate"}
        if node.op == "concatenate" or (node.op in ("sum", "prod") and below):
            why = f"the {name} are changed between their product and the attention, e.g. by a rotary embedding in another form"
            raise Unread(why, node.id, "rotary")

    def up_of(self, edge: Any) -> int:
        """The id of an operand's node under reshapes."""
        nid = edge.nid
        while self.node(nid).op == "reshape":
            nid = self.node(nid).operands[0].nid
        return nid

    def columns(self, q: Projection, k: Projection, v: Projection) -> str:
        """The order of the columns of queries, keys and values in one product."""
        read = [self.strides(self.features(p)) for p in (q, k, v)]
        heads, few, c = self.sizes.get("h", 1), self.heads_of(k), self.sizes.get("c", 1)
        starts = [start for start, _ in read]
        by_head = {strides.get("h", strides.get("g")) for _, strides in read} - {None}  # of one head none is told
        if self.are_dense(read, q, heads + 2 * few):
            if by_head <= {c} and starts == [0, heads * c, (heads + few) * c]:
                return "concatenated"
            if few == heads and by_head <= {3 * c} and starts == [0, c, 2 * c]:
                return "interleaved"
        why = (
            "the columns of its one projection are not ordered as queries, keys, values, neither as a whole nor by head"
        )
        raise Unread(why, q.nid, "axes")

    def are_dense(self, read: list[tuple[int, dict[str, int]]], product: Projection, heads: int) -> bool:
        """Whether the columns are exactly those of so many heads, with contiguous features, as many for values as for keys."""
        c, d = self.sizes.get("c", 1), self.sizes.get("d", 1)
        each = {strides.get("c", strides.get("d", 1)) for _, strides in read}
        return c == d and each == {1} and self.length(self.features(product)) == heads * c

    def heads_of(self, keys: Projection) -> int:
        """The number of key heads: as many as query heads, fewer, or a single one without an axis."""
        of_keys = "h" in letters_in(self.features(keys))
        return self.sizes.get("g", self.sizes.get("h", 1) if of_keys else 1)

    def features(self, product: Projection) -> Atoms:
        """The columns of a product's weight, outer first, as the product's axes have them."""
        rows = product.x.atoms
        return tuple(a for a in all_letters(product.out.shown) if a not in rows)

    def strides(self, atoms: Atoms) -> tuple[int, dict[str, int]]:
        """(where the first entry is, stride of each letter) of merged letters and cuts."""
        stride, start, found = 1, 0, {}
        for atom in reversed(atoms):
            if isinstance(atom, AxisPart):
                first, theirs = self.strides(atom.inner)
                found.update({a: s * stride for a, s in theirs.items()})
                start += (atom.start + first) * stride
            else:
                found[atom] = stride
            stride *= self.size(atom)
        return start, found

    def common_source(self, q: Projection, k: Projection, v: Projection) -> Side:
        """The common input of all three."""
        if not q.x.shown == k.x.shown == v.x.shown:
            raise Unread("queries, keys and values read one value along different axes", self.attention, "axes")
        if any(a not in ("t", "e") and str(a)[0] != "b" for a in q.x.atoms):
            raise Unread("its attention has rows along an axis of heads, as with a single head", self.attention, "axes")
        return q.x


def _having(node: CNode, known: Mapping[int, Atoms], letter: str) -> int | None:
    """The first operand of a node that has an axis of this letter, if one has."""
    letters = (letters_in(all_letters([known.get(x, ()) for x in o.axes])) for o in node.operands)
    return next((i for i, theirs in enumerate(letters) if letter in theirs), None)
