"""What runs: the fused ops. A folder per op, with `reference.py` (plain jnp, the meaning) and one file per backend."""

from .dot_product_attention import DOT_PRODUCT_ATTENTION
from .gated_matmul import GATED_MATMUL
from .gemm_epilogue import GEMM_EPILOGUE
from .group_norm import GROUP_NORM
from .implementation import BackendVerdict as BackendVerdict
from .implementation import Residual as Residual
from .layer_norm import LAYER_NORM
from .lerp import LERP
from .matmul import MATMUL
from .multi_transformer import MULTI_TRANSFORMER
from .op import Op as Op
from .op import meaning_of as meaning_of
from .op import plain_meaning_of as plain_meaning_of

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        GEMM_EPILOGUE,
        DOT_PRODUCT_ATTENTION,
        LAYER_NORM,
        GROUP_NORM,
        LERP,
        MATMUL,
        GATED_MATMUL,
        MULTI_TRANSFORMER,
    )
}
