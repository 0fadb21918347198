"""Pass `grouped_matmul`: `jax.lax.ragged_dot` and `ragged_dot_general`, each product of groups of rows -> one op.

An already differentiated program has the gradients as two more such products, in the backward pass. Each is a site of its own: it
reads only values that the program keeps anyway.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ....graph.declined import Declined
from ....graph.program.ir import Node
from ....kernels.op.arrays import FLOATS
from ....kernels.ops.gemm_epilogue.cublaslt import product_arithmetic
from ....kernels.ops.grouped_matmul.op import GROUPED_MATMUL as OP
from ....kernels.ops.grouped_matmul.op import KINDS
from ....kernels.ops.grouped_matmul.reference import dimensions
from ...engine.base import Pass, Search, Substitution
from ...engine.outcomes import Candidate, Rejection
from ...engine.site import Site
from .products import region_with

# The dimension numbers of `jax.lax.ragged_dot` and of its gradients -> the attributes of the op.
_KNOWN = {dimensions(kind, contract): (kind, contract) for kind in KINDS for contract in (0, 1)}


class GroupedMatmulPass(Pass):
    """See the module docstring."""

    name = op = "grouped_matmul"
    formula = "jax.lax.ragged_dot: each row times the matrix of its group"
    needs = "matrices of rows (rank 2), no batch axes; f64/f32/bf16/f16; on a Hopper GPU bf16/f16 and axis sizes that are multiples of 64"
    summary = "Replaces the grouped products of a mixture of experts by kernels in which a row meets the matrix of its own group alone."
    spellings = (
        "jax.lax.ragged_dot and jax.lax.ragged_dot_general, with rows x K operands and one matrix for each group, without batch axes.",
        "Each of the two gradients is a site of its own.",
    )
    default = (
        "On. Its kernels run on Hopper GPUs, in bfloat16 and float16, for 1,024 rows or more in multiples of 8, 2 to 256 groups, and axes "
        "that are multiples of 64. Elsewhere the product keeps XLA's code."
    )
    codes = ("axes",)
    primitives = ("ragged_dot_general",)

    def sample(self) -> tuple[Any, tuple[Any, ...]]:
        sizes = jnp.asarray([3, 5], jnp.int32)
        return lambda x, w: jax.lax.ragged_dot(x, w, sizes), (jnp.zeros((8, 4)), jnp.zeros((2, 4, 16)))

    def is_anchor(self, node: Node) -> bool:
        return node.primitive in self.primitives  # of a backward pass too

    def examine(self, search: Search, anchor: Node) -> list[Candidate | Rejection]:
        return _Grouped(self, search, anchor).examined()


class _Grouped(Site):
    """One product of groups of rows."""

    def examine(self) -> Candidate | Rejection:
        node, params = self.anchor, self.anchor.params
        found = _KNOWN.get(params["ragged_dot_dimension_numbers"])
        if found is None:
            raise Declined("its axes are not those of jax.lax.ragged_dot or its gradients", "axes", edit=_OWN_AXES)
        kind, contract = found
        x, w, sizes = node.inputs
        if (len(x.shape), len(w.shape), len(sizes.shape)) != (2, 2 if kind == "weights" else 3, 1):
            raise Declined(f"it has more axes: x {x!r}, w {w!r}, group_sizes {sizes!r}", "axes", edit=_OWN_AXES)
        self.check_dtypes()
        attrs = {
            "kind": kind,
            "w_contract": contract,
            "precision": params["precision"],
            "out": params["preferred_element_type"],
            "implementation": self.search.implementation,
        }
        leaves = dict(zip(OP.slots, node.values, strict=True))
        region = region_with(self.view, node.outputs[0], leaves, {node.id: node}, {})
        where = {v.id: i for i, v in enumerate(region.inputs)}

        def operands(*inputs: Any) -> tuple[Any, ...]:
            return tuple(inputs[where[v.id]] for v in leaves.values())

        arithmetic = product_arithmetic(np.dtype(x.dtype).name, attrs["precision"], self.search.device)
        plan = Substitution(OP, attrs, operands, lambda out: out, OP.formula(**attrs), arithmetic)
        outcome = self.offered(region, plan, "", concepts=("grouped_matmul",))
        return replace(outcome, alone=True) if isinstance(outcome, Candidate) else outcome

    def check_dtypes(self) -> None:
        """Declines an operand whose dtype the op does not take."""
        dtypes = {np.dtype(a.dtype).name for a in self.anchor.inputs[:2]}
        if len(dtypes) > 1 or not dtypes <= set(FLOATS):
            sentence = (
                f"it multiplies {' by '.join(sorted(dtypes))}; the fused op takes one of {', '.join(FLOATS)} for both"
            )
            raise Declined(sentence, "dtype", edit="cast x and w to one dtype before the product")


_OWN_AXES = "write it as jax.lax.ragged_dot of arrays rows x K and groups x K x N"

PASSES = {48: GroupedMatmulPass()}
