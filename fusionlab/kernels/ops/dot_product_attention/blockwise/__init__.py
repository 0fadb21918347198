"""Attention by blocks of query rows, in plain JAX: `attention` is the implementation, `blocks` cuts and joins."""
