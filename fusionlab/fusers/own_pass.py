"""Passes of users' own: a pattern by example, and what is to run in its place.

A plain JAX function says what is looked for, whatever its spelling in a program; the matcher proposes, certification decides, as with
every other pass.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ArgumentError
from ..graph.canonical import View
from ..graph.certify import Verdict, prove_function
from ..graph.evaluate import is_float, narrows
from ..graph.ir import Node, Value
from ..graph.known import primitive_names
from ..graph.match import Match, Miss, close, match
from ..graph.pattern import Example, Pattern, ScalarEdge, pattern_of
from ..graph.region import CASTS, SCALINGS, VIEWS, NotARegion, Region, cut
from ..graph.scopes import is_backward
from ..kernels import OPS, plain_meaning_of
from ..kernels.own import DTYPES, CudaKernel, PatternOp
from .base import Plan, Search, anchor_text
from .findings import Candidate, Rejection
from .layout import arrange, axes_of, in_order, restore
from .site import Site, with_concepts

_LETTERS, _SCALARS = 8, 8  # how many an example may have
_SIZES = (5, 6, 7, 9, 10, 11, 13, 14)  # of the axes at which functions are compared
_NUMBERS = ((0.75, 1.5, 2.25, 0.375, 3.5, 1.125, 0.625, 2.75), (1.0, 2.0, 0.5, 4.0, 0.25, 8.0, 3.0, 6.0))
_RESERVED = frozenset(
    "implementation gradient present residuals live shape shardings partitioned device saved ct wanted tangents out role".split()
)
_NEAREST = 24  # values that a site may be read from, nearest first
_CONE = 64  # nodes that a site may have
_CHAINS = 16


@dataclass(frozen=True, eq=False)
class PatternPass:
    """A pass made by `pattern_pass`; attributes as of `Pass`, and

    Attributes:
      fused_op: the op, which only this pass knows.
      gauged, bare: the pattern's spellings as examples, with leaves that may carry a factor, and with leaves that carry none.
    """

    name: str
    formula: str
    needs: str
    fused_op: PatternOp
    gauged: tuple[Example, ...]
    bare: tuple[Example, ...]
    options: Mapping[str, tuple[Any, str]] = field(default_factory=dict)

    @property
    def op(self) -> str:
        return self.name

    def __call__(self, *operands: Any, implementation: str | None = None, **scalars: float) -> Any:
        """The op itself, on arrays with one axis per letter; scalars by name."""
        return self.fused_op.call(*operands, implementation=implementation, **scalars)

    def sample(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        shapes = _shapes(self.gauged[0].leaves)
        numbers = _NUMBERS[0][: len(self.gauged[0].scalars)]
        return lambda *leaves: self.gauged[0].fn(*leaves, *numbers), tuple(jnp.zeros(s.shape) for s in shapes)

    def search(self, search: Search) -> Iterator[Candidate | Rejection]:
        roots = {p.nodes[p.root].op for p in map(pattern_of, self.gauged)}
        for nid in sorted(n for op in roots for n in search.view.by_op.get(op, ())):
            makers = _makers(search.view, nid)
            if makers:
                outcome = _Site(self, search, nid, makers).examine()
                if outcome is not None:
                    yield outcome


def pattern_pass(
    name: str,
    pattern: Callable[..., Any] | Sequence[Callable[..., Any]],
    *,
    axes: Mapping[str, str],
    scalars: Sequence[str] = (),
    implementations: Mapping[str, Callable[..., Any] | CudaKernel] | None = None,
    backward: Callable[..., Any] | None = None,
    formula: str | None = None,
) -> PatternPass:
    """A pass of your own, by example: wherever a program computes `pattern`, however it is spelt, an op of yours can stand.

    Args:
      name: of the pass and of its op, which is one node of this name in a trace.
      pattern: `fn(*operands, *scalars) -> array` in plain JAX, without side effects; or several that are the same function, where programs
        spell it in ways that the matcher does not bring together. It knows no sizes: a program's axes may be several for one letter.
      axes: operand -> its axis letters ({"x": "mn", "bias": "n"}); equal letters are equal lengths.
      scalars: names of the numbers that follow the operands; whatever numbers a program has there are taken.
      implementations: name -> what runs: functions like `pattern`, and `CudaKernel`s. "xla" is the op's meaning, by default the
        (first) pattern; the others are taken before it, the first that can run. Every function is certified against the pattern here,
        values and gradients in float64, on ordinary and on extreme numbers; a kernel where it is about to run.
      backward: `fn(ct, *operands, *scalars) -> gradient of each operand`, certified as well; None takes JAX's own of "xla".
      formula: what it computes, for readers; by default "name(operands)".

    Returns:
      A pass, for `fl.register` and, called with arrays, the op itself. Both are differentiable, and pass jit, vmap (by the meaning in
      "xla") and scan.

    Raises:
      ArgumentError: an implementation is not the pattern's function, or an argument does not fit; the message says what differs.

    >>> import jax, jax.numpy as jnp
    >>> cap = pattern_pass("softcap", lambda x, cap: cap * jnp.tanh(x / cap), axes={"x": "m"}, scalars=["cap"])
    >>> cap(jnp.zeros(3), cap=30.0).tolist()
    [0.0, 0.0, 0.0]
    """
    spellings = tuple(pattern) if isinstance(pattern, Sequence) else (pattern,)
    others = dict(implementations or {})
    _check_words(name, axes, scalars, spellings, others)
    reference = others.pop("xla", spellings[0])
    if isinstance(reference, CudaKernel):
        raise ArgumentError(
            f'pattern_pass {name}: "xla" is a CudaKernel, needed a plain JAX function; call the kernel "cuda"'
        )
    told = formula or f"{name}({', '.join((*axes, *scalars))})"
    gauged = _examples(name, spellings, axes, tuple(scalars), bare=False)
    result = _result(name, spellings[0], axes, scalars)
    for number, fn in enumerate(spellings[1:], 2):
        _certify(name, f"spelling {number} of the pattern", spellings[0], fn, axes, scalars)
    for key, fn in {"xla": reference, **others}.items():
        if not isinstance(fn, CudaKernel) and fn is not spellings[0]:
            _certify(name, f"implementation {key!r}", spellings[0], fn, axes, scalars)
    op = PatternOp(name, axes, result, tuple(scalars), reference, others, backward, told, reference is spellings[0])
    if backward is not None:
        _certify(name, "the op with its backward", spellings[0], _call_of(op), axes, scalars)
    needs = f"operands of one dtype of f64/f32/bf16/f16, and {' '.join(f'{n}[{x}]' for n, x in axes.items())}"
    return PatternPass(name, told, needs, op, gauged, _examples(name, spellings, axes, tuple(scalars), bare=True))


def _check_words(name: Any, axes: Any, scalars: Any, spellings: tuple[Any, ...], others: Mapping[str, Any]) -> None:
    """Raises ArgumentError for names that cannot be, or mean something else already."""
    what = f"pattern_pass {name}"
    if not isinstance(name, str) or not name.isidentifier() or name.endswith(("_grad", "_tangent", "_cotangent")):
        raise ArgumentError(
            f"{what}: the name is no identifier, or ends in _grad, _tangent or _cotangent; choose another"
        )
    if name in OPS or name in primitive_names():
        raise ArgumentError(f"{what}: an operation of this name exists already; choose another name")
    if not isinstance(axes, Mapping) or not axes or isinstance(scalars, str):
        raise ArgumentError(
            f'{what}: axes={axes!r}, scalars={scalars!r}; needed a dict as {{"x": "mn"}}, and a list of names'
        )
    words = [*axes, *scalars]
    wrong = [
        w for w in words if not str(w).isidentifier() or w in _RESERVED or w.startswith("d_") or words.count(w) > 1
    ]
    if wrong:
        raise ArgumentError(
            f"{what}: operand or scalar {wrong[0]!r} is used twice or has a meaning of its own; choose another name"
        )
    if any(not isinstance(x, str) or (x and not x.isalpha()) or len(set(x)) < len(x) for x in axes.values()):
        raise ArgumentError(f"{what}: axes={dict(axes)!r}, needed letters, each once for an operand")
    if len(set("".join(axes.values()))) > _LETTERS or len(scalars) > _SCALARS:
        raise ArgumentError(f"{what}: at most {_LETTERS} axis letters and {_SCALARS} scalars")
    if not spellings or not all(map(callable, spellings)):
        raise ArgumentError(f"{what}: pattern: got {spellings!r}, needed a function, or a list of functions")
    if bad := [k for k, fn in others.items() if not callable(fn) and not isinstance(fn, CudaKernel)]:
        raise ArgumentError(f"{what}: implementation {bad[0]!r} is neither a function nor a CudaKernel")


def _examples(
    name: str, spellings: tuple[Any, ...], axes: Mapping[str, str], scalars: tuple[str, ...], bare: bool
) -> tuple[Example, ...]:
    """The spellings as examples, each known to compile to a pattern."""
    many = len(spellings) > 1
    made = tuple(
        Example(f"{name}, spelling {i}" if many else name, fn, axes, scalars, bare=bare)
        for i, fn in enumerate(spellings, 1)
    )
    for example in made:
        try:
            found = pattern_of(example)
        except (ValueError, TypeError, IndexError, AttributeError) as error:
            raise ArgumentError(f"pattern_pass {name}: the pattern cannot be used as an example: {error}") from error
        read = _reached(found)
        unread = [leaf for nid, leaf in found.leaf_of.items() if nid not in read]
        told = {edge.scalar for edge in (*found.edges.values(), found.factor) if isinstance(edge, ScalarEdge)}
        unread += [s for s in scalars if s not in told]
        if unread or not found.size:
            raise ArgumentError(
                f"pattern_pass {name}: the pattern {f'does not read {unread[0]}' if unread else 'computes nothing'}"
            )
    return made


def _reached(pattern: Pattern) -> set[int]:
    seen, stack = set[int](), [pattern.root]
    while stack:
        nid = stack.pop()
        if nid not in seen:
            seen.add(nid)
            stack += [o.nid for o in pattern.nodes[nid].operands]
    return seen


def _shapes(axes: Mapping[str, str]) -> list[Any]:
    """Small shapes of the operands, each letter of another length."""
    size = dict(zip(dict.fromkeys("".join(axes.values())), _SIZES, strict=False))
    return [jax.ShapeDtypeStruct(tuple(size[x] for x in letters), jnp.float32) for letters in axes.values()]


def _result(name: str, fn: Callable[..., Any], axes: Mapping[str, str], scalars: Sequence[str]) -> str:
    """The axis letters of the result."""
    letter = dict(zip(_SIZES, dict.fromkeys("".join(axes.values())), strict=False))
    out = jax.eval_shape(lambda *leaves: fn(*leaves, *_NUMBERS[0][: len(scalars)]), *_shapes(axes))
    if not hasattr(out, "shape") or not is_float(out.dtype):
        raise ArgumentError(f"pattern_pass {name}: the pattern gives {out}, needed one array of floats")
    if any(n not in letter for n in out.shape) or len(set(out.shape)) < len(out.shape):
        raise ArgumentError(
            f"pattern_pass {name}: the pattern's result has shape {list(out.shape)} where axes have lengths {letter}; needed a result "
            f"whose axes are each one of the operands'"
        )
    return "".join(letter[n] for n in out.shape)


def _call_of(op: PatternOp) -> Callable[..., Any]:
    return lambda *given: op.call(*given[: len(op.slots)], **dict(zip(op.scalars, given[len(op.slots) :], strict=True)))


def _certify(
    name: str,
    what: str,
    old: Callable[..., Any],
    new: Callable[..., Any],
    axes: Mapping[str, str],
    scalars: Sequence[str],
) -> None:
    """Raises ArgumentError where a function is not the pattern's."""
    for numbers in _NUMBERS[: 2 if scalars else 1]:
        given = numbers[: len(scalars)]
        try:
            verdict = prove_function(
                lambda *leaves, given=given: old(*leaves, *given),
                lambda *leaves, given=given: new(*leaves, *given),
                list(axes),
                _shapes(axes),
                plain_meaning_of,
            )
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"pattern_pass {name}: {what} does not take what the pattern takes: {error}") from error
        if not verdict.ok:
            with_numbers = "".join(f", {s} = {x:g}" for s, x in zip(scalars, given, strict=True))
            raise ArgumentError(
                f"pattern_pass {name}: {what} is not the pattern's function{with_numbers}: {verdict.detail}; needed the same values and "
                f"gradients"
            )


def _makers(view: View, nid: int) -> list[Node]:
    """The nodes that make a canonical node's value or a multiple of it, the last first; no views or casts, and none of a backward pass."""
    found = (view.block.producer.get(v.id) for v in reversed(view.values_of.get(nid, ())))
    return [n for n in found if n is not None and n.primitive not in VIEWS | CASTS and not is_backward(n.eqn)]


class _Site(Site):
    """One value that may be the pattern's result."""

    def __init__(self, pass_: PatternPass, search: Search, nid: int, makers: list[Node]) -> None:
        super().__init__(pass_, search, makers[0])
        self.pattern_pass, self.root_nid, self.makers = pass_, nid, makers

    def examine(self) -> Candidate | Rejection | None:
        """The first that is no rejection, else the first rejection; None where it is not even nearly the pattern."""
        declined: Rejection | None = None
        miss: Miss | None = None
        for maker in self.makers:
            self.anchor = maker
            for leaves in self.proposals(maker):
                if isinstance(leaves, Miss):
                    miss = leaves if miss is None or leaves.matched > miss.matched else miss
                    continue
                outcome = self.at(maker, leaves)
                if isinstance(outcome, Candidate):
                    return with_concepts(outcome, (self.pattern_pass.name,))
                if isinstance(outcome, Miss):
                    miss = outcome if miss is None or outcome.matched > miss.matched else miss
                else:
                    declined = declined or outcome
        if declined is not None:
            return declined
        if miss is None or miss.matched < min(max(2, math.ceil(miss.total / 2)), miss.total):
            return None
        self.anchor = self.makers[0]
        near = self.near_miss(miss)
        return replace(near, edit=near.edit or f"write {self.pattern_pass.formula} as the pattern has it")

    # -- what may be the operands ---------------------------------------------------------------------------------

    def proposals(self, maker: Node) -> Iterator[dict[str, Value] | Miss]:
        """The raw values that may be the leaves, by name; or why there are none.

        In the block's view a product is one node with all its factors. Where the pattern is not found in it, it is looked for in views that
        begin at one of the values that the result is made of.
        """
        cone = self.cone(maker)
        read = [v.id for n in cone for v in {a.id: a for a in n.inputs if isinstance(a, Value)}.values()]
        inner = {v.id: v for n in cone for v in n.inputs if isinstance(v, Value) and read.count(v.id) > 1}
        nearest = sorted((v for v in inner.values() if v.id in self.search.block.producer), key=lambda v: -v.id)
        found = False
        for view in (self.search.view, *(self.beginning_at(v, maker) for v in nearest[:_NEAREST])):
            for item in self.found_in(view, maker):
                found |= not isinstance(item, Miss)
                yield item
            if found:
                return

    def cone(self, maker: Node) -> list[Node]:
        """The nodes that a value is made by, nearest first."""
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

    def beginning_at(self, value: Value, maker: Node) -> View:
        """The view of what a value is made into, on the way to `maker`; what else is read there is a leaf, under its views."""
        made, nodes = {value.id}, []
        for node in self.between([value], maker):
            if node.primitive in VIEWS or any(isinstance(a, Value) and a.id in made for a in node.inputs):
                nodes.append(node)
                made.update(
                    v.id for v in node.outputs if any(isinstance(a, Value) and a.id in made for a in node.inputs)
                )
        return self.search.view.over([value], nodes)

    def found_in(self, view: View, maker: Node) -> Iterator[dict[str, Value] | Miss]:
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
            try:
                region = cut(view, root, found.leaves)
            except NotARegion:
                continue
            chains = [self.chain(view, region.leaves[name]) for name in self.pattern_pass.fused_op.slots]
            for values in itertools.islice(itertools.product(*chains), _CHAINS):
                yield dict(zip(self.pattern_pass.fused_op.slots, values, strict=True))

    def chain(self, view: View, value: Value) -> list[Value]:
        """A value, and what it is a multiple of by literal factors."""
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
        return chain

    # -- the site -------------------------------------------------------------------------------------------------

    def at(self, maker: Node, leaves: Mapping[str, Value]) -> Candidate | Rejection | Miss:
        """What is made of it with these operands: now a leaf carries no factor, so every number has to be the pattern's."""
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
            numbers = _numbers(found, float(ref.coef))
            if not isinstance(numbers, dict):
                reason = f"the result is multiplied by {float(ref.coef):g} where the pattern has {numbers:g}"
                missed = missed or self.of_whole(found, reason)
            elif numbers and all(close(x, 1.0) for x in numbers.values()):  # every tanh is 1 * tanh(x / 1)
                missed = missed or Miss(
                    found.pattern, 0, found.pattern.size, ref.nid, "its numbers are all 1", "scalar", {}
                )
            else:
                return self.candidate(view, replace(found, scalars=numbers), root, leaves)
        assert missed is not None
        return replace(missed, target=self.root_nid, bound={missed.pattern.root: self.root_nid})

    def of_whole(self, found: Match, reason: str) -> Miss:
        size = found.pattern.size
        return Miss(found.pattern, size, size, self.root_nid, reason, "scalar", {})

    def candidate(self, view: View, found: Match, root: Value, leaves: Mapping[str, Value]) -> Candidate | Rejection:
        try:
            region = cut(view, root, found.leaves, through_scale=frozenset(leaves))
            if any(region.leaves[n].id != v.id for n, v in leaves.items()):
                raise NotARegion("its operands are read in different forms")
            problem = self.dtypes(region)
            if problem is not None:
                return problem
            plan = self.plan(view, found, region)
        except NotARegion as reason:
            return self.rejection("structure", f"{anchor_text(self.anchor)}: {reason}")
        verdict = self.search.certifier.extremes(
            region, plan.call, (plan.op.name, tuple(sorted(plan.attrs.items(), key=str)))
        )
        if not verdict.ok:
            sentence = f"{anchor_text(self.anchor)}: {plan.formula} would replace it, but {verdict.detail}"
            return self.rejection(verdict.code or "value", sentence, site=region.nodes)
        names = ", ".join(leaves)
        return self.offered(region, plan, f"compute the outside use from {names} again")

    def verdict(self, region: Region, plan: Plan) -> Verdict:
        """What `propose` does not ask: extreme numbers, and the functions that may run instead of the op's meaning."""
        op, what = self.pattern_pass.fused_op, (plan.op.name, tuple(sorted(plan.attrs.items(), key=str)))
        certifier, numbers = self.search.certifier, op.numbers(plan.attrs)
        verdict = certifier.extremes(region, plan.call, what)
        for key, fn in op.functions.items():

            def call(*inputs: Any, fn: Callable[..., Any] = fn) -> Any:
                return plan.finish(fn(*plan.operands(*inputs), *numbers))

            for prove in (certifier.region, certifier.extremes):
                verdict = prove(region, call, (*what, key)) if verdict.ok else verdict
        return verdict

    def dtypes(self, region: Region) -> Rejection | None:
        given = {str(v.dtype) for v in (*region.leaves.values(), region.root)}
        casts = [n for n in region.nodes if n.primitive in CASTS and is_float(n.outputs[0].dtype)]
        inner = next((n for n in casts if narrows(n.outputs[0].dtype, region.root.dtype)), None)
        if len(given) == 1 and given <= set(DTYPES) and inner is None:
            return None
        where = anchor_text(self.anchor)
        if inner is not None:
            what = f"reads what {anchor_text(inner)} rounds to {inner.outputs[0].dtype}; the op would not round there"
        elif len(given) > 1:
            what = f"mixes {', '.join(sorted(given))}; the op computes in one dtype"
        else:
            what = f"computes in {', '.join(given)}; the op takes {', '.join(DTYPES)}"
        return self.rejection(
            "dtype", f"{where} {what}", edit="cast the operands to one dtype first", site=region.nodes
        )

    def plan(self, view: View, found: Match, region: Region) -> Plan:
        """Operands with one axis per letter; the result back."""
        op, sizes = self.pattern_pass.fused_op, found.sizes
        axes = {n: axes_of(found, view, found.leaf_id(n), v) for n, v in region.leaves.items()}
        groups: dict[str, tuple[int, ...]] = {}
        for slot, letters in op.letters.items():
            for x in letters:
                groups.setdefault(x, in_order(axes[slot], found.letters.get(x, ())))
        root_axes = axes_of(found, view, found.pattern.root, region.root)
        position = {v.id: i for i, v in enumerate(region.inputs)}
        where = {n: position[v.id] for n, v in region.leaves.items()}

        def operands(*inputs: Any) -> tuple[Any, ...]:
            return tuple(
                arrange(inputs[where[n]], axes[n], [groups[x] for x in op.letters[n]], sizes) for n in op.slots
            )

        def finish(out: Any) -> Any:
            return restore(out, [groups[x] for x in op.result], root_axes, region.root.shape, sizes)

        numbers = {s: _number(found.scalars[s], region.root.dtype) for s in op.scalars}
        attrs = {**numbers, "implementation": self.search.implementation}
        return Plan(op, attrs, operands, finish, op.formula(**numbers))


def _number(value: float, dtype: Any) -> float:
    """As the user wrote it: without the noise of its inverse, and, of a float32, the shortest number that is the same."""
    short = float(f"{value:.10g}")
    if abs(short - value) <= 1e-11 * abs(value):
        value = short
    single = float(str(np.float32(value)))
    return single if str(dtype) != "float64" and abs(float(np.float32(value)) - value) <= 1e-11 * abs(value) else value


def _numbers(found: Match, factor: float) -> dict[str, float] | float:
    """The scalars that a match captured, with the one that only `factor`, the multiple that the result is, tells.

    Where that is another than the pattern's, the pattern's.
    """
    wanted, known = found.pattern.factor, dict(found.scalars)
    if not isinstance(wanted, ScalarEdge):
        return known if close(float(wanted), factor) else float(wanted)
    value = known.setdefault(wanted.scalar, (factor / wanted.const) ** (1 / wanted.power) if factor > 0 else math.nan)
    needed = wanted.const * value**wanted.power
    return known if close(needed, factor) else needed
