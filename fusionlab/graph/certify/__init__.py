"""The proof of a match: the region and its replacement agree as real functions, in values and gradients, and on numbers at the edge.

Read `certify` first, which asks the others in turn: `reduced_sizes` (at which sizes), `inputs` and `special` (of which numbers),
`programs` (both sides evaluated) and `verdict` (whether they agree). `activations` recognises functions of one number by value.
`switch_points` and `stress` try what users wrote themselves. `alike` says of which other programs a proof holds too.
"""
