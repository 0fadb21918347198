"""Whether a rewrite is ever wrong. `generator.py` makes random programs of `pieces/`, `near/` has what must not be accepted,
`judge.py` decides in float64 on the whole program, `mutants.py` changes one thing of an accepted site.
"""
