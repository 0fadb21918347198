"""LayerNorm, RMSNorm and GroupNorm: spellings, sums in front, gradients."""
