"""A program with the arrays that it runs on, and smaller ones cut out of it: what they read and do not make is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from fusionlab.graph.jax_compat import (
    FLATTENED,
    child_jaxprs,
    rebuild,
    scan_counts,
    split_closed,
    variables_in,
    without_dead_code,
)
from fusionlab.graph.primitives import having
from fusionlab.graph.program.equations import inlined
from fusionlab.graph.settings import as_function

_CALLS = FLATTENED | having("remat", "rule")
_MOST_UNROLLED = 4096  # equations of a program whose loops are written out


@dataclass(frozen=True, eq=False)
class Small:
    """A program with its arrays.

    Attributes:
      closed: a closed jaxpr that captures nothing.
      arrays: one for each of its inputs.
    """

    closed: Any
    arrays: tuple[Any, ...]

    @property
    def jaxpr(self) -> Any:
        return split_closed(self.closed)[0]

    @property
    def fn(self) -> Callable[..., Any]:
        """Arrays -> a list of arrays."""
        return as_function(self.closed)

    @property
    def count(self) -> int:
        """The number of its equations, those inside loops and calls included."""
        return _count(self.closed)


def small(closed: Any, arrays: Sequence[Any]) -> Small:
    """A program whose captured arrays become inputs; equations that nothing reads are left out."""
    jaxpr, consts = split_closed(without_dead_code(closed))
    constvars = jaxpr.constvars if consts else ()
    read = set(variables_in([*(a for eqn in jaxpr.eqns for a in eqn.invars), *jaxpr.outvars]))
    given = [(v, x) for v, x in zip([*jaxpr.invars, *constvars], [*arrays, *consts], strict=True) if v in read]
    new = rebuild(closed, [], [v for v, _ in given], list(jaxpr.outvars), list(jaxpr.eqns), [])
    return Small(new, tuple(x for _, x in given))


def _count(closed: Any) -> int:
    eqns = split_closed(closed)[0].eqns
    return len(eqns) + sum(_count(child) for eqn in eqns for _, _, child in child_jaxprs(eqn))


def cut(whole: Small, kept: Iterable[int]) -> Small:
    """Some equations of a program, by number: what they read from others is recorded, what no other of them reads is returned."""
    eqns = [whole.jaxpr.eqns[i] for i in sorted(kept)]
    made = {v for eqn in eqns for v in eqn.outvars}
    read = dict.fromkeys(v for eqn in eqns for v in variables_in(eqn.invars))
    returned = set(variables_in(whole.jaxpr.outvars))
    everywhere = {v for eqn in whole.jaxpr.eqns for v in variables_in(eqn.invars)} | returned
    outs = [v for eqn in eqns for v in eqn.outvars if v in returned or (v not in read and v in everywhere)]
    inputs = [v for v in read if v not in made]
    return Small(rebuild(whole.closed, [], inputs, outs, eqns, []), recorded(whole, inputs))


def recorded(whole: Small, atoms: Sequence[Any]) -> tuple[Any, ...]:
    """What some variables of a program, or literals, are when it runs."""
    jaxpr = whole.jaxpr
    known: dict[Any, Any] = dict(zip(jaxpr.invars, whole.arrays, strict=True))
    unknown = list(dict.fromkeys(v for v in variables_in(atoms) if v not in known))
    if unknown:
        behind = without_dead_code(rebuild(whole.closed, [], list(jaxpr.invars), unknown, list(jaxpr.eqns), []))
        known.update(zip(unknown, jax.jit(as_function(behind))(*whole.arrays), strict=True))
    return tuple(np.asarray(a.val, a.aval.dtype) if hasattr(a, "val") else known[a] for a in atoms)


# Inside loops, branches and calls.


def entered(whole: Small, number: int, step: int = 0) -> Small | None:
    """The body of an equation as a program: a loop's in one step, the branch that is taken; None for what has no body to enter."""
    eqn = whole.jaxpr.eqns[number]
    name, p = eqn.primitive.name, eqn.params
    if name in _CALLS:
        return small(_scoped(_body(eqn), eqn), recorded(whole, eqn.invars))
    if name == "cond":
        index, *operands = recorded(whole, eqn.invars)
        return small(_scoped(p["branches"][int(index)], eqn), operands)
    if name == "scan" and p["length"]:
        return small(_scoped(p["jaxpr"], eqn), _at_step(eqn, recorded(whole, eqn.invars), step))
    return None


def _scoped(body: Any, outer: Any) -> Any:
    """A body whose equations name the scopes around it as well: they tell what is a backward pass."""
    jaxpr, consts = split_closed(body)
    eqns = [_inside_of(eqn, outer) for eqn in jaxpr.eqns]
    return rebuild(body, list(jaxpr.constvars), list(jaxpr.invars), list(jaxpr.outvars), eqns, list(consts))


def _inside_of(eqn: Any, outer: Any) -> Any:
    info = eqn.source_info
    return eqn.replace(source_info=info.replace(name_stack=outer.source_info.name_stack + info.name_stack))


def _body(eqn: Any) -> Any:
    return eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))


def _at_step(eqn: Any, given: Sequence[Any], step: int) -> list[Any]:
    """What the body of a scan reads in the step of that index."""
    p = eqn.params
    constants, carries = scan_counts(p)
    fixed, carry, xs = (
        list(given[:constants]),
        list(given[constants : constants + carries]),
        given[constants + carries :],
    )
    body = jax.jit(as_function(_as_closed(p["jaxpr"])))
    for t in range(p["length"] - 1, step, -1) if p["reverse"] else range(step):
        carry = body(*fixed, *carry, *(x[t] for x in xs))[:carries]
    return [*fixed, *carry, *(x[step] for x in xs)]


def _as_closed(jaxpr: Any) -> Any:
    return jaxpr if hasattr(jaxpr, "consts") else jex_core.ClosedJaxpr(jaxpr, ())


def written_out(whole: Small, loops: bool) -> Small | None:
    """The program with the bodies of calls in their place, with `loops` those of scans as well, step by step; None if it has none, or
    would grow too long.
    """
    writer = _Writer(loops)
    outs = writer.run(whole.closed, list(whole.jaxpr.invars))
    if not writer.changed or len(writer.eqns) > _MOST_UNROLLED:
        return None
    return small(rebuild(whole.closed, [], list(whole.jaxpr.invars), outs, writer.eqns, []), whole.arrays)


class _Writer:
    def __init__(self, loops: bool) -> None:
        self.loops, self.changed = loops, False
        self.eqns: list[Any] = []
        self.entries: dict[
            tuple[Any, int], Any
        ] = {}  # (what loops gave stacked, or read step by step; the step) -> the entry

    def run(self, closed: Any, atoms: Sequence[Any]) -> list[Any]:
        jaxpr, consts = split_closed(closed)
        names: dict[Any, Any] = dict(zip(jaxpr.invars, atoms, strict=True))
        if consts:
            names.update((v, jex_core.Literal(c, v.aval)) for v, c in zip(jaxpr.constvars, consts, strict=True))

        def read(atom: Any) -> Any:
            return atom if hasattr(atom, "val") else names[atom]

        for eqn in jaxpr.eqns:
            if len(self.eqns) > _MOST_UNROLLED:
                break
            given = list(map(read, eqn.invars))
            if (outs := self._inside(eqn, given)) is None:
                outs = [jex_core.Var(v.aval) for v in eqn.outvars]
                self.eqns.append(eqn.replace(invars=given, outvars=outs))
            names.update(zip(eqn.outvars, outs, strict=True))
        return [names.get(a, a) if not hasattr(a, "val") else a for a in jaxpr.outvars]

    def _inside(self, eqn: Any, given: list[Any]) -> list[Any] | None:
        name = eqn.primitive.name
        if name in _CALLS:
            self.changed = True
            return self.run(_scoped(_body(eqn), eqn), given)
        if name == "scan" and self.loops and eqn.params["length"]:
            self.changed = True
            return self._scan(eqn, given)
        return None

    def _scan(self, eqn: Any, given: list[Any]) -> list[Any]:
        p = eqn.params
        constants, carries = scan_counts(p)
        fixed, carry, xs = given[:constants], given[constants : constants + carries], given[constants + carries :]
        made: dict[int, list[Any]] = {}
        for t in range(p["length"] - 1, -1, -1) if p["reverse"] else range(p["length"]):
            outs = self.run(_scoped(p["jaxpr"], eqn), [*fixed, *carry, *(self._entry(eqn, x, t) for x in xs)])
            carry, made[t] = outs[:carries], outs[carries:]
        columns = ([made[t][i] for t in range(p["length"])] for i in range(len(eqn.outvars) - carries))
        return [*carry, *(self._stacked(eqn, column) for column in columns)]

    def _entry(self, eqn: Any, x: Any, t: int) -> Any:
        if hasattr(x, "val"):
            return self._added(eqn, lambda x: x[t], [x])[0]
        if (x, t) not in self.entries:  # a loop and its backward pass read the same ones
            (self.entries[x, t],) = self._added(eqn, lambda x: x[t], [x])
        return self.entries[x, t]

    def _stacked(self, eqn: Any, column: list[Any]) -> Any:
        (stack,) = self._added(eqn, lambda *ys: jnp.stack(ys), column)
        self.entries.update(((stack, t), entry) for t, entry in enumerate(column))
        return stack

    def _added(self, eqn: Any, fn: Callable[..., Any], atoms: Sequence[Any]) -> list[Any]:
        """The results of a function of a few atoms, whose equations are added."""
        closed = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in atoms))
        eqns, outs = inlined(closed, atoms, eqn.source_info, None)
        self.eqns += eqns
        return outs


def inward(whole: Small, steps: Sequence[int] = ()) -> Iterator[Small]:
    """Programs that may show the same without one loop or call: first bodies, of loops in these steps and the first, middle and last."""
    for i, eqn in enumerate(whole.jaxpr.eqns):
        length = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for step in dict.fromkeys([*(s for s in steps if s < length), 0, length // 2, length - 1]):
            inside = entered(whole, i, step)
            if inside is not None and inside.jaxpr.eqns:
                yield inside
    for loops in (False, True):
        out = written_out(whole, loops)
        if out is not None:
            yield out
