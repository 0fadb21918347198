"""Programs as graphs: their structure, evaluation, matching, certification and rewriting. Nothing here knows about fused ops.

Read in this order; each folder may import those before it, and the top-level modules of the package (`errors`, `device`,
`output`):

    jax_compat.py   the differences between JAX's versions.
    dtypes.py, primitives.py, settings.py   facts about dtypes and JAX's primitives, and the settings of JAX that a program depends on.
    declined.py     the exception by which a place is declined: raised in graph, caught by the search.
    calls/          a function's arguments and state as arrays, and the jit around it.
    program/        the raw graph: tracing, text form, signatures.
    canonical/      the canonical view: one spelling per meaning.
    interpret/      programs evaluated in numpy's float64.
    matching/       patterns by example, found in the canonical view.
    cost/           operations and bytes.
    certify/        the proof that a match and its replacement compute the same function.
    backward/       the backward pass of a region in an already differentiated program.
    rewriting/      the program rewritten, with fused ops in place of regions.
    xla/            the program as compiled by XLA.
"""
