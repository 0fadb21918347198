"""A function with its derivative as two programs: the forward one, the backward one, and the residuals passed between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jax.extend import core as jex_core

from ..certify.certify import with_vjp
from ..jax_compat import split_closed, variables_in
from ..primitives import having

# Made again where the gradients are computed, rather than kept until then: they cost nothing, and what they are made of is there.
_FREE = having("layout", "variance", "cast")

Taken = tuple[Literal["input", "value", "residual"], int]


@dataclass(frozen=True, eq=False)
class Split:
    """A function and its derivative.

    Attributes:
      forward: jaxpr of the inputs -> (value, *residuals).
      backward: jaxpr of (*taken, cotangent) -> gradients.
      taken: the source of each operand of `backward` but the last: an input, the value or a residual, with its number.
      others: the number of further results that `forward` gives after the value.
    """

    forward: Any
    backward: Any
    taken: tuple[Taken, ...]
    others: int = 0

    @property
    def residuals(self) -> tuple[Any, ...]:
        """The types of the residuals."""
        return tuple(v.aval for v in split_closed(self.forward)[0].outvars[1 + self.others :])


def split_vjp(fn: Callable[..., Any], avals: Sequence[Any], out: Any, wanted: Sequence[int]) -> Split:
    """Splits `fn` (arguments of types `avals` -> one result of type `out`), differentiated by the arguments `wanted`."""
    return split_of(with_vjp(fn, avals, out, wanted))


def split_of(closed: Any, others: int = 0) -> Split:
    """Splits a jaxpr of (inputs, cotangent) -> (value, further results, of which there are `others`, and gradients)."""
    jaxpr, consts = split_closed(closed)
    constants = dict(zip(jaxpr.constvars if consts else (), consts, strict=True))
    *inputs, cotangent = jaxpr.invars
    values, gradients = list(jaxpr.outvars[: 1 + others]), list(jaxpr.outvars[1 + others :])
    value = values[0]
    still, back = _halves(jaxpr.eqns, cotangent)
    first = _needed(still, values)
    chosen = set(map(id, first))
    again = [eqn for eqn in still if id(eqn) not in chosen]
    free = _free(first, {*inputs, *constants})
    back = _needed([*(eqn for eqn in first if id(eqn) in free), *again, *back], gradients)
    needed = _read_from_outside(back, gradients, {cotangent, *constants})
    computed = _results_of(first)
    residuals = [v for v in needed if v in computed and v is not value]
    taken = tuple(_taken(v, inputs, value, residuals) for v in needed)
    forward = _closed(jaxpr, constants, inputs, [*values, *residuals], first)
    return Split(forward, _closed(jaxpr, constants, [*needed, cotangent], gradients, back), taken, others)


def _halves(eqns: Sequence[Any], cotangent: Any) -> tuple[list[Any], list[Any]]:
    """(equations that do not depend on the cotangent, those that do)."""
    moving, back, still = {cotangent}, [], []
    for eqn in eqns:
        if moving.isdisjoint(variables_in(eqn.invars)):
            still.append(eqn)
        else:
            back.append(eqn)
            moving.update(eqn.outvars)
    return still, back


def _results_of(eqns: Sequence[Any]) -> set[Any]:
    return {v for eqn in eqns for v in eqn.outvars}


def _read_from_outside(eqns: Sequence[Any], results: Sequence[Any], known: set[Any]) -> list[Any]:
    """The variables, each once, that equations read or return, and that are neither computed by them nor known."""
    known = _results_of(eqns) | known
    atoms = itertools.chain(*(eqn.invars for eqn in eqns), results)
    return list(dict.fromkeys(v for v in variables_in(atoms) if v not in known))


def _taken(var: Any, inputs: list[Any], value: Any, residuals: list[Any]) -> Taken:
    if var is value:
        return "value", 0
    return ("residual", residuals.index(var)) if var in residuals else ("input", inputs.index(var))


def _needed(eqns: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The equations that some results depend on, in their order."""
    wanted, kept = set(variables_in(results)), []
    for eqn in reversed(eqns):
        if not wanted.isdisjoint(eqn.outvars):
            kept.append(eqn)
            wanted.update(variables_in(eqn.invars))
    return kept[::-1]


def _free(eqns: Sequence[Any], known: set[Any]) -> set[int]:
    """Ids of the equations that only change the form of `known` variables."""
    known, free = set(known), set[int]()
    for eqn in eqns:
        if eqn.primitive.name in _FREE and known.issuperset(variables_in(eqn.invars)):
            free.add(id(eqn))
            known.update(eqn.outvars)
    return free


def _closed(like: Any, constants: dict[Any, Any], invars: list[Any], outvars: list[Any], eqns: list[Any]) -> Any:
    read = {v for eqn in eqns for v in variables_in(eqn.invars)} | set(variables_in(outvars))
    kept = {v: c for v, c in constants.items() if v in read}
    debug = like.debug_info._replace(arg_names=None, result_paths=None)
    new = jex_core.Jaxpr(list(kept), invars, outvars, eqns, debug_info=debug)
    return jex_core.ClosedJaxpr(new, list(kept.values()))
