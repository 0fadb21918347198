"""What a search found. `findings` is the value that `fl.find` gives; `structures` (with `structure_forms`, `gated_structures` and
`layer_rows`) tells what its sites are parts of; `site_kernels` counts XLA's kernels of each site.
"""
