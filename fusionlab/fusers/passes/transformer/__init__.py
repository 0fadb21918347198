"""Passes `multi_transformer_*`: a whole layer composed of the sites of other passes, and rows of layers, as one op.

Read `multi_transformer` first (the passes), then `reading` (a layer read off a block's view in which its sites are folded), `site`
(cut out of its block), `plan` (the op and its operands) and `stacks` (rows of layers). The others each read one part: `norms`,
`projections`, `residuals`, `rotary`, `rotary_tables`, `caches`, `factors`, `axes`, `devices`. `sample` has the layers for the
passes' pictures.
"""
