"""Layers and train steps: `multi_transformer` (whole layers), `decoding` and `generating` (token by token), `tensor_parallel` (two
GPUs), `pairs` with `pair_fates` and `pair_memory` (forward and backward replaced together), `widened` (scores of widened operands),
`parts` (where the time goes). `torch_encoder` is the rival in torch.
"""
