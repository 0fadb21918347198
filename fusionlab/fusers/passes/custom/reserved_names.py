"""The names with a meaning in the graph's rules, which no other op may have."""

from __future__ import annotations

import functools

import jax

from ....graph.canonical import rules
from ....graph.cost import rules as cost_rules
from ....graph.interpret import numpy_indexing as numpy_places
from ....graph.interpret import numpy_rules
from ....graph.program.trace import FLATTENED


@functools.cache
def primitive_names() -> frozenset[str]:
    """Names of the primitives that rules know by name, and of JAX's public primitives."""
    tables = (
        rules.CANONICAL_RULES,
        rules.TRANSPARENT,
        cost_rules.COST_RULES,
        numpy_rules.PLAIN,
        numpy_rules.SHAPED,
        numpy_rules.BOUND,
        numpy_places.PLACED,
        FLATTENED,
    )
    shown = (name.removesuffix("_p") for name in dir(jax.lax) if name.endswith("_p"))
    return frozenset().union(*tables, shown)
