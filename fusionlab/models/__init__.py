"""Small real models in plain JAX, spelled as a user would spell them: for notebooks, tests and benchmarks alike.

Each module has `init` (parameters from a key, always the same for the same key) and pure apply functions. Parameters
are nested dicts of arrays; modules stand in `jax.named_scope`s, so their names show in graphs and reports.
"""
