"""The report on a search. `findings` is the value that `fl.find` returns; `structures` (with `structure_forms`, `gated_structures` and
`layer_rows`) groups sites into larger structures; `site_kernels` counts XLA's kernels of each site; `sections` prints all of it.
"""
