"""Small real models in plain JAX, written as a user would write them, for notebooks, tests and benchmarks.

Each module has `init` (parameters from a key, always the same for the same key) and pure apply functions. Parameters
are nested dicts of arrays; modules use `jax.named_scope`, so their names show in graphs and reports.
"""
