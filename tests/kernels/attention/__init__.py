"""`dot_product_attention`: reference, cuDNN's calls, our own kernels, the probe of masks."""
