"""The fused ops: what each means, and each way to run it on a device.

    launch/   from a plan of launches to kernels on XLA's stream: every kernel of ours is launched in `launch/ffi_call.py`.
    choose/   which way a call takes: what was measured for it, or a rule.
    op/       the op protocol: one op is three primitives with a meaning in plain `jax.numpy` and any number of implementations.
    ops/      the ops, a folder each: `reference.py` is the meaning, `op.py` the call, and a module for each implementation.

May import `graph`; of the ops, one may use another's kernels where its module says so.
"""

import sys

from .op.implementation import BackendVerdict as BackendVerdict
from .op.implementation import Residual as Residual
from .op.op import Op as Op
from .op.op import meaning_of as meaning_of
from .op.op import plain_meaning_of as plain_meaning_of
from .ops.dot_product_attention import DOT_PRODUCT_ATTENTION
from .ops.gated_matmul import GATED_MATMUL
from .ops.gemm_epilogue import GEMM_EPILOGUE
from .ops.group_norm import GROUP_NORM
from .ops.layer_norm import LAYER_NORM
from .ops.lerp import LERP
from .ops.matmul import MATMUL
from .ops.multi_transformer import MULTI_TRANSFORMER

# The name of a module that saved notebooks import, from before the ops had a folder of their own.
sys.modules.update({f"{__name__}.{old}": sys.modules[f"{__name__}.ops.{old}"] for old in ("lerp", "lerp.plan")})

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
