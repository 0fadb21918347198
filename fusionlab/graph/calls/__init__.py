"""A call of a function: the arrays it takes and gives, what is fixed beside them, and the jit that the function is under.

Read `parts` first, then `state` (flax's objects that change in place), `wrappers` (the jit) and `binding`, which puts them
together.
"""
