"""Sums whose only reader can add the terms itself: it is given the terms instead.

Two methods of a primitive describe this: `addends(params)` is a dict, operand -> the number of arrays that may be given instead, as the
terms of a sum; `adding(params, operand, count)` are the parameters with which it takes so many there and adds them in order, each
sum rounded to their dtype: bit for bit the result of the additions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ..jax_compat import variables_in, variables_read
from ..primitives import having
from ..program.equations import kind
from ..program.explicit_axes import is_split_in_type

_ADDS = having("addition")


def without_sums(eqns: list, outvars: list) -> list:
    """Equations, all of them read, without the additions that their readers can do."""
    takers = [eqn for eqn in eqns if getattr(eqn.primitive, "addends", None) is not None]
    if not takers:
        return eqns
    reads = Counter(variables_read(eqns, outvars))
    sums = {eqn.outvars[0]: eqn for eqn in eqns if _is_sum(eqn) and reads[eqn.outvars[0]] == 1}
    changed, gone = dict[int, Any](), set[int]()
    for eqn in takers:
        changed[id(eqn)] = _taking(eqn, sums, gone)
    return [changed.get(id(eqn), eqn) for eqn in eqns if id(eqn) not in gone]


def _is_sum(eqn: Any) -> bool:
    """Whether an equation adds two arrays of its result's own type."""
    if eqn.primitive.name not in _ADDS or eqn.effects or is_split_in_type(eqn.outvars[0].aval):
        return False
    given = variables_in(eqn.invars)
    return len(given) == 2 and all(kind(v.aval) == kind(eqn.outvars[0].aval) for v in given)


def _taking(eqn: Any, sums: Mapping[Any, Any], gone: set[int]) -> Any:
    """An equation that does its own additions where it can; `gone` gets the ids of the additions that become unnecessary."""
    # From the last operand to the first: what is put in moves those behind.
    for operand, most in sorted(eqn.primitive.addends(eqn.params).items(), reverse=True):
        terms = [eqn.invars[operand]]
        while terms[0] in sums and len(terms) < most:
            addition = sums[terms[0]]
            gone.add(id(addition))
            left, right = addition.invars
            # Of two sums one stays, as any other term does: only a chain of additions has one order.
            terms[:1] = (left, right) if left in sums or right not in sums else (right, left)
        if len(terms) > 1:
            invars = [*eqn.invars[:operand], *terms, *eqn.invars[operand + 1 :]]
            eqn = eqn.replace(invars=invars, params=eqn.primitive.adding(eqn.params, operand, len(terms)))
    return eqn
