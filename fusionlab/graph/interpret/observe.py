"""Runs a program equation by equation and hands out every value as it is made, those in the bodies of loops and calls included.

Each equation is a program of its own, so its results are those of the program as it is written: XLA fuses nothing across equations.
A value is let go of after its last use; one that is read much later waits on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np
from jax import numpy as jnp

from ..jax_compat import FLATTENED, enable_x64, scan_counts, split_closed, types_in, variables_in
from ..primitives import having
from ..settings import has_wide_types, jax_defaults
from .widen import Interpreter, Val, is_inexact, only_draws, plain, wide_dtype

# Equations whose bodies are walked; all others run whole.
ENTERED = FLATTENED | having("remat", "rule") | {"scan"}


@dataclass(frozen=True)
class Made:
    """A value, as it is made.

    Attributes:
      variable: of the jaxpr that makes it.
      steps: the steps of the loops around it, outermost first.
      value: an array.
    """

    variable: Any
    steps: tuple[int, ...]
    value: Any


class Arithmetic(Protocol):
    """What the values of a running program are, and what an equation makes of them."""

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """The context for all else."""
        ...

    def argument(self, array: Any, aval: Any) -> Any:
        """An array that the program is given."""
        ...

    def constant(self, array: Any, aval: Any) -> Any:
        """An array that it captured."""
        ...

    def literal(self, number: np.ndarray) -> Any:
        """A number written into it."""
        ...

    def equation(self, eqn: Any, values: list[Any]) -> list[Any]:
        """The results of an equation."""
        ...

    def carried(self, value: Any) -> Any:
        """What one step of a loop hands to the next."""
        ...

    def array(self, value: Any) -> Any:
        """The value as an array."""
        ...


class Own:
    """The dtypes of the program `closed`."""

    def __init__(self, closed: Any) -> None:
        self._wide = has_wide_types(types_in(closed))

    def around(self) -> contextlib.AbstractContextManager[Any]:
        return enable_x64(True) if self._wide else contextlib.nullcontext()

    def argument(self, array: Any, aval: Any) -> Any:
        return array if _is_key(aval) else jnp.asarray(array, aval.dtype)

    def constant(self, array: Any, aval: Any) -> Any:
        return array

    def literal(self, number: np.ndarray) -> Any:
        return jnp.asarray(number)

    def equation(self, eqn: Any, values: list[Any]) -> list[Any]:
        with eqn.ctx.manager:
            outs = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
        return list(outs) if eqn.primitive.multiple_results else [outs]

    def carried(self, value: Any) -> Any:
        return value

    def array(self, value: Any) -> Any:
        return value


@dataclass(frozen=True)
class Wide:
    """Every float in float64, as the reference has it."""

    interpreter: Interpreter = field(default_factory=Interpreter)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        with jax_defaults(), enable_x64(True):
            yield

    def argument(self, array: Any, aval: Any) -> Any:
        if not is_inexact(aval.dtype):
            return plain(array if _is_key(aval) else jnp.asarray(array, aval.dtype))
        return plain(jnp.asarray(np.asarray(array, aval.dtype).astype(wide_dtype(aval.dtype))))

    def constant(self, array: Any, aval: Any) -> Any:
        return self.interpreter.constant(array, aval)

    def literal(self, number: np.ndarray) -> Any:
        return self.interpreter.literal(number)

    def equation(self, eqn: Any, values: list[Any]) -> list[Any]:
        with eqn.ctx.manager:
            return self.interpreter.equation(eqn, values)

    def carried(self, value: Val) -> Any:
        return plain(value.wide)

    def array(self, value: Val) -> Any:
        return value.wide


def observed(closed: Any, arrays: Sequence[Any], arithmetic: Arithmetic) -> Iterator[Made]:
    """Every value that the program makes from these arrays, in the order in which they are made.

    Args:
      closed: a closed jaxpr.
      arrays: one for each of its inputs.
      arithmetic: `Own` or `Wide`.
    """
    jaxpr, _ = split_closed(closed)
    with arithmetic.around():
        given = [arithmetic.argument(x, v.aval) for x, v in zip(arrays, jaxpr.invars, strict=True)]
    return _Walk(arithmetic).run(closed, given, ())


def count_of(closed: Any) -> int:
    """How many values `observed` hands out."""
    total = 0
    for eqn in split_closed(closed)[0].eqns:
        total += len(eqn.outvars)
        if eqn.primitive.name in ENTERED and not (eqn.primitive.name == "scan" and only_draws(eqn)):
            body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            total += count_of(body) * eqn.params.get("length", 1)
    return total


_LATER = 64  # equations after which a value that is still to be read is kept on the host until then
_Values = Generator[Made, None, list[Any]]


@dataclass(frozen=True)
class _Walk:
    """No context is held while a value is handed out."""

    arithmetic: Arithmetic

    def run(self, closed: Any, args: Sequence[Any], steps: tuple[int, ...]) -> _Values:
        jaxpr, consts = split_closed(closed)
        values = dict(zip(jaxpr.invars, args, strict=True))
        with self.arithmetic.around():
            for v, const in zip(jaxpr.constvars if consts else (), consts, strict=True):
                values[v] = self.arithmetic.constant(const, v.aval)
        dying = _last_uses(jaxpr)
        waiting = _read_later(jaxpr, dying)
        for i, eqn in enumerate(jaxpr.eqns):
            outs = yield from self._equation(eqn, [self._read(values, a) for a in eqn.invars], steps)
            values.update(zip(eqn.outvars, outs, strict=True))
            for v, value in zip(eqn.outvars, outs, strict=True):
                yield Made(v, steps, self._array(value))
            for v in dying.get(i, ()):
                values.pop(v, None)
            for v in waiting.get(i - _LATER, ()):
                values[v] = jax.tree.map(_on_host, values[v])
        return [self._read(values, a) for a in jaxpr.outvars]

    def _read(self, values: dict, atom: Any) -> Any:
        if not hasattr(atom, "val"):
            return values[atom]
        with self.arithmetic.around():
            return self.arithmetic.literal(np.asarray(atom.val, atom.aval.dtype))

    def _array(self, value: Any) -> Any:
        with self.arithmetic.around():
            return self.arithmetic.array(value)

    def _equation(self, eqn: Any, values: list[Any], steps: tuple[int, ...]) -> _Values:
        name = eqn.primitive.name
        # In steps it would draw other numbers; of no steps there is nothing to stack.
        if name == "scan" and eqn.params["length"] and not only_draws(eqn):
            return (yield from self._scan(eqn, values, steps))
        if name in ENTERED and name != "scan":
            return (yield from self.run(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")), values, steps))
        with self.arithmetic.around():
            return self.arithmetic.equation(eqn, values)

    def _scan(self, eqn: Any, values: list[Any], steps: tuple[int, ...]) -> _Values:
        p = eqn.params
        constants, carries = scan_counts(p)
        fixed, carry, xs = values[:constants], values[constants : constants + carries], values[constants + carries :]
        made: dict[int, list[Any]] = {}
        for t in range(p["length"] - 1, -1, -1) if p["reverse"] else range(p["length"]):
            with self.arithmetic.around():
                given = [*map(self.arithmetic.carried, carry), *(jax.tree.map(lambda x, t=t: x[t], x) for x in xs)]
            outs = yield from self.run(p["jaxpr"], [*fixed, *given], (*steps, t))
            carry, made[t] = outs[:carries], outs[carries:]
        with self.arithmetic.around():
            stacked = [
                jax.tree.map(lambda *ys: jnp.stack(ys), *(made[t][i] for t in range(p["length"])))
                for i in range(len(eqn.outvars) - carries)
            ]
            return [*map(self.arithmetic.carried, carry), *stacked]


def _last_uses(jaxpr: Any) -> dict[int, list[Any]]:
    """Number of an equation -> the variables that nothing needs after it."""
    last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in (*variables_in(eqn.invars), *eqn.outvars)}
    kept = set(variables_in(jaxpr.outvars))
    found: dict[int, list[Any]] = {}
    for v, i in last.items():
        if v not in kept:
            found.setdefault(i, []).append(v)
    return found


def _read_later(jaxpr: Any, dying: dict[int, list[Any]]) -> dict[int, list[Any]]:
    """Number of an equation -> those of its results that another reads more than `_LATER` equations later."""
    last = {v: i for i, variables in dying.items() for v in variables}
    late = {i: [v for v in eqn.outvars if last.get(v, i) > i + _LATER] for i, eqn in enumerate(jaxpr.eqns)}
    return {i: variables for i, variables in late.items() if variables}


def _on_host(x: Any) -> Any:
    """The array on the host, unless it is one of keys or lies on several devices."""
    return x if _is_key(x) or (isinstance(x, jax.Array) and len(x.devices()) > 1) else np.asarray(x)


def _is_key(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jax.dtypes.extended)
