"""The verbs of `fusionlab`, each a few lines that tie the rooms together. Read `lab` first (trace, find, fuse, compare, explore), then
`shown` (what they give back), `fused` and `filtered` (the function that `fuse` gives), `explorer`, `saved`, `by_site`, `tuning`,
`catalogue` (`passes()`) and `dump`. May import every room but `testing`'s assertions.
"""
