"""The fused ops, a folder each. In every one: `reference.py` (the meaning in plain `jax.numpy`, with tangent and cotangent: read it
first), `op.py` (the public call and its checks), and a module for each implementation; a `.cu` file is a kernel, and the module
next to it compiles and launches it. `card.py` is the op's entry in all lists of ops: an op is in all of them by having one.
Kernels of several ops include `activation.cuh`, `early.cuh`, `packs.cuh` and `warp.cuh`. Several ops share `geometry` and `passes`
(the layout and the parameters of kernels), `norms` and `norm_checks`. `clock` is not an op: it marks time on XLA's stream.
"""
