"""Changes to the blocks of a rewritten program, one block after another: work that fused backward passes take over from neighbouring
equations, and less that loops keep for the loops that run back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend import core as jex_core

from .bias_gradients import with_row_sums
from .fold_sums import without_sums
from .stacked import with_less_stacked

Change = Callable[[list, list], list]  # (equations, results) of a block -> its equations


def with_neighbours(closed: Any) -> Any:
    """A closed jaxpr of the same inputs and results whose fused ops do additions and row sums themselves (`addends`, `row_sums`)."""
    return _changed(closed, lambda eqns, outvars: without_sums(with_row_sums(eqns, outvars), outvars))


def with_less_kept(closed: Any) -> Any:
    """A closed jaxpr of the same inputs and results whose loops keep less for the loops that run back (`stacked`)."""
    return _changed(closed, with_less_stacked)


def _changed(closed: Any, change: Change) -> Any:
    jaxpr = _block(closed.jaxpr, change)
    return closed if jaxpr is closed.jaxpr else closed.replace(jaxpr=jaxpr)


def _block(jaxpr: Any, change: Change) -> Any:
    eqns = [_inside(eqn, change) for eqn in jaxpr.eqns]
    done = change(eqns, jaxpr.outvars)
    same = len(done) == len(jaxpr.eqns) and all(a is b for a, b in zip(done, jaxpr.eqns, strict=True))
    return jaxpr if same else jaxpr.replace(eqns=done)


def _inside(eqn: Any, change: Change) -> Any:
    """An equation with its bodies processed. A fused op's own parameters are not programs."""
    if hasattr(eqn.primitive, "addends"):
        return eqn
    params = {k: _body(v, change) for k, v in eqn.params.items()}
    return eqn if all(params[k] is v for k, v in eqn.params.items()) else eqn.replace(params=params)


def _body(value: Any, change: Change) -> Any:
    if isinstance(value, jex_core.ClosedJaxpr):
        return _changed(value, change)
    if isinstance(value, jex_core.Jaxpr):
        return _block(value, change)
    if type(value) in (tuple, list):
        items = [_body(v, change) for v in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    return value
