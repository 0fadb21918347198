"""`multi_transformer` made of the project's own ops, each of which chooses how it runs and has a fused backward."""

from __future__ import annotations

from ..dot_product_attention.op import DOT_PRODUCT_ATTENTION
from ..gated_matmul.op import GATED_MATMUL
from ..gemm_epilogue.op import GEMM_EPILOGUE
from ..layer_norm.op import LAYER_NORM
from .layer import LayerOps, forward_by

forward = forward_by(LayerOps(GEMM_EPILOGUE.call, GATED_MATMUL.call, DOT_PRODUCT_ATTENTION.call, LAYER_NORM.call))
