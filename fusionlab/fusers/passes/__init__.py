"""The passes, a folder each: its examples (plain JAX functions that are matched), its conditions, and the fused op it becomes.

linear: `act(x @ w + b)`. norm: LayerNorm, RMSNorm, GroupNorm. lerp: linear interpolation. attention: softmax(q k^T) v. matmul:
routes of products, and gated pairs. transformer: whole layers, of the sites of the passes before. custom: a pass that a user writes
as an example. A module that has passes says so at its end, in `PASSES`, where `fusers/registry.py` finds them; it imports `graph`,
`kernels`, `fusers/engine`, and of other passes those named before it here.
"""
