"""Passes written by users: a pattern by example, and its replacement.

A plain JAX function defines the pattern, however a program spells it; the matcher proposes and certification decides, as for every other
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from ....errors import ArgumentError
from ....graph.certify.certify import prove_function
from ....graph.dtypes import is_float
from ....graph.matching.pattern import Example, Pattern, ScalarEdge, pattern_of
from ....graph.program.ir import Node
from ....kernels import OPS, plain_meaning_of
from ....kernels.op.own import CudaKernel, PatternOp
from ....tracebacks import own_lines_hidden
from ...engine.base import Pass, Search
from ...engine.outcomes import Candidate, Rejection
from .own_site import OwnSite, makers_of
from .reserved_names import primitive_names

_LETTERS, _SCALARS = 8, 8  # how many an example may have
_SIZES = (5, 6, 7, 9, 10, 11, 13, 14)  # of the axes at which functions are compared
_NUMBERS = ((0.75, 1.5, 2.25, 0.375, 3.5, 1.125, 0.625, 2.75), (1.0, 2.0, 0.5, 4.0, 0.25, 8.0, 3.0, 6.0))
_RESERVED = frozenset(
    "implementation gradient present residuals live shape shardings partitioned device saved ct wanted tangents out role".split()
)


@dataclass(frozen=True, eq=False, repr=False)
class PatternPass(Pass):
    """A pass made by `pattern_pass`; attributes as in `Pass`, and

    Attributes:
      fused_op: the op, known only to this pass.
      gauged, bare: the pattern's spellings as examples, with leaves that may carry a factor, and with leaves that may not.
    """

    name: str
    op: str
    formula: str
    needs: str
    fused_op: PatternOp = field()
    gauged: tuple[Example, ...]
    bare: tuple[Example, ...]

    def __call__(self, *operands: Any, implementation: str | None = None, **scalars: float) -> Any:
        """The op itself, on arrays with one axis per letter; scalars by name."""
        return self.fused_op.call(*operands, implementation=implementation, **scalars)

    def sample(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        shapes = _shapes(self.gauged[0].leaves)
        numbers = _NUMBERS[0][: len(self.gauged[0].scalars)]
        return lambda *leaves: self.gauged[0].fn(*leaves, *numbers), tuple(jnp.zeros(s.shape) for s in shapes)

    def anchors(self, search: Search) -> Iterator[tuple[Node, int, list[Node]]]:
        roots = {p.nodes[p.root].op for p in map(pattern_of, self.gauged)}
        for nid in sorted(n for op in roots for n in search.view.by_op.get(op, ())):
            makers = makers_of(search.view, nid)
            if makers:
                yield makers[0], nid, makers

    def examine(self, search: Search, anchor: Node, nid: int, makers: list[Node]) -> list[Candidate | Rejection]:
        return OwnSite(self, search, nid, makers).examined()


@own_lines_hidden
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
    """A pass of your own, by example: wherever a program computes `pattern`, in any spelling, your op can replace it.

    Args:
      name: of the pass and of its op, which is one node of this name in a trace.
      pattern: `fn(*operands, *scalars) -> array` in plain JAX, without side effects; or several spellings of one function, if the matcher
        does not recognise them as equal. It must not depend on sizes: one letter may stand for several axes of a program.
      axes: operand -> its axis letters ({"x": "mn", "bias": "n"}); equal letters are equal lengths.
      scalars: names of the numbers that follow the operands; any number in a program matches.
      implementations: name -> implementation: functions like `pattern`, and `CudaKernel`s. "xla" is the op's meaning, by default the
        (first) pattern; the others take precedence, the first that can run. Every function is certified against the pattern, here and
        at every site: values and gradients in float64 and as rounded in the program's dtypes, on random numbers of many sizes, zeros
        and ties; a kernel is certified before it runs. An error on a few numbers only, at x == 1.7 or for x in (5, 5.01), can be
        missed: only its author knows of such a branch.
      backward: `fn(ct, *operands, *scalars) -> gradient of each operand`, certified as well, with its own gradients; None takes JAX's
        own gradient of "xla". Both read the operands again: nothing else is kept for them.
      formula: a readable formula; by default "name(operands)".

    Returns:
      A pass, for `fl.register` and, called with arrays, the op itself. Both are differentiable and work under jit, vmap (by the
      meaning in "xla") and scan.

    Raises:
      ArgumentError: an implementation does not compute the pattern's function, or an argument is invalid; the message names the difference.

    >>> import jax, jax.numpy as jnp
    >>> cap = pattern_pass("softcap", lambda x, cap: cap * jnp.tanh(x / cap), axes={"x": "m"}, scalars=["cap"])
    >>> cap(jnp.zeros(3), cap=30.0).tolist()
    [0.0, 0.0, 0.0]
    """
    spellings = tuple(pattern) if isinstance(pattern, Sequence) else (pattern,)
    others = dict(implementations or {})
    given = _Given(name, spellings, axes, scalars)
    given.check_words(others)
    pattern_fn, reference = spellings[0], given.plain(others.pop("xla", spellings[0]))
    formula = formula or f"{name}({', '.join((*axes, *scalars))})"
    gauged, result = given.examples(bare=False), given.result()
    for number, fn in enumerate(spellings[1:], 2):
        # What stands in its place has to hold where the spelling does; that may overflow where the pattern does not.
        given.certify(f"spelling {number} of the pattern", fn, pattern_fn)
    for key, fn in {"xla": reference, **others}.items():
        if not isinstance(fn, CudaKernel) and fn is not pattern_fn:
            given.certify(f"implementation {key!r}", pattern_fn, fn)
    op = PatternOp(name, axes, result, tuple(scalars), reference, others, backward, formula, reference is pattern_fn)
    if backward is not None:
        given.certify("the op with its backward", pattern_fn, _call_of(op))
    given.certify_derivatives(op)
    needs = f"operands of one dtype of f64/f32/bf16/f16, and {' '.join(f'{n}[{x}]' for n, x in axes.items())}"
    return PatternPass(name, name, formula, needs, op, gauged, given.examples(bare=True))


@dataclass(frozen=True)
class _Given:
    """The arguments of `pattern_pass`, as attributes. Each method raises ArgumentError for invalid ones."""

    name: Any
    spellings: tuple[Callable[..., Any], ...]
    axes: Mapping[str, str]
    scalars: Sequence[str]

    def error(self, problem: str) -> ArgumentError:
        return ArgumentError(f"pattern_pass {self.name}: {problem}")

    def plain(self, reference: Callable[..., Any] | CudaKernel) -> Callable[..., Any]:
        """The op's meaning, which must not be a kernel."""
        if isinstance(reference, CudaKernel):
            raise self.error('"xla" is a CudaKernel, needed a plain JAX function; call the kernel "cuda"')
        return reference

    def check_words(self, others: Mapping[str, Any]) -> None:
        """Raises ArgumentError for names that are invalid or already taken."""
        name = self.name
        if not isinstance(name, str) or not name.isidentifier() or name.endswith(("_grad", "_tangent", "_cotangent")):
            raise self.error("the name is not an identifier, or ends in _grad, _tangent or _cotangent; choose another")
        if name in OPS or name in primitive_names():
            raise self.error("an operation of this name already exists; choose another name")
        self.check_operands()
        self.check_letters()
        self.check_functions(others)

    def check_operands(self) -> None:
        axes, scalars = self.axes, self.scalars
        if not isinstance(axes, Mapping) or not axes or isinstance(scalars, str):
            raise self.error(
                f'axes={axes!r}, scalars={scalars!r}; needed a dict such as {{"x": "mn"}}, and a list of names'
            )
        words = [*axes, *scalars]
        wrong = [
            w for w in words if not str(w).isidentifier() or w in _RESERVED or w.startswith("d_") or words.count(w) > 1
        ]
        if wrong:
            raise self.error(f"operand or scalar {wrong[0]!r} is used twice or reserved; choose another name")

    def check_letters(self) -> None:
        if any(not isinstance(x, str) or (x and not x.isalpha()) or len(set(x)) < len(x) for x in self.axes.values()):
            raise self.error(f"axes={dict(self.axes)!r}, needed letters, each at most once per operand")
        if len(set("".join(self.axes.values()))) > _LETTERS or len(self.scalars) > _SCALARS:
            raise self.error(f"at most {_LETTERS} axis letters and {_SCALARS} scalars")

    def check_functions(self, others: Mapping[str, Any]) -> None:
        if not self.spellings or not all(map(callable, self.spellings)):
            raise self.error(f"pattern: got {self.spellings!r}, needed a function, or a list of functions")
        if bad := [k for k, fn in others.items() if not callable(fn) and not isinstance(fn, CudaKernel)]:
            raise self.error(f"implementation {bad[0]!r} is neither a function nor a CudaKernel")

    def examples(self, bare: bool) -> tuple[Example, ...]:
        """The spellings as examples, each checked to compile to a pattern."""
        name, axes, scalars, many = self.name, self.axes, tuple(self.scalars), len(self.spellings) > 1
        examples = tuple(
            Example(f"{name}, spelling {i}" if many else name, fn, axes, scalars, bare=bare, jitted=True, concrete=True)
            for i, fn in enumerate(self.spellings, 1)
        )
        for example in examples:
            try:
                found = pattern_of(example)
            except (ValueError, TypeError, IndexError, AttributeError) as error:
                raise self.error(f"the pattern cannot be used as an example: {error}") from error
            unread = _unread(found, scalars)
            if unread or not found.size:
                raise self.error(f"the pattern {f'does not read {unread[0]}' if unread else 'computes nothing'}")
        return examples

    def result(self) -> str:
        """The axis letters of the result."""
        letter = dict(zip(_SIZES, dict.fromkeys("".join(self.axes.values())), strict=False))
        numbers = _NUMBERS[0][: len(self.scalars)]
        out = jax.eval_shape(lambda *leaves: self.spellings[0](*leaves, *numbers), *_shapes(self.axes))
        if not hasattr(out, "shape") or not is_float(out.dtype):
            raise self.error(f"the pattern gives {out}, needed one array of floats")
        if any(n not in letter for n in out.shape) or len(set(out.shape)) < len(out.shape):
            raise self.error(
                f"the pattern's result has shape {list(out.shape)} where axes have lengths {letter}; needed a result "
                f"each of whose axes is an axis of an operand"
            )
        return "".join(letter[n] for n in out.shape)

    def certify(self, subject: str, old: Callable[..., Any], new: Callable[..., Any]) -> None:
        """Raises ArgumentError unless two functions are the same."""
        for numbers in _NUMBERS[: 2 if self.scalars else 1]:
            given = numbers[: len(self.scalars)]
            was, now = (lambda *leaves, fn=fn, given=given: fn(*leaves, *given) for fn in (old, new))
            try:
                verdict = prove_function(was, now, list(self.axes), _shapes(self.axes), plain_meaning_of)
            except (TypeError, ValueError) as error:
                raise self.error(f"{subject} does not take the pattern's arguments: {error}") from error
            if not verdict.ok:
                with_numbers = "".join(f", {s} = {x:g}" for s, x in zip(self.scalars, given, strict=True))
                raise self.error(
                    f"{subject} does not compute the pattern's function{with_numbers}: {verdict.detail}; needed equal values and gradients"
                )

    def certify_derivatives(self, op: PatternOp) -> None:
        """Raises ArgumentError unless the op is differentiable like the pattern: in forward mode, and twice."""
        shapes, numbers, count = _shapes(self.axes), _NUMBERS[0][: len(self.scalars)], len(self.axes)
        pattern = self.spellings[0]
        try:
            forwards = jax.jit(lambda *leaves: jax.jvp(lambda *xs: op.meaning_fn(*xs, *numbers), leaves, leaves)[1])
            forwards.lower(*shapes)  # where it is only traced, jax.custom_vjp does not complain
        except TypeError as error:
            raise self.error(
                f'"xla" has no forward derivative: {error}; write it without jax.custom_vjp, and pass its rule as `backward`'
            ) from error
        if op.same_code and not op.has_backward:
            return

        def pulled(fn: Callable[..., Any]) -> Callable[..., Any]:
            """The gradients' product with given arrays, whose own gradients are all second derivatives."""

            def product(ct: Any, *given: Any) -> Any:
                gradients = jax.vjp(lambda *xs: fn(*xs, *numbers), *given[:count])[1](ct)
                return sum(jnp.sum(g * a) for g, a in zip(gradients, given[count:], strict=True))

            return product

        out = jax.eval_shape(lambda *leaves: pattern(*leaves, *numbers), *shapes)
        names = ["the cotangent", *self.axes, *(f"the tangent of {n}" for n in self.axes)]
        both = pulled(pattern), pulled(_call_of(op))
        verdict = prove_function(*both, names, [out, *shapes, *shapes], plain_meaning_of, ordinary=True)
        if not verdict.ok:
            raise self.error(
                f"its second derivatives are not the pattern's: {verdict.detail} (of the gradient's product with a tangent)"
            )


def _unread(pattern: Pattern, scalars: Sequence[str]) -> list[str]:
    """The operands and scalars that the pattern's result does not depend on."""
    read = _reached(pattern)
    read_scalars = {edge.scalar for edge in (*pattern.edges.values(), pattern.factor) if isinstance(edge, ScalarEdge)}
    leaves = [leaf for nid, leaf in pattern.leaf_of.items() if nid not in read]
    return [*leaves, *(s for s in scalars if s not in read_scalars)]


def _reached(pattern: Pattern) -> set[int]:
    seen, stack = set[int](), [pattern.root]
    while stack:
        nid = stack.pop()
        if nid not in seen:
            seen.add(nid)
            stack += [o.nid for o in pattern.nodes[nid].operands]
    return seen


def _shapes(axes: Mapping[str, str]) -> list[Any]:
    """Small shapes of the operands, with a different length for each letter."""
    size = dict(zip(dict.fromkeys("".join(axes.values())), _SIZES, strict=False))
    return [jax.ShapeDtypeStruct(tuple(size[x] for x in letters), jnp.float32) for letters in axes.values()]


def _call_of(op: PatternOp) -> Callable[..., Any]:
    return lambda *given: op.call(*given[: len(op.slots)], **dict(zip(op.scalars, given[len(op.slots) :], strict=True)))
