"""Advice that no fusion gives. `lint` is the record, and what a rule is; `stacked_scans` and `recomputed_products` are rules, and
`compiler_options` has rules whose edit is an option of the compiler; `rules` lists all of them and asks them. A rule only proposes:
`fl.advise` tries the edit and measures it.
"""
