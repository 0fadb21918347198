"""The canonical view: the same program with one spelling per meaning, in which patterns are matched. It is never shown and never run.

Read `view` first (what a canonical node is, and how a block becomes a view), then `rules` (a table: primitive -> its canonical
form) and `algebra` (what rules share: elementwise nodes, monomials, sums). `einsum` has the products, `axes` which axes are the
same one, `blocks` the view of every block of a program. The others each see through one way to write a thing: concatenations,
convolutions of one point, factored sums, reshaped batches, fused ops.
"""
