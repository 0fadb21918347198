"""How this device adds up: what the roundings of a program's sums depend on besides their dtypes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from fusionlab.graph.dtypes import is_float
from fusionlab.graph.interpret.resummed import TERMS, Arithmetic
from fusionlab.graph.jax_compat import child_jaxprs, split_closed
from fusionlab.graph.settings import jax_defaults

from ..errors.reduction_sizes import sums_of

_COLUMNS = 128


def arithmetic_for(closed: Any) -> Arithmetic:
    """The arithmetic of the default device, as far as this program depends on it."""
    narrow = sorted({str(d) for d in _reduced(closed) if is_float(d) and d.itemsize < 4})
    return Arithmetic(sums_of(closed, jax.default_backend()).tf32, tuple((d, error_of_sums(d)) for d in narrow))


def is_narrow(closed: Any) -> bool:
    """Whether a program computes anything in a float narrower than float32."""
    for eqn in split_closed(closed)[0].eqns:
        dtypes = (getattr(v.aval, "dtype", None) for v in eqn.outvars)
        if any(d is not None and is_float(d) and d.itemsize < 4 for d in dtypes):
            return True
        if any(is_narrow(child) for _, _, child in child_jaxprs(eqn)):
            return True
    return False


def _reduced(closed: Any) -> Iterator[Any]:
    """The dtypes of a program's reductions that add."""
    for eqn in split_closed(closed)[0].eqns:
        if eqn.primitive.name == "reduce_sum":
            yield eqn.outvars[0].aval.dtype
        for _, _, child in child_jaxprs(eqn):
            yield from _reduced(child)


@functools.cache
def error_of_sums(dtype: str) -> float:
    """How many times the error of one rounding a sum of `TERMS` terms of this dtype has: 1 where it is added up in float32.

    A compiler may round each partial sum to the program's dtype or none of them; no setting states which, so one sum is measured.
    """
    draw = np.random.default_rng(0).standard_normal((TERMS, _COLUMNS))
    with jax_defaults():
        x = jnp.asarray(draw, dtype)
        got = jax.jit(lambda x: lax.reduce(x, np.zeros((), dtype), lax.add, (0,)))(x)
    want = np.asarray(x, np.float64).sum(0)
    error = np.linalg.norm(np.asarray(got, np.float64) - want)
    once = np.linalg.norm(np.asarray(want.astype(dtype), np.float64) - want)
    return max(1.0, float(error / once)) if once else 1.0
