"""Passes of users' own: a pattern by example, and what is to run in its place.

A plain JAX function says what is looked for, whatever its spelling in a program; the matcher proposes, certification decides, as with
every other pass.
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


@dataclass(frozen=True, eq=False)
class PatternPass(Pass):
    """A pass made by `pattern_pass`; attributes as of `Pass`, and

    Attributes:
      fused_op: the op, which only this pass knows.
      gauged, bare: the pattern's spellings as examples, with leaves that may carry a factor, and with leaves that carry none.
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
        (first) pattern; the others are taken before it, the first that can run. Every function is certified against the pattern, here and
        at every site: values and gradients in float64 and as rounded in the program's dtypes, on random numbers of many sizes, zeros
        and ties; a kernel where it is about to run. What is wrong on a few numbers alone, at x == 1.7 or for x in (5, 5.01), can be
        missed: nothing but its author knows of such a branch.
      backward: `fn(ct, *operands, *scalars) -> gradient of each operand`, certified as well, with its own gradients; None takes JAX's
        own of "xla". Either is given the operands again: nothing else is kept for it.
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
    reference = _plain(name, others.pop("xla", spellings[0]))
    formula = formula or f"{name}({', '.join((*axes, *scalars))})"
    gauged = _examples(name, spellings, axes, tuple(scalars), bare=False)
    result = _result(name, spellings[0], axes, scalars)
    for number, fn in enumerate(spellings[1:], 2):
        # What stands in its place has to hold where the spelling does; that may overflow where the pattern does not.
        _certify(name, f"spelling {number} of the pattern", fn, spellings[0], axes, scalars)
    for key, fn in {"xla": reference, **others}.items():
        if not isinstance(fn, CudaKernel) and fn is not spellings[0]:
            _certify(name, f"implementation {key!r}", spellings[0], fn, axes, scalars)
    op = PatternOp(name, axes, result, tuple(scalars), reference, others, backward, formula, reference is spellings[0])
    if backward is not None:
        _certify(name, "the op with its backward", spellings[0], _call_of(op), axes, scalars)
    _certify_derivatives(name, op, spellings[0], axes, scalars)
    needs = f"operands of one dtype of f64/f32/bf16/f16, and {' '.join(f'{n}[{x}]' for n, x in axes.items())}"
    return PatternPass(
        name, name, formula, needs, op, gauged, _examples(name, spellings, axes, tuple(scalars), bare=True)
    )


def _plain(name: str, reference: Callable[..., Any] | CudaKernel) -> Callable[..., Any]:
    """The op's meaning. Raises ArgumentError where that is a kernel."""
    if isinstance(reference, CudaKernel):
        raise ArgumentError(
            f'pattern_pass {name}: "xla" is a CudaKernel, needed a plain JAX function; call the kernel "cuda"'
        )
    return reference


def _check_words(name: Any, axes: Any, scalars: Any, spellings: tuple[Any, ...], others: Mapping[str, Any]) -> None:
    """Raises ArgumentError for names that cannot be, or mean something else already."""
    prefix = f"pattern_pass {name}"
    _check_name(prefix, name)
    _check_operands(prefix, axes, scalars)
    _check_letters(prefix, axes, scalars)
    _check_functions(prefix, spellings, others)


def _check_name(prefix: str, name: Any) -> None:
    if not isinstance(name, str) or not name.isidentifier() or name.endswith(("_grad", "_tangent", "_cotangent")):
        raise ArgumentError(
            f"{prefix}: the name is no identifier, or ends in _grad, _tangent or _cotangent; choose another"
        )
    if name in OPS or name in primitive_names():
        raise ArgumentError(f"{prefix}: an operation of this name exists already; choose another name")


def _check_operands(prefix: str, axes: Any, scalars: Any) -> None:
    if not isinstance(axes, Mapping) or not axes or isinstance(scalars, str):
        raise ArgumentError(
            f'{prefix}: axes={axes!r}, scalars={scalars!r}; needed a dict as {{"x": "mn"}}, and a list of names'
        )
    words = [*axes, *scalars]
    wrong = [
        w for w in words if not str(w).isidentifier() or w in _RESERVED or w.startswith("d_") or words.count(w) > 1
    ]
    if wrong:
        raise ArgumentError(
            f"{prefix}: operand or scalar {wrong[0]!r} is used twice or has a meaning of its own; choose another name"
        )


def _check_letters(prefix: str, axes: Mapping[str, Any], scalars: Sequence[str]) -> None:
    if any(not isinstance(x, str) or (x and not x.isalpha()) or len(set(x)) < len(x) for x in axes.values()):
        raise ArgumentError(f"{prefix}: axes={dict(axes)!r}, needed letters, each once for an operand")
    if len(set("".join(axes.values()))) > _LETTERS or len(scalars) > _SCALARS:
        raise ArgumentError(f"{prefix}: at most {_LETTERS} axis letters and {_SCALARS} scalars")


def _check_functions(prefix: str, spellings: tuple[Any, ...], others: Mapping[str, Any]) -> None:
    if not spellings or not all(map(callable, spellings)):
        raise ArgumentError(f"{prefix}: pattern: got {spellings!r}, needed a function, or a list of functions")
    if bad := [k for k, fn in others.items() if not callable(fn) and not isinstance(fn, CudaKernel)]:
        raise ArgumentError(f"{prefix}: implementation {bad[0]!r} is neither a function nor a CudaKernel")


def _examples(
    name: str, spellings: tuple[Any, ...], axes: Mapping[str, str], scalars: tuple[str, ...], bare: bool
) -> tuple[Example, ...]:
    """The spellings as examples, each known to compile to a pattern."""
    many = len(spellings) > 1
    examples = tuple(
        Example(f"{name}, spelling {i}" if many else name, fn, axes, scalars, bare=bare, jitted=True, concrete=True)
        for i, fn in enumerate(spellings, 1)
    )
    for example in examples:
        try:
            found = pattern_of(example)
        except (ValueError, TypeError, IndexError, AttributeError) as error:
            raise ArgumentError(f"pattern_pass {name}: the pattern cannot be used as an example: {error}") from error
        unread = _unread(found, scalars)
        if unread or not found.size:
            raise ArgumentError(
                f"pattern_pass {name}: the pattern {f'does not read {unread[0]}' if unread else 'computes nothing'}"
            )
    return examples


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


def _certify_derivatives(
    name: str, op: PatternOp, pattern: Callable[..., Any], axes: Mapping[str, str], scalars: Sequence[str]
) -> None:
    """Raises ArgumentError where the op's derivatives cannot be had as JAX has the pattern's, forwards, and from a gradient again."""
    shapes, numbers, new = _shapes(axes), _NUMBERS[0][: len(scalars)], _call_of(op)
    try:
        forwards = jax.jit(lambda *leaves: jax.jvp(lambda *xs: op.meaning_fn(*xs, *numbers), leaves, leaves)[1])
        forwards.lower(*shapes)  # where it is only traced, jax.custom_vjp does not complain
    except TypeError as error:
        raise ArgumentError(
            f'pattern_pass {name}: "xla" has no forward derivative: {error}; write it without jax.custom_vjp, and give its rule as '
            f"`backward`"
        ) from error
    if op.same_code and not op.has_backward:
        return

    def pulled(fn: Callable[..., Any]) -> Callable[..., Any]:
        """The gradients' product with given arrays: its own gradients are all second derivatives."""

        def product(*given: Any) -> Any:
            ct, leaves, along = given[0], given[1 : 1 + len(axes)], given[1 + len(axes) : 1 + 2 * len(axes)]
            gradients = jax.vjp(lambda *xs: fn(*xs, *given[1 + 2 * len(axes) :]), *leaves)[1](ct)
            return sum(jnp.sum(g * a) for g, a in zip(gradients, along, strict=True))

        return product

    out = jax.eval_shape(lambda *leaves: pattern(*leaves, *numbers), *shapes)
    names = ["the cotangent", *axes, *(f"the tangent of {n}" for n in axes)]
    verdict = prove_function(
        lambda *given: pulled(pattern)(*given, *numbers),
        lambda *given: pulled(new)(*given, *numbers),
        names,
        [out, *shapes, *shapes],
        plain_meaning_of,
        ordinary=True,
    )
    if not verdict.ok:
        raise ArgumentError(
            f"pattern_pass {name}: its second derivatives are not the pattern's: {verdict.detail} (of the gradient's product with a "
            f"tangent)"
        )


def _certify(
    name: str,
    subject: str,
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
            raise ArgumentError(
                f"pattern_pass {name}: {subject} does not take what the pattern takes: {error}"
            ) from error
        if not verdict.ok:
            with_numbers = "".join(f", {s} = {x:g}" for s, x in zip(scalars, given, strict=True))
            raise ArgumentError(
                f"pattern_pass {name}: {subject} is not the pattern's function{with_numbers}: {verdict.detail}; needed the same values and "
                f"gradients"
            )
