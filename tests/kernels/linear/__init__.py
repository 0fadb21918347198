"""`gemm_epilogue`."""
