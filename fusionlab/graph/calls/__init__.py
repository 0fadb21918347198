"""A call of a function: its arrays, the fixed rest of its arguments, and the jit around the function.

Read `parts` first, then `state` (flax's objects that change in place), `wrappers` (the jit) and `binding`, which puts them
together.
"""
