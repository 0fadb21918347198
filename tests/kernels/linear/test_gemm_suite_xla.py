"""The reference of gemm_epilogue, held to the test base that the CUDA implementations inherit."""

from tests.kernels.linear.gemm_suite import GemmEpilogueSuite


class TestXla(GemmEpilogueSuite):
    implementation = "xla"
    activations = ("none", "relu", "gelu_tanh", "silu")
    slack = 3.0
