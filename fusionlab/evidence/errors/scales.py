"""By which factor an array as a whole is larger than its reference: what no single element shows, since rounding hides it there."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from fusionlab.graph.jax_compat import enable_x64
from fusionlab.graph.settings import jax_defaults

_BLOCK = 1 << 22


def scale(got: Any, want: Any) -> float | None:
    """<got, want> / <want, want>: 1.01 of an array that is 1 % too large. Rounding errors, which point either way, cancel in it.

    None where the two are no floats, not finite, or the reference is zero.
    """
    if not all(jnp.issubdtype(x.dtype, np.floating) for x in (got, want)):
        return None
    if isinstance(got, jax.Array) and isinstance(want, jax.Array) and got.devices() == want.devices():
        with jax_defaults(), enable_x64(True):
            product, square = (float(x) for x in _products(got, want))
    else:
        flat, wanted = np.asarray(got).reshape(-1), np.asarray(want).reshape(-1)
        product = square = 0.0
        for i in range(0, flat.size, _BLOCK):
            a, b = (x[i : i + _BLOCK].astype(np.float64) for x in (flat, wanted))
            product, square = product + float(a @ b), square + float(b @ b)
    found = product / square if square > 0 else math.nan
    return found if math.isfinite(found) else None


@jax.jit
def _products(got: Any, want: Any) -> tuple[Any, Any]:
    got, want = got.astype(np.float64), want.astype(np.float64)
    return jnp.sum(got * want), jnp.sum(want * want)
