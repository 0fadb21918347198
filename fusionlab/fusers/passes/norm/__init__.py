"""Pass `layer_norm`: LayerNorm and RMSNorm, and GroupNorm as a form of it. Read `layer_norm` first, then `examples` (the spellings),
`surroundings` (what a norm's root is a root of), `summands` (a residual that the op adds up itself), `group_norms` and `misses`.
"""
