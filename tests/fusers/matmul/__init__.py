"""Routes of matrix products, and gated pairs."""
