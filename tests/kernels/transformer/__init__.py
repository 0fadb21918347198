"""`multi_transformer`, and its kernels for one token at a time."""
