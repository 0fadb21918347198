"""Five kernels a layer: `plan` says how `decode.cu` is compiled and launched; `project.cuh` has the products, `attend.cuh` the
attention.
"""
