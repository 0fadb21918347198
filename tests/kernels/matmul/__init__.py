"""`matmul` and `gated_matmul`."""
