"""A traced program as Python: a function of `jax.lax` calls, one line for each equation."""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from fusionlab.errors import ArgumentError
from fusionlab.graph.jax_compat import FLATTENED, scan_counts, split_closed
from fusionlab.graph.primitives import having
from fusionlab.graph.program.ir import type_text
from fusionlab.graph.program.scopes import is_backward, is_in_derivative, jaxpr_in_backward, source_of
from fusionlab.kernels.op.primitive import FusedPrimitive, Marker

from .program import Small

_ALIKE = {"add_any": "add"}  # by the public primitive that computes the same
_INLINED = FLATTENED | having("rule")
# Written as functions of their operands, where every parameter is at its default.
_PLAIN = frozenset(
    "add sub mul div neg max min rem pow exp exp2 expm1 log log1p tanh logistic sqrt rsqrt cbrt erf erfc erf_inv sin cos tan abs sign "
    "floor ceil is_finite eq ne lt le gt ge select_n stop_gradient".split()
)


def source_of_program(program: Small, name: str = "program") -> str:
    """The function `name`, of as many arrays as the program has inputs; it returns a tuple. It needs `jax`, `np` and `lax`.

    Raises:
      ArgumentError: an equation has no form as source: a kernel of another library, a callback, a program split over devices.
    """
    writer = _Function(jaxpr_in_backward(program.closed))
    args = [f"x{i}" for i in range(len(program.jaxpr.invars))]
    types = ", ".join(f"{a}: {type_text(v.aval)}" for a, v in zip(args, program.jaxpr.invars, strict=True))
    body, outs = writer.body(program.closed, args, 1)
    lines = [f"def {name}({', '.join(args)}):", f'    """{types}"""', *body]
    return "\n".join([*lines, f"    return {_tuple(outs)}", ""])


class _Function:
    """Numbers the values of a program through all of its functions.

    `scoped` keeps the scopes by which a backward pass is known for one.
    """

    def __init__(self, scoped: bool) -> None:
        self.numbers = itertools.count()
        self.scoped = scoped

    def body(self, closed: Any, args: Sequence[str], depth: int) -> tuple[list[str], list[str]]:
        """(lines, names of the results) at operands of these names."""
        jaxpr, consts = split_closed(closed)
        names: dict[Any, str] = dict(zip(jaxpr.invars, args, strict=True))
        names.update((v, _value(np.asarray(c))) for v, c in zip(jaxpr.constvars if consts else (), consts, strict=True))
        lines: list[str] = []
        for scope, eqns in itertools.groupby(jaxpr.eqns, _derivative if self.scoped else lambda eqn: ""):
            lines += [f'{"    " * depth}with jax.named_scope("{scope}"):'] if scope else []
            for eqn in eqns:
                lines += self._equation(eqn, [_atom(names, a) for a in eqn.invars], names, depth + bool(scope))
        return lines, [_atom(names, a) for a in jaxpr.outvars]

    def _equation(self, eqn: Any, args: list[str], names: dict[Any, str], depth: int) -> Iterator[str]:
        name, p, pad = eqn.primitive.name, eqn.params, "    " * depth
        if name in _INLINED:
            yield f"{pad}# {name}: what is in it"
            lines, outs = self.body(p.get("jaxpr", p.get("call_jaxpr")), args, depth)
            yield from lines
            names.update(zip(eqn.outvars, outs, strict=True))
            return
        outs = [f"v{next(self.numbers)}" for _ in eqn.outvars]
        names.update(zip(eqn.outvars, outs, strict=True))
        source = source_of(eqn)
        where = f"  # {source.short}" if source is not None else ""
        if name == "scan":
            yield from self._scan(eqn, args, outs, where, depth)
        elif name == "cond":
            functions = [self._nested(branch, depth) for branch in p["branches"]]
            yield from itertools.chain.from_iterable(lines for _, lines in functions)
            branches = _tuple([f for f, _ in functions])
            yield f"{pad}{_tuple(outs)} = lax.switch({args[0]}, {branches}, {', '.join(args[1:])}){where}"
        elif name in having("remat"):
            function, lines = self._nested(p["jaxpr"], depth)
            yield from lines
            yield f"{pad}{_tuple(outs)} = jax.checkpoint({function})({', '.join(args)}){where}"
        else:
            given = f"{outs[0]}" if not eqn.primitive.multiple_results else _tuple(outs)
            yield f"{pad}{given} = {_call(eqn, args)}{where}"

    def _nested(self, closed: Any, depth: int) -> tuple[str, list[str]]:
        """(name, lines) of a function inside another."""
        name, pad = f"f{next(self.numbers)}", "    " * depth
        args = [f"v{next(self.numbers)}" for _ in split_closed(closed)[0].invars]
        lines, outs = self.body(closed, args, depth + 1)
        return name, [f"{pad}def {name}({', '.join(args)}):", *lines, f"{pad}    return {_tuple(outs)}"]

    def _scan(self, eqn: Any, args: list[str], outs: list[str], where: str, depth: int) -> Iterator[str]:
        p, pad = eqn.params, "    " * depth
        constants, carries = scan_counts(p)
        carry, x = f"v{next(self.numbers)}", f"v{next(self.numbers)}"
        step = f"f{next(self.numbers)}"
        entries = len(args) - constants - carries
        inside = [
            *args[:constants],
            *(f"{carry}[{i}]" for i in range(carries)),
            *(f"{x}[{i}]" for i in range(entries)),
        ]
        lines, results = self.body(p["jaxpr"], inside, depth + 1)
        yield f"{pad}def {step}({carry}, {x}):"
        yield from lines
        yield f"{pad}    return {_tuple(results[:carries])}, {_tuple(results[carries:])}"
        given = f"{_tuple(args[constants : constants + carries])}, {_tuple(args[constants + carries :])}"
        options = f"length={p['length']}, reverse={p['reverse']}, unroll={p['unroll']}"
        yield f"{pad}{_tuple(outs[:carries])}, {_tuple(outs[carries:])} = lax.scan({step}, {given}, {options}){where}"


def _derivative(eqn: Any) -> str:
    return "transpose(jvp())" if is_backward(eqn) else "jvp()" if is_in_derivative(eqn) else ""


def _call(eqn: Any, args: Sequence[str]) -> str:
    """An equation as an expression."""
    name, p = str(eqn.primitive.name), eqn.params
    name = _ALIKE.get(name, name)
    given = ", ".join(args)
    if name in _PLAIN and hasattr(lax, name) and all(v is None or v is False for v in p.values()) and _one_shape(eqn):
        return f"lax.{name}({given})"
    if name == "convert_element_type" and not p["weak_type"] and p["sharding"] is None:
        return f"lax.convert_element_type({given}, {_dtype(p['new_dtype'])})"
    scatter = name.startswith("scatter")  # the combination of entries, a program, is in the name
    kept = {
        k: v
        for k, v in p.items()
        if not isinstance(v, Marker) and not (scatter and k in ("update_jaxpr", "update_consts"))
    }
    try:
        params = ", ".join(f"{k}={_parameter(v)}" for k, v in kept.items())
    except _NotWrittenError as error:
        raise _no_source(eqn, f"its parameter {error} has no form as source") from None
    called = f"lax.{name.replace('-', '_')}" if scatter else f"{_primitive(eqn)}.bind"
    return f"{called}({', '.join(filter(None, (given, params)))})"


def _one_shape(eqn: Any) -> bool:
    shapes = {a.aval.shape for a in eqn.invars if not (hasattr(a, "val") and a.aval.shape == ())}
    return len(shapes) == 1


def _primitive(eqn: Any) -> str:
    primitive = eqn.primitive
    if isinstance(primitive, FusedPrimitive):
        return f"fusionlab.kernels.OPS[{primitive.op.name!r}].primitives[{primitive.name!r}]"
    public = f"{primitive.name}_p"
    for module in ("lax", "jax.extend.core.primitives"):
        if getattr(_module(module), public, None) is primitive:
            return f"{module}.{public}"
    raise _no_source(eqn, "JAX has no public name for it")


@functools.cache
def _module(name: str) -> Any:
    import jax.extend.core.primitives as primitives

    return lax if name == "lax" else primitives


def _no_source(eqn: Any, why: str) -> ArgumentError:
    source = source_of(eqn)
    where = f" at {source}" if source is not None else ""
    return ArgumentError(
        f"minimise: {eqn.primitive.name}{where} cannot be written as source: {why}. Needed a program of JAX's own operations; the "
        "program found is in `.fn` and its arrays in `.arrays`, and `.jaxpr` prints it"
    )


class _NotWrittenError(Exception):
    """A parameter that has no form as source."""


def _parameter(value: Any) -> str:
    """A parameter as an expression."""
    match value:
        case None | bool() | int() | str() | float():
            return _named_number(value) if isinstance(value, enum.Enum) else repr(value)
        case np.dtype():
            return _dtype(value)
        case np.generic() | np.ndarray():
            return _value(np.asarray(value))
        case enum.Enum():
            return _named_number(value)
        case tuple() if (names := getattr(value, "_fields", None)) is not None:
            fields = ", ".join(f"{k}={_parameter(v)}" for k, v in zip(names, value, strict=True))
            return f"{_public(type(value))}({fields})"
        case tuple():
            return _tuple([_parameter(v) for v in value])
        case list():
            return f"[{', '.join(map(_parameter, value))}]"
    fields = getattr(value, "__dict__", None)
    if isinstance(value, Mapping) or not fields or not hasattr(lax, type(value).__name__):
        raise _NotWrittenError(f"of type {type(value).__name__}")
    return f"{_public(type(value))}({', '.join(f'{k}={_parameter(v)}' for k, v in fields.items())})"


def _named_number(value: enum.Enum) -> str:
    return f"{_public(type(value))}.{value.name}"


def _public(cls: type) -> str:
    for name, module in (("lax", lax), ("jax.lax", jax.lax)):
        if getattr(module, cls.__name__, None) is cls:
            return f"{name}.{cls.__name__}"
    raise _NotWrittenError(f"of type {cls.__name__}")


def _dtype(dtype: Any) -> str:
    if not isinstance(dtype, np.dtype):
        raise _NotWrittenError(f"of dtype {dtype}")
    return f"jax.numpy.dtype({dtype.name!r})"


def _atom(names: Mapping[Any, str], atom: Any) -> str:
    return _value(np.asarray(atom.val, atom.aval.dtype)) if hasattr(atom, "val") else names[atom]


def _value(array: np.ndarray) -> str:
    """An array written out; a scalar in most cases."""
    if array.dtype.kind == "b" and not array.shape:
        return f"np.bool_({bool(array)})"
    if array.dtype.kind in "iuf" and not array.shape:
        return f"np.{array.dtype.name}({_finite(str(array))})"
    numbers = array if array.dtype.kind in "iubcf" else array.astype(np.float64)
    return f"np.asarray({_finite(repr(numbers.tolist()))}, {_dtype(array.dtype)})"


def _finite(text: str) -> str:
    return text.replace("inf", "np.inf").replace("nan", "np.nan")


def _tuple(items: Sequence[str]) -> str:
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
