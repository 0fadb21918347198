"""The pass of losses, `linear_cross_entropy`: a product with a matrix, and the cross-entropy of its rows.

Read `linear_cross_entropy` first, then `heads` (the product, its bias and its cap), `rows` (the loss by row, cut out of the program),
`numbers` (which loss it is, by value) and `sums` (the weighted sum of the rows).
"""
