"""What a program adds up, and how its products multiply: what a tolerance has to know beside the dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from fusionlab.graph.compat import child_jaxprs, split_closed


@dataclass(frozen=True)
class Sums:
    """Of one program on one device.

    Attributes:
      reduction_size: the terms of its largest sum.
      tf32: whether a float32 product of it may run in TF32 (10 bits of mantissa): XLA's default on an NVIDIA GPU since
        Ampere, wherever the product asks for no precision. Source: jax.default_matmul_precision's documentation.
    """

    reduction_size: int
    tf32: bool = False


def sums_of(jaxpr: Any, platform: str) -> Sums:
    """The `Sums` of a traced program on a platform as JAX names it ("cpu", "gpu")."""
    return Sums(reduction_size(jaxpr), platform in ("gpu", "cuda") and _asks_for_default(jaxpr))


def reduction_size(jaxpr: Any) -> int:
    """The terms of the largest sum in a program: contracted axes of a product, reduced axes of a sum."""
    largest = 1
    for eqn in split_closed(jaxpr)[0].eqns:
        name = eqn.primitive.name
        shape = eqn.invars[0].aval.shape if eqn.invars and hasattr(eqn.invars[0].aval, "shape") else ()
        if name == "dot_general":
            axes = eqn.params["dimension_numbers"][0][0]
            largest = max(largest, int(np.prod([shape[i] for i in axes], dtype=np.int64)))
        elif name in ("reduce_sum", "cumsum", "reduce_prod"):
            axes = eqn.params.get("axes", (eqn.params.get("axis"),))
            largest = max(largest, int(np.prod([shape[i] for i in axes], dtype=np.int64)))
        elif name == "conv_general_dilated":
            kernel = eqn.invars[1].aval
            largest = max(largest, kernel.size // max(1, kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]))
        largest = max([largest, *(reduction_size(child) for _, _, child in child_jaxprs(eqn))])
    return largest


def _asks_for_default(jaxpr: Any) -> bool:
    """Whether a product of float32 operands leaves the precision to the platform."""
    for eqn in split_closed(jaxpr)[0].eqns:
        asked = eqn.params.get("precision")
        if eqn.invars and "precision" in eqn.params and eqn.invars[0].aval.dtype == jnp.float32:
            both = asked if isinstance(asked, tuple) else (asked,)
            if any(p in (None, jax.lax.Precision.DEFAULT) for p in both):
                return True
        if any(_asks_for_default(child) for _, _, child in child_jaxprs(eqn)):
            return True
    return False
