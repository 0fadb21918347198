"""The meaning of `multi_transformer` in plain jnp: its layers, each part by the reference of the op it is.

For one layer, with norm1 the attention's norm and norm2 the feed-forward's:

    pre_norm:  a = x + attend(norm1(x)) @ out + out_bias;      y = a + mlp(norm2(a))
    post:      a = norm1(x + attend(x) @ out + out_bias);      y = norm2(a + mlp(a))
    mlp(h) = act(h @ up + up_bias) @ down + down_bias,  gated: (act(h @ gate + gate_bias) * (h @ up + up_bias)) @ down + down_bias
"""

from __future__ import annotations

from ..dot_product_attention.op import DOT_PRODUCT_ATTENTION
from ..gated_matmul.op import GATED_MATMUL
from ..gemm_epilogue.op import GEMM_EPILOGUE
from ..layer_norm.op import LAYER_NORM
from .layer import LayerOps, forward_by

forward = forward_by(
    LayerOps(
        GEMM_EPILOGUE.reference,
        GATED_MATMUL.reference,
        DOT_PRODUCT_ATTENTION.reference,
        LAYER_NORM.reference,
    )
)
