"""The fused ops, a folder each. In every one: `reference.py` (the meaning in plain `jax.numpy`, with tangent and cotangent: read it
first), `op.py` (the public call and its checks), and a module for each implementation; a `.cu` file is a kernel, and the module
beside it says how it is compiled and launched. `card.py` is what lists of all ops say of it: an op is in all of them by having one.
`activation.cuh`, `early.cuh`, `packs.cuh` and `warp.cuh` are what kernels of several ops include. What several ops have in common:
`geometry` and `passes` (how kernels are laid out and told), `norms` and `norm_checks`. `clock` is no op: it marks time on XLA's stream.
"""
