"""A whole transformer layer, read off a block's view in which its small sites are folded into the ops they become.

The reading starts at an attention. Upwards it finds the projections and what they are made of, downwards the output projection, the
residual sums, the norms and the feed-forward. It only says what a layer could be made of: the site is certified like any other.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ..graph.canonical import ONE, CNode, View
from ..graph.labelled import Labelled, labels_of
from .layer_axes import Atoms, Cut, Shown, Side, Unread, Walk, number_of, renamed, slot_of

STEPS = 8  # of a reading, for the measure of progress: q, k, v, output, residual, norm, feed-forward, residual
_JOINED = ("concatenate", "dynamic_update_slice")
_PRODUCTS = ("gemm_epilogue", "dot")
_CODES = {
    "name": "named_residual",
    "stop_gradient": "stop_gradient",
    "custom_jvp_call": "custom_rule",
    "custom_vjp_call": "custom_rule",
}  # of what stands where the op has something else
_HELD = {
    "name": "it names a value inside the layer, which a remat policy may ask for",
    "stop_gradient": "it stops a gradient inside the layer",
}
EPSILON_LIMIT = 1e-3  # the original's: it refuses to fuse a norm with a larger one


@dataclass(frozen=True)
class Product:
    """A matrix product with what follows it.

    Attributes: `nid`, `out` (its own axes), `x`, `w`, `bias` (None: none), `activation`.
    """

    nid: int
    out: Side
    x: Side
    w: Side
    bias: Side | None
    activation: str


@dataclass(frozen=True)
class Norm:
    nid: int
    x: Side
    kind: str
    epsilon: float
    scale: Side | None
    bias: Side | None


@dataclass(frozen=True)
class Cache:
    """How the keys (or values) of a call join those before: `kind` is "append" or "write", `node` makes all of them, `step` is where they are
    written, counted from the end where it is negative and `from_the_end`.
    """

    kind: str
    node: int
    shown: Shown
    before: Side
    step: int | None
    from_the_end: bool = False


@dataclass(frozen=True)
class Layer:
    """What a layer is made of.

    Attributes:
      root: the node it ends in. x: what it reads, [b.., t, e].
      q, k, v: their projections; all three the same one in `fused`, whose columns are told by `columns`.
      keys, values: the call's own, as the attention or the cache reads them.
      key_cache, value_cache: None where there is none.
      attention: the attention's node. out, up, gate, down: the other products. norm1, norm2: the attention's and the feed-forward's.
    """

    root: Side
    x: Side
    attention: int
    q: Product
    k: Product
    v: Product
    keys: Side
    values: Side
    key_cache: Cache | None
    value_cache: Cache | None
    out: Product
    norm1: Norm
    norm2: Norm
    up: Product
    gate: Product | None
    down: Product
    pre_norm: bool
    columns: str
    sizes: dict[str, int]

    @property
    def fused(self) -> bool:
        return self.columns != "separate"

    @property
    def decoder(self) -> bool:
        return self.key_cache is not None


class Partial(Exception):  # noqa: N818 - an answer to the search, not an error of the user's
    """A layer that was read so far only: the steps done, whether it is a decoder and fused as far as known, and why it ends."""

    def __init__(self, why: Unread, steps: int, decoder: bool, fused: bool, nids: tuple[int, ...]) -> None:
        super().__init__(str(why))
        self.why, self.steps, self.decoder, self.fused, self.nids = why, steps, decoder, fused, nids


class Reader(Walk):
    """Reads the layer around one attention of a view.

    Raises (`read`):
      Partial: it is none; the exception says how far it got.
    """

    def __init__(self, view: View, attention: int) -> None:
        super().__init__(view)
        self.attention = attention
        self.steps = 0
        self.decoder = self.is_fused = False
        self.met: list[int] = [attention]
        self.held: int | None = None

    def read(self) -> Layer:
        try:
            return self._read()
        except Unread as why:
            op = self.node(why.nid).op
            if why.code == "structure" and op in _CODES:
                why = Unread(_HELD.get(op, f"{op} stands inside the layer"), why.nid, _CODES[op])
            raise Partial(why, self.steps, self.decoder, self.is_fused, tuple(self.met)) from None

    def _read(self) -> Layer:
        node = self.node(self.attention)
        names = self.letters(node)
        sides = {slot: self.of_attention(node, names, slot) for slot in ("query", "key", "value")}
        self.decoder = any(self.node(sides[slot].nid).op in _JOINED for slot in ("key", "value"))
        key_cache, keys = self.cached(sides["key"])
        value_cache, values = self.cached(sides["value"])
        if (key_cache is None) != (value_cache is None):
            raise Unread("keys and values do not both join a cache", self.attention)
        q, k, v, columns = self.projections(sides["query"], keys, values)
        self.same_cache(key_cache, value_cache)
        source = self.common_source(q, k, v)
        out = self.output(node, names)
        layer = self.around(source, (q, k, v, columns), (keys, values), (key_cache, value_cache), out)
        if self.held is not None:
            raise Unread(f"{self.node(self.held).op} stands inside", self.held)
        return layer

    # -- the attention --------------------------------------------------------------------------------------------

    def letters(self, node: CNode) -> dict[int, str]:
        """Label of the attention's -> its letter here."""
        count, names = itertools.count(), {}
        for label, name in enumerate(node.params.names):
            names[label] = f"b{next(count)}" if name == "b" else name
        if len(set(names.values())) != len(names):
            raise Unread("its attention has rows or heads along several axes", node.id, "axes")
        for operand in node.operands:
            for axis, label in enumerate(operand.axes):
                self.sizes.setdefault(names[label], self.node(operand.nid).shape[axis])
        return names

    def of_attention(self, node: CNode, names: dict[int, str], slot: str) -> Side:
        number = slot_of(node, slot)
        assert number is not None
        edge = node.operands[number]
        if edge.coef != 1:
            raise Unread(f"its {slot} is multiplied by {edge.coef:g} besides the score scale", edge.nid, "scalar")
        return Side(edge.nid, tuple((names[label],) for label in edge.axes))

    def cached(self, side: Side) -> tuple[Cache | None, Side]:
        """The cache that keys or values join, if any, and those of this call."""
        node = self.node(side.nid)
        if node.op == "concatenate" and len(node.operands) == 2:
            return self.appended(node, side)
        if node.op == "dynamic_update_slice":
            return self.written(node, side)
        return None, renamed(side, {"s": "t"})

    def appended(self, node: CNode, side: Side) -> tuple[Cache, Side]:
        known, _ = node.params
        axis = int(dict(known[2])["dimension"]) if known[0] == "params" else -1
        old, new = node.operands
        shapes: tuple[Any, ...] = known[1] if known[0] == "params" else ()
        sides = [self._joined(node, side, edge, shape, axis) for edge, shape in zip((old, new), shapes, strict=False)]
        if len(sides) != 2 or old.coef != 1 or new.coef != 1:
            raise Unread("keys or values are put together in a way that is not known", node.id)
        self.met.append(node.id)
        before, fresh = renamed(sides[0], {"s": "p"}), renamed(sides[1], {"s": "t"})
        self.sizes["p"] = int(shapes[0][axis])
        self.sizes.setdefault("t", int(shapes[1][axis]))
        return Cache("append", node.id, side.shown, before, None), fresh

    def _joined(self, node: CNode, side: Side, edge: Any, shape: Any, axis: int) -> Side:
        """One operand of a concatenation along `axis`, or the update of a larger one."""
        found: list[Atoms] = [()] * len(self.node(edge.nid).shape)
        theirs, own = iter(edge.axes), iter(side.shown)
        made = (
            self.view.values_of[node.id][0].shape if axis < 0 else [2 if d == axis else n for d, n in enumerate(shape)]
        )
        for size, whole in zip(shape, made, strict=True):
            atoms = next(own) if whole != 1 else ()
            if size == 1:
                continue
            source = next(theirs)
            if source < 0:
                raise Unread("a cache is joined with a value that is repeated along an axis", node.id, "axes")
            found[source] = atoms
        return Side(edge.nid, tuple(found))

    def written(self, node: CNode, side: Side) -> tuple[Cache, Side]:
        known, _ = node.params
        if known[0] != "params":
            raise Unread("a cache is written in a way that is not known", node.id)
        shape, update, *_ = known[1]
        old, new, *starts = node.operands
        own = iter(side.shown)
        atoms = [next(own) if n != 1 else () for n in shape]
        moving = [d for d, n in enumerate(update) if n != shape[d]]
        if len(moving) != 1 or atoms[moving[0]] != ("s",) or old.coef != 1 or new.coef != 1:
            raise Unread("a cache is written otherwise than at one place along its positions", node.id, "axes")
        at = starts[moving[0]]
        if any(s.nid != ONE or s.coef != 0 for d, s in enumerate(starts) if d != moving[0]):
            raise Unread("a cache is written at other than its first head, feature or batch entry", node.id, "axes")
        if at.coef != 1 and at.nid != ONE:
            raise Unread("a cache is written at a multiple of a step", node.id)
        self.met.append(node.id)
        fresh = renamed(self._part(node, new, update, atoms), {"s": "t"})
        self.sizes.setdefault("t", int(update[moving[0]]))
        before = self._part(node, old, shape, atoms)
        if at.nid == ONE:
            raise Unread(f"a cache is written at the fixed position {at.coef}", node.id)
        step = self.before_wrapping(at.nid, int(shape[moving[0]]))
        return Cache("write", node.id, side.shown, before, at.nid if step is None else step, step is not None), fresh

    def _part(self, node: CNode, edge: Any, shape: Any, atoms: list[Atoms]) -> Side:
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
        if node.op != "select" or len(node.operands) != 3:
            return None
        negative, index, wrapped = node.operands
        test, added = self.node(negative.nid), self.node(wrapped.nid)
        if test.op != "gt" or added.op != "iadd" or len(test.operands) != 2 or len(added.operands) != 2:
            return None
        zero, tested = test.operands
        numbers = [o.coef for o in added.operands if o.nid == ONE]
        plain = [o.nid for o in added.operands if o.nid != ONE and o.coef == 1]
        whole = (
            zero.nid == ONE
            and zero.coef == 0
            and tested.coef == 1
            and index.coef == 1
            and negative.coef == wrapped.coef == 1
        )
        return index.nid if whole and numbers == [length] and plain == [index.nid] and tested.nid == index.nid else None

    def same_cache(self, keys: Cache | None, values: Cache | None) -> None:
        """Keys and values join their caches alike."""
        if keys is None or values is None:
            return
        if keys.kind != values.kind:
            raise Unread("keys are appended and values are written, or the other way round", values.node)
        if keys.step != values.step:
            raise Unread("keys and values are written at different positions", values.node)
        if keys.before.nid == values.before.nid:
            raise Unread("keys and values are kept in one cache", values.node)

    # -- the projections ------------------------------------------------------------------------------------------

    def product(self, side: Side, feature: str, base: str = "e") -> Product:
        """The product that makes a value with the axis `feature` from its weight, through views."""
        made = self.through(self.up(side))
        node = self.node(made.nid)
        known = dict(zip(labels_of(node) or (), made.shown, strict=False))
        if node.op == "gemm_epilogue" and isinstance(node.params, Labelled):
            slots = [slot_of(node, "x"), slot_of(node, "w"), slot_of(node, "bias")]
            activation = str(dict(node.params.traits)["activation"])
        elif node.op == "dot":
            w = next((i for i, o in enumerate(node.operands) if self._has(o, known, feature)), None)
            slots = [None if w is None else 1 - w, w, None]
            activation = "none"
        else:
            raise Unread(f"{node.op} stands where the op has a projection", node.id)
        if slots[0] is None or slots[1] is None or any(node.operands[i].coef != 1 for i in slots if i is not None):
            raise Unread("a product is multiplied by a number", node.id, "scalar")
        self.met.append(node.id)
        summed = {x for i in slots[:2] for x in node.operands[i].axes} - known.keys()  # type: ignore[index]
        new = {x: base if n == 0 else f"{base}{n}" for n, x in enumerate(sorted(summed))}
        x, w, bias = (None if i is None else self.operand(node, made.shown, i, new) for i in slots)
        assert x is not None and w is not None
        return Product(node.id, made, x, self.up(w, parts=False), bias and self.up(bias, parts=False), activation)

    def through(self, side: Side) -> Side:
        """Past what a layer may not have, so that it is told at the end that it is a layer but for that."""
        while self.node(side.nid).op in _HELD:
            self.held = self.held or side.nid
            edge = self.node(side.nid).operands[0]
            if len(self.node(side.nid).operands) != 1 or edge.axes != tuple(range(len(side.shown))):
                break
            side = self.up(Side(edge.nid, side.shown))
        return side

    def _has(self, edge: Any, known: dict[int, Atoms], feature: str) -> bool:
        return any(_holds(atom, feature) for x in edge.axes for atom in known.get(x, ()))

    def projections(self, query: Side, keys: Side, values: Side) -> tuple[Product, Product, Product, str]:
        if self.sizes.get("s") is not None and not self.decoder and self.sizes["s"] != self.sizes.get("t", 1):
            raise Unread(
                f"{self.sizes.get('t', 1)} queries see {self.sizes['s']} keys of another value, as in a cross attention",
                self.attention,
            )
        found: list[Product] = []
        for side, feature, what in ((query, "c", "queries"), (keys, "c", "keys"), (values, "d", "values")):
            self.positioned(side, what)
            one = self.product(side, feature)
            if one.activation != "none":
                raise Unread(
                    f"the {what} are activated: {one.activation} stands behind their product", one.nid, "activation"
                )
            found.append(one)
            if one.x.nid != found[0].x.nid:
                raise Unread(f"queries and {what} are made of different values", one.nid)
            self.steps += 1
        q, k, v = found
        together = len({q.nid, k.nid, v.nid})
        self.is_fused = together == 1
        if together == 3:
            return q, k, v, "separate"
        if together == 2:
            raise Unread("two of queries, keys and values are one product, and the third is another", v.nid)
        return q, k, v, self.columns(q, k, v)

    def positioned(self, side: Side, what: str) -> None:
        """What is done to queries, keys or values behind their product: a scale that is no number, or a rotary embedding.

        Raises:
          Unread: one of them.
        """
        node = self.node(self.up(side).nid)
        products = {o.nid for o in node.operands if self.node(self.up_of(o)).op in _PRODUCTS}
        if node.op == "prod" and len(products) == 1:
            raise Unread(
                f"the {what} are multiplied by a value that is no number known when tracing, as by a scale of each head",
                node.id,
                "scalar",
            )
        if node.op in ("sum", "concatenate", "prod"):
            below = {self.node(o.nid).op for o in node.operands}
            turned = node.op == "concatenate" or "prod" in below or "concatenate" in below
            if turned:
                raise Unread(
                    f"the {what} are changed between their product and the attention, as by a rotary embedding; sites with one are not fused yet",
                    node.id,
                )

    def up_of(self, edge: Any) -> int:
        """What an operand is made of, through reshapes."""
        nid = edge.nid
        while self.node(nid).op == "reshape":
            nid = self.node(nid).operands[0].nid
        return nid

    def columns(self, q: Product, k: Product, v: Product) -> str:
        """How one product holds the columns of queries, keys and values."""
        read = [self.strides(self.features(p)) for p in (q, k, v)]
        (total, *_), c, d = read[0], self.sizes.get("c", 1), self.sizes.get("d", 1)
        heads, few = self.sizes.get("h", 1), self.sizes.get("g", self.sizes.get("h", 1))
        starts = [start for _, start, _ in read]
        inner = [strides for *_, strides in read]
        dense = all(s.get("c", s.get("d", 1)) == 1 for s in inner)
        by_head = [s.get("h", s.get("g")) for s in inner]
        if c == d and dense and total == (heads + 2 * few) * c:
            one = [b is None or b == c for b in by_head]
            if all(one) and starts == [0, heads * c, (heads + few) * c]:
                return "concatenated"
            if few == heads and all(b is None or b == 3 * c for b in by_head) and starts == [0, c, 2 * c]:
                return "interleaved"
        raise Unread(
            "the columns of its one projection are in another order than queries, keys, values, as a whole or by head",
            q.nid,
            "axes",
        )

    def features(self, product: Product) -> Atoms:
        """The columns of a product's weight, outer first, as the product's axes have them."""
        rows = {a for axis in product.x.shown for a in axis}
        return tuple(a for axis in product.out.shown for a in axis if a not in rows)

    def strides(self, atoms: Atoms) -> tuple[int, int, dict[str, int]]:
        """(number of entries, where the first is, stride of each letter) of merged letters and cuts."""
        stride, start, found = 1, 0, {}
        for atom in reversed(atoms):
            if isinstance(atom, Cut):
                inside, first, theirs = self.strides(atom.inner)
                found.update({a: s * stride for a, s in theirs.items()})
                start += (atom.start + first) * stride
            else:
                found[atom] = stride
            stride *= self.size(atom)
        return stride, start, found

    def common_source(self, q: Product, k: Product, v: Product) -> Side:
        """What all three are made of."""
        if not q.x.nid == k.x.nid == v.x.nid:
            raise Unread("queries and keys are made of different values, as in a cross attention", self.attention)
        if not q.x.shown == k.x.shown == v.x.shown:
            raise Unread("queries, keys and values read one value along different axes", self.attention, "axes")
        return q.x

    # -- the rest -------------------------------------------------------------------------------------------------

    def reader(self, side: Side, what: str, wanted: Collection[str], needed: str) -> CNode:
        """The one node of the `wanted` ops that reads a value; what else reads it is told when the site is cut out."""
        users = [self.node(u) for u in self.view.users.get(side.nid, ())]
        fit = [n for n in users if n.op in wanted]
        if len(fit) == 1:
            return fit[0]
        if not users:
            raise Unread(f"nothing reads {what}, needed {needed}", side.nid)
        if not fit:
            raise Unread(
                f"{', '.join(sorted({n.op for n in users}))} reads {what} where the op has {needed}", users[0].id
            )
        raise Unread(f"{len(fit)} of {', '.join(sorted(wanted))} read {what}, needed one", side.nid)

    def output(self, node: CNode, names: dict[int, str]) -> Product:
        """The product that the attention's heads are given to."""
        side = Side(node.id, tuple((names[x],) for x in node.params.labels))
        what, ends = "the attention's result", ("the output projection",)
        user = self.reader(side, what, {"reshape", *_PRODUCTS}, *ends)
        while user.op == "reshape":
            side = self.after_reshape(user, side.shown)
            user = self.reader(side, what, {"reshape", *_PRODUCTS}, *ends)
        found = self.consumed(user, side, "e")
        if found is None:
            raise Unread(f"{user.op} reads the attention's result where the op has the output projection", user.id)
        if found.activation != "none":
            raise Unread(f"the output projection is activated: {found.activation}", user.id, "activation")
        if {a for axis in found.x.shown for a in axis} & {"h", "d"} != {a for a in ("h", "d") if a in self.sizes}:
            raise Unread("the output projection does not read all heads", user.id, "axes")
        self.steps += 1
        return found

    def consumed(self, node: CNode, side: Side, made: str) -> Product | None:
        """A product that reads `side`, whose weight has the axis `made`; None where the node is none."""
        if node.op == "gemm_epilogue" and isinstance(node.params, Labelled):
            slots = [slot_of(node, "x"), slot_of(node, "w"), slot_of(node, "bias")]
            activation = str(dict(node.params.traits)["activation"])
        elif node.op == "dot":
            x = next(i for i, o in enumerate(node.operands) if o.nid == side.nid)
            slots, activation = [x, 1 - x, None], "none"
        else:
            return None
        ix, iw, ib = slots
        assert ix is not None and iw is not None
        if node.operands[ix].nid != side.nid or any(node.operands[i].coef != 1 for i in slots if i is not None):
            return None
        labels = labels_of(node) or ()
        known = self.slots(node, ix, side.shown)
        weight = node.operands[iw]
        fresh = [x for x in weight.axes if x not in known]
        if len(fresh) > 1 or any(x in labels and x in known for x in weight.axes):
            raise Unread("a weight has rows, or columns along several axes", node.id, "axes")
        for x in fresh:
            self.sizes.setdefault(made, self.node(weight.nid).shape[weight.axes.index(x)])
            known[x] = (made,)
        self.met.append(node.id)
        sides = [Side(node.operands[i].nid, tuple(known[x] for x in node.operands[i].axes)) for i in (ix, iw)]
        bias = None if ib is None else Side(node.operands[ib].nid, tuple(known[x] for x in node.operands[ib].axes))
        weight, bias = self.up(sides[1], parts=False), bias and self.up(bias, parts=False)
        return Product(node.id, self.result(node, known), sides[0], weight, bias, activation)

    def norm(self, nid: int, shown: Shown) -> Norm:
        """A norm, where it is one over the model's width."""
        node = self.node(nid)
        if node.op != "layer_norm" or not isinstance(node.params, Labelled):
            raise Unread(f"{node.op} stands where the op has a norm", nid)
        labels = node.params.labels
        known = dict(zip(labels, shown, strict=True))
        over = [x for x, name in enumerate(node.params.names) if name == "n"]
        if [known.get(x) for x in over] != [("e",)]:
            raise Unread("a norm is taken over other axes than the model's width", nid, "axes")
        sides = {}
        for slot in ("x", "scale", "bias"):
            i = slot_of(node, slot)
            if i is not None:
                if node.operands[i].coef != 1:
                    raise Unread("a norm's operand is multiplied by a number", nid, "scalar")
                sides[slot] = Side(node.operands[i].nid, tuple(known[x] for x in node.operands[i].axes))
        epsilon = number_of(node, "epsilon")
        if epsilon > EPSILON_LIMIT:
            raise Unread(
                f"epsilon is {epsilon:g}, above the {EPSILON_LIMIT:g} up to which a layer is fused", nid, "scalar",
                "take a smaller epsilon, if that is what is meant",
            )  # fmt: skip
        self.met.append(nid)
        return Norm(
            nid, sides["x"], str(dict(node.params.traits)["kind"]), epsilon, sides.get("scale"), sides.get("bias")
        )

    def sum_of(self, side: Side, what: str, of: Collection[int]) -> CNode:
        """The sum that adds a value to one of some nodes; the one that reads it, where there is no such."""
        users = [self.node(u) for u in self.view.users.get(side.nid, ())]
        fit = [n for n in users if n.op == "sum" and any(o.nid in of for o in n.operands)]
        return fit[0] if len(fit) == 1 else self.reader(side, what, {"sum"}, "a residual sum")

    def added(self, side: Side, what: str, of: Collection[int]) -> tuple[Side, Side]:
        """The sum that reads a value, and what it adds to it: one of the nodes `of`, if any."""
        node = self.sum_of(side, what, of)
        if len(node.operands) != 2 or any(o.coef != 1 for o in node.operands):
            raise Unread(f"{what} is added with a factor, or to more than one value", node.id, "scalar")
        mine = next(i for i, o in enumerate(node.operands) if o.nid == side.nid)
        known = self.slots(node, mine, side.shown)
        total = self.result(node, known)
        other = node.operands[1 - mine]
        self.met.append(node.id)
        return total, Side(other.nid, tuple(known[x] for x in other.axes))

    def around(self, source: Side, projected: Any, own: Any, caches: Any, out: Product) -> Layer:
        of = {source.nid, *(o.nid for o in self.node(source.nid).operands[:1])}
        total, rest = self.added(out.out, "the output projection's result", of)
        q, k, v, columns = projected
        pre = rest.nid != source.nid
        if pre and self.node(source.nid).op != "layer_norm":
            raise Unread(
                "queries, keys and values read no norm, nor what is added to the attention's result",
                source.nid,
                about="norm before",
            )
        if rest.shown != source.shown:
            raise Unread("what is added to the attention's result has other axes", total.nid, "axes")
        readers = [self.node(u).op for u in self.view.users.get(total.nid, ())]
        if not pre and "sum" in readers and self.node(source.nid).op == "layer_norm":
            raise Unread(
                "what is added to the attention's result is its norm's result, needed what that norm was taken of",
                total.nid,
            )
        self.steps += 1
        if pre:
            norm1, norm2, x, begun = self.norms_before(source, total, rest)
        else:
            norm1, x, begun = self.norm_after(total), source, None
            norm2 = None
        fed = Side(norm2.nid, total.shown) if norm2 is not None else Side(norm1.nid, total.shown)
        self.steps += 1
        up, gate, down = self.feed_forward(fed, {total.nid} if pre else set())
        self.steps += 1
        end, rest = self.added(down.out, "the feed-forward's result", {total.nid, fed.nid})
        again = total if pre else fed
        if rest != again:
            raise Unread("the feed-forward's result is added to another value than what it was made of", end.nid)
        self.steps += 1
        root = end
        if norm2 is None:
            norm2 = self.norm_after(end)
            root = Side(norm2.nid, end.shown)
        del begun
        return Layer(
            root, x, self.attention, q, k, v, own[0], own[1], caches[0], caches[1], out, norm1, norm2, up, gate, down,
            pre, columns, self.sizes,
        )  # fmt: skip

    def norms_before(self, source: Side, total: Side, rest: Side) -> tuple[Norm, Norm, Side, None]:
        norm1 = self.norm(source.nid, source.shown)
        if norm1.x.nid != rest.nid:
            raise Unread("what is added to the attention's result is not what its norm was taken of", total.nid)
        if norm1.x != rest:
            raise Unread("what is added to the attention's result has other axes", total.nid, "axes")
        found = [u for u in self.view.users.get(total.nid, ()) if self.node(u).op == "layer_norm"]
        if len(found) != 1:
            raise Unread(
                f"{len(found)} norms read the sum after the attention, needed one", total.nid, about="norm after"
            )
        return norm1, self.norm(found[0], total.shown), rest, None

    def norm_after(self, total: Side) -> Norm:
        try:
            node = self.reader(total, "the residual sum", {"layer_norm"}, "a norm")
        except Unread as why:
            raise Unread(str(why), why.nid, why.code, about="norm after") from None
        return self.norm(node.id, total.shown)

    def feed_forward(self, fed: Side, beside: set[int]) -> tuple[Product, Product | None, Product]:
        """Up (and gate) and down products of what a norm gave."""
        readers = [self.node(u) for u in self.view.users.get(fed.nid, ())]
        products = [
            p for n in readers if n.op in ("gemm_epilogue", "dot") and (p := self.consumed(n, fed, "f")) is not None
        ]
        if len(products) == 2:
            return self.gated(products)
        if len(products) != 1:
            raise Unread(
                f"{len(products)} products read the feed-forward's norm, needed one, or two of a gate", fed.nid
            )
        (up,) = products
        if up.activation == "none":
            user = self.view.users.get(up.nid, (up.nid,))[0]
            if self.node(user).op in _CODES:
                raise Unread("it stands behind the feed-forward's first product", user)
            raise Unread("the feed-forward has no activation that the op knows", user, "activation")
        return up, None, self.last(up.out)

    def gated(self, products: list[Product]) -> tuple[Product, Product, Product]:
        active = [p for p in products if p.activation != "none"]
        if len(active) != 1:
            raise Unread(
                "two products read the feed-forward's norm, and not one of them is activated",
                products[0].nid,
                "activation",
            )
        (gate,) = active
        (up,) = (p for p in products if p is not gate)
        node = self.reader(gate.out, "the gate", {"prod"}, "the product with the other")
        if tuple(node.params) != (1.0, 1.0) or {o.nid for o in node.operands} != {gate.nid, up.nid}:
            raise Unread("the gate is not multiplied with the other product", node.id)
        if any(o.coef != 1 for o in node.operands):
            raise Unread("the gate is multiplied by a number", node.id, "scalar")
        mine = next(i for i, o in enumerate(node.operands) if o.nid == gate.nid)
        known = self.slots(node, mine, gate.out.shown)
        if self.slots(node, 1 - mine, up.out.shown) != known:
            raise Unread("the gate is multiplied along other axes", node.id, "axes")
        self.met.append(node.id)
        return up, gate, self.last(self.result(node, known))

    def last(self, side: Side) -> Product:
        node = self.reader(side, "the feed-forward's inner value", _PRODUCTS, "its second product")
        down = self.consumed(node, side, "e")
        if down is None:
            raise Unread(f"{node.op} reads the feed-forward's inner value where the op has the second product", node.id)
        if down.activation != "none":
            raise Unread(f"the feed-forward's second product is activated: {down.activation}", node.id, "activation")
        return down


def _holds(atom: Any, letter: str) -> bool:
    return atom == letter or (isinstance(atom, Cut) and any(_holds(a, letter) for a in atom.inner))
