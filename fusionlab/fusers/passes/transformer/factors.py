"""Factors after a layer's products, which the fused op does not have: they are folded into the products' weights and biases.

A vector along the features before a residual sum (layer scale, Touvron et al. 2021, arXiv:2103.17239) multiplies the columns of the
product's weight and its bias. And h * sigmoid(c h), the quick gelu with c = 1.702 (Hendrycks and Gimpel 2016, arXiv:1606.08415), is
silu(c h) / c: c multiplies the first product, and its inverse the weight of the second. One product for both sides of a gate,
silu(g) * u of its halves g and u, is split into two products with the halves of its weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from ....graph.canonical.nodes import CNode
from .axes import Side, Unread, is_plain, is_product_of, read_by, renamed
from .projections import Projection, ProjectionWalk

BOTH = "y"  # the letter of the columns of a weight that makes both sides of a gate
FACTOR = "_factor"  # what the leaf of a product's factor is called behind the product's slot
_WIDE = ("float32", "float64")
_STRETCH = 64.0  # a larger number, or a smaller one, may take a weight out of its dtype's range


class FactorWalk(ProjectionWalk):
    """The part of a reading that handles factors on a product."""

    def scaled(self, product: Projection) -> Projection:
        """A product with the vector along its features that multiplies it before any other reader, if there is one."""
        users = self.users(product.out.nid)
        if len(users) != 1 or not is_product_of(users[0], 2):
            return product
        (node,) = users
        known, vector = self.beside(node, product.out)
        if not is_plain(node) or vector.shown != (("e",),):
            return product
        self.met.append(node.id)
        return replace(product, out=self.result(node, known), factor=self.up(vector, parts=False))

    def quick(self, up: Projection) -> Projection | None:
        """A product h with h * sigmoid(c h) as a product with silu; None for any other."""
        users = self.users(up.out.nid)
        by_op = {n.op: n for n in users}
        if up.activation != "none" or len(users) != 2 or by_op.keys() != {"logistic", "prod"}:
            return None
        gate, node = by_op["logistic"], by_op["prod"]
        stretch = float(gate.operands[0].coef)
        if not is_product_of(node, 2) or not is_plain(node) or read_by(node) != {up.out.nid, gate.id}:
            return None
        known, other = self.beside(node, up.out)
        active = self.result(gate, self.slots(gate, 0, up.out.shown))
        if not 1 / _STRETCH <= stretch <= _STRETCH or other != active:
            return None
        self.met += [gate.id, node.id]
        return replace(up, out=self.result(node, known), activation="silu", stretch=stretch)

    def packed(self, both: Projection) -> tuple[Projection, Projection, Side] | None:
        """(up, gate, their result) for a product with one half multiplied by silu of the other; None for any other product."""
        parts = self.users(both.out.nid)
        cuts = {n.id: self.part_of(n) for n in parts}
        each = self.sizes["f"] // 2
        if both.activation != "none" or len(parts) != 2 or {*cuts.values()} != {(0, each), (each, each)}:
            return None
        sides = {n.id: self.part_side(n, both.out) for n in parts}
        gate = self.gate_of(sides)
        end = None if gate is None else self.product_of(sides, gate)
        if gate is None or end is None:
            return None
        active = gate.operands[0].nid
        self.met += [*sides, end.nid]
        whole = {"f": BOTH}
        self.sizes[BOTH], self.sizes["f"] = self.sizes["f"], each
        both = replace(both, w=renamed(both.w, whole), bias=both.bias and renamed(both.bias, whole))
        (other,) = cuts.keys() - {active}
        return replace(both, part=cuts[other]), replace(both, part=cuts[active], activation="silu"), end

    def gate_of(self, halves: Mapping[int, Side]) -> CNode | None:
        """The sigmoid of one of the halves; None unless there is exactly one."""
        gates = [u for nid in halves for u in self.users(nid) if u.op == "logistic"]
        return gates[0] if len(gates) == 1 and is_plain(gates[0]) else None

    def product_of(self, sides: dict[int, Side], gate: CNode) -> Side | None:
        """The product of two values and the sigmoid `gate` of one of them, axis by axis; None unless there is exactly one. The gate
        joins the `sides`.
        """
        sides[gate.id] = self.result(gate, self.slots(gate, 0, sides[gate.operands[0].nid].shown))
        # g * sigmoid(g) alone is another node that reads the gate.
        ends = [u for u in self.users(gate.id) if is_product_of(u, 3)]
        if len(ends) != 1 or not is_plain(ends[0]) or read_by(ends[0]) != sides.keys():
            return None
        (end,) = ends
        first, *others = (self.slots(end, i, sides[o.nid].shown) for i, o in enumerate(end.operands))
        return self.result(end, first) if all(known == first for known in others) else None

    def part_side(self, part: CNode, whole: Side) -> Side:
        """A part of a value, with the letters of its operand's axes."""
        return Side(part.id, tuple(whole.shown[axis] for axis in part.operands[0].axes))


def factors_of(product: Projection, slot: str, leaves: Mapping[str, Any]) -> tuple[float, str | None]:
    """(number, leaf) by which an operand of a product is multiplied instead of its result.

    Raises:
      Unread: it has 16 bits, and would be rounded once more than in the program.
    """
    number = 1.0 if slot == "down_bias" else product.stretch
    vector = None if product.factor is None else slot.removesuffix("_bias") + FACTOR
    dtypes = {str(jnp.dtype(leaves[name].dtype)) for name in (slot, vector) if name is not None}
    if (number != 1.0 or vector is not None) and (len(dtypes) > 1 or not dtypes <= set(_WIDE)):
        factor = "by a vector along its features" if vector is not None else f"by {number:g}, as in a quick gelu,"
        raise Unread(
            f"a product is multiplied {factor} where the op multiplies its weight instead, which would round "
            f"{' and '.join(sorted(dtypes))} once more than the program does",
            product.nid,
            "rounding",
        )
    return number, vector
