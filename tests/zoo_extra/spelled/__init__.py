"""One layer of each model of the extra zoo, as a plain JAX program: the same operations in the same order, weights as arguments.

They need no library but JAX, so that the default tier searches them. `missed` says what is not accepted of them yet, and why.
"""
