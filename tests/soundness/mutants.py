"""Mutants of a program: one primitive, number, operand, order, axis, mask or cast of it changed.

A site that is still found in a mutant has to be the mutant's. Axes that are read in another order are read backwards here: sizes at which
no two axes agree leave no other way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core

# Primitive -> those that may stand in its place.
OTHERS: Mapping[str, Sequence[str]] = {
    "add": ("sub", "mul"),
    "sub": ("add",),
    "mul": ("div", "add"),
    "div": ("mul",),
    "neg": ("abs",),
    "abs": ("neg",),
    "rsqrt": ("sqrt", "logistic"),
    "sqrt": ("rsqrt",),
    "square": ("abs",),
    "exp": ("tanh", "logistic"),
    "log": ("tanh",),
    "max": ("min",),
    "min": ("max",),
    "tanh": ("logistic", "sin"),
    "logistic": ("tanh",),
    "erf": ("tanh",),
    "erfc": ("logistic",),
    "reduce_sum": ("reduce_max",),
    "reduce_max": ("reduce_sum", "reduce_min"),
    "lt": ("le", "gt"),
    "gt": ("ge", "lt"),
    "le": ("lt", "ge"),
    "ge": ("gt", "le"),
    "and": ("or",),
    "or": ("and",),
}
_FACTORS = (1.1, 0.9, -1.0, 2.0, 1.003, 0.0)
_CALLS = ("jit", "pjit", "custom_jvp_call")


@dataclass(frozen=True)
class Flat:
    """A program without calls: its equations, in order."""

    consts: list[tuple[Any, Any]]
    inputs: list[Any]
    equations: list[Any]
    outputs: list[Any]
    debug: Any

    def closed(self, equations: list[Any]) -> Any:
        variables = [v for v, _ in self.consts]
        debug = self.debug._replace(arg_names=None, result_paths=None)
        jaxpr = jex_core.Jaxpr(variables, self.inputs, self.outputs, equations, debug_info=debug)
        return jex_core.ClosedJaxpr(jaxpr, [c for _, c in self.consts])


def flat(closed: Any) -> Flat:
    """A closed jaxpr with the bodies of its jits, and of JAX's own activations, in their place."""
    jaxpr = closed.jaxpr
    found = Flat(list(zip(jaxpr.constvars, closed.consts, strict=True)), list(jaxpr.invars), [], [], jaxpr.debug_info)

    def run(jaxpr: Any, env: dict[Any, Any]) -> list[Any]:
        def read(a: Any) -> Any:
            return a if isinstance(a, jex_core.Literal) else env.get(a, a)

        for eqn in jaxpr.eqns:
            ins = [read(a) for a in eqn.invars]
            inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
            if eqn.primitive.name in _CALLS and inner is not None:
                found.consts.extend(zip(inner.jaxpr.constvars, inner.consts, strict=True))
                env.update(
                    zip(eqn.outvars, run(inner.jaxpr, dict(zip(inner.jaxpr.invars, ins, strict=True))), strict=True)
                )
                continue
            outs = [jex_core.Var(v.aval) for v in eqn.outvars]
            env.update(zip(eqn.outvars, outs, strict=True))
            found.equations.append(eqn.replace(invars=ins, outvars=outs))
        return [read(a) for a in jaxpr.outvars]

    found.outputs.extend(run(jaxpr, {}))
    return found


def mutants(program: Flat, rng: random.Random) -> Iterator[tuple[str, Any]]:
    """Without end: (what was changed, the mutant as a closed jaxpr). Some do not type-check, and those may raise where they are run."""
    while True:
        at = rng.randrange(len(program.equations))
        change = rng.choice(_CHANGES)(program, at, rng)
        if change is not None:
            what, instead = change
            equations = [*program.equations[:at], *instead, *program.equations[at + 1 :]]
            yield f"{what} of {program.equations[at].primitive.name}", program.closed(equations)


Change = tuple[str, list[Any]] | None


def _traced(fn: Callable[..., Any], *atoms: Any) -> tuple[Any, list[Any]]:
    """(the equation that `fn` is, its results) on atoms; None of its own where it is several."""
    closed = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in atoms))
    eqn = closed.jaxpr.eqns[-1]
    outs = [jex_core.Var(v.aval) for v in eqn.outvars]
    return eqn.replace(invars=list(atoms), outvars=outs), outs


def _read(a: Any) -> bool:
    return not isinstance(a, jex_core.Literal)


def _is_float(a: Any) -> bool:
    return jnp.issubdtype(a.aval.dtype, jnp.floating)


_MAKERS: Mapping[str, Callable[..., Any]] = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "neg": lax.neg,
    "abs": lax.abs,
    "sin": lax.sin,
    "rsqrt": lax.rsqrt,
    "sqrt": lax.sqrt,
    "tanh": lax.tanh,
    "logistic": lax.logistic,
    "max": lax.max,
    "min": lax.min,
    "lt": lax.lt,
    "le": lax.le,
    "gt": lax.gt,
    "ge": lax.ge,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
}


def _primitive(program: Flat, at: int, rng: random.Random) -> Change:
    eqn = program.equations[at]
    names = OTHERS.get(eqn.primitive.name, ())
    if not names:
        return None
    name = rng.choice(names)
    if name.startswith("reduce_"):
        maker = {"reduce_max": jnp.max, "reduce_min": jnp.min, "reduce_sum": jnp.sum}[name]
        made, _ = _traced(lambda x: maker(x, tuple(int(a) for a in eqn.params["axes"])), *eqn.invars)
    else:
        made, _ = _traced(_MAKERS[name], *eqn.invars)
    return f"{name} in place", [made.replace(outvars=eqn.outvars)]


def _number(program: Flat, at: int, rng: random.Random) -> Change:
    eqn = program.equations[at]
    numbers = [i for i, a in enumerate(eqn.invars) if not _read(a) and not a.aval.shape and _is_float(a)]
    if not numbers:
        return None
    i, factor = rng.choice(numbers), rng.choice(_FACTORS)
    old = eqn.invars[i]
    with np.errstate(all="ignore"):
        new = jex_core.Literal(np.asarray(np.asarray(old.val, np.float64) * factor, old.aval.dtype)[()], old.aval)
    return f"a number {old.val:g} times {factor}", [eqn.replace(invars=[*eqn.invars[:i], new, *eqn.invars[i + 1 :]])]


def _order(program: Flat, at: int, rng: random.Random) -> Change:
    eqn = program.equations[at]
    if eqn.primitive.name in ("sub", "div"):
        return "another order", [eqn.replace(invars=eqn.invars[::-1])]
    if eqn.primitive.name == "select_n" and len(eqn.invars) == 3:
        which, no, yes = eqn.invars
        return "another order", [eqn.replace(invars=[which, yes, no])]
    return None


def _operand(program: Flat, at: int, rng: random.Random) -> Change:
    eqn = program.equations[at]
    i = rng.randrange(len(eqn.invars)) if eqn.invars else 0
    if not eqn.invars or not _read(eqn.invars[i]):
        return None
    old = eqn.invars[i]
    there = [*program.inputs, *(v for v, _ in program.consts), *(v for e in program.equations[:at] for v in e.outvars)]
    alike = [v for v in there if v is not old and (v.aval.shape, v.aval.dtype) == (old.aval.shape, old.aval.dtype)]
    if not alike:
        return None
    return "another operand", [eqn.replace(invars=[*eqn.invars[:i], rng.choice(alike), *eqn.invars[i + 1 :]])]


def _changed(what: str, wanted: Callable[[Any], bool], change: Callable[[random.Random, Any], Callable]) -> Any:
    """A change of one operand before an equation reads it."""

    def change_of(program: Flat, at: int, rng: random.Random) -> Change:
        eqn = program.equations[at]
        places = [i for i, a in enumerate(eqn.invars) if _read(a) and wanted(a)]
        if not places:
            return None
        i = rng.choice(places)
        made, (new,) = _traced(change(rng, eqn.invars[i]), eqn.invars[i])
        return what, [made, eqn.replace(invars=[*eqn.invars[:i], new, *eqn.invars[i + 1 :]])]

    return change_of


def _backwards(rng: random.Random, a: Any) -> Callable:
    axis = rng.choice([d for d, n in enumerate(a.aval.shape) if n > 1])
    return lambda x: lax.rev(x, (axis,))


def _in_sixteen_bits(rng: random.Random, a: Any) -> Callable:
    return lambda x: lax.reduce_precision(x, 8, 7)


_CHANGES: Sequence[Callable[[Flat, int, random.Random], Change]] = (
    _primitive,
    _number,
    _order,
    _operand,
    _changed("an axis backwards", lambda a: any(n > 1 for n in a.aval.shape), _backwards),
    _changed("the contrary of a mask", lambda a: a.aval.dtype == bool, lambda rng, a: lax.bitwise_not),
    _changed("16 bits", _is_float, _in_sixteen_bits),
    _changed("another function", _is_float, lambda rng, a: rng.choice([lax.tanh, lax.neg, lax.abs])),
)
