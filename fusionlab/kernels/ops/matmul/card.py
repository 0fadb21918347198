"""The entry of `matmul` in the lists of all ops."""

from ...op.card import CUBLASLT, CUDA, XLA, Card
from ..gemm_epilogue.elementwise import SOURCE
from .op import MATMUL

# XLA's product, and the kernel that follows it, which is gemm_epilogue's.
CARD = Card(
    60, MATMUL, hue="crimson", requirements=(XLA, CUBLASLT, CUDA), sources=(SOURCE,), variant="{dtype} {activation}"
)
