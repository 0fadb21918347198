"""What is asked of dtypes in every room."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def is_float(dtype: Any) -> bool:
    """Whether a dtype is a floating one (numpy's `kind` does not tell ml_dtypes' floats from its narrow integers)."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def narrows(dtype: Any, other: Any) -> bool:
    """Whether the float `dtype` cannot hold every value of the float `other` (fewer mantissa or exponent bits)."""
    a, b = jnp.finfo(dtype), jnp.finfo(other)
    return a.nmant < b.nmant or a.maxexp < b.maxexp or a.minexp > b.minexp
