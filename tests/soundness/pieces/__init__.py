"""Pieces of random programs: sites of each pass, what stands between them, losses and optimisers."""
