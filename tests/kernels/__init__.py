"""Tests of `fusionlab/kernels`, a folder for each op, and `op`, `launch` and `choose`.

A `*_suite.py` asks everything of an implementation; tests run it on a CPU, and `tests/gpu` on a GPU. `emulated.py` compiles CUDA
kernels as C++ with the headers of `cuda_shim`, so that they run here.
"""
