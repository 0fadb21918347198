"""Facts about dtypes that the whole package needs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def is_float(dtype: Any) -> bool:
    """Whether a dtype is a floating one (numpy's `kind` does not distinguish ml_dtypes' floats from its narrow integers)."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def arithmetic_dtype(dtype: Any) -> Any:
    """The dtype of arithmetic, statistics and sums of a fused op with operands and results of `dtype`: float32 or wider."""
    return jnp.promote_types(dtype, jnp.float32)


def narrows(dtype: Any, other: Any) -> bool:
    """Whether the float `dtype` cannot hold every value of the float `other` (fewer mantissa or exponent bits)."""
    a, b = jnp.finfo(dtype), jnp.finfo(other)
    return a.nmant < b.nmant or a.maxexp < b.maxexp or a.minexp > b.minexp
