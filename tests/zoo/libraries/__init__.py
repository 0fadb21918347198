"""Models by library: flax linen and nnx, equinox, haiku, jax.nn, transformers."""
