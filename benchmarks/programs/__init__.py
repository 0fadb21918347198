"""Layers and train steps: `multi_transformer` (whole layers), `language_models` (loss and gradients), `decoding` and `generating` (token
by token), `pairs` with `pair_fates` and `pair_memory` (forward and backward replaced together), `widened`
(scores of widened operands). `torch_language` is the rival in torch.
"""
