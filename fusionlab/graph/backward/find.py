"""The backward pass of a region in an already differentiated program.

There is no backward pattern: the region itself is differentiated by the installed JAX, and the result is looked up in the
program's canonical view, node by node, with a candidate in place of the cotangent. A gradient found in this way is exact by construction,
and written as this JAX writes it.

The candidates for the cotangent are at the frontier: nodes that read values of the region, or values computed only from them, and one
other value, of the shape of the region's root.

A value that is read in several places has a gradient of several terms. The order in which JAX adds them depends on the code around
the region, and terms from elsewhere may come in between, so gradients are compared as sets of terms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend import core as jex_core

from ..canonical.algebra import compose
from ..canonical.nodes import CNode, Coef, Ref, node_axes, tidy
from ..canonical.rules import inline
from ..canonical.view import CanonicalView
from ..certify.certify import with_vjp
from ..dtypes import is_float
from ..matching.region import VIEWS, Region, region_signature
from ..primitives import having
from ..program.ir import Atom, Block, Literal, Node, Value, values_in
from ..program.scopes import in_backward
from ..program.signature import Memo
from ..program.trace import block_of_jaxpr

_TERMS = 64  # of one value's gradient
_ADDITIONS = having("addition")
# Nodes made of the region's values alone that are looked at; differentiation makes a few for each of the region's own.
_CLOSURE = 400


@dataclass(frozen=True)
class Share:
    """The gradient of one leaf, as the program has it: a value, or some of the terms of a value that is a sum.

    Attributes:
      value: the value.
      own: ids of the values whose sum the gradient is: `value` itself, or terms of it.
      through: ids of the additions between those and `value`, which add terms from elsewhere as well; None where the gradient
        cannot be separated from those.
    """

    value: Value
    own: frozenset[int]
    through: frozenset[int] | None = frozenset()


@dataclass(frozen=True)
class Backward:
    """The places where the gradients of a region are computed.

    Attributes:
      view: the view of its block, or of the two blocks read as one.
      cotangent: the value that is the cotangent of the region's root; the literal 1 for a scalar that the program differentiates itself.
      gradients: leaf name -> its gradient.
      absent: leaves of floats whose gradient the program does not compute from this cotangent.
    """

    view: CanonicalView
    cotangent: Atom
    gradients: dict[str, Share]
    absent: tuple[str, ...]


@dataclass
class Derivatives(Memo):
    """The programs of regions' derivatives, cached by the regions' computation, so that equal layers share them."""

    def jaxpr(self, region: Region) -> Any:
        """(inputs, cotangent) -> (value, gradients of the inputs of floats)."""
        return self.once(("jaxpr", region_signature(region)), lambda: _derivative(region))

    def of(self, region: Region) -> Block:
        """The same, as a block."""
        return self.once(("block", region_signature(region)), lambda: block_of_jaxpr(self.jaxpr(region)))


def _derivative(region: Region) -> Any:
    function = jex_core.jaxpr_as_fun(region.jaxpr())
    avals = [v.aval for v in region.inputs]
    return with_vjp(lambda *a: function(*a)[0], avals, region.root.aval)


def find_backward(
    view: CanonicalView,
    region: Region,
    derivatives: Derivatives,
    sums: SumTerms,
    expected: int | None = None,
    taken: frozenset[int] | set[int] = frozenset(),
) -> Backward | None:
    """The backward pass of a region of `view`, by the cotangent that explains most gradients; None if there is none.

    If the program needs no gradient of an operand that several regions read (data), the cotangent of one region also explains the
    gradients of the others. Then the cotangent at the canonical node `expected` is chosen, else the first without values in `taken`.
    """
    program = None
    best: Backward | None = None
    best_rank = 0, False, False
    for cotangent in _cotangents(view, region):
        program = program or derivatives.of(region)
        found = _explained(view, region, cotangent, program, sums, taken)
        if not _is_backward(found):
            continue  # x.T @ v of a forward pass is the gradient of x @ w, were v its cotangent
        sure = view.read(cotangent).nid == expected
        free = taken.isdisjoint(i for share in found.gradients.values() for i in share.own)
        rank = len(found.gradients), sure, free
        if best is None or rank > best_rank:
            best, best_rank = found, rank
        if not best.absent and best_rank[1:] in ((True, True), (expected is not None, True)):
            break
    return best


def _explained(
    view: CanonicalView,
    region: Region,
    cotangent: Atom,
    program: Block,
    sums: SumTerms,
    taken: frozenset[int] | set[int],
) -> Backward:
    """The gradients that are computed from a cotangent; `program` is the region's derivative."""
    names = {v.id: name for name, v in region.leaves.items()}
    floats = [v for v in region.inputs if is_float(v.dtype)]
    probe = _Probe(view)
    refs = [view.read(v) for v in region.inputs]
    found = inline(probe, program, [*refs, view.read(cotangent)])[1:]
    shares = {names[v.id]: sums.find(probe, ref, v, taken) for ref, v in zip(found, floats, strict=True)}
    gradients = {name: share for name, share in shares.items() if share is not None}
    return Backward(view, cotangent, gradients, tuple(name for name in shares if name not in gradients))


def _is_backward(found: Backward) -> bool:
    """Whether a node of a backward pass computes one of the gradients."""
    makers = (found.view.block.producer.get(share.value.id) for share in found.gradients.values())
    return any(maker is not None and in_backward(maker) for maker in makers)


# A factor, a node, the node's axis at each axis of the value, and the reshapes of sums on the way down to it.
Term = tuple[Coef, int, tuple[int | None, ...], tuple[Any, ...]]


class SumTerms:
    """The values of a block, by the terms they are the sums of."""

    def __init__(self, view: CanonicalView) -> None:
        self.view = view
        self.by_term: dict[Term, list[tuple[int, Value]]] = {}
        self.terms_of: dict[int, Counter[Term]] = {}  # value id -> its terms, where these are several
        for node in view.block.nodes:
            value = node.outputs[0] if node.outputs else None
            if value is not None and is_float(value.dtype):  # inside a checkpoint nothing says which are gradients
                terms = _terms(view, view.ref[value.id])
                if len(terms) > 1:
                    self.terms_of[value.id] = Counter(terms)
                for term in terms:
                    self.by_term.setdefault(term, []).append((len(terms), value))

    def find(self, probe: CanonicalView, ref: Ref, leaf: Value, taken: frozenset[int] | set[int]) -> Share | None:
        """The value of the leaf's type that is a Ref, or a sum that has all of its terms: the shortest, the first in the program
        of those that are not `taken`.
        """
        terms = _terms(probe, ref)
        if any(nid >= len(self.view.nodes) for _, nid, *_ in terms):
            return None
        wanted = Counter(terms)
        whole = self._holding(terms, wanted, leaf)
        seen = ((n, self._viewed(v) if n == len(terms) else v) for n, v in whole)
        n, value = min(seen, key=lambda found: (found[0], found[1].id in taken, found[1].id), default=(0, None))
        if value is None:
            return None
        return Share(value, frozenset({value.id})) if n == len(terms) else self._share(self._outermost(value), wanted)

    def _holding(self, terms: list[Term], wanted: Counter[Term], leaf: Value) -> Iterator[tuple[int, Value]]:
        """(number of its terms, value) of each value of the leaf's type that has all of some terms."""
        rarest = min(terms, key=lambda t: len(self.by_term.get(t, ())))
        for n, v in self.by_term.get(rarest, ()):
            same_type = v.shape == leaf.shape and v.dtype == leaf.dtype
            if same_type and n >= len(terms) and wanted <= self.terms(v):
                yield n, v

    def terms(self, value: Value) -> Counter[Term]:
        """The terms of a value."""
        return self.terms_of.get(value.id) or Counter(_terms(self.view, self.view.ref[value.id]))

    def _viewed(self, value: Value) -> Value:
        """The last value of the same entries after views that are the only readers: the gradient of `x.T @ w` is transposed twice."""
        block, last, ref = self.view.block, value, self.view.ref
        at = value
        while at.id not in block.returned:
            users = block.users.get(at.id, ())
            if len(users) != 1 or users[0].primitive not in VIEWS:
                break
            at = users[0].outputs[0]
            if ref[at.id] == ref[value.id] and at.aval == value.aval:
                last = at
        return last

    def _outermost(self, value: Value) -> Value:
        """The last of the sums that a sum alone is added up into, one by one: where all terms of all gradients meet."""
        block = self.view.block
        while value.id not in block.returned:
            users = block.users.get(value.id, ())
            if len(users) != 1 or users[0].primitive not in _ADDITIONS:
                break
            value = users[0].outputs[0]
        return value

    def _share(self, value: Value, wanted: Counter[Term]) -> Share:
        """The values whose sum in `value` is the wanted gradient."""
        own, others, through = set[int](), set[int](), set[int]()
        left, stack = Counter(wanted), [value]
        while stack:
            part = stack.pop()
            terms = self.terms(part)
            maker = self.view.block.producer.get(part.id)
            if terms <= left:
                own.add(part.id)
                left = left - terms
            elif left.keys().isdisjoint(terms):
                others.add(part.id)
            elif maker is None or maker.primitive not in _ADDITIONS:
                return Share(value, frozenset(), None)
            else:
                through.add(maker.id)
                stack += values_in(maker.inputs)
        return Share(value, frozenset(own), None if left or own & others else frozenset(through))


def _terms(view: CanonicalView, ref: Ref) -> list[Term]:
    """The terms of a value, down through sums of sums and through a reshape of a sum, which is the sum of its terms' reshapes."""
    found: list[Term] = []
    stack: list[Term] = [(ref.coef, ref.nid, node_axes(ref), ())]
    while stack and len(stack) + len(found) < _TERMS:
        coef, nid, places, reshapes = stack.pop()
        node = view.nodes[nid]
        if node.op == "reshape" and view.nodes[(below := node.operands[0]).nid].op == "sum":
            how = node.params, node.shape, below.axes, places
            stack.append((coef * below.coef, below.nid, tuple(range(len(below.axes))), (*reshapes, how)))
            continue
        if node.op != "sum":
            found.append((tidy(coef), nid, places, reshapes))
            continue
        for o in node.operands:
            stack.append((coef * o.coef, o.nid, compose(o.axes, places), reshapes))
    return found + [(tidy(c), n, p, r) for c, n, p, r in stack]


def _cotangents(view: CanonicalView, region: Region) -> Iterator[Atom]:
    """Candidates for the cotangent of the region's root, nearest first, each once; of a scalar that of what is differentiated itself."""
    tried: set[int] = set()
    for odd in _frontier(view, region):
        for value in _shown_by(view, odd):
            if value.shape == region.root.shape and value.dtype == region.root.dtype and value.id not in tried:
                tried.add(value.id)
                yield value
    if region.root.shape == () and is_float(region.root.dtype):
        yield Literal(np.ones((), region.root.dtype)[()], region.root.aval)


def _shown_by(view: CanonicalView, value: Value) -> Iterator[Value]:
    """A value and those with the same entries in another view or shape."""
    found: Value | None = value
    while found is not None:
        yield found
        maker, nid = view.block.producer.get(found.id), view.ref[found.id].nid
        sources = values_in(maker.inputs) if maker is not None else []
        reshaped = maker is not None and maker.primitive in VIEWS
        found = next((a for a in sources if reshaped or view.ref[a.id].nid == nid), None)


def _frontier(view: CanonicalView, region: Region) -> Iterator[Value]:
    """The single other operand of nodes that read the region's values, or values computed only from them."""
    around = _Surroundings(view, region)
    level = around.own
    while level:
        after: list[Value] = []
        for node in (n for value in level for n in view.block.users.get(value.id, ())):
            if node.id in around.seen or node.id in around.inside:
                continue
            others = around.others(node)
            yield from around.candidates(node, others)
            if not others:
                after += around.take(node)
        level = after


class _Surroundings:
    """The values computed only from a region's `own` values: `known`, by id, and the nodes `seen` that compute them."""

    def __init__(self, view: CanonicalView, region: Region) -> None:
        self.view, self.root = view, region.root
        nodes = (*region.nodes, *region.support)
        self.inside = {n.id for n in nodes}
        self.own = [*(v for n in nodes for v in n.outputs), *region.inputs]
        self.known = {v.id for v in self.own}
        self.of_root = {region.root.id}  # made of the root alone, as the cotangent of sum(sin(y)) is
        self.seen: set[int] = set()

    def others(self, node: Node) -> dict[int, Value]:
        """The operands of a node that are not known, without literals."""
        read = (v for v in values_in(node.inputs) if v.id not in self.known)
        return {v.id: v for v in read if not self.view.is_literal(self.view.ref[v.id])}

    def candidates(self, node: Node, others: Mapping[int, Value]) -> Iterator[Value]:
        """The operands of a node that may be a cotangent; `others` are its own."""
        read = values_in(node.inputs)
        beside = (v for v in read if v.id not in self.known and v.id not in others)
        yield from (v for v in beside if v.shape)  # the cotangent of a sum: ones
        yield from (v for v in read if v.id in self.of_root and v.id != self.root.id)
        if len(others) == 1:
            yield from others.values()

    def take(self, node: Node) -> Sequence[Value]:
        """The results of a node with known operands, which become known; none once enough nodes have been examined."""
        if any(v.id in self.of_root for v in values_in(node.inputs)):
            self.of_root.update(v.id for v in node.outputs)
        if len(self.seen) >= _CLOSURE:
            return ()
        self.seen.add(node.id)
        self.known.update(v.id for v in node.outputs)
        return node.outputs


class _Nodes:
    """The nodes of a view, and further ones that are not added to it."""

    def __init__(self, base: list[CNode]) -> None:
        self.base, self.count, self.own = base, len(base), list[CNode]()

    def __getitem__(self, nid: int) -> CNode:
        return self.base[nid] if nid < self.count else self.own[nid - self.count]

    def __len__(self) -> int:
        return self.count + len(self.own)

    def append(self, node: CNode) -> None:
        self.own.append(node)


class _Table:
    """A view's hash-consing table, read-only, and a separate one for new entries."""

    def __init__(self, base: dict[Any, int]) -> None:
        self.base, self.own = base, dict[Any, int]()

    def get(self, key: Any) -> int | None:
        found = self.base.get(key)
        return self.own.get(key) if found is None else found

    def __setitem__(self, key: Any, nid: int) -> None:
        self.own[key] = nid


class _Probe(CanonicalView):
    """A view that looks nodes up in another view without changing it."""

    def __init__(self, base: CanonicalView) -> None:
        self._start(base.block)
        self.nodes = _Nodes(base.nodes)  # type: ignore[assignment]
        self._table = _Table(base._table)  # type: ignore[assignment]
        self._unique = base._unique
