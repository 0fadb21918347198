"""How a pattern is found in a program. Read in this order:

    pattern   an ordinary JAX function, traced at example sizes, becomes a canonical pattern with its parameters.
    match     the pattern is unified with a canonical view, starting from one node (the anchor); the nearest miss is kept for the rejection.
    constants values that depend on no input, computed.
    region    from a match back to raw nodes: its extent, its cuts, and whether one of its values is read outside.
    walks     walks through raw nodes without a pattern: from values up to their makers, and down to their readers.
    wide      programs that compute, on purpose, in more bits than their replacement would.

Matching works on the view of `graph/canonical`, `graph/certify` proves a match afterwards, and `fusers/engine/site.py` is the caller.
"""
