"""The passes, one folder each: its examples (plain JAX functions to match), its conditions, and its fused op.

linear: `act(x @ w + b)`. norm: LayerNorm, RMSNorm, GroupNorm. lerp: linear interpolation. attention: softmax(q k^T) v. matmul:
routes of products, and gated pairs. transformer: whole layers, composed of the sites of the passes before. custom: a pass that a user
writes as an example. A module with passes lists them at its end, in `PASSES`, where `fusers/registry.py` finds them; it may import
`graph`, `kernels`, `fusers/engine`, and the passes named before it here.
"""
