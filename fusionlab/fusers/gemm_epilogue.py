"""Pass `gemm_epilogue`: act(x @ w + b) -> one `gemm_epilogue` op.

The linear part is matched by example; the activation is recognised by value, from the linear result onwards. Every product
with a bias or an activation is a site; a bare product is not, since there is nothing to fuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from ..graph.evaluate import is_float
from ..graph.fingerprint import ELEMENTWISE, Recognised, between, cone, recognise, value_name
from ..graph.ir import Node, Value
from ..graph.match import Match, Miss, close, match
from ..graph.pattern import Example, pattern_of
from ..graph.region import VIEWS, Escape, NotARegion, Region, cut, escapes
from ..graph.rules import passed_whole
from ..graph.scopes import is_backward, is_differentiated
from ..kernels import OPS
from ..kernels.gemm_epilogue.activations import ACTIVATIONS
from ..kernels.gemm_epilogue.op import DTYPES
from .base import SUMS_OVER_DEVICES, Plan, Search, anchor_text, option, propose
from .findings import Candidate, Rejection
from .layout import Axes, arrange, axes_of, in_order, restore
from .site import FUSE_FIRST, Site

LINEAR = Example("linear", lambda x, w, b: x @ w + b, {"x": "mk", "w": "kn", "b": "n"})
PRODUCT = Example("product", lambda x, w: x @ w, {"x": "mk", "w": "kn"})
KNOWN = {name: act.fn for name, act in ACTIVATIONS.items() if name != "none"}
_FLOATS = "cast x, w and b to bfloat16 or float32"
# Functions that make an elementwise cone an activation rather than a scaling.
NONLINEAR = ELEMENTWISE - frozenset("add sub mul div neg convert_element_type copy".split())


@dataclass(frozen=True)
class _Linear:
    """x @ w (+ b) found at an anchor: the raw value it makes, and the match."""

    value: Value
    match: Match
    bias: bool
    swapped: bool = False  # the match calls the weight x: without a bias the pattern is symmetric

    def leaf(self, role: str) -> int:
        """The pattern node of the operand that plays `role` ("x", "w" or "b")."""
        names = {"x": "w", "w": "x"} if self.swapped else {}
        return self.match.leaf_id(names.get(role, role))

    @property
    def leaves(self) -> dict[str, int]:
        """Role -> canonical node."""
        return {role: self.match.nodes[self.leaf(role)] for role in ("x", "w", "b")[: 3 if self.bias else 2]}


def _concepts(bias: bool, activation: str | None) -> tuple[str, ...]:
    """What a site is made of: "linear" with a bias, and its activation by its usual name, whatever the spelling."""
    known = ACTIVATIONS.get(activation or "none")
    return (*(("linear",) if bias else ()), *((known.kind,) if known and known.name != "none" else ()))


@dataclass(frozen=True)
class GemmEpiloguePass:
    """See the module docstring."""

    name: str = "gemm_epilogue"
    op: str = "gemm_epilogue"
    formula: str = "act(x @ w + b), act one of " + ", ".join(ACTIVATIONS)
    needs: str = (
        "w a matrix (unit axes aside), b along the output features, one dtype of f64/f32/bf16/f16, the pre-activation read by the "
        "activation alone"
    )
    options: Any = None

    def __post_init__(self) -> None:
        strict = (False, "judge the weight's rank before any squeeze, as the original pass did")
        object.__setattr__(self, "options", {"strict_rank": strict})

    def sample(self) -> tuple[Any, tuple[Any, ...]]:
        import jax

        def linear(x: Any, w: Any, b: Any) -> Any:
            return jax.nn.gelu(x @ w + b)

        return linear, (jnp.zeros((8, 4)), jnp.zeros((4, 16)), jnp.zeros(16))

    def search(self, search: Search) -> Iterator[Candidate | Rejection]:
        for node in search.block.nodes:
            if node.primitive == "dot_general" and not is_backward(node.eqn):
                yield from _Site(self, search, node).examine()


class _Site(Site):
    """One product, from anchor to candidate or rejection."""

    def __init__(self, pass_: GemmEpiloguePass, search: Search, anchor: Node) -> None:
        super().__init__(pass_, search, anchor)
        self.product = self.rows_apart(anchor.outputs[0])

    def rows_apart(self, product: Value) -> Value:
        """The product itself, or, of rows that were merged for it, the value in which they are apart again."""
        users = self.search.block.users.get(product.id, ())
        if len(users) == 1 and users[0].primitive == "reshape":
            apart = users[0].outputs[0]
            if self.nid(apart) != self.nid(product) and self.view.nodes[self.nid(apart)].op == "dot":
                return apart
        return product

    def examine(self) -> Iterator[Candidate | Rejection]:
        problem = self.wrong_dtype()
        if problem is not None:
            yield problem
        if self.view.nodes[self.nid(self.product)].op != "dot":
            return
        linear = self.linear()
        if isinstance(linear, Rejection):
            yield linear
        elif linear is not None:
            yield from self.with_activation(linear)

    def wrong_dtype(self) -> Rejection | None:
        """For a product of integers with something to fuse behind it."""
        users = self.search.block.users.get(self.product.id, ())
        if is_float(self.product.dtype) or not any(u.primitive in ("add", "max", "custom_jvp_call") for u in users):
            return None
        sentence = (
            f"{anchor_text(self.anchor)} computes in {self.product.dtype}; the fused op takes {', '.join(DTYPES)}"
        )
        return self.rejection("dtype", sentence, edit=_FLOATS)

    # -- the linear part ------------------------------------------------------------------------------------------

    def linear(self) -> _Linear | Rejection | None:
        """The product with its bias, or bare; a Rejection when something is added that is no bias; None when it is no site."""
        added = self.addition()
        if added is None:
            return self.bare()
        node, total, other = added
        if self.made_of(self.view.read(other).nid, self.nid(self.product), 6):
            if self.feeds_softmax(self.product):
                return None  # it subtracts its maximum
            return self.bare()  # h + 0.044715 h^3, and the like
        if node.primitive == "sub":
            if self.batch() and self.feeds_softmax(total):
                return None  # attention scores
            sentence = f"{anchor_text(node)} subtracts, where a bias is added"
            return self.rejection("bias", sentence, [node], (1, 2), "add the negated bias")
        found = match(pattern_of(LINEAR), self.view, self.view.ref[total.id].nid)
        if isinstance(found, Match):
            rows = self.row_bias(found, total, node)
            return rows or _Linear(total, found, True)
        return self.not_a_bias(node, other, found)

    def bare(self) -> _Linear | Rejection | None:
        """The product without a bias."""
        found = match(pattern_of(PRODUCT), self.view, self.nid(self.product))
        return self.oriented(found) if isinstance(found, Match) else self.batch_of_weights()

    def batch_of_weights(self, total: Value | None = None) -> Rejection | None:
        """For a product over a batch of matrices with a bias (`total` is the sum), a known activation behind it, or both."""
        start = total or self.product
        name = self.known_after(start) or self.behind(start)
        if name is None and total is None:
            return None
        rank = len(self.anchor.inputs[1].shape)
        sentence = f"{anchor_text(self.anchor)} multiplies by a weight of rank {rank}: a batch of matrices, and the fused op takes one"
        return self.rejection("rank", sentence, concepts=_concepts(total is not None, name))

    def batch(self) -> list[Any]:
        """The batch axes of the product."""
        dot = self.view.nodes[self.nid(self.product)]
        return [x for x in dot.params if all(x in o.axes for o in dot.operands)]

    def feeds_softmax(self, value: Value) -> bool:
        """Whether exponentials are made of a value: it is the scores of an attention."""
        level = {self.nid(value)}
        for _ in range(5):
            if any(self.view.nodes[n].op == "exp" for n in level):
                return True
            level = {u for n in level for u in self.view.users.get(n, ()) if self.view.nodes[u].op != "dot"}
        return False

    def oriented(self, found: Match) -> _Linear:
        """Without a bias the weight is told by rank (it has one free axis), else by order (it stands on the right)."""
        free = {"x": len(found.letters["m"]), "w": len(found.letters["n"])}
        left = self.view.read(self.anchor.inputs[0]).nid
        swapped = free["x"] == 1 if free["x"] != free["w"] else found.leaves["x"] != left
        return _Linear(self.product, found, False, swapped)

    def addition(self) -> tuple[Node, Value, Any] | None:
        """The add that reads the product (through views and scalings): (node, its result, the other operand)."""
        nid = self.nid(self.product)
        value = self.product
        while True:
            users = self.search.block.users.get(value.id, ())
            adds = [
                u
                for u in users
                if u.primitive in ("add", "sub") and self.view.nodes[self.nid(u.outputs[0])].op == "sum"
            ]
            if adds:
                total = adds[0].outputs[0]
                others = [a for a in adds[0].inputs if not (isinstance(a, Value) and self.nid(a) == nid)]
                return (adds[0], total, others[0]) if len(others) == 1 else None
            same = [u for u in users if u.outputs and self.nid(u.outputs[0]) == nid]
            if len(users) != 1 or not same:
                return None
            value = same[0].outputs[0]

    def given(self, atom: Any) -> bool:
        """Whether an operand is an input or captured array of the block, through views and casts: a parameter, as a bias is."""
        while isinstance(atom, Value):
            maker = self.search.block.producer.get(atom.id)
            if maker is None:
                return True
            if maker.primitive not in VIEWS | {"convert_element_type"}:
                return False
            atom = maker.inputs[0]
        return True

    def given_broadcast(self, atom: Any) -> bool:
        """Whether an operand is an input of the block that is broadcast where the block's own node reads it (a hoisted bias)."""
        view, index = self.view, None
        if view.outer is not None and isinstance(atom, Value):
            index = next((i for i, v in enumerate(view.block.inputs) if v.id == atom.id), None)
        if view.outer is None or index is None or index >= passed_whole(view.outer[1]):
            return False
        outer, node = view.outer
        return min(outer.read(node.inputs[index]).dims, default=0) < 0

    def row_bias(self, found: Match, total: Value, node: Node) -> Rejection | None:
        """A vector added down the rows of a 2-D product is x @ w + b with x and w swapped: true algebra, but no bias."""
        axes = axes_of(found, self.view, found.pattern.root, total)
        features = found.letters["n"]
        real = [c for c in axes if c is not None]
        if not features or len(found.letters["m"]) != 1 or len(features) != 1 or real[-1] in features:
            return None
        sentence = f"{anchor_text(node)} adds a vector along the rows of the product, not along its output features"
        return self.rejection(
            "bias", sentence, [node], (1, 2), "transpose the product so that the features come last: (x @ w).T + b"
        )

    def not_a_bias(self, node: Node, other: Any, miss: Miss) -> Rejection | None:
        """Why what is added is no bias; None when the product is no linear layer at all."""
        dot = self.view.nodes[self.nid(self.product)]
        batch = self.batch()
        other_ref = self.view.read(other)
        if self.view.nodes[other_ref.nid].op == "dot":
            return None  # a sum of two products
        span = sum(d >= 0 for d in other_ref.dims)
        if batch:
            # Attention scores plus a mask or a bias, and the like, are no linear layer.
            is_bias = span < len(dot.shape) and not self.feeds_softmax(node.outputs[0])
            return self.batch_of_weights(node.outputs[0]) if is_bias else None
        if span >= len(dot.shape) and not self.given(other):
            return None  # a residual connection: what is added was computed elsewhere
        if span >= len(dot.shape) and self.given_broadcast(other):
            sentence = f"{anchor_text(node)} adds a bias that the loop around is given broadcast to every row"
            edit = "broadcast the bias inside the loop"
            return self.rejection("bias", sentence, [node], (1, 2), edit, concepts=_concepts(True, None))
        if span >= len(dot.shape):
            sentence = (
                f"{anchor_text(node)} adds a full tensor {list(other.shape)}, not a bias along the output features"
            )
            return self.rejection(
                "bias", sentence, [node], (1, 2), "add the bias first, (x @ w + b) + y, if there is one"
            )
        if not span:
            sentence = f"{anchor_text(node)} adds a scalar, not a bias along the output features"
            return self.rejection("bias", sentence, [node], (1, 2))
        sentence = (
            f"{anchor_text(node)} adds {list(other.shape)}, which is no bias along the output features: {miss.reason}"
        )
        return self.rejection("bias", sentence, [node], (1, 2), None)

    # -- the activation -------------------------------------------------------------------------------------------

    def with_activation(self, linear: _Linear) -> Iterator[Candidate | Rejection]:
        end, name, problem = self.activation(linear)
        if end is not None and name is not None:
            yield self.candidate(linear, end, name, ())
            return
        if problem is not None:
            yield problem
        summed = None if linear.bias else self.summed()
        notes = (f"linear part only: {problem.sentence}",) if problem else ()
        if linear.bias:
            yield self.candidate(linear, linear.value, "none", notes)
        elif summed is not None:
            notes = (*notes, f"the product alone: {anchor_text(summed)} sums it over devices before anything is added")
            yield self.candidate(linear, linear.value, "none", notes)

    def summed(self) -> Node | None:
        """The sum over devices between a row-parallel product and what is added to it, as its bias."""
        value, found = self.product, None
        while len(users := self.search.block.users.get(value.id, ())) == 1:
            (user,) = users
            if found is not None and user.primitive == "add":
                return found
            if found is None and user.primitive in SUMS_OVER_DEVICES:
                found = user
            elif user.primitive not in VIEWS:
                return None
            value = user.outputs[user.inputs.index(value)]
        return None

    def activation(self, linear: _Linear) -> tuple[Value | None, str | None, Rejection | None]:
        """The last recognised function of the linear result that nothing escapes from, or why there is none."""
        nodes = cone(self.view, linear.value)
        if not any(n.primitive in NONLINEAR or n.primitive == "custom_jvp_call" for n in nodes):
            return None, None, self.custom_rule(linear)
        problem: Rejection | None = None
        first_unknown: tuple[Node, Recognised] | None = None
        for node in reversed(nodes):
            value = node.outputs[0]
            if value.shape != linear.value.shape or value.dtype != linear.value.dtype:
                continue
            known = recognise(self.view, linear.value, value, KNOWN, self.search.certifier)
            if known.name is None:
                first_unknown = first_unknown or (node, known)
                continue
            leak = self.leak(linear.value, value)
            if leak is None:
                return value, known.name, None
            larger = leak.user is not None and leak.user in nodes and not is_differentiated(leak.node.eqn)
            if larger and first_unknown is not None:
                continue  # a part of a larger function, which is the one to speak of
            edit = "let the activation be the only reader: recompute the linear result, or use its activated value"
            problem = problem or self.escaping(leak, edit, nodes, known.name, _concepts(False, known.name))
        if problem is None and first_unknown is not None:
            problem = self.unknown(linear, nodes, *first_unknown)
        problem = problem or self.custom_rule(linear)
        return None, None, problem

    def unknown(self, linear: _Linear, nodes: list[Node], node: Node, known: Recognised) -> Rejection | None:
        sentence = f"{anchor_text(node)} ends a function of the linear result that is no known activation: {known.why}"
        edit = "use relu, gelu, silu, sigmoid or tanh of jax.nn if that is what is meant"
        if known.code == "gradient":
            name = "relu" if known.nearest.startswith("relu") else known.nearest.partition("_")[0]
            edit = f"use jax.nn.{name}, if that is what is meant: it has the gradient of the fused op"
        if is_differentiated(self.anchor.eqn):
            edit = FUSE_FIRST  # the function is the activation's derivative, or holds it
        return self.rejection(known.code, sentence, [node], None, edit, nodes)

    def custom_rule(self, linear: _Linear) -> Rejection | None:
        """Why the activation behind a rule of the user's, a name, a cast or a stop_gradient is not fused."""
        problem = self.set_apart(linear)
        name = self.behind(linear.value) if problem is not None else None
        return replace(problem, concepts=_concepts(False, name)) if problem is not None and name else problem

    def behind(self, value: Value) -> str | None:
        """The known activation of a value that a rule of the user's computes, or that follows a name, a cast or a stop_gradient."""
        for user in self.search.block.users.get(value.id, ()):
            if user.primitive in ("custom_jvp_call", "custom_vjp_call"):
                return value_name(user, KNOWN, self.search.certifier)
            if user.primitive in ("name", "reduce_precision", "convert_element_type", "stop_gradient"):
                return self.known_after(user.outputs[0]) or self.behind(user.outputs[0])
        return None

    def known_after(self, value: Value) -> str | None:
        """The last known activation of a value."""
        nodes = cone(self.view, value)
        names = (recognise(self.view, value, n.outputs[0], KNOWN, self.search.certifier).name for n in reversed(nodes))
        return next((n for n in names if n), None)

    def set_apart(self, linear: _Linear) -> Rejection | None:
        """What stands right after the linear result and is no part of an activation."""
        for user in self.search.block.users.get(linear.value.id, ()):
            if user.primitive in ("custom_jvp_call", "custom_vjp_call"):
                sentence = (
                    f"{anchor_text(user)} has a derivative of the user's own, which a fused activation would replace"
                )
                return self.rejection("custom_rule", sentence, [user], None, None, [user])
            if user.primitive == "stop_gradient":
                sentence = f"{anchor_text(user)} stops the gradient of the linear result"
                return self.rejection("stop_gradient", sentence, [user], None, None, [user])
            if user.primitive in ("name", "reduce_precision") and self.goes_on(linear, user.outputs[0]):
                sentence = f"{anchor_text(user)} names a value inside the site, which a remat policy may ask for"
                edit = "name x or the activated value instead, with jax.ad_checkpoint.checkpoint_name"
                return self.rejection("named_residual", sentence, [user], None, edit, [user])
            if user.primitive == "convert_element_type" and any(
                n.primitive in NONLINEAR or n.primitive == "custom_jvp_call" for n in cone(self.view, user.outputs[0])
            ):
                sentence = (
                    f"{anchor_text(user)} casts the linear result before what follows, and the fused op would compute "
                    f"the activation in {linear.value.dtype}"
                )
                return self.rejection("dtype", sentence, [user], None, "apply the activation before the cast", [user])
        return None

    def goes_on(self, linear: _Linear, value: Value) -> bool:
        """Whether a bias or an activation follows a copy of the linear result."""
        users = self.search.block.users.get(value.id, ())
        added = [a for u in users if u.primitive == "add" for a in u.inputs if a is not value]
        ends = (n.primitive in NONLINEAR or n.primitive == "custom_jvp_call" for n in cone(self.view, value))
        if any(ends) or (not linear.bias and any(map(self.given, added))):
            return True
        return any(self.goes_on(linear, u.outputs[0]) for u in users if u.primitive in ("name", "reduce_precision"))

    def leak(self, start: Value, end: Value) -> Escape | None:
        """Who else reads the linear result or an inner value of the activation; None when nobody does."""
        block = self.search.block
        nodes = between(self.view, start, end)
        inside = {n.id for n in nodes}
        for value in (start, *(v for n in nodes for v in n.outputs)):
            if value.id == end.id or self.view.is_literal(self.view.ref[value.id]):
                continue
            maker = block.producer[value.id]
            if value.id in block.returned:
                return Escape(value, maker, None)
            for user in block.users.get(value.id, ()):
                if user.id not in inside:
                    return Escape(value, maker, user)
        return None

    # -- the candidate --------------------------------------------------------------------------------------------

    def candidate(self, linear: _Linear, root: Value, activation: str, notes: tuple[str, ...]) -> Candidate | Rejection:
        try:
            region = cut(self.view, root, linear.leaves, as_read=frozenset({"x"}))
            problem = self.conditions(linear, region, activation)
            if problem is not None:
                return problem
            plan = _plan(self.search, linear, region, activation, self.anchor)
        except NotARegion as reason:
            return self.rejection("structure", f"{anchor_text(self.anchor)}: {reason}", [self.anchor], (1, 2), None)
        concepts = _concepts(linear.bias, activation)
        return propose(self.search, self.pass_.name, region, plan, self.anchor, notes, concepts)

    def conditions(self, linear: _Linear, region: Region, activation: str) -> Rejection | None:
        if self.anchor not in region.nodes:
            raise NotARegion("the product does not stand inside the site")
        dtypes = {str(v.dtype) for v in (*region.leaves.values(), region.root)}
        concepts = _concepts(linear.bias, activation)
        if len(dtypes) != 1:
            sentence = (
                f"{anchor_text(self.anchor)} mixes {', '.join(sorted(dtypes))}; the fused op computes in one dtype"
            )
            edit = "cast x, w and b to one dtype before the product"
            return self.rejection("dtype", sentence, edit=edit, concepts=concepts)
        if not dtypes <= set(DTYPES):
            sentence = f"{anchor_text(self.anchor)} computes in {dtypes.pop()}; the fused op takes {', '.join(DTYPES)}"
            return self.rejection("dtype", sentence, edit=_FLOATS, concepts=concepts)
        x, w = region.leaves["x"], region.leaves["w"]
        if len(x.shape) < 2:
            sentence = f"{anchor_text(self.anchor)} multiplies a vector {x!r}; the fused op needs rows"
            return self.rejection(
                "rank", sentence, [self.anchor], None, "give x a leading axis, or map the layer with jax.vmap"
            )
        if option(self.search, self.pass_, "strict_rank") and len(w.shape) != 2:
            sentence = f"{anchor_text(self.anchor)} multiplies by {w!r}, a weight of rank {len(w.shape)}"
            return self.rejection(
                "rank", sentence, [self.anchor], None, "reshape the weight to a matrix, or leave strict_rank off"
            )
        scale = self.scale(linear, region)
        if not close(scale, 1.0):
            sentence = f"{anchor_text(self.anchor)}: the product is multiplied by {scale:g} before the bias"
            return self.rejection("scalar", sentence, [self.anchor], None, "fold the factor into x or w")
        leaks = escapes(region)
        if leaks:
            edit = "compute the outside use from x, w and b again"
            return self.escaping(leaks[0], edit, region.nodes, concepts=concepts)
        return None

    def scale(self, linear: _Linear, region: Region) -> float:
        """The factor on the product that its operands do not carry themselves."""
        m = linear.match
        carried = self.carried(region, ("x", "w"))
        if not linear.bias:
            return float(self.view.ref[linear.value.id].coef) / carried
        root = self.view.nodes[m.nodes[m.pattern.root]]
        product = self.nid(self.product)
        on_edge = next(float(o.coef) for o in root.operands if o.nid == product)
        return on_edge / carried


def _plan(search: Search, linear: _Linear, region: Region, activation: str, anchor: Node) -> Plan:
    """Operands into x [*M, K], w [K, N] or [N, K], b [N]; the result back to the root's axes."""
    m, view, sizes = linear.match, search.view, linear.match.sizes
    axes: dict[str, Axes] = {role: axes_of(m, view, linear.leaf(role), v) for role, v in region.leaves.items()}
    x_axes, w_axes = axes["x"], axes["w"]
    k = in_order(w_axes, [c for c in w_axes if c is not None and c in x_axes])
    n = tuple(c for c in w_axes if c is not None and c not in k)
    rows = tuple(c for c in x_axes if c is not None and c not in k)
    position = {v.id: i for i, v in enumerate(region.inputs)}
    pick = {role: position[v.id] for role, v in region.leaves.items()}
    direct = len(k) == 1 and len(n) == 1 and len(x_axes) >= 2 and len(w_axes) == 2
    x_contract = x_axes.index(k[0]) if direct else -1
    w_contract = w_axes.index(k[0]) if direct else 0
    out_groups = [[c] for c in rows] + [list(n)]

    def operands(*inputs: Any) -> tuple[Any, ...]:
        x, w = inputs[pick["x"]], inputs[pick["w"]]
        bias = arrange(inputs[pick["b"]], axes["b"], [n], sizes) if linear.bias else None
        if direct:
            return x, w, bias
        x_groups = [[c] for c in rows] or [[]]
        return arrange(x, x_axes, [*x_groups, k], sizes), arrange(w, w_axes, [k, n], sizes), bias

    root_axes = axes_of(m, view, m.pattern.root, linear.value)  # an activation keeps the axes

    def finish(out: Any) -> Any:
        return restore(out, out_groups, root_axes, region.root.shape, sizes)

    attrs = {
        "activation": activation,
        "x_contract": x_contract,
        "w_contract": w_contract,
        "precision": anchor.params.get("precision"),
        "implementation": search.implementation,
    }
    op = OPS["gemm_epilogue"]
    return Plan(op, attrs, operands, finish, op.formula(**attrs | {"bias": linear.bias}))
