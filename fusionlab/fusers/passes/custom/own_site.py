"""One place where a user's pattern may match: the possible operands, and the outcome."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ....graph.canonical.view import CanonicalView
from ....graph.certify.certify import ProofOutcome, prove_function
from ....graph.declined import Declined
from ....graph.dtypes import is_float, narrows
from ....graph.matching.match import Match, Miss, close, match
from ....graph.matching.pattern import ScalarEdge, pattern_of
from ....graph.matching.region import CASTS, SCALINGS, VIEWS, Region, cut
from ....graph.matching.wide import wider_in
from ....graph.program.ir import Node, Value, all_nodes
from ....graph.program.scopes import is_backward
from ....graph.program.trace import block_of_jaxpr
from ....kernels.op.arrays import FLOATS as DTYPES
from ....kernels.op.arrays import precisions
from ....kernels.op.own import PRECISION, REFUSALS
from ...engine.base import WIDER_EDIT, Search, Substitution
from ...engine.declining import attempted
from ...engine.layout import arrange, axes_of, input_positions, ordered_classes, restore
from ...engine.outcomes import Candidate, Rejection, with_concepts
from ...engine.proposing import wider_text
from ...engine.site import Site
from ...engine.wording import anchor_text

if TYPE_CHECKING:
    from .own_pass import PatternPass

_NEAREST = 24  # values that a site may be read from, nearest first
_CONE = 64  # nodes that a site may have
_CHAINS = 16
_WHOLE = 1 << 14  # elements that functions are compared at with all their positions, at most


def makers_of(view: CanonicalView, nid: int) -> list[Node]:
    """The nodes that compute a canonical node's value or a multiple of it, last first, without views, casts and backward passes."""
    found = (view.block.producer.get(v.id) for v in reversed(view.values_of.get(nid, ())))
    return [n for n in found if n is not None and n.primitive not in VIEWS | CASTS and not is_backward(n.eqn)]


class OwnSite(Site):
    """One value that may be the pattern's result."""

    def __init__(self, pass_: PatternPass, search: Search, nid: int, makers: list[Node]) -> None:
        super().__init__(pass_, search, makers[0])
        self.pattern_pass, self.root_nid, self.makers = pass_, nid, makers

    def examine(self) -> Candidate | Rejection | None:
        """The first candidate, else the first rejection; None if it is not even close to the pattern."""
        declined: Rejection | None = None
        miss: Miss | None = None
        for maker in self.makers:
            self.anchor = maker
            for leaves in self.proposals(maker):
                outcome = leaves if isinstance(leaves, Miss) else self.at(maker, leaves)
                if isinstance(outcome, Candidate):
                    return with_concepts(outcome, (self.pattern_pass.name,))
                if isinstance(outcome, Miss):
                    miss = outcome if miss is None or outcome.matched > miss.matched else miss
                else:
                    declined = declined or outcome
        return declined or self.nearly(miss)

    def nearly(self, miss: Miss | None) -> Rejection | None:
        """The rejection of a near miss; None if the nearest miss is not near."""
        if miss is None or miss.matched < min(2, miss.total):
            return None
        self.anchor = self.makers[0]
        near = self.near_miss(miss)
        # Two operations of twelve are no near miss, unless what stands there is made to stand in the way.
        if near.code == "structure" and 3 * miss.matched < miss.total:
            return None
        return replace(near, edit=near.edit or f"write {self.pattern_pass.formula} as in the pattern")

    # -- what may be the operands ---------------------------------------------------------------------------------

    def proposals(self, maker: Node) -> Iterator[dict[str, Value] | Miss]:
        """The raw values that may be the leaves, by name; or the miss if there are none.

        In the block's view a product is one node with all its factors. A pattern that is not found in it is searched for in views that
        begin at one of the values from which the result is computed.
        """
        found = False
        for view in (self.search.view, *(self.beginning_at(v, maker) for v in self.read_twice(maker)[:_NEAREST])):
            for item in self.found_in(view, maker):
                found |= not isinstance(item, Miss)
                yield item
            if found:
                return

    def read_twice(self, maker: Node) -> list[Value]:
        """The values of the block read by several of the nodes that compute a result, nearest first."""
        reads = [{a.id: a for a in n.inputs if isinstance(a, Value)} for n in self.cone(maker)]
        times = Counter(itertools.chain.from_iterable(reads))
        inner = {i: v for read in reads for i, v in read.items() if times[i] > 1 and i in self.search.block.producer}
        return [inner[i] for i in sorted(inner, reverse=True)]

    def cone(self, maker: Node) -> list[Node]:
        """The nodes that compute a value, nearest first."""
        producer, seen, order = self.search.block.producer, {maker.id}, [maker]
        for node in order:
            if len(order) > _CONE:
                break
            for a in node.inputs:
                below = producer.get(a.id) if isinstance(a, Value) else None
                if below is not None and below.id not in seen:
                    seen.add(below.id)
                    order.append(below)
        return order

    def between(self, leaves: Sequence[Value], maker: Node) -> list[Node]:
        """The nodes from some values to a node, in program order."""
        given, producer = {v.id for v in leaves}, self.search.block.producer
        nodes, stack = {maker.id: maker}, [maker]
        while stack and len(nodes) <= 4 * _CONE:
            for a in stack.pop().inputs:
                below = producer.get(a.id) if isinstance(a, Value) and a.id not in given else None
                if below is not None and below.id not in nodes:
                    nodes[below.id] = below
                    stack.append(below)
        return [nodes[i] for i in sorted(nodes)]

    def beginning_at(self, value: Value, maker: Node) -> CanonicalView:
        """The view of the nodes from a value to `maker`; anything else that they read is a leaf, under its views."""
        reached, nodes = {value.id}, []
        for node in self.between([value], maker):
            if node.primitive in VIEWS or any(isinstance(a, Value) and a.id in reached for a in node.inputs):
                nodes.append(node)
                reached.update(
                    v.id for v in node.outputs if any(isinstance(a, Value) and a.id in reached for a in node.inputs)
                )
        return self.search.view.over([value], nodes)

    def found_in(self, view: CanonicalView, maker: Node) -> Iterator[dict[str, Value] | Miss]:
        root = maker.outputs[0]
        ref = view.ref.get(root.id)
        if ref is None:
            return
        for example in self.pattern_pass.gauged:
            pattern = pattern_of(example)
            if view.nodes[ref.nid].op != pattern.nodes[pattern.root].op:
                continue
            found = match(pattern, view, ref.nid)
            if isinstance(found, Miss):
                if view is self.search.view:  # what a miss names is of the view that is told of
                    yield found
                continue
            region = self.whole(view, root, found)
            if isinstance(region, Miss):
                yield region
                continue
            chains = [self.chain(view, region.leaves[name]) for name in self.pattern_pass.fused_op.slots]
            for values in itertools.islice(itertools.product(*chains), _CHAINS):
                yield dict(zip(self.pattern_pass.fused_op.slots, values, strict=True))

    def whole(self, view: CanonicalView, root: Value, found: Match) -> Region | Miss:
        """The region of a match."""
        pattern, size = found.pattern, found.pattern.size
        miss = functools.partial(Miss, pattern, size, size, self.root_nid)
        return attempted(
            lambda: cut(view, root, found.leaves),
            lambda reason: miss(reason.sentence, "structure", {pattern.root: self.root_nid}),
        )

    def chain(self, view: CanonicalView, value: Value) -> list[Value]:
        """The values of which a value is a multiple by literal factors, furthest first, and the value."""
        chain = [value]
        while (node := view.block.producer.get(chain[-1].id)) is not None and node.primitive in VIEWS | SCALINGS:
            sources = [
                a
                for a in node.inputs
                if isinstance(a, Value) and a.id in view.ref and view.ref[a.id].nid == view.ref[value.id].nid
            ]
            if len(sources) != 1:
                break
            chain.append(sources[0])
        return chain[::-1]

    # -- the site -------------------------------------------------------------------------------------------------

    def at(self, maker: Node, leaves: Mapping[str, Value]) -> Candidate | Rejection | Miss:
        """The outcome with these operands: leaves carry no factor now, so every number must be the pattern's."""
        root = maker.outputs[0]
        unique = list({v.id: v for v in leaves.values()}.values())
        view = self.search.view.over(unique, self.between(unique, maker))
        ref = view.ref[root.id]
        given = {name: view.ref[v.id].nid for name, v in leaves.items()}
        missed: Miss | None = None
        for example in self.pattern_pass.bare:
            found = match(pattern_of(example), view, ref.nid, given)
            if isinstance(found, Miss):
                missed = missed or found
                continue
            numbers = self.numbers(found, float(ref.coef), ref.nid)
            if not isinstance(numbers, Miss):
                return self.attempt(self.candidate, view, replace(found, scalars=numbers), root, leaves)
            missed = missed or numbers
        assert missed is not None
        return replace(missed, target=self.root_nid, bound={missed.pattern.root: self.root_nid})

    def numbers(self, found: Match, factor: float, nid: int) -> dict[str, float] | Miss:
        """The pattern's numbers at a match whose result, a canonical node, is multiplied by `factor`; or why they are not a site's."""
        numbers, size = _numbers(found, factor), found.pattern.size
        if not isinstance(numbers, dict):
            wanted = "none of its scalars gives that factor" if math.isnan(numbers) else f"{numbers:g} is needed"
            reason = f"the result is multiplied by {factor:g}, where {wanted}"
            return Miss(found.pattern, size, size, self.root_nid, reason, "scalar", {})
        if numbers and all(close(x, 1.0) for x in numbers.values()):  # every tanh is 1 * tanh(x / 1)
            return Miss(found.pattern, 0, size, nid, "its numbers are all 1", "scalar", {})
        return numbers

    def candidate(
        self, view: CanonicalView, found: Match, root: Value, leaves: Mapping[str, Value]
    ) -> Candidate | Rejection:
        region = cut(view, root, found.leaves, through_scale=frozenset(leaves))
        if any(region.leaves[n].id != v.id for n, v in leaves.items()):
            raise Declined("its operands are read in different forms")
        self.check_dtypes(region)
        plan = self.plan(view, found, region)
        given, op = self.given(region, plan), self.pattern_pass.fused_op
        if unfit := op.unfit(op.meaning_fn, given, plan.attrs):
            sentence = f"{anchor_text(self.anchor)}: {plan.formula} cannot be used here: {unfit}"
            edit = f"make {op.name} compute with these operands"
            self.decline("structure", sentence, edit=edit, site=region.nodes)
        self.check_width(region, plan, given)
        verdict = self.verdict(region, plan, given)
        if not verdict.ok:
            sentence = f"{anchor_text(self.anchor)} could become {plan.formula}, but {verdict.detail}"
            self.decline(verdict.code or "value", sentence, site=region.nodes)
        names = ", ".join(leaves)
        return self.offered(region, plan, f"compute the outside use from {names} again")

    def given(self, region: Region, plan: Substitution) -> dict[str, Any]:
        """The types of the op's operands here."""
        types = (jax.ShapeDtypeStruct(v.shape, v.dtype) for v in region.inputs)
        return dict(zip(self.pattern_pass.fused_op.slots, jax.eval_shape(plan.operands, *types), strict=True))

    def check_width(self, region: Region, plan: Substitution, given: Mapping[str, Any]) -> None:
        """Declines arithmetic wider than the op's meaning, which may use 16 bits throughout."""
        op = self.pattern_pass.fused_op
        numbers, types = op.numbers(plan.attrs), [given[slot] for slot in op.slots]
        program = block_of_jaxpr(jax.make_jaxpr(lambda *leaves: op.meaning_fn(*leaves, *numbers))(*types))
        floats = [v.dtype for n in all_nodes(program.nodes) for v in n.outputs if is_float(v.dtype)]
        dtype = functools.reduce(jnp.promote_types, floats, region.root.dtype)
        wide = wider_in(region, dtype)
        if wide is not None:
            edit = WIDER_EDIT.format(jnp.dtype(dtype).name)
            self.decline("dtype", wider_text(wide, dtype), [wide], edit=edit, site=region.nodes)

    def verdict(self, region: Region, plan: Substitution, given: Mapping[str, Any]) -> ProofOutcome:
        """The checks that `propose` does not make: extreme numbers, and the functions that may run instead of the op's meaning."""
        op, plan_key = self.pattern_pass.fused_op, (plan.op.name, tuple(sorted(plan.attrs.items(), key=str)))
        certifier, numbers = self.search.certifier, op.numbers(plan.attrs)
        verdict = certifier.extremes(region, plan.call, plan_key)
        able = {key: fn for key, fn in op.functions.items() if op.unfit(fn, given, plan.attrs) is None}
        for key, fn in able.items():

            def call(*inputs: Any, fn: Callable[..., Any] = fn) -> Any:
                return plan.finish(fn(*plan.operands(*inputs), *numbers))

            for prove in (certifier.region, certifier.extremes):
                verdict = prove(region, call, (*plan_key, key)) if verdict.ok else verdict
        return self.of_positions(given, plan.attrs, {"xla": op.meaning_fn, **able}) if verdict.ok else verdict

    def of_positions(
        self, given: Mapping[str, Any], attrs: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]
    ) -> ProofOutcome:
        """Whether the implementation is the pattern at the lengths of this site: at a proof's few entries, arange(n) < 20 is all True.

        Long axes are shortened; a function that does not accept the shorter ones is not checked.
        """
        op, certifier = self.pattern_pass.fused_op, self.search.certifier
        shapes, numbers = op.shortened(op.sizes({n: a.shape for n, a in given.items()}), _WHOLE)[1], op.numbers(attrs)
        avals = [jax.ShapeDtypeStruct(shapes[n], given[n].dtype) for n in op.slots]
        pattern = self.pattern_pass.gauged[0].fn

        def prove(fn: Callable[..., Any]) -> ProofOutcome:
            old, new = (lambda *leaves, f=f: f(*leaves, *numbers) for f in (pattern, fn))
            try:
                return prove_function(old, new, op.slots, avals, certifier.inline, ordinary=True)
            except REFUSALS:
                return ProofOutcome(None)

        for key, fn in functions.items():
            proof_key = op.name, key, tuple(shapes.values()), str(avals[0].dtype), tuple(numbers)
            verdict = certifier.once(("positions", proof_key), lambda fn=fn: prove(fn))
            if verdict.code not in (None, "uncertified"):
                return verdict
        return ProofOutcome(None)

    def check_dtypes(self, region: Region) -> None:
        """Declines several dtypes, a dtype that the op does not take, and rounding inside."""
        given = {str(v.dtype) for v in (*region.leaves.values(), region.root)}
        inner = _rounding(region)
        where = anchor_text(self.anchor)
        if inner is not None:
            problem = (
                f"reads {anchor_text(inner)}, which rounds to {inner.outputs[0].dtype}; the op would not round there"
            )
        elif len(given) > 1:
            problem = f"mixes {', '.join(sorted(given))}; the op computes in one dtype"
        elif not given <= set(DTYPES):
            problem = f"computes in {', '.join(given)}; the op takes {', '.join(DTYPES)}"
        else:
            return
        self.decline("dtype", f"{where} {problem}", edit="cast the operands to one dtype first", site=region.nodes)

    def plan(self, view: CanonicalView, found: Match, region: Region) -> Substitution:
        """Operands with one axis per letter; the result back."""
        op, sizes = self.pattern_pass.fused_op, found.sizes
        axes = {n: axes_of(found, view, found.leaf_id(n), v) for n, v in region.leaves.items()}
        groups: dict[str, tuple[int, ...]] = {}
        for slot, letters in op.letters.items():
            for x in letters:
                groups.setdefault(x, ordered_classes(axes[slot], found.letters.get(x, ())))
        root_axes = axes_of(found, view, found.pattern.root, region.root)
        where = input_positions(region)

        def operands(*inputs: Any) -> tuple[Any, ...]:
            return tuple(
                arrange(inputs[where[n]], axes[n], [groups[x] for x in op.letters[n]], sizes) for n in op.slots
            )

        def finish(out: Any) -> Any:
            return restore(out, [groups[x] for x in op.result], root_axes, region.root.shape, sizes)

        numbers = {s: _number(found.scalars[s], region.root.dtype) for s in op.scalars}
        attrs = {**numbers, PRECISION: _precision(region), "implementation": self.search.implementation}
        return Substitution(op, attrs, operands, finish, op.formula(**numbers))


def _rounding(region: Region) -> Node | None:
    """The first node that rounds to fewer bits than the region's result has."""
    casts = (n for n in region.nodes if n.primitive in CASTS and is_float(n.outputs[0].dtype))
    return next((n for n in casts if narrows(n.outputs[0].dtype, region.root.dtype)), None)


def _precision(region: Region) -> str | None:
    """The precision that the products of a region request, as in `jax.default_matmul_precision`; None if they request none.

    Raises:
      Declined: they request several, and none of them serves for all.
    """
    asked = {n.params.get("precision") for n in all_nodes(region.nodes) if n.primitive == "dot_general"}
    names = {_precision_name(p) for p in asked}
    if len(names - {None}) <= 1 and (len(names) == 1 or names <= {None, "high", "highest"}):
        return next(iter(names - {None}), None)
    raise Declined(f"its products request different precisions ({', '.join(sorted(map(str, asked)))})")


def _precision_name(precision: Any) -> str | None:
    each = set(precisions(precision)) - {jax.lax.Precision.DEFAULT}  # which is what None is
    if len(each) > 1:
        raise Declined(f"a product requests a precision per operand ({precision})")
    return next(
        (p.name.lower() if isinstance(p, jax.lax.Precision) else str(getattr(p, "name", p)) for p in each), None
    )


def _number(value: float, dtype: Any) -> float:
    """A number as the user wrote it: without the noise of its inverse, and for float32 the shortest equal number."""
    double = str(dtype) == "float64"
    short = float(f"{value:{'.13g' if double else '.10g'}}")
    if abs(short - value) <= (1e-15 if double else 1e-11) * abs(value):
        value = short
    single = float(str(np.float32(value)))
    return single if not double and abs(float(np.float32(value)) - value) <= 1e-11 * abs(value) else value


def _numbers(found: Match, factor: float) -> dict[str, float] | float:
    """The scalars that a match captured, including one that only the result's `factor` determines.

    If the factor is not the pattern's, the pattern's factor; NaN if no scalar gives it.
    """
    wanted, known = found.pattern.factor, dict(found.scalars)
    if not isinstance(wanted, ScalarEdge):
        return known if close(float(wanted), factor) else float(wanted)
    try:
        value = known.setdefault(wanted.scalar, float((factor / wanted.const) ** (1 / wanted.power)))
    except (TypeError, ZeroDivisionError):  # a root of a negative number, or no result at all
        return math.nan
    needed = wanted.const * value**wanted.power
    return known if close(needed, factor) else needed
