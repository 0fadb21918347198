"""The entry of `gemm_epilogue` in the lists of all ops."""

from __future__ import annotations

from ...op.arrays import FLOATS
from ...op.card import CUBLASLT, CUDA, XLA, Card, Variants
from .elementwise import KERNEL_ACTIVATIONS, SOURCE, backward_plan, forward_plan, saves_for_backward
from .op import GEMM_EPILOGUE

# On other architectures than sm_90: each dtype, each kind of saved value, and each function of the special function unit once.
SAMPLE = (
    ("bfloat16", "relu"),
    ("bfloat16", "gelu_tanh"),
    ("bfloat16", "gelu_erf"),
    ("float32", "gelu_erf"),
    ("float32", "relu_tie"),
    ("float16", "silu"),
    ("float64", "tanh"),
)


def variants(arch: str) -> Variants:
    """Each dtype with each activation."""
    pairs = [(d, a) for d in FLOATS for a in KERNEL_ACTIVATIONS] if arch == "sm_90" else SAMPLE
    for dtype, activation in pairs:
        columns = (256, 255) if (dtype, activation) in SAMPLE else (256,)  # 255: one element at a time
        for n in columns:
            saves = saves_for_backward(activation)[0]
            name = f"{dtype} {activation}" + ("" if n == 256 else " any columns")
            yield f"{name}: forward", forward_plan(64, n, dtype, activation, bias=True, saves=saves)
            yield f"{name}: backward", backward_plan(64, n, dtype, activation, dbias=True, saves=saves)[0]


CARD = Card(
    10,
    GEMM_EPILOGUE,
    hue="orange",
    concepts=("linear",),
    kinds=("relu", "gelu_tanh", "gelu_erf", "silu", "sigmoid", "tanh"),
    requirements=(XLA, CUBLASLT, CUDA),
    sources=(SOURCE,),
    variant="{dtype} {activation}",
    variants=variants,
)
