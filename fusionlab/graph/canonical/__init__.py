"""The canonical view: the same program with one spelling per meaning, in which patterns are matched. It is never shown and never run.

Read `view` first (what a canonical node is, and how a block becomes a view), then `rules` (a table: primitive -> its canonical
form) and `algebra` (the constructors shared by rules: elementwise nodes, monomials, sums). `einsum` has the products, `axes` the
equality of axes, `blocks` the view of every block of a program. Each of the others handles one kind of spelling: concatenations,
convolutions of one point, factored sums, reshaped batches, fused ops.
"""
