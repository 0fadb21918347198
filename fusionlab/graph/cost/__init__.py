"""What a program costs: operations and bytes by node (`cost`, with `rules` by primitive and `traffic` for bytes), and the kernels that
a compiler like XLA would make of it (`kernel_model`), against which a gain is predicted.
"""
