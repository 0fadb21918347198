"""The names that mean something to the graph's rules: what no op of anybody else's may be called."""

from __future__ import annotations

import functools

import jax

from . import cost_rules, numpy_places, numpy_rules, rules
from .trace import FLATTENED


@functools.cache
def primitive_names() -> frozenset[str]:
    """Names of primitives that a rule knows by name, and of those that JAX shows."""
    tables = (
        rules.RULES,
        rules.TRANSPARENT,
        cost_rules.RULES,
        numpy_rules.PLAIN,
        numpy_rules.SHAPED,
        numpy_rules.BOUND,
        numpy_places.PLACED,
        FLATTENED,
    )
    shown = (name.removesuffix("_p") for name in dir(jax.lax) if name.endswith("_p"))
    return frozenset().union(*tables, shown)
