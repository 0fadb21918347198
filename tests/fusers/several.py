"""A pass whose sites give two results: h = tanh(x @ w + b), and h * y."""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from fusionlab.fusers.engine.base import Pass, Search, Substitution
from fusionlab.fusers.engine.declining import reject
from fusionlab.fusers.engine.proposing import propose
from fusionlab.graph.declined import Declined
from fusionlab.graph.matching.region import cut, escapes
from fusionlab.graph.program.ir import Value


def gate(x, w, b, y):
    """What it finds."""
    h = jnp.tanh(x @ w + b)
    return h, h * y


class GateOp:
    """What it makes of it: told from it by the logistic function it is made of."""

    name = "gate"
    implementations = types.MappingProxyType({})

    def call(self, x, w, b, y):
        h = 2.0 * jax.nn.sigmoid(2.0 * (x @ w + b)) - 1.0
        return h * y, h

    def residuals(self, *_, **__):
        return ()

    def backends(self, *_, **__):
        return ()

    declines = False

    def left_to_xla(self, *_, **__):
        return None

    def waits(self, *_, **__):
        return False


@dataclass
class GatePass(Pass):
    """Finds `gate`; `finish` is what its plan makes of the op's two results.

    What other nodes of the primitive `also` make of h is a result too.
    """

    finish: object = staticmethod(lambda out: out)
    whole: bool = False
    also: str = ""
    name: str = "gate"
    op: str = "gate"
    fused_op: object = field(default_factory=GateOp)
    formula: str = "h = tanh(x @ w + b), h * y"
    needs: str = ""
    options: dict = field(default_factory=dict)
    searches: list = field(default_factory=list)

    def sample(self):
        x = jnp.ones((3, 4))
        return gate, (x, jnp.ones((4, 4)), jnp.ones(4), jnp.ones((3, 4)))

    def search(self, search: Search):
        self.searches.append(search)
        block, view = search.block, search.view
        for node in block.nodes:
            h = node.inputs[0]
            tanh = block.producer.get(h.id) if node.primitive == "mul" and isinstance(h, Value) else None
            if tanh is None or tanh.primitive != "tanh":
                continue
            total = block.producer[tanh.inputs[0].id]
            product = block.producer[total.inputs[0].id]
            more = [n.outputs[0] for n in block.users[h.id] if n.primitive == self.also and n is not node]
            values = dict(zip("xwby", (*product.inputs, total.inputs[1], node.inputs[1]), strict=True))
            try:
                region = cut(
                    view, node.outputs[0], {k: view.ref[v.id].nid for k, v in values.items()}, others=(h, *more)
                )
            except Declined as reason:
                yield reject(self.name, "order", str(reason), node, [node], [node])
                continue
            assert not escapes(region)
            places = [region.inputs.index(region.leaves[k]) for k in "xwby"]
            operands = functools.partial(_picked, places)
            plan = Substitution(self.fused_op, {}, operands, self.finish, "h * y, h = tanh(x @ w + b)")
            yield propose(search, self.name, region, plan, node, concepts=("gate",))


def _picked(places, *given):
    return tuple(given[i] for i in places)
