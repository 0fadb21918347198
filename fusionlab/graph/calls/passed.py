"""The results of a program that are its own inputs, passed through unchanged by jit, remat, branches or loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend import core as jex_core

from ..jax_compat import FLATTENED, child_jaxprs, scan_counts, split_closed, variables_in
from ..primitives import having

# What takes its operands as its body's inputs, in order, and gives the body's results.
_CALLS = FLATTENED | having("remat", "rule")


def passed_through(jaxpr: Any) -> list[int | None]:
    """For each result the number of the input that it is; None for a computed value, a constant, or a literal."""
    jaxpr, _ = split_closed(jaxpr)
    origin: dict[Any, int] = {v: i for i, v in enumerate(jaxpr.invars)}

    def of(atom: Any) -> int | None:
        return None if isinstance(atom, jex_core.Literal) else origin.get(atom)

    for eqn in jaxpr.eqns:
        if eqn.params and not origin.keys().isdisjoint(variables_in(eqn.invars)):
            for out, i in zip(eqn.outvars, _of_equation(eqn), strict=True):
                if i is not None and (found := of(eqn.invars[i])) is not None:
                    origin[out] = found
    return [of(v) for v in jaxpr.outvars]


def _of_equation(eqn: Any) -> Sequence[int | None]:
    """For each result of an equation the operand that it is."""
    children = [child for _, _, child in child_jaxprs(eqn)]
    nothing = [None] * len(eqn.outvars)
    name = eqn.primitive.name
    if name == "cond":
        return _of_cond(children) or nothing
    if name == "scan":
        return _of_scan(eqn, children[0])
    if name == "while":
        return _of_while(eqn)
    if name in _CALLS and len(children) == 1:
        inner, _ = split_closed(children[0])
        if (len(inner.invars), len(inner.outvars)) == (len(eqn.invars), len(eqn.outvars)):
            return passed_through(children[0])
    return nothing


def _of_cond(branches: Sequence[Any]) -> Sequence[int | None]:
    """As `passed_through`, of a cond: None where the branches differ; they do not get the cond's first operand, its index."""
    found = {tuple(passed_through(branch)) for branch in branches}
    return [None if i is None else i + 1 for i in found.pop()] if len(found) == 1 else ()


def _of_scan(eqn: Any, body: Any) -> Sequence[int | None]:
    consts, carry = scan_counts(eqn.params)
    kept = passed_through(body)
    same = [i if i == consts + n else None for n, i in enumerate(kept[:carry])]
    # What every trip stacks of its slice is what was sliced.
    return same + [i if i is not None and i >= consts + carry else None for i in kept[carry:]]


def _of_while(eqn: Any) -> Sequence[int | None]:
    first, own = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    kept = passed_through(eqn.params["body_jaxpr"])
    return [first + i if i == own + n else None for n, i in enumerate(kept)]
