"""Sums over rows that the maker of an array returns with it: a bias's gradient is the sum of the array from the next backward pass.

Two methods of primitives describe this. Of the reader: `row_sum(params)` is (operand, result, parameters without that result), where the
result is the sum of the operand over all axes but the last; None if it returns no such sum. Of the maker: `summing(params, result, dtype)`
is (parameters, number of the further result) with which it also returns that sum of one of its results, a vector of `dtype`, without
further reads; None if it cannot. It sums the values before they are rounded.
"""

from __future__ import annotations

from typing import Any

from jax.extend import core as jex_core

from ..jax_compat import has_pending_sums, variables_read
from ..program.equations import kind
from ..program.explicit_axes import is_split_in_type

_RESHAPES = ("reshape", "squeeze")


def with_row_sums(eqns: list, outvars: list) -> list:
    """The equations, with such sums returned by the makers of the arrays where possible."""
    readers = [eqn for eqn in eqns if getattr(eqn.primitive, "row_sum", None) is not None]
    if not readers:
        return eqns
    maker = {v: eqn for eqn in eqns for v in eqn.outvars}
    read = set(variables_read(eqns, outvars))
    changed: dict[int, Any] = {}
    for eqn in readers:
        changed |= _with_row_sum(eqn, maker, read, changed)
    done = (changed.get(id(eqn), eqn) for eqn in eqns)
    return [eqn for eqn in done if eqn is not None]


def _with_row_sum(eqn: Any, maker: dict[Any, Any], read: set[Any], changed: dict[int, Any]) -> dict[int, Any]:
    """The new equations of a reader and of the maker of its array (by id of the old one) if the maker can return the sum; else none.
    `changed` are the equations replaced so far.
    """
    found = eqn.primitive.row_sum(eqn.params)
    if found is None or eqn.outvars[found[1]] not in read:
        return {}
    operand, result, params = found
    array, total = _rows_of(eqn.invars[operand], maker), eqn.outvars[result]
    by = maker.get(array)
    if by is None or not _fits(array.aval, total.aval):
        return {}
    summing = _summing(changed.get(id(by), by), array, total)
    return {} if summing is None else {id(by): summing, id(eqn): _without(eqn, result, params)}


def _rows_of(var: Any, maker: dict[Any, Any]) -> Any:
    """The array whose columns a variable has, its rows in another shape."""
    while (
        not isinstance(var, jex_core.Literal)
        and (eqn := maker.get(var)) is not None
        and eqn.primitive.name in _RESHAPES
    ):
        (source, *more) = eqn.invars
        turned = eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None  # it transposes first
        if more or turned or not source.aval.shape[-1:] == var.aval.shape[-1:] != ():
            break
        var = source
    return var


def _fits(array: Any, total: Any) -> bool:
    """Whether a sum over rows of an array has a type, on one device or on shards of several."""
    if any(is_split_in_type(aval) or has_pending_sums(aval) for aval in (array, total)):
        return False
    return total.shape == array.shape[-1:] and kind(total)[2] == kind(array)[2]


def _summing(eqn: Any, array: Any, total: Any) -> Any:
    """The maker of an array, returning its sum as well; None if it cannot."""
    method = getattr(eqn.primitive, "summing", None)
    found = method(eqn.params, list(eqn.outvars).index(array), total.aval.dtype) if method is not None else None
    if found is None:
        return None
    params, place = found
    return eqn.replace(params=params, outvars=[*eqn.outvars[:place], total, *eqn.outvars[place:]])


def _without(eqn: Any, result: int, params: dict[str, Any]) -> Any:
    """The reader without that result; None if it had no other."""
    outvars = [v for i, v in enumerate(eqn.outvars) if i != result]
    if not outvars:
        return None
    named = dict(zip(eqn.primitive.operand_names(eqn.params), eqn.invars, strict=True))
    invars = [named[name] for name in eqn.primitive.operand_names(params)]
    return eqn.replace(params=params, outvars=outvars, invars=invars)
