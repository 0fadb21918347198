"""Our own kernels of attention. Read `backend` first (which calls they take), then `tiles` (how they are compiled and launched) and
`attention.cu`; `threefry.cuh` makes JAX's random bits inside of it.
"""
