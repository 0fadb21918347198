"""The sizes of a program's sums and the precision of its products: what a tolerance depends on besides the dtype."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from fusionlab.graph.jax_compat import child_jaxprs, split_closed, variables_in

_PRODUCTS = ("dot_general", "conv_general_dilated")


@dataclass(frozen=True)
class ReductionSizes:
    """The sums and products of one program on one device.

    Attributes:
      reduction_size: the terms of its largest sum.
      tf32: whether a float32 product of it may run in TF32 (10 bits of mantissa): XLA's default on an NVIDIA GPU since
        Ampere, where the product sets no precision. Source: jax.default_matmul_precision's documentation.
      coarsest: the float dtype with the fewest bits of mantissa among the operands of its products; "" without any.
    """

    reduction_size: int
    tf32: bool = False
    coarsest: str = ""


def sums_of(jaxpr: Any, platform: str) -> ReductionSizes:
    """The `ReductionSizes` of a traced program on a platform as JAX names it ("cpu", "gpu")."""
    tf32 = platform in ("gpu", "cuda") and _asks_for_default(jaxpr)
    operands = {str(d) for d in _operand_dtypes(jaxpr) if jnp.issubdtype(d, np.floating)}
    return ReductionSizes(reduction_size(jaxpr), tf32, min(sorted(operands), key=mantissa_bits, default=""))


@functools.cache  # asked once for every value of a program
def mantissa_bits(dtype: Any) -> int:
    """Bits of mantissa of a float or complex dtype."""
    return int(jnp.finfo(dtype).nmant)


def _operand_dtypes(jaxpr: Any) -> Iterator[Any]:
    """The dtypes of the operands of a program's products, in every region."""
    for eqn in split_closed(jaxpr)[0].eqns:
        if eqn.primitive.name in _PRODUCTS:
            yield from (v.aval.dtype for v in eqn.invars)
        for _, _, child in child_jaxprs(eqn):
            yield from _operand_dtypes(child)


def reduction_size(jaxpr: Any) -> int:
    """The number of terms of the largest sum in a program: contracted axes of a product, reduced axes of a sum."""
    sizes = (
        max([reduction_size_of(eqn), *(reduction_size(child) for _, _, child in child_jaxprs(eqn))])
        for eqn in split_closed(jaxpr)[0].eqns
    )
    return max(sizes, default=1)


def reduction_size_of(eqn: Any) -> int:
    """The number of terms of the sums that one equation makes itself; 1 where it makes none."""
    name = eqn.primitive.name
    shape = eqn.invars[0].aval.shape if eqn.invars and hasattr(eqn.invars[0].aval, "shape") else ()
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval
        return max(1, kernel.size // max(1, kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]))
    if name == "dot_general":
        axes = eqn.params["dimension_numbers"][0][0]
    elif name in ("reduce_sum", "cumsum", "reduce_prod"):
        axes = eqn.params.get("axes", (eqn.params.get("axis"),))
    else:
        return 1
    return max(1, int(np.prod([shape[i] for i in axes], dtype=np.int64)))


@dataclass(frozen=True)
class Roughness:
    """What the rounding of a value depends on.

    Attributes:
      longest: the terms of the longest sum behind it.
      dtype: the float dtype with the fewest bits of mantissa that it, or a value that it is made of, was rounded to; "" for none.
    """

    longest: int = 1
    dtype: str = ""

    def __or__(self, other: Roughness) -> Roughness:
        dtypes = sorted(filter(None, {self.dtype, other.dtype}))
        return Roughness(max(self.longest, other.longest), min(dtypes, key=mantissa_bits, default=""))


def roughness_of(jaxpr: Any) -> dict[Any, Roughness]:
    """Variable -> its roughness, in the bodies of a program's loops and calls as well: there each operand may be behind each value."""
    found: dict[Any, Roughness] = {}
    _spread(jaxpr, Roughness(), found)
    return found


def coarsest_of(jaxpr: Any) -> str:
    """The float dtype with the fewest bits of mantissa of the results of a program's equations; "" for none."""
    return _spread(jaxpr, Roughness(), {}).dtype


def _spread(jaxpr: Any, given: Roughness, found: dict[Any, Roughness]) -> Roughness:
    """Notes the roughness of all values of a jaxpr whose inputs are so rough; that of all of them together."""
    whole = given
    for eqn in split_closed(jaxpr)[0].eqns:
        floats = (str(v.aval.dtype) for v in eqn.outvars if jnp.issubdtype(getattr(v.aval, "dtype", bool), np.inexact))
        behind = [found.get(v, given) for v in variables_in(eqn.invars)]
        rough = functools.reduce(operator.or_, [*behind, *(Roughness(1, d) for d in floats)], Roughness())
        rough |= Roughness(reduction_size_of(eqn))
        for _, _, child in child_jaxprs(eqn):
            once = _spread(child, rough, found)
            rough |= _spread(child, once, found)  # once more, as a loop hands on what it made
        found.update(dict.fromkeys(eqn.outvars, rough))
        whole |= rough
    return whole


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
