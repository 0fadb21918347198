"""Factors that a layer has behind its products, where the fused op has none: they go into the products' weights and biases.

A vector along the features before a residual sum (layer scale, Touvron et al. 2021, arXiv:2103.17239) multiplies the columns of the
product's weight and its bias. And h * sigmoid(c h), the quick gelu with c = 1.702 (Hendrycks and Gimpel 2016, arXiv:1606.08415), is
silu(c h) / c: c multiplies the first product, and its inverse the weight of the second. One product that makes both sides of a gate,
silu(g) * u of its halves g and u, is two of halves of its weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from ....graph.canonical.nodes import CNode
from .axes import Shown, Side, Unread, renamed
from .projections import Product, ProjectionWalk

BOTH = "y"  # the letter of the columns of a weight that makes both sides of a gate
FACTOR = "_factor"  # what the leaf of a product's factor is called behind the product's slot
_WIDE = ("float32", "float64")
_STRETCH = 64.0  # a larger number, or a smaller one, may take a weight out of its dtype's range


class FactorWalk(ProjectionWalk):
    """The part of a reading that is about what multiplies a product."""

    def scaled(self, product: Product) -> Product:
        """With the vector along its features that it is multiplied by before anything else reads it, if it is."""
        users = [self.node(u) for u in self.view.users.get(product.out.nid, ())]
        node = users[0] if len(users) == 1 else None
        if node is None or node.op != "prod" or len(node.operands) != 2 or tuple(node.params) != (1.0, 1.0):
            return product
        mine = next(i for i, o in enumerate(node.operands) if o.nid == product.out.nid)
        known, other = self.slots(node, mine, product.out.shown), node.operands[1 - mine]
        if any(o.coef != 1 for o in node.operands) or [known.get(x) for x in other.axes] != [("e",)]:
            return product
        self.met.append(node.id)
        return replace(product, out=self.result(node, known), factor=self.up(Side(other.nid, (("e",),)), parts=False))

    def quick(self, up: Product) -> Product | None:
        """A product h and h * sigmoid(c h) as a product of silu; None where it is none."""
        users = [self.node(u) for u in self.view.users.get(up.out.nid, ())]
        gates = [n for n in users if n.op == "logistic"]
        products = [n for n in users if n.op == "prod" and tuple(n.params) == (1.0, 1.0)]
        if up.activation != "none" or len(users) != 2 or len(gates) != 1 or len(products) != 1:
            return None
        (gate,), (node,) = gates, products
        stretch = float(gate.operands[0].coef)
        if {o.nid for o in node.operands} != {up.out.nid, gate.id} or any(o.coef != 1 for o in node.operands):
            return None
        mine = next(i for i, o in enumerate(node.operands) if o.nid == up.out.nid)
        known = self.slots(node, mine, up.out.shown)
        active = self.result(gate, self.slots(gate, 0, up.out.shown))
        if not 1 / _STRETCH <= stretch <= _STRETCH or self.slots(node, 1 - mine, active.shown) != known:
            return None
        self.met += [gate.id, node.id]
        return replace(up, out=self.result(node, known), activation="silu", stretch=stretch)

    def packed(self, both: Product) -> tuple[Product, Product, Side] | None:
        """(up, gate, what they make) of one product of whose halves one is multiplied with silu of the other; None where it is none."""
        parts = [self.node(u) for u in self.view.users.get(both.out.nid, ())]
        cuts = [self.part_of(n) if n.op in ("split", "slice") else None for n in parts]
        each = self.sizes["f"] // 2
        if both.activation != "none" or sorted(c or () for c in cuts) != [(0, each), (each, each)]:
            return None
        sides = {n.id: Side(n.id, self.cut_shown(n, both.out)) for n in parts}
        gates = [u for n in parts for u in map(self.node, self.view.users.get(n.id, ())) if u.op == "logistic"]
        if len(gates) != 1 or gates[0].operands[0].coef != 1 or gates[0].operands[0].nid not in sides:
            return None
        active = gates[0].operands[0].nid
        sides[gates[0].id] = self.result(gates[0], self.slots(gates[0], 0, sides[active].shown))
        users = (self.node(u) for u in self.view.users.get(gates[0].id, ()))  # g * sigmoid(g) alone is one of them
        ends = [u for u in users if u.op == "prod" and tuple(u.params) == (1.0, 1.0, 1.0)]
        if len(ends) != 1 or any(o.coef != 1 for o in ends[0].operands):
            return None
        (end,) = ends
        known = [self.slots(end, i, sides[o.nid].shown) for i, o in enumerate(end.operands) if o.nid in sides]
        if {o.nid for o in end.operands} != sides.keys() or any(k != known[0] for k in known):
            return None
        self.met += [*sides, end.id]
        whole = {"f": BOTH}
        self.sizes[BOTH], self.sizes["f"] = self.sizes["f"], each
        both = replace(both, w=renamed(both.w, whole), bias=both.bias and renamed(both.bias, whole))
        gate, up = sorted(zip(parts, cuts, strict=True), key=lambda one: one[0].id != active)
        return replace(both, part=up[1]), replace(both, part=gate[1], activation="silu"), self.result(end, known[0])

    def cut_shown(self, part: CNode, whole: Side) -> Shown:
        """What the axes are of a part of a value: such a node names, for each of its own axes, its operand's."""
        return tuple(whole.shown[axis] for axis in part.operands[0].axes)


def factors_of(product: Product, slot: str, leaves: Mapping[str, Any]) -> tuple[float, str | None]:
    """(number, leaf) that an operand of a product is multiplied by in place of its result.

    Raises:
      Unread: it has 16 bits, and would be rounded once more than the program rounds it.
    """
    number = 1.0 if slot == "down_bias" else product.stretch
    vector = None if product.factor is None else slot.removesuffix("_bias") + FACTOR
    dtypes = {str(jnp.dtype(leaves[name].dtype)) for name in (slot, vector) if name is not None}
    if (number != 1.0 or vector is not None) and (len(dtypes) > 1 or not dtypes <= set(_WIDE)):
        what = "by a vector along its features" if vector is not None else f"by {number:g}, as in a quick gelu,"
        raise Unread(
            f"a product is multiplied {what} where the op has its weight multiplied so, and {' and '.join(sorted(dtypes))} would be "
            "rounded once more than the program rounds",
            product.nid,
            "rounding",
        )
    return number, vector
