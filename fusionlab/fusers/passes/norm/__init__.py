"""Pass `layer_norm`: LayerNorm and RMSNorm, and GroupNorm as a form of it. Read `layer_norm` first, then `examples` (the spellings),
`surroundings` (the nodes around a norm's root), `summands` (a residual that the op adds itself), `group_norms` and `misses`.
"""
