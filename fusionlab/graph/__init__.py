"""What a program is, what it computes, and how a part of it is replaced. Nothing here knows a fused op.

Read in this order; each folder may import those before it, and of the package the modules at its top (`errors`, `device`,
`output`):

    jax_compat.py   what JAX's versions spell in different ways.
    dtypes.py, primitives.py, settings.py   facts on dtypes, on JAX's primitives, and the settings of JAX that a program depends on.
    declined.py     the one way to decline a place: graph raises it, and whoever searches catches it.
    calls/          a function's arguments and state as arrays, and the jit it is under.
    program/        the raw graph: traced, written as text, told apart.
    canonical/      the canonical view: one spelling per meaning.
    interpret/      programs evaluated in numpy's float64.
    matching/       patterns by example, found in the canonical view.
    cost/           operations and bytes.
    certify/        the proof that a match computes what its replacement does.
    backward/       the backward pass of a region, in a program that is differentiated already.
    rewriting/      the program again, with fused ops in place of regions.
    xla/            what XLA made of a program.
"""
