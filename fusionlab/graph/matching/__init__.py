"""How a pattern is found in a program. Read in this order:

    pattern   an ordinary JAX function, traced at example sizes, becomes a canonical pattern with its parameters.
    match     the pattern is unified with a canonical view, from one node (the anchor) on; the nearest miss is kept for the rejection.
    region    from a match back to raw nodes: what it covers, where it is cut, and whether a value of it is read outside.
    walks     ways through raw nodes, without a pattern: from values up to what makes them, and down to what reads them.
    wide      programs that compute in more bits, on purpose, than what would replace them.

What is matched in is `graph/canonical`; what proves a match afterwards is `graph/certify`; who asks is `fusers/engine/site.py`.
"""
