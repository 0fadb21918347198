"""The fused ops themselves, as functions: differentiable, and one named node each in a trace.

They behave like the equivalent plain `jax.numpy` code under jit, grad, vmap, scan, checkpoint and forward mode, and
refuse a bad argument by its name. `multi_transformer` comes with a class for its layers' weights, `TransformerLayer`, and functions
that lay them out.
"""

from .kernels.ops.dot_product_attention import dot_product_attention
from .kernels.ops.gated_matmul import gated_matmul
from .kernels.ops.gemm_epilogue import gemm_epilogue
from .kernels.ops.group_norm import group_norm
from .kernels.ops.grouped_matmul import grouped_matmul
from .kernels.ops.layer_norm import layer_norm, layer_norm_and_sum
from .kernels.ops.lerp import lerp
from .kernels.ops.linear_cross_entropy import linear_cross_entropy
from .kernels.ops.matmul import matmul
from .kernels.ops.multi_transformer import (
    TransformerLayer,
    multi_transformer,
    pack_keys,
    pack_qkv,
    pack_qkv_bias,
    rotary_tables,
    unpack_keys,
    unpack_qkv,
    unpack_qkv_bias,
)

__all__ = [
    "TransformerLayer",
    "dot_product_attention",
    "gated_matmul",
    "gemm_epilogue",
    "group_norm",
    "grouped_matmul",
    "layer_norm",
    "layer_norm_and_sum",
    "lerp",
    "linear_cross_entropy",
    "matmul",
    "multi_transformer",
    "pack_keys",
    "pack_qkv",
    "pack_qkv_bias",
    "rotary_tables",
    "unpack_keys",
    "unpack_qkv",
    "unpack_qkv_bias",
]
