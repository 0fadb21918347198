"""The verbs of `fusionlab`, each a few lines that tie the rooms together. Read `lab` first (trace, find, fuse), then `shown` (what they
give back), `fused` and `filtered` (the function that `fuse` gives), `comparison`, `explorer`, `saved`, `by_site`, `tuning`, `catalogue`
(`passes()`) and `dump`. May import every room but `testing`'s assertions.
"""
