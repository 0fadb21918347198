"""What a search found. `findings` is the value that `fl.find` gives; `structures` (with `structure_forms` and `gated_structures`)
tells what its sites are parts of; `site_kernels` counts XLA's kernels of each site.
"""
