"""Programs evaluated in numpy without compilation: in float64 at reduced sizes for proofs, or in the program's own arithmetic for
constants.

Read `evaluate` first, then `numpy_rules` and `numpy_indexing` (the meaning of each primitive), `limits` (the sizes to which axes
may be reduced), `on_devices` (inside a shard_map) and `random_bits`. `widen` and `promote` make the float64 reference with JAX itself,
against which all errors are measured.
"""
