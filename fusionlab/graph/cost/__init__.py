"""The cost of a program: operations and bytes by node (`cost`, with `rules` by primitive and `traffic` for bytes), and a model of the
kernels of a compiler like XLA (`kernel_model`), against which gains are predicted.
"""
