"""What a search finds and costs: `recall` with `recall_kinds` (the zoos), `decisions` (every site's outcome, written down and compared),
`first_find` (the first search of a process), `random_programs` and `mutants` (whether a rewrite is ever wrong), `cotangents` (backward
passes by differences), `xla_mapping` (XLA's kernels against nodes).
"""
