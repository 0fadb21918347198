"""Programs evaluated in numpy, without compiling anything: in float64 at reduced sizes for proofs, or as the program does it for
constants.

Read `evaluate` first, then `numpy_rules` and `numpy_indexing` (what each primitive means), `on_devices` (inside a shard_map) and
`random_bits`. `widen` and `promote` are the float64 reference by JAX itself, against which all errors are measured.
"""
