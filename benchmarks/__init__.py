"""Benchmarks: every number this project states comes from a record under `results/`, made by a command named in it.

`python -m benchmarks NAME` runs one: NAME is a module with a `main` in one of the folders. `measuring.py` is what they share. `ops/`
times single ops, `programs/` whole layers and train steps, `search/` asks what a search finds and what it takes, `method/` how far the
timing can be trusted. They import `fusionlab`, and of `tests` the zoos and the random programs.
"""
