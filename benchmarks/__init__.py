"""Benchmarks: every number this project states comes from a record under `results/`, made by a command named in it."""
