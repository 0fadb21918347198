"""The linear part of a site: x @ w + b, or x @ w, found at its product.

It is matched by example. An added term that is not a bias is declined here, unless it shows that the product belongs to
something else: the scores of an attention, or one of two products that are summed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

from ....graph.canonical.rules import passed_whole
from ....graph.matching.match import Match, match
from ....graph.matching.pattern import Example, pattern_of
from ....graph.program.ir import Node, Value
from ...engine.base import Pass, Search
from ...engine.layout import BROADCAST, axes_of, present, real_axes
from ...engine.passages import Passage, passage, shapes_before, thin_shape
from ...engine.site import Site, input_index
from ...engine.wording import anchor_text
from .beyond import activates
from .epilogues import Epilogue, concepts_of, feeds_softmax

LINEAR = Example("linear", lambda x, w, b: x @ w + b, {"x": "mk", "w": "kn", "b": "n"})
PRODUCT = Example("product", lambda x, w: x @ w, {"x": "mk", "w": "kn"})


@dataclass(frozen=True)
class Addend:
    """A term added to a product after views of it: `added`, its canonical node, and the views."""

    added: Value
    nid: int
    views: tuple[Node, ...]


@dataclass(frozen=True)
class Linear:
    """x @ w (+ b) found at an anchor: the raw value it computes, and the match.

    Attributes:
      behind: for a bias added after views of the product: the added term, with the views. The match is then the product's.
    """

    value: Value
    match: Match
    bias: bool
    swapped: bool = False  # the match calls the weight x: without a bias the pattern is symmetric
    behind: Addend | None = None

    def leaf(self, role: str) -> int:
        """The pattern node of the operand that plays `role` ("x", "w" or "b")."""
        names = {"x": "w", "w": "x"} if self.swapped else {}
        return self.match.leaf_id(names.get(role, role))

    @property
    def matched_bias(self) -> bool:
        """Whether the bias is a part of the match."""
        return self.bias and self.behind is None

    @property
    def leaves(self) -> dict[str, int]:
        """Role -> canonical node."""
        found = {role: self.match.nodes[self.leaf(role)] for role in ("x", "w", "b")[: 3 if self.matched_bias else 2]}
        return found if self.behind is None else found | {"b": self.behind.nid}


class LinearSite(Site):
    """A site anchored at a matrix product; finds `x @ w` or `x @ w + b`.

    Attributes:
      product: the anchor's result, or, if rows were merged for it, the value in which they are split again.
    """

    def __init__(self, pass_: Pass, search: Search, anchor: Node) -> None:
        super().__init__(pass_, search, anchor)
        self.product = self.rows_apart(anchor.outputs[0])

    def rows_apart(self, product: Value) -> Value:
        """The product itself, or, if rows were merged for it, the value in which they are split again."""
        users = self.users(product)
        if len(users) == 1 and users[0].primitive == "reshape":
            apart = users[0].outputs[0]
            if self.nid(apart) != self.nid(product) and self.view.nodes[self.nid(apart)].op == "dot":
                return apart
        return product

    def linear(self) -> Linear | None:
        """The product with its bias, or bare; None if it is not a site.

        Raises:
          Declined: an added term is not a bias, or the weight is not a matrix.
        """
        added = self.addition()
        if added is None:
            return self.biased_behind() or self.bare()
        node, other = added
        total = node.outputs[0]
        if self.computed_from(self.view.read(other).nid, self.nid(self.product), 6):
            # It subtracts its maximum; else h + 0.044715 h^3, and the like.
            return None if feeds_softmax(self, self.product) else self.bare()
        if node.primitive == "sub":
            return self.difference(node, total, other)
        found = match(pattern_of(LINEAR), self.view, self.nid(total))
        if not isinstance(found, Match):
            return self.check_addend(node, other)
        self.check_rows(found, total, node)
        return Linear(total, found, True)

    def refuse_bias(self, node: Node, problem: str, edit: str | None, **more: Any) -> NoReturn:
        """Declines a term that a node adds to the product or subtracts from it."""
        self.decline("bias", f"{anchor_text(node)} {problem}", [node], (1, 2), edit, **more)

    def difference(self, node: Node, total: Value, other: Any) -> Linear | None:
        """The outcome for a product in a difference, on either side."""
        if self.batch() and feeds_softmax(self, total):
            return None  # attention scores
        if self.span(other) >= len(self.view.nodes[self.nid(self.product)].shape):
            return self.bare()  # a difference from something as large, as a loss takes it: no bias
        pair = ["the product", self.shown(other)]
        taken, whole = pair if other is node.inputs[0] else reversed(pair)
        return self.refuse_bias(node, f"subtracts {taken} from {whole}, where a bias is added", "add the negated bias")

    def span(self, atom: Any) -> int:
        """The number of axes along which an operand is not broadcast."""
        return sum(d >= 0 for d in self.view.read(atom).dims)

    def bare(self) -> Linear | None:
        """The product without a bias: the weight is the operand with one free axis, else the one on the right."""
        found = match(pattern_of(PRODUCT), self.view, self.nid(self.product))
        if not isinstance(found, Match):
            return self.check_batch()
        rows, columns = len(found.letters["m"]), len(found.letters["n"])
        left = self.view.read(self.anchor.inputs[0]).nid
        return Linear(self.product, found, False, rows == 1 if rows != columns else found.leaves["x"] != left)

    def biased_behind(self) -> Linear | None:
        """The product with a bias that is added to it in another shape. Declines an added parameter that is not a bias."""
        way = passage(self, self.product)
        node, other = self.added_behind(way)
        thin = thin_shape(self, other, len(way.end.shape)) if other is not None else None
        found = match(pattern_of(PRODUCT), self.view, self.nid(self.product))
        if node is None or thin is None or not isinstance(found, Match):
            return None
        assert isinstance(other, Value)
        shapes = shapes_before(way.views, thin)
        linear = None if shapes is None else self.of_features(found, shapes[-1], thin[-1] != 1)
        if linear is not None:
            behind = Addend(other, self.nid(other), way.views)
            return replace(linear, value=node.outputs[0], bias=True, behind=behind)
        if thin == tuple(way.end.shape) or not self.given(other):
            return None  # as large as the product, as a residual connection is, or made of something else
        problem = (
            f"adds {list(thin)} after {anchor_text(way.views[-1])}, which is not a bias along the output features: "
            f"in the layout before that it varies along other axes of {self.product!r}"
        )
        edit = "add the bias to the product itself, x @ w + b, before changing its shape"
        following = Epilogue(self, node.outputs[0], True).following(node.outputs[0])
        return self.refuse_bias(node, problem, edit, site=[node, *way.views, *following])

    def added_behind(self, way: Passage) -> tuple[Node | None, Any]:
        """The add that reads the product through views, and its other operand; None for both if there is none."""
        node = next((u for u in self.users(way.end) if u.primitive == "add"), None) if way.views else None
        others = [a for a in node.inputs if a is not way.end] if node is not None else []
        return (node, others[0]) if len(others) == 1 else (None, None)

    def of_features(self, found: Match, thin: tuple[int, ...], last: bool) -> Linear | None:
        """The product, whose weight is the operand with exactly the free axes along which a term of this shape varies: the features, which
        come last in the product, or after its views (`last`).
        """
        axes = axes_of(found, self.view, found.pattern.root, self.product, broadcast=True)
        if BROADCAST in axes:
            return None
        varies = {c for c, n in zip(axes, thin, strict=True) if n != 1}
        real = present(axes)
        for swapped, letter in ((False, "n"), (True, "m")):
            if varies and varies == set(found.letters[letter]) and (last or real[-1] in varies):
                return Linear(self.product, found, False, swapped)
        return None

    def check_batch(self, total: Value | None = None) -> None:
        """Declines a product over a batch of matrices with a bias (`total` is the sum), a known activation after it, or both."""
        start = total or self.product
        behind = Epilogue(self, start, total is not None)
        name, nodes = behind.known(), behind.following(start)
        activated = name or any(activates(self.search, n) for n in nodes)  # a loss's square is no activation
        if feeds_softmax(self, start) or (total is None and not activated):
            return
        rank = len(self.anchor.inputs[1].shape)
        sentence = f"{anchor_text(self.anchor)} multiplies by a weight of rank {rank}: a batch of matrices; the fused op takes one"
        site = [self.anchor, *nodes, *([self.search.block.producer[start.id]] if total is not None else ())]
        self.decline("rank", sentence, progress=(1, 1), site=site, concepts=concepts_of(total is not None, name))

    def batch(self) -> list[Any]:
        """The batch axes of the product."""
        dot = self.view.nodes[self.nid(self.product)]
        return [x for x in dot.params if all(x in o.axes for o in dot.operands)]

    def addition(self) -> tuple[Node, Any] | None:
        """The add that reads the product (through views and scalings), and its other operand."""
        nid = self.nid(self.product)
        value = self.product
        while True:
            users = self.users(value)
            node = next(filter(self.is_sum, users), None)
            if node is not None:
                # A number is a literal operand of the equation, and no value. Of h + h nothing is left.
                others = [a for a in node.inputs if self.view.read(a).nid != nid]
                return (node, others[0]) if len(others) == 1 else None
            # A callback, as of jax.debug.print, is kept for its effect and may have no outputs.
            if len(users) != 1 or not users[0].outputs or self.nid(users[0].outputs[0]) != nid:
                return None
            value = users[0].outputs[0]

    def is_sum(self, node: Node) -> bool:
        """Whether a node is an addition or a subtraction in the program, and a sum of two in the view."""
        return node.primitive in ("add", "sub") and self.view.nodes[self.nid(node.outputs[0])].op == "sum"

    def check_hoisted(self, node: Node, bias: Value) -> None:
        """Declines a bias that is an input of the block and was broadcast in the enclosing block.

        A value that a scan's body reads but does not change is a constant of the scan, and may be broadcast before it.
        """
        index = input_index(self.view.block, bias)
        if self.view.outer is None or index is None or index >= passed_whole(self.view.outer[1]):
            return
        outer, loop = self.view.outer
        if min(outer.read(loop.inputs[index]).dims, default=0) < 0:
            problem = "adds a bias that was broadcast to every row before the surrounding loop"
            self.refuse_bias(node, problem, "broadcast the bias inside the loop", concepts=concepts_of(True, None))

    def check_rows(self, found: Match, total: Value, node: Node) -> None:
        """Declines a vector added along the rows of a 2-D product: x @ w + b with x and w swapped is valid algebra, but not a bias."""
        axes = axes_of(found, self.view, found.pattern.root, total, broadcast=True)
        rows, features = found.letters["m"], found.letters["n"]
        if len(features) == len(rows) == 1 and present(axes)[-1] not in features:
            problem = "adds a vector along the rows of the product, not along its output features"
            self.refuse_bias(node, problem, "transpose the product so that the features come last: (x @ w).T + b")

    def shown(self, atom: Any) -> str:
        """The added term as the program has it: a number, or a value with the line that computes it."""
        ref = self.view.read(atom)
        if self.view.is_literal(ref):
            return f"{ref.coef:g}"
        maker = self.search.block.producer.get(atom.id)
        return repr(atom) if maker is None else anchor_text(maker)

    def check_addend(self, node: Node, other: Any) -> None:
        """Declines an added term that is not a bias, unless the product is not a linear layer at all."""
        rank = len(self.view.nodes[self.nid(self.product)].shape)
        if self.view.nodes[self.view.read(other).nid].op == "dot":
            return  # a sum of two products
        span = self.span(other)
        if self.batch():
            # Attention scores plus a mask or a bias, and the like, are no linear layer.
            if span < rank:
                self.check_batch(node.outputs[0])
            return
        if span >= rank and not self.given(other):
            return  # a residual connection: what is added was computed elsewhere
        edit = None
        if span >= rank:
            self.check_hoisted(node, other)
            addend = f"a full tensor {list(other.shape)}, {self.shown(other)}, not a bias along the output features"
            edit = "add the bias first, (x @ w + b) + y, if there is one"
        elif not span:
            addend = f"a scalar, {self.shown(other)}, not a bias along the output features"
        else:
            axes = real_axes(other.shape)
            of = f"{'axis' if len(axes) == 1 else 'axes'} {', '.join(map(str, axes))} of {self.shown(other)}"
            addend = f"{list(other.shape)}, which is not a bias along the output features: it varies along {of}"
        self.refuse_bias(node, f"adds {addend}", edit)
