"""What a loop keeps for the loop that runs back: nothing that the second can make itself, by the same equations, from less.

A differentiated scan stacks the values that its backward pass reads, in the form in which it reads them: the widened copy of an array,
a mask broadcast to the scores, a parameter in another shape, the same array transposed. Here the second scan makes such a value in its
own body, from the arrays that both are given and the values that are stacked anyway, or from a smaller one that is stacked in its place.
Equations that move or compare entries, or cast them or combine them with a number, are done again for less; other arithmetic of entries
(the activation of a value that is stacked as well) only where next to nothing more is stacked for it. The equations are the program's
own, or those with which a fused op's first result is made of its operands and its other results: `again(params)` of its primitive.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend import core as jex_core

from ..jax_compat import has_side_effects, rebuild, scan_counts, scan_numbers, variables_in, varying_axes
from ..primitives import having
from ..program.crossing import stacked_type
from ..program.equations import inlined, kind
from ..program.explicit_axes import as_argument, mesh_of
from ..settings import jax_defaults

_MOVES = having("layout", "variance", "copy", "cast", "equality", "order", "logic", "choice") | {"iota"}
_WITH_A_NUMBER = having("scaling", "addition", "difference")
_ARITHMETIC = _WITH_A_NUMBER | having(
    "power", "root", "extreme", "magnitude", "exponential", "logarithm", "trigonometric", "hyperbolic", "sigmoid"
)
_MOST_AGAIN = 16  # equations of arithmetic from what is there to one value
_FEW = 16  # times as many bytes as may be stacked, or passed on, for a value that arithmetic makes: a number of each row, a vector


def with_less_stacked(eqns: list, outvars: list) -> list:
    """The equations of a block, its scans with less to pass on; what nobody reads then is left to dead code elimination."""
    scans = [eqn for eqn in eqns if eqn.primitive.name == "scan"]
    if len(scans) < 2:
        return eqns
    users = _users(eqns, outvars)
    now = {id(eqn): eqn for eqn in scans}
    for forward, reader, only in _pairs(scans, users):
        plan = _Plan(_Scan(now[id(forward)]), _Scan(now[id(reader)]), users.keys(), only)
        if plan.gone:
            now[id(forward)], now[id(reader)] = plan.forward_eqn(), plan.reader_eqn()
    return [now.get(id(eqn), eqn) for eqn in eqns]


def _pairs(scans: list, users: Mapping[Any, list]) -> Iterator[tuple[Any, Any, set[Any]]]:
    """(scan, another of as many steps that reads its per-step results, those that nothing else reads)."""
    for forward in scans:
        own = forward.outvars[scan_counts(forward.params)[1] :]
        for reader in scans:
            only = {v for v in own if len(users.get(v, ())) == 1 and users[v][0] is reader}
            if only and reader.params["length"] == forward.params["length"]:
                yield forward, reader, only


def _users(eqns: Iterable[Any], outvars: Iterable[Any]) -> dict[Any, list[Any]]:
    """Variable -> the equations that read it, as often as they do; None where it is a result of the block."""
    users: dict[Any, list[Any]] = {}
    for eqn in eqns:
        for var in variables_in(eqn.invars):
            users.setdefault(var, []).append(eqn)
    for var in variables_in(outvars):
        users.setdefault(var, []).append(None)
    return users


class _Scan:
    """A scan equation in parts.

    Attributes: `eqn`, `body` (closed), `jaxpr` (the body's), `consts`, `carried` (how many of each), `given` (outer atom of each operand
    and the body's variable for it), `results` (the body's atom of each per-step result and the outer variable for it).
    """

    def __init__(self, eqn: Any) -> None:
        self.eqn, self.body = eqn, eqn.params["jaxpr"]
        self.jaxpr = self.body.jaxpr
        self.consts, self.carried = scan_counts(eqn.params)
        self.given = list(zip(eqn.invars, self.jaxpr.invars, strict=True))
        self.results = list(zip(self.jaxpr.outvars[self.carried :], eqn.outvars[self.carried :], strict=True))

    @property
    def first(self) -> int:
        """The number of its first operand that has an entry for each step."""
        return self.consts + self.carried

    def with_parts(self, given: Sequence[tuple[Any, Any]], consts: int, outvars: Sequence[Any], eqns: list) -> Any:
        """The equation with other operands (outer atom, the body's variable), results of the body and equations in the body. Results
        without an outer variable get one.
        """
        more = [stacked_type(v.aval, self.eqn.params["length"]) for v in outvars[len(self.jaxpr.outvars) :]]
        captured = list(self.jaxpr.constvars), list(getattr(self.body, "consts", ()))
        body = rebuild(self.body, captured[0], [v for _, v in given], list(outvars), eqns, captured[1])
        counts = consts, self.carried, len(given) - consts - self.carried, len(outvars) - self.carried
        params = self.eqn.params | scan_numbers(self.eqn.params, *counts) | {"jaxpr": body}
        outer = [*self.eqn.outvars, *map(jex_core.Var, more)]
        return self.eqn.replace(params=params, invars=[a for a, _ in given], outvars=outer)


def _bytes(var: Any) -> int:
    shape, dtype = getattr(var.aval, "shape", ()), getattr(var.aval, "dtype", None)
    return math.prod(shape) * getattr(dtype, "itemsize", 0)


@dataclass
class _Plan:
    """What a scan need not stack for another one.

    Attributes:
      forward, reader: the scans.
      read: the results of the first that anything reads.
      only: those that nothing but the second reads, once.
      outer: variable of the first body -> the atom that it is given for it: whole, or with an entry for each step.
      stored: variable of the first body -> the result in which it is stacked.
      instead: the body's variable of a result that is not -> the variables of the first body from which the second makes it; that variable
        alone where it is given to the first body itself.
      price: the bytes that the variables of the first body take until the second reads them, if it reads one that it does not read yet.
    """

    forward: _Scan
    reader: _Scan
    read: Collection[Any]
    only: set[Any]
    outer: dict[Any, Any] = field(default_factory=dict)
    stored: dict[Any, Any] = field(default_factory=dict)
    instead: dict[Any, tuple[Any, ...]] = field(default_factory=dict)
    price: dict[Any, int] = field(default_factory=dict)
    _roots: dict[Any, tuple[Any, ...]] = field(default_factory=dict)
    _arithmetic: dict[Any, int] = field(default_factory=dict)  # equations of it from the roots on
    _again: list[Any] = field(default_factory=list)  # the equations of the first body, as they are when done again

    def __post_init__(self) -> None:
        results = [(v, outer) for v, outer in self.forward.results if not isinstance(v, jex_core.Literal)]
        self.only &= _variables(self.reader.given[self.reader.first :])
        self.wanted = {v: outer for v, outer in reversed(results) if outer in self.only}
        self.stored |= {v: outer for v, outer in results if outer in self.read and outer not in self.only}
        self._given()
        for eqn in self.forward.jaxpr.eqns:
            steps = _made_by_arithmetic(eqn)
            self._make(eqn, eqn.outvars[1:] if steps else eqn.outvars)
            for step in steps:
                self._make(step, step.outvars)
            self._again += steps or [eqn]
        # Result -> the body's variable.
        self.gone = {outer: v for v, outer in results if outer in self.only and self.stored.get(v) is not outer}
        self.roots = list(dict.fromkeys(r for v in self.gone.values() for r in self.instead.get(v, (v,))))

    def _given(self) -> None:
        """Decides on the operands of the first body."""
        forward, reader, length = self.forward, self.reader, self.forward.eqn.params["length"]
        whole, entries = _variables(reader.given[: reader.consts]), _variables(reader.given[reader.first :])
        for i, (atom, var) in enumerate(forward.given):
            is_whole, is_carried = i < forward.consts, forward.consts <= i < forward.first
            there = isinstance(atom, jex_core.Literal) or atom in (whole if is_whole else entries)
            self.price[var] = _bytes(var) * (1 if is_whole else length)
            if not is_carried:
                self.outer[var] = atom
                self.price[var] *= not there
            self._decide(var, None if is_carried else (var,))

    def _make(self, eqn: Any, results: Iterable[Any]) -> None:
        """Decides on results of an equation of the first body."""
        again = 1 + sum(self._arithmetic.get(v, 0) for v in set(variables_in(eqn.invars)))
        for var in results:
            self.price[var] = direct = self.forward.eqn.params["length"] * _bytes(var)
            roots = None
            if _may_be_again(eqn) and var not in self.stored:
                if _is_free(eqn):
                    roots = self._cheaper(eqn, direct)
                elif again <= _MOST_AGAIN:
                    roots = self._cheaper(eqn, max(direct // _FEW, 1))
            self._arithmetic[var] = again if roots is not None else 0
            self._decide(var, roots)

    def _cheaper(self, eqn: Any, direct: int) -> tuple[Any, ...] | None:
        """What an equation's result can be made from in less than `direct` bytes, or in as many without stacking anything; else None."""
        found = tuple(dict.fromkeys(r for v in variables_in(eqn.invars) for r in self._roots.get(v, (v,))))
        need = sum(self.price.get(r, direct) for r in found)
        return found if need < direct or (need == direct and found and self.outer.keys() >= set(found)) else None

    def _decide(self, var: Any, roots: tuple[Any, ...] | None) -> None:
        """`roots`: what the second body can make a variable from; None if it has to be stacked to be there."""
        self._roots[var] = (var,) if roots is None else roots
        if roots is None and var in self.wanted:
            self.stored.setdefault(var, self.wanted[var])
        elif var in self.wanted and var not in self.stored:
            self.instead[var] = self._roots[var]
            self.price.update(dict.fromkeys(self._roots[var], 0))
        if var in self.stored:
            self.price[var] = 0

    # -- the new equations ----------------------------------------------------------------------------------------

    def forward_eqn(self) -> Any:
        """The first scan, which stacks what takes the place of others as well; `stored` gets that."""
        scan = self.forward
        new = [r for r in self.roots if r not in self.stored and r not in self.outer]
        eqn = scan.with_parts(scan.given, scan.consts, [*scan.jaxpr.outvars, *new], scan.jaxpr.eqns)
        self.stored.update(zip(new, eqn.outvars[len(scan.eqn.outvars) :], strict=True))
        return eqn

    def reader_eqn(self) -> Any:
        """The second scan, which makes in its body what it was given before. It comes after `forward_eqn`."""
        scan, env = self.reader, dict[Any, Any]()
        given = scan.given[scan.first :]
        there = _variables(given) & self.gone.keys()
        consts, entries = list(scan.given[: scan.consts]), [(a, v) for a, v in given if not _among(a, there)]
        whole = {v for _, v in self.forward.given[: self.forward.consts]}
        for root in self.roots:
            atom = self.outer[root] if root in self.outer else self.stored[root]
            env[root] = _entering(consts if root in whole else entries, atom, root.aval)
        again = self._made_again(env)
        renamed = {v: env[self.gone[a]] for a, v in given if _among(a, there)}
        eqns = [e.replace(invars=_renamed(e.invars, renamed)) for e in scan.jaxpr.eqns]
        operands = [*consts, *scan.given[scan.consts : scan.first], *entries]
        return scan.with_parts(operands, len(consts), _renamed(scan.jaxpr.outvars, renamed), [*again, *eqns])

    def _made_again(self, env: dict[Any, Any]) -> list[Any]:
        """The equations of the first body that make what is no longer stacked, on the variables of `env`, which gets their results."""
        wanted, chosen = {v for v in self.gone.values() if v not in env}, list[Any]()
        for eqn in reversed(self._again):
            if not wanted.isdisjoint(eqn.outvars):
                chosen.append(eqn)
                wanted.update(v for v in variables_in(eqn.invars) if v not in env)
        eqns = list[Any]()
        for eqn in reversed(chosen):
            outvars = [jex_core.Var(v.aval) for v in eqn.outvars]
            eqns.append(eqn.replace(invars=_renamed(eqn.invars, env), outvars=outvars))
            env.update(zip(eqn.outvars, outvars, strict=True))
        return eqns


def _variables(given: Iterable[tuple[Any, Any]]) -> set[Any]:
    """The variables among the outer atoms of some operands."""
    return set(variables_in(a for a, _ in given))


def _among(atom: Any, variables: Set[Any]) -> bool:
    return not isinstance(atom, jex_core.Literal) and atom in variables


def _may_be_again(eqn: Any) -> bool:
    """Whether an equation may be done again rather than its result kept."""
    return eqn.primitive.name in _MOVES | _ARITHMETIC and len(eqn.outvars) == 1 and not has_side_effects(eqn)


def _is_free(eqn: Any) -> bool:
    """Whether it takes next to nothing inside the kernel that reads its result."""
    with_a_number = eqn.primitive.name in _WITH_A_NUMBER and len(variables_in(eqn.invars)) == 1
    return eqn.primitive.name in _MOVES or with_a_number


def _made_by_arithmetic(eqn: Any) -> list[Any]:
    """Equations that make the first result of a fused op from its operands and its other results; none where the op has none, or the
    values vary along axes of a `shard_map`."""
    function = getattr(eqn.primitive, "again", lambda params: None)(eqn.params)
    if function is None or any(varying_axes(v.aval) for v in eqn.outvars):
        return []
    out, *others = eqn.outvars
    kept = [*eqn.invars, *others]
    avals = [a.aval for a in kept]
    with jax_defaults(), mesh_of(avals), jax.disable_jit():  # its calls are written out
        closed = jax.make_jaxpr(function)(*map(as_argument, avals))
    eqns, (made,) = inlined(closed, kept, eqn.source_info, [])
    if closed.consts or kind(made.aval) != kind(out.aval) or not eqns or made is not eqns[-1].outvars[0]:
        return []
    return [*eqns[:-1], eqns[-1].replace(outvars=[out])]


def _entering(given: list[tuple[Any, Any]], atom: Any, aval: Any) -> Any:
    """The body's variable for an outer atom among some operands, to which it is added if it is not one of them."""
    for other, var in given:
        if other is atom:
            return var
    given.append((atom, jex_core.Var(aval)))
    return given[-1][1]


def _renamed(atoms: Iterable[Any], names: Mapping[Any, Any]) -> list[Any]:
    return [a if isinstance(a, jex_core.Literal) else names.get(a, a) for a in atoms]
