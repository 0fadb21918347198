"""GroupNorm as a form of the norm pass: channels in groups, statistics over a group's channels and over positions -> one `group_norm` op,
with the scale and the bias of the channels and the SiLU after it.

Programs split the channels by a reshape and join them again before the scale, after it, or never (Flax repeats the statistics for each
channel). An axis that a reshape splits is not a single axis of the canonical view, so the raw nodes between a result and the split value
are examined instead: any other operand is a scale or a bias, depending on its reader. The proof decides whether the whole is a GroupNorm.
It compares numbers, which distinguish functions only if these are smooth: nodes with a threshold are not allowed between x and a result
(a variance clipped at 0.1 is unchanged on most numbers), except a maximum with 0, which never changes a variance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ....graph.matching.region import Region, cut
from ....graph.primitives import having
from ....graph.program.ir import Atom, Node, Value
from ....kernels import OPS
from ...engine.base import Pass, Search, Substitution
from ...engine.declining import attempted
from ...engine.layout import input_positions
from ...engine.outcomes import Candidate, Rejection
from ..linear.epilogues import Epilogue
from .misses import NormSite
from .surroundings import ROOTS, ChannelGroups, DerivedFrom, Surroundings, as_written

GROUP_NORM_CONCEPTS = ("group_norm",)
_SMOOTH = having("layout", "variance", "cast", "addition", "difference", "scaling", "power", "root", "copy") | {
    "reduce_sum"
}
_EDIT = "compute the outside use from x again"


class GroupSite(NormSite):
    """One GroupNorm, from anchor to candidates and rejections.

    Attributes:
      channels: the value that is split, and how.
      odd: a node between x and a result that a norm does not have.
    """

    def __init__(
        self, pass_: Pass, search: Search, anchor: Node, around: Surroundings, channels: ChannelGroups
    ) -> None:
        super().__init__(pass_, search, anchor)
        self.around, self.channels = around, channels
        self.is_of_x = DerivedFrom(around, channels.x)
        self.odd: Node | None = None

    def outcomes(self) -> Iterator[Candidate | Rejection]:
        """The outcome for each value that may be the norm's result: the furthest first, with and without a SiLU after it."""
        for value in self.around.results if self.channels.batch_axes is not None else ():
            vectors = self.vectors(value)
            if vectors is None:
                continue
            joined = self.joined(value)
            found, _ = Epilogue(self, joined, biased=True).last()
            activated = [found] if found is not None and found[1] == "silu" else []
            for root, activation in (*activated, (joined, "none")):
                outcome = self.attempt(self.outcome, root, activation, vectors)
                if outcome is not None:
                    yield outcome

    def joined(self, value: Value) -> Value:
        """The value after the reshape that joins the channels again, if that is the only reader of a result."""
        user = self.only_reader(value)
        return user.outputs[0] if user is not None and user.primitive == "reshape" else value

    def vectors(self, root: Value) -> dict[str, Value] | None:
        """The scale and bias of the channels between x and a result; None if the result depends on anything else."""
        found: dict[str, Value] = {}
        stack, seen = [root], set[int]()
        while stack:
            node = self.search.block.producer[stack.pop().id]
            if node.id in seen:
                continue
            seen.add(node.id)
            if not self.is_smooth(node):
                self.odd = self.odd or node
                return None
            for a in self.read(node):
                if self.is_of_x(a):
                    stack.append(a)
                    continue
                slot, vector = _slot(node, a), self.flat(a)
                if slot is None or vector is None or found.setdefault(slot, vector).id != vector.id:
                    return None
        return found

    def read(self, node: Node) -> list[Value]:
        """The operands of a node other than x itself and numbers."""
        return [a for a in node.values if a != self.channels.x and self.number(a) is None]

    def number(self, atom: Atom) -> Any:
        """The number that all entries of a value equal; None if they differ."""
        ref = self.view.read(atom)
        return ref.coef if self.view.is_literal(ref) else None

    def is_smooth(self, node: Node) -> bool:
        """Whether a node is a smooth function of its operands on its domain, or leaves a variance unchanged."""
        if node.primitive in ROOTS:  # of the variance alone: the root of a square is a threshold
            return self.nid(node.outputs[0]) == self.nid(self.anchor.outputs[0])
        if node.primitive == "max":
            return any(self.number(a) == 0 for a in node.inputs)
        if node.primitive == "select_n":  # jnp.var asks whether it has more entries than ddof
            return self.number(node.inputs[0]) is not None
        return node.primitive in _SMOOTH or self.around.summed(node) is not None

    def flat(self, value: Value) -> Value | None:
        """The array with one entry per channel, in order, of which a value is a broadcast; None if it has more or fewer entries."""
        while True:
            vector = self.around.base(value)
            maker = self.around.maker(vector)
            if maker is None or maker.primitive != "reshape" or not isinstance(maker.inputs[0], Value):
                return vector if math.prod(vector.shape) == self.channels.x.shape[-1] else None
            value = maker.inputs[0]

    def outcome(self, root: Value, activation: str, vectors: Mapping[str, Value]) -> Candidate | Rejection | None:
        """The site that ends in a value; None if it cannot be cut out."""
        leaves = {"x": self.channels.x, **vectors}
        shapes = {name: tuple(v.shape) for name, v in leaves.items()}
        nids = {name: self.nid(v) for name, v in leaves.items()}
        casts = frozenset(leaves)
        region = attempted(lambda: cut(self.view, root, nids, through_casts=casts, shapes=shapes), lambda reason: None)
        if region is None or self.anchor not in region.nodes:
            return None
        if any(region.leaves[n].shape != shape for n, shape in shapes.items()):
            return None
        self.check_dtypes(region)
        epsilon = self.epsilon()
        self.check_guarded(epsilon)
        return self.offered(
            region, self.plan(region, activation, epsilon), _EDIT, self.notes(region), GROUP_NORM_CONCEPTS
        )

    def epsilon(self) -> float:
        """The number added under the root; 0 if there is none."""
        ref = self.view.read(self.anchor.inputs[0])
        node = self.view.nodes[ref.nid]
        added = (o.coef for o in node.operands if node.op == "sum" and self.view.nodes[o.nid].op == "one")
        return float(ref.coef) * float(next(added, 0.0))

    def plan(self, region: Region, activation: str, epsilon: float) -> Substitution:
        """Takes x unchanged, [*B, *P, C]; the vectors [C], in the order of the groups."""
        where, root = input_positions(region), region.root

        def operands(*inputs: Any) -> tuple[Any, ...]:
            vectors = (inputs[where[n]].reshape(-1) if n in where else None for n in ("scale", "bias"))
            return inputs[where["x"]].astype(root.dtype), *vectors

        op = OPS["group_norm"]
        attrs = {
            "groups": self.channels.groups,
            "epsilon": as_written(epsilon),
            "activation": activation,
            "batch_axes": self.channels.batch_axes,
            "implementation": self.search.implementation,
        }
        there = {slot: slot in where for slot in ("scale", "bias")}
        return Substitution(op, attrs, operands, lambda out: out.reshape(root.shape), op.formula(**attrs, **there))


def _slot(node: Node, atom: Value) -> str | None:
    """The role of a vector in a norm, by its reader: x is multiplied by a scale, and a bias is added."""
    if node.primitive == "mul":
        return "scale"
    added = node.primitive == "add" or (node.primitive == "sub" and node.inputs[0] == atom)
    return "bias" if added else None
