"""Work that fused backward passes take over from neighbouring equations after rewriting, block by block."""

from __future__ import annotations

from typing import Any

from jax.extend import core as jex_core

from .bias_gradients import with_row_sums
from .fold_sums import without_sums


def with_neighbours(closed: Any) -> Any:
    """A closed jaxpr of the same inputs and results whose fused ops do additions and row sums themselves (`addends`, `row_sums`)."""
    jaxpr = _block(closed.jaxpr)
    return closed if jaxpr is closed.jaxpr else closed.replace(jaxpr=jaxpr)


def _block(jaxpr: Any) -> Any:
    eqns = [_inside(eqn) for eqn in jaxpr.eqns]
    done = without_sums(with_row_sums(eqns, jaxpr.outvars), jaxpr.outvars)
    same = len(done) == len(jaxpr.eqns) and all(a is b for a, b in zip(done, jaxpr.eqns, strict=True))
    return jaxpr if same else jaxpr.replace(eqns=done)


def _inside(eqn: Any) -> Any:
    """An equation with its bodies processed. A fused op's own parameters are not programs."""
    if hasattr(eqn.primitive, "addends"):
        return eqn
    params = {k: _body(v) for k, v in eqn.params.items()}
    return eqn if all(params[k] is v for k, v in eqn.params.items()) else eqn.replace(params=params)


def _body(value: Any) -> Any:
    if isinstance(value, jex_core.ClosedJaxpr):
        return with_neighbours(value)
    if isinstance(value, jex_core.Jaxpr):
        return _block(value)
    if type(value) in (tuple, list):
        items = [_body(v) for v in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    return value
