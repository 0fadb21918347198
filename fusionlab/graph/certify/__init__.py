"""The proof of a match: the region and its replacement agree as real functions, in values and gradients, and near the dtype's limits.

Read `certify` first, which uses the others in turn: `reduced_sizes` (the sizes), `inputs` and `special` (the numbers),
`programs` (both sides evaluated) and `verdict` (whether they agree). `activations` recognises functions of one number by value,
on the points of `profiles`. `switch_points` finds where elementwise functions switch; `stress` tests functions that users wrote.
`alike` transfers a proof to similar programs.
"""
