"""Five kernels per layer: `plan` compiles and launches `decode.cu`; `project.cuh` has the products, `attend.cuh` the
attention.
"""
