"""Every implementation of gemm_epilogue on a CUDA device, against float64."""

from tests.kernels.gemm_suite import GemmEpilogueSuite


class TestCublaslt(GemmEpilogueSuite):
    implementation = "cublaslt"


class TestCuda(GemmEpilogueSuite):
    implementation = "cuda"


class TestXla(GemmEpilogueSuite):
    implementation = "xla"
    slack = 2.0
