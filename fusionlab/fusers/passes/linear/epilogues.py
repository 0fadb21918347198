"""The epilogue of a product, or of its sum with a bias: an activation to fuse with it, or why there is none.

The activation is recognised by value, in any spelling. It is fused if nothing else reads the pre-activation, and if no node with a
meaning of its own comes in between: a derivative of the user's, a name, a cast, a stop_gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ....graph.certify.activations import NONLINEAR, KnownActivation, Recognised, between, cone, recognise, value_name
from ....graph.matching.region import VIEWS, Escape
from ....graph.primitives import SUMS_OVER_DEVICES, having
from ....graph.program.ir import Node, Value
from ....graph.program.scopes import in_backward, in_differentiated, is_in_derivative
from ....kernels.ops.gemm_epilogue.activations import ACTIVATIONS
from ...engine.outcomes import Rejection
from ...engine.passages import passage
from ...engine.site import Site
from ...engine.wording import anchor_text

KNOWN = {name: KnownActivation(act.fn, act.looks) for name, act in ACTIVATIONS.items() if name != "none"}

# What a norm and a loss make of a value before they sum it up.
_MEASURES = having("power", "magnitude")
# What says where a value lies on a mesh, and what else stands between two parts of a site and computes nothing.
LAYS_OUT = having("placement")
_BETWEEN = LAYS_OUT | {"name", "reduce_precision"}
_APART = _BETWEEN | {"convert_element_type", "stop_gradient"}
_RULES = having("rule")


def concepts_of(bias: bool, activation: str | None) -> tuple[str, ...]:
    """The concepts of a site: "linear" if it has a bias, and its activation by its usual name, whatever the spelling."""
    known = ACTIVATIONS.get(activation or "none")
    return (*(("linear",) if bias else ()), *((known.kind,) if known and known.name != "none" else ()))


def activation_name(activation: str) -> str:
    """The usual name of an activation: "relu" for any spelling of it."""
    known = ACTIVATIONS.get(activation)
    return known.kind if known is not None else activation


class Epilogue:
    """The nodes that follow one value of a site: its product, or (`biased`) the product with its bias."""

    def __init__(self, site: Site, start: Value, biased: bool) -> None:
        self.site, self.start, self.biased = site, start, biased
        self.view, self.certifier = site.view, site.search.certifier

    def activation(self) -> tuple[tuple[Value, str] | None, Rejection | None]:
        """The end of the last recognised function of the start, and its name; and why it is not fused, or why there is none.

        If both are given, something else reads its inner values.
        """
        nodes = cone(self.view, self.start)
        leaking: list[tuple[Value, str, Escape]] = []
        unknown: list[tuple[Node, Recognised]] = []
        for node, known in self.recognised(self.start, nodes):
            value = node.outputs[0]
            leak = None if known.name is None else self.leak(value)
            if known.name is None:
                unknown += [(node, known)] if self.is_applied(node, nodes) else []
            elif leak is None:
                return (value, known.name), None
            # One in a part of a larger function is not the one to speak of.
            elif not unknown or not _goes_on_in(leak, nodes):
                leaking.append((value, known.name, leak))
        if leaking:
            end, name, leak = leaking[0]
            return (end, name), self.leaks(leak, name, nodes)
        return None, self.unknown(nodes, *unknown[0]) if unknown else self.custom_rule()

    def recognised(self, start: Value, nodes: Sequence[Node]) -> Iterator[tuple[Node, Recognised]]:
        """The functions that elementwise nodes compute from a value, last first; none if all of them are linear."""
        for node in reversed(nodes) if any(n.primitive in NONLINEAR for n in nodes) else ():
            value = node.outputs[0]
            if (value.shape, value.dtype) == (start.shape, start.dtype):
                yield node, recognise(self.view, start, value, KNOWN, self.certifier)

    def last(self) -> tuple[tuple[Value, str] | None, Rejection | None]:
        """`activation`, one of the two: in a differentiated program it may be the backward pass that reads its inner values."""
        found, problem = self.activation()
        fused = problem is None or self.site.search.differentiated
        return (found, None) if found is not None and fused else (None, problem)

    def leaks(self, leak: Escape, name: str, nodes: list[Node]) -> Rejection:
        """The rejection of a known activation whose inner values are read elsewhere."""
        edit = "let the activation be the only reader: recompute the linear result, or use its activated value"
        return self.site.escaping(leak, edit, nodes, activation_name(name), concepts_of(False, name))

    def is_applied(self, node: Node, nodes: list[Node]) -> bool:
        """Whether the program uses a node's function of the start, so that it may be meant as an activation.

        Excluded are a derivative, which only a backward pass reads; a square or a magnitude that is only summed, as in a norm or a loss;
        and the terms of a loss.
        """
        value = node.outputs[0]
        primitives = {n.primitive for n in between(self.view, self.start, value)}
        if in_backward(node) or not primitives & NONLINEAR:
            return False
        block = self.site.search.block
        if value.id in block.returned and not (block.path and in_differentiated(node)):
            return True
        measured = primitives & NONLINEAR <= _MEASURES
        users = self.site.users(value)
        return any(not (u in nodes or in_backward(u) or _sums_up(u, measured)) for u in users)

    def leak(self, end: Value) -> Escape | None:
        """The outside reader of the start or of an inner value of the activation that ends in `end`; None if there is none."""
        block = self.site.search.block
        nodes = between(self.view, self.start, end)
        for value in (self.start, *(v for n in nodes for v in n.outputs)):
            if value.id == end.id or self.view.is_literal(self.view.ref[value.id]):
                continue
            outside = [u for u in self.site.users(value) if u not in nodes]
            readers = [None] if value.id in block.returned else outside
            if readers:
                return Escape(value, block.producer[value.id], readers[0])
        return None

    def unknown(self, nodes: list[Node], node: Node, known: Recognised) -> Rejection:
        """The rejection of a function that is not a known activation."""
        known = known.explained()
        if known.origin:
            rejection = self.site.rejection(known.code, f"{anchor_text(node)}: {known.why}", [node], None, None, nodes)
            return replace(rejection, origin=known.origin, failed=True)
        name = activation_name(known.nearest)
        why = known.why.replace(known.nearest, name) if known.nearest else known.why
        sentence = f"{anchor_text(node)} ends a function of the linear result that is not a known activation: {why}"
        edit = "use relu, gelu, silu, sigmoid or tanh of jax.nn if one of them is meant"
        if known.code == "gradient":
            edit = f"use jax.nn.{name.partition('_')[0]}, if it is meant: it has the fused op's gradient"
        return self.site.rejection(known.code, sentence, [node], None, edit, nodes)

    # -- set apart: behind a rule of the user's, a name, a cast or a stop_gradient --------------------------------------

    def custom_rule(self) -> Rejection | None:
        """The rejection of an activation separated from the start by a node that is not part of an activation."""
        for user in self.site.users(self.start):
            told = self.told_apart(user)
            if told is not None:
                code, problem, edit = told
                rejection = self.site.rejection(code, f"{anchor_text(user)} {problem}", [user], None, edit, [user])
                followers = () if user.primitive in _RULES else self.following(user.outputs[0])
                site_ids = rejection.site_ids | {n.id for n in followers}
                return replace(rejection, site_ids=site_ids, concepts=concepts_of(False, self.behind(self.start)))
        return None

    def told_apart(self, user: Node) -> tuple[str, str, str | None] | None:
        """Code, problem and edit for a node that separates the start from its activation; None for any other."""
        kind = user.primitive
        if kind in _RULES:
            return "custom_rule", "has a derivative of the user's own, which a fused activation would replace", None
        if kind == "stop_gradient":
            return "stop_gradient", "stops the gradient of the linear result", None
        if kind in ("name", "reduce_precision") and self.goes_on(user.outputs[0]):
            edit = "name x or the activated value instead, with jax.ad_checkpoint.checkpoint_name"
            return "named_residual", "names a value inside the site, which a remat policy may ask for", edit
        if kind in LAYS_OUT and self.goes_on(user.outputs[0]):
            start = "sum with the bias" if self.biased else "product"
            where = f"the layout of the {start} on the mesh before it is used further"
            edit = "fix the layout of x, of w, or of the result after the bias and the activation"
            return "sharding", f"fixes {where}; that value does not exist in the fused op", edit
        if kind == "convert_element_type" and self.is_activated(user.outputs[0]):
            computed = f"the fused op would compute the activation in {self.start.dtype}"
            problem = f"casts the linear result before its activation; {computed}"
            return "dtype", problem, "apply the activation before the cast"
        return None

    def following(self, value: Value) -> list[Node]:
        """The activation of a copy of the start, node by node."""
        way = passage(self.site, value)
        nodes = [*way.views, *cone(self.view, way.end)]
        if any(n.primitive in NONLINEAR for n in nodes):
            return nodes
        apart = [u for u in self.site.users(value) if u.primitive in _APART]
        return [n for u in apart for n in (u, *self.following(u.outputs[0]))]

    def goes_on(self, value: Value) -> bool:
        """Whether a bias or an activation follows a copy of the start."""
        users = self.site.users(value)
        added = [a for u in users if u.primitive == "add" for a in u.inputs if a is not value]
        if self.is_activated(value) or (not self.biased and any(map(self.site.given, added))):
            return True
        return any(self.goes_on(u.outputs[0]) for u in users if u.primitive in _BETWEEN)

    def is_activated(self, value: Value) -> bool:
        """Whether a nonlinear function follows."""
        return any(n.primitive in NONLINEAR for n in cone(self.view, passage(self.site, value).end))

    # -- the name of the activation, fused or not -----------------------------------------------------------------------

    def known(self) -> str | None:
        """The last known activation of the start, else one that is separated from it."""
        return self.known_after(self.start) or self.behind(self.start)

    def known_after(self, value: Value) -> str | None:
        """The last known activation of a value."""
        found = self.recognised(value, cone(self.view, value))
        return next((known.name for _, known in found if known.name), None)

    def behind(self, value: Value) -> str | None:
        """The known activation of a value that a user's derivative rule contains, or that follows a name, a cast or a stop_gradient."""
        for user in self.site.users(value):
            if user.primitive in _RULES:
                return value_name(user, KNOWN, self.certifier)
            if user.primitive in _APART:
                return self.known_after(user.outputs[0]) or self.behind(user.outputs[0])
        return None


def _sums_up(user: Node, measured: bool) -> bool:
    """Whether a reader only sums the squares of a norm or a loss (`measured`), or sums to the single number of a loss."""
    return user.primitive == "reduce_sum" and (measured or user.outputs[0].shape == ())


def _goes_on_in(leak: Escape, nodes: list[Node]) -> bool:
    """Whether the reader of an inner value is one of these nodes and not in a backward pass."""
    return leak.user is not None and leak.user in nodes and not is_in_derivative(leak.node.eqn)


# -- what is no activation ------------------------------------------------------------------------------------------------


def feeds_softmax(site: Site, value: Value) -> bool:
    """Whether a value is exponentiated, as the scores of an attention are."""
    view, level = site.view, {site.nid(value)}
    for _ in range(7):
        if any(view.nodes[n].op == "exp" for n in level):
            return True
        level = {u for n in level for u in view.users.get(n, ()) if view.nodes[u].op != "dot"}
    return False


def summed_over_devices(site: Site, product: Value) -> Node | None:
    """The sum over devices between a row-parallel product and the value added to it, its bias."""
    value, found = product, None
    while len(users := site.users(value)) == 1:
        (user,) = users
        if found is not None and user.primitive == "add":
            return found
        if found is None and user.primitive in SUMS_OVER_DEVICES:
            found = user
        elif user.primitive not in VIEWS:
            return None
        value = user.outputs[user.inputs.index(value)]
    return None
